"""From a close to a commit: a pure function of named, immutable bytes.

Whoever computes it gets the same parameters and outer state, byte for byte, and an update that decodes to the same
(its compressed bytes, and so its name, may differ between versions of zstd); so it does not matter who does, how
often, or who is killed on the way. All three are written under names that their digests give them before the
commit that names them is created: at any moment the bucket holds a whole version or none of it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from msgspec import Struct

from diloco_blob.aggregate.closing import ClosedRound
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.payloads import Fetched, Payloads, Spool
from diloco_blob.aggregate.step import NewVersion, Share, Stepper
from diloco_blob.aggregate.tally import capped_sum, updated_tally
from diloco_blob.core.errors import Conflict, Corrupt, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, read_head
from diloco_blob.protocol.records import FORMAT, Commit, Merged, ObjectRef, Skipped, Weights, encode
from diloco_blob.wire import FloatArray, digest


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
    with Spool() as spool, ExitStack() as files:
        payloads = Payloads(ctx, head.fragment, spool)
        fetched, rejected = _fetch(payloads, closed)
        ctx.at("merge.fetched")
        merged = _merged(fetched)
        shares = _shares(payloads, merged, fetched)
        try:
            version = Stepper(ctx.store, ctx.run.run, head).compute(shares, closed.close.discount, files)
        except NotFound as error:
            return _gone(ctx, head, error)
        ctx.at("merge.computed")
        weights, outer, update = _write(ctx, head, version)
        step_norm = version.step_norm
    commit = Commit(
        format=FORMAT,
        run=ctx.run.digest,
        write_id=ctx.ids.fresh(),
        fragment=head.fragment,
        version=head.version + 1,
        parent=head.digest,
        close=closed.digest,
        weights=weights,
        outer=outer,
        update=update,
        merged=tuple(merged),
        rejected=tuple(rejected),
        tally=updated_tally(
            head.tally,
            merged=[one.chosen for one in fetched],
            skipped=closed.close.skipped,
            rejected=rejected,
        ),
        tokens=capped_sum(head.commit.tokens if head.commit else 0, *(entry.tokens for entry in merged)),
        step_norm=step_norm,
        merge_s=ctx.clock.monotonic() - started,
    )
    return _put_commit(ctx, head, commit)


def _fetch(payloads: Payloads, closed: ClosedRound) -> tuple[list[Fetched], list[Skipped]]:
    fetched: list[Fetched] = []
    rejected: list[Skipped] = []
    for chosen in closed.close.chosen:
        found = payloads.fetch(chosen)
        if isinstance(found, Skipped):
            rejected.append(found)
        else:
            fetched.append(found)
    return fetched, rejected


def _merged(fetched: Sequence[Fetched]) -> list[Merged]:
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
        )
        for one in fetched
    ]


def _shares(payloads: Payloads, merged: Sequence[Merged], fetched: Sequence[Fetched]) -> list[Share]:
    """One share for each island, in the order of the close."""
    weights = {entry.island: entry.weight for entry in merged}
    streams: dict[str, list[Iterator[tuple[str, FloatArray]]]] = {}
    for one in fetched:
        streams.setdefault(one.chosen.island, []).append(payloads.decode(one))
    return [Share(weights[island], tuple(found)) for island, found in streams.items()]


def _write(ctx: Context, head: Head, new: NewVersion) -> tuple[Weights, ObjectRef, ObjectRef]:
    """Write the version's files, which nothing names yet. One of them is in memory at a time."""
    fragment, version = head.fragment, head.version + 1

    def put(key_of: Callable[[int, int, str], str], data: bytes, step: str) -> ObjectRef:
        name = digest(data)
        ref = ObjectRef(key=key_of(fragment, version, name), digest=name, size=len(data))
        ctx.store.put(ref.key, data)
        ctx.at(step)
        return ref

    params = put(keys.params, new.params.contents(), "params.after_put")
    outer = put(keys.outer, new.outer.contents(), "outer.after_put")
    update = put(keys.update, new.update, "update.after_put")
    return Weights(params=params, digest=new.weights_digest), outer, update


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
