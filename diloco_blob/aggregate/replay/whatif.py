"""What if the run had been merged by another rule, or without somebody?

Each version is computed again from the contributions that its close chose, on top of the version that was recomputed
before it. Contributions stay as they were made: they started from the versions that really were, so the answer tells
what the *merging* would have done, not what training from other weights would have.

The result is a run of its own in a store of its own. Its version 0 is the oldest version that can still be recomputed
on, so `export` reads it like any other; it has no islands, so `verify` does not hold there.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct

from diloco_blob.aggregate.closing import choose
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.merging import compute, make_commit, write_files
from diloco_blob.aggregate.payloads import read_chunks
from diloco_blob.aggregate.replay.checking import check_kept
from diloco_blob.aggregate.replay.rounds import read_round
from diloco_blob.aggregate.replay.tensors import distance, stored
from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.settings import Collect, Merge
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import Collected, Kept
from diloco_blob.protocol.heads import Head, find_head, read_head, read_run
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Weights, encode
from diloco_blob.store.base import ObjectStore


class Effect(Struct, frozen=True):
    """What the change does to one version."""

    fragment: int
    version: int
    """As the run numbers it."""
    num_merged: int
    """Contributions in it now."""
    num_left_out: int
    """Contributions that the run merged and this does not."""
    step_norm: float
    """L2 norm of the step that the run took."""
    what_if_step_norm: float
    difference: float
    """L2 norm of recomputed − real weights."""
    distance: float
    """L2 norm of real weights − those of the first version, `WhatIfReport.bases`."""


class WhatIfReport(Struct, frozen=True):
    """What a change does to a run."""

    effects: tuple[Effect, ...]
    """By fragment and version."""
    bases: tuple[int, ...]
    """Of each fragment, the version that the first recomputed one was computed from."""
    difference: float
    """L2 norm of recomputed − real weights, over the newest versions of all fragments."""
    distance: float
    """L2 norm of real weights − those of the first versions, likewise."""


def changed_merge(merge: Merge, changes: Mapping[str, Any]) -> Merge:
    """Merge settings with some fields changed.

    Raises:
        InvalidSettings: There is no such value.
    """
    try:
        return msgspec.convert({**msgspec.to_builtins(merge), **changes}, Merge)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"no such rule: {error}", "docs/settings.md lists the settings of [merge]") from error


def what_if(ctx: Context, into: ObjectStore, *, merge: Merge, without: Collection[str] = ()) -> WhatIfReport:
    """Recompute a run along a changed rule.

    Args:
        ctx: The run; its store is only read from.
        into: An empty store, which takes the recomputed run.
        merge: How to merge, instead of as the run's settings say.
        without: Islands whose contributions are left out.

    Returns:
        What that does to each version.

    Raises:
        InvalidSettings: An island that never contributed, or values that are not allowed.
        NotFound: No version can be recomputed any more.
        Corrupt: Records or files of the run are damaged, or a result is not finite.
        Unavailable, Denied: A store did not answer.
    """
    fragments = range(len(ctx.run.run.fragments))
    kept = [Kept(ctx.store, ctx.run, fragment) for fragment in fragments]
    newest = [find_head(ctx.store, ctx.run, fragment) for fragment in fragments]
    _check_islands(newest, without)
    if all(head.version <= one.horizon for head, one in zip(newest, kept, strict=True)):
        raise NotFound(
            "no version of this run can be recomputed",
            "contributions are kept as long as collect.keep_versions says, and there must be some",
        )
    bases = [read_head(ctx.store, ctx.run, fragment, one.horizon) for fragment, one in enumerate(kept)]
    walk = _Walk(ctx, into, merge, frozenset(without), bases)
    effects, ends = [], []
    for one, head, base in zip(kept, newest, bases, strict=True):
        found = list(walk.effects(one, base, head.version))
        effects += found
        ends += found[-1:]
    return WhatIfReport(
        effects=tuple(effects),
        bases=tuple(base.version for base in bases),
        difference=math.hypot(*(end.difference for end in ends)),
        distance=math.hypot(*(end.distance for end in ends)),
    )


def _check_islands(newest: list[Head], without: Collection[str]) -> None:
    known = sorted({island for head in newest for island in head.tally})
    for island in sorted(without):
        if island not in known:
            raise InvalidSettings(
                f"no island {island[:80]!r} contributed to this run", f"there are {', '.join(known[:20]) or 'none'}"
            )


class _Walk:
    """The run that is recomputed, and the one that it becomes.

    Args:
        ctx: The run.
        into: Where the recomputed one goes.
        merge: Its rule.
        without: Who is left out.
        bases: Versions of the run, one per fragment, that become version 0.
    """

    def __init__(
        self, ctx: Context, into: ObjectStore, merge: Merge, without: frozenset[str], bases: list[Head]
    ) -> None:
        run = ctx.run.run
        try:
            settings = msgspec.structs.replace(run.settings, merge=merge, collect=Collect(keep_versions=0))
        except ValueError as error:
            raise InvalidSettings(str(error)) from error
        weights = tuple(_copied(ctx.store, into, base) for base in bases)
        new = msgspec.structs.replace(run, settings=settings, fragments=weights, write_id=ctx.ids.fresh())
        into.put(keys.RUN, encode(new), if_absent=True)
        self._real = ctx
        # The real run's receipts and payloads, judged and merged by the new settings.
        changed = msgspec.structs.replace(run, settings=settings)
        self._source = dataclasses.replace(ctx, run=msgspec.structs.replace(ctx.run, run=changed))
        self._target = dataclasses.replace(ctx, store=into, run=read_run(into))
        self._without = without

    def effects(self, kept: Kept, base: Head, newest: int) -> Iterator[Effect]:
        """Recompute the versions of one fragment after `base`, one by one."""
        real = base
        new = read_head(self._target.store, self._target.run, base.fragment, 0)
        for version in range(base.version + 1, newest + 1):
            try:
                # The first one goes on from the run's own outer state, which a version 0 does not have.
                new, real, effect = self._step(kept, base, real, None if version == base.version + 1 else new)
            except NotFound as error:
                raise self._gone(kept, version, error) from error
            except Collected as error:
                raise _overtaken(version) from error
            yield effect

    def _step(self, kept: Kept, base: Head, real: Head, new: Head | None) -> tuple[Head, Head, Effect]:
        """The version after `real`, recomputed on `new`: its heads there and here, and how they differ."""
        source, target, fragment, version = self._source, self._target, real.fragment, real.version + 1
        found = read_round(source, real)
        after = read_head(source.store, source.run, fragment, version)
        commit = after.commit
        assert commit is not None  # noqa: S101 - version 0 is not recomputed
        chosen, discount = choose(
            source.run.run.settings, [mail for mail in found.mails if mail.island not in self._without]
        )
        number = version - base.version
        before = new or read_head(target.store, target.run, fragment, 0)
        with ExitStack() as files:
            if new is None:
                made = compute(source, real, chosen, discount, files)
            else:
                made = compute(source, new, chosen, discount, files, heads=target.store)
            check_kept(kept, version, made.rejected, commit)
            refs = write_files(target, before, made.version)
        close = found.closed
        record = make_commit(target, before, made, refs, close=close.digest, skipped=close.close.skipped)
        target.store.put(keys.commit(fragment, number), encode(record), if_absent=True)
        new = read_head(target.store, target.run, fragment, number)
        merged = {(entry.island, entry.seq) for entry in made.merged}
        effect = Effect(
            fragment=fragment,
            version=version,
            num_merged=len(merged),
            num_left_out=sum((entry.island, entry.seq) not in merged for entry in commit.merged),
            step_norm=commit.step_norm,
            what_if_step_norm=record.step_norm,
            difference=self._distance(new, after, target.store),
            distance=self._distance(base, after, source.store),
        )
        return new, after, effect

    def _distance(self, one: Head, real: Head, store: ObjectStore) -> float:
        layout = fragment_layout(self._real.run.run.tensors, real.fragment)
        return distance(
            stored(store, one.weights.params, layout), stored(self._real.store, real.weights.params, layout)
        )

    def _gone(self, kept: Kept, version: int, error: NotFound) -> Exception:
        try:
            kept.check_missing(version - 1)
        except Collected:
            return _overtaken(version)
        return Corrupt(f"version {version} cannot be recomputed: {error.message}", "diloco-blob verify says more")


def _overtaken(version: int) -> NotFound:
    return NotFound(f"version {version} was collected while it was read", "start again: the run goes on meanwhile")


def _copied(store: ObjectStore, into: ObjectStore, base: Head) -> Weights:
    """The weights of a version as those of version 0 of another run."""
    ref = base.weights.params
    new = msgspec.structs.replace(ref, key=keys.params(base.fragment, 0, ref.digest))
    into.put(new.key, b"".join(read_chunks(store, ref)))
    return Weights(params=new, digest=base.weights.digest)
