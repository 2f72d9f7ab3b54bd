"""From a close to a commit: a pure function of named, immutable bytes.

Whoever computes it gets the same parameters and outer state, byte for byte, and an update that decodes to the same
(its compressed bytes, and so its name, may differ between versions of zstd); so it does not matter who does, how
often, or who is killed on the way. All three are written under names that their digests give them before the
commit that names them is created: at any moment the bucket holds a whole version or none of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct

from diloco_blob.aggregate.ahead import Ahead
from diloco_blob.aggregate.closing import ClosedRound
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.files import VersionFile
from diloco_blob.aggregate.payloads import Fetched, Payloads, Spool, Tensors
from diloco_blob.aggregate.step import NewVersion, Share, Stepper
from diloco_blob.aggregate.tally import capped_sum, updated_tally
from diloco_blob.core.errors import Conflict, Corrupt, NotFound
from diloco_blob.outer import clip_factors
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, read_head
from diloco_blob.protocol.layout import fragment_tensors
from diloco_blob.protocol.records import FORMAT, Chosen, Commit, Merged, ObjectRef, Skipped, Weights, encode
from diloco_blob.store.base import ObjectStore


class Outcome(Struct, frozen=True):
    """How a merge ended."""

    commit: Commit
    """The version's commit as it stands in the store."""
    ours: bool
    """Whether this pass created it."""


def merge(ctx: Context, head: Head, closed: ClosedRound) -> Outcome:
    """Make the version that a close describes.

    Args:
        ctx: The pass.
        head: The version before.
        closed: Its close.

    Raises:
        Corrupt: The head's weights or outer state are damaged or missing, or the result is not finite.
        Unavailable: The store did not answer; nothing was decided.
    """
    started = ctx.clock.monotonic()
    ctx.at("merge.begin")
    with ExitStack() as files:
        try:
            made = compute(ctx, head, closed.close.chosen, closed.close.discount, files)
        except NotFound as error:
            return _gone(ctx, head, error)
        ctx.at("merge.computed")
        refs = write_files(ctx, head, made.version)
    commit = make_commit(ctx, head, made, refs, close=closed.digest, skipped=closed.close.skipped)
    return _put_commit(ctx, head, msgspec.structs.replace(commit, merge_s=ctx.clock.monotonic() - started))


@dataclass(frozen=True)
class Computed:
    """A version as it follows from its close."""

    merged: tuple[Merged, ...]
    rejected: tuple[Skipped, ...]
    fetched: tuple[Fetched, ...]
    version: NewVersion


@dataclass(frozen=True)
class Refs:
    """The files of a version as they stand in the store."""

    weights: Weights
    outer: ObjectRef
    update: ObjectRef


def compute(
    ctx: Context,
    head: Head,
    chosen: Sequence[Chosen],
    discount: float,
    files: ExitStack,
    *,
    heads: ObjectStore | None = None,
) -> Computed:
    """Everything from a close to the files of a version; writes nothing to any store.

    Args:
        ctx: The pass.
        head: The version before.
        chosen: The contributions of the close.
        discount: Of the close.
        files: Closes the temporary files.
        heads: Where the files of `head` are, if not in the run's store.

    Raises:
        NotFound: The head's weights or outer state are gone.
        Corrupt: They are damaged, or the result is not finite.
    """
    payloads = Payloads(ctx, head.fragment, files.enter_context(Spool()))
    sizes = [math.prod(spec.shape) for spec in fragment_tensors(ctx.run.run.tensors, head.fragment)]
    ahead = files.enter_context(Ahead(sum(sizes), max(sizes, default=0)))
    fetched, rejected = _fetch(payloads, chosen, ahead)
    ctx.at("merge.fetched")
    merged = _merged(fetched, _clips(ctx, payloads, len(sizes), fetched, ahead))
    shares = _shares(payloads, merged, fetched)
    version = Stepper(heads or ctx.store, ctx.run.run, head, ahead).compute(shares, discount, files)
    return Computed(tuple(merged), tuple(rejected), tuple(fetched), version)


def make_commit(
    ctx: Context, head: Head, made: Computed, refs: Refs, *, close: str, skipped: Sequence[Skipped]
) -> Commit:
    """The record of a version whose files are written.

    Args:
        ctx: The pass.
        head: The version before.
        made: The version.
        refs: Its files.
        close: Digest of the close record.
        skipped: What the close skipped.
    """
    return Commit(
        format=FORMAT,
        run=ctx.run.digest,
        write_id=ctx.ids.fresh(),
        fragment=head.fragment,
        version=head.version + 1,
        parent=head.digest,
        close=close,
        weights=refs.weights,
        outer=refs.outer,
        update=refs.update,
        merged=made.merged,
        rejected=made.rejected,
        tally=updated_tally(
            head.tally,
            merged=[one.chosen for one in made.fetched],
            skipped=skipped,
            rejected=made.rejected,
        ),
        tokens=capped_sum(head.commit.tokens if head.commit else 0, *(entry.tokens for entry in made.merged)),
        step_norm=made.version.step_norm,
        merge_s=0.0,
    )


def _fetch(payloads: Payloads, chosen: Sequence[Chosen], ahead: Ahead) -> tuple[list[Fetched], list[Skipped]]:
    fetched: list[Fetched] = []
    rejected: list[Skipped] = []
    # Fetched by this thread, one after the other, as the tasks are asked for; looked at by others meanwhile.
    for found in ahead.results(partial(payloads.check, payloads.fetch(entry)) for entry in chosen):
        if isinstance(found, Skipped):
            rejected.append(found)
        else:
            fetched.append(found)
    return fetched, rejected


def _clips(
    ctx: Context, payloads: Payloads, num_tensors: int, fetched: Sequence[Fetched], ahead: Ahead
) -> dict[str, float]:
    """The clipping factors of the islands that are left. Costs one more pass over the decoded contributions."""
    islands = {one.chosen.island: 1.0 for one in fetched}
    if ctx.run.run.settings.merge.clip == "none":
        return islands
    shares = _shares(payloads, _merged(fetched, islands), fetched)
    norms = list(ahead.results(partial(share.norm, num_tensors) for share in shares))
    return dict(zip(islands, clip_factors(norms), strict=True))


def _merged(fetched: Sequence[Fetched], clips: Mapping[str, float]) -> list[Merged]:
    """The weights of the close, shared out among the islands that are left; alike, if these have none."""
    weights = {one.chosen.island: one.chosen.weight for one in fetched}
    total = math.fsum(weights.values())
    return [
        Merged(
            island=one.chosen.island,
            seq=one.chosen.seq,
            staleness=one.chosen.staleness,
            weight=one.chosen.weight / total if total > 0.0 else 1.0 / len(weights),
            tokens=one.chosen.tokens,
            clip=clips[one.chosen.island],
            steps=one.chosen.steps,
            train_s=one.chosen.train_s,
        )
        for one in fetched
    ]


def _shares(payloads: Payloads, merged: Sequence[Merged], fetched: Sequence[Fetched]) -> list[Share]:
    """One share for each island, in the order of the close."""
    entries = {entry.island: entry for entry in merged}
    streams: dict[str, list[Tensors]] = {}
    for one in fetched:
        streams.setdefault(one.chosen.island, []).append(payloads.decode(one))
    return [Share(entries[island].weight, tuple(found), entries[island].clip) for island, found in streams.items()]


def write_files(ctx: Context, head: Head, new: NewVersion) -> Refs:
    """Write the version's files, which nothing names yet."""
    fragment, version = head.fragment, head.version + 1

    def put(key_of: Callable[[int, int, str], str], file: VersionFile, step: str) -> ObjectRef:
        name = file.digest
        ref = ObjectRef(key=key_of(fragment, version, name), digest=name, size=file.size)
        ctx.store.put(ref.key, file.body())
        ctx.at(step)
        return ref

    params = put(keys.params, new.params, "params.after_put")
    outer = put(keys.outer, new.outer, "outer.after_put")
    update = put(keys.update, new.update, "update.after_put")
    return Refs(Weights(params=params, digest=new.weights_digest), outer, update)


def _put_commit(ctx: Context, head: Head, commit: Commit) -> Outcome:
    ctx.at("commit.before_put")
    try:
        ctx.store.put(keys.commit(commit.fragment, commit.version), encode(commit), if_absent=True)
    except Conflict:
        return Outcome(commit=_winner(ctx, head), ours=False)
    ctx.at("commit.after_put")
    return Outcome(commit=commit, ours=True)


def _winner(ctx: Context, head: Head) -> Commit:
    commit = read_head(ctx.store, ctx.run, head.fragment, head.version + 1).commit
    if commit is None or commit.parent != head.digest:
        raise Corrupt(f"fragment {head.fragment} version {head.version + 1} does not descend from its predecessor")
    return commit


def _gone(ctx: Context, head: Head, error: NotFound) -> Outcome:
    """The head's files are gone: right if the head has been overtaken and collected meanwhile, else damage."""
    try:
        return Outcome(commit=_winner(ctx, head), ours=False)
    except NotFound:
        raise Corrupt(
            f"weights or outer state of fragment {head.fragment} version {head.version} are missing: {error.message}",
            "the newest version of a run must never be collected; restore the object, or export an older version",
        ) from error
