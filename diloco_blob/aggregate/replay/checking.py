"""Every version that is still recomputable, computed again from its receipts and payloads, and compared.

Where `audit` shows that a bucket holds together, this shows that it was made as its settings say: an aggregator that
weighed, rejected, clipped or stepped wrongly, and recorded that consistently, is found here alone. What is recomputed
starts from the version before *as it is in the bucket*, so that a fault is reported in the version in which it arose.
"""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from msgspec import Struct

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.files import VersionFile
from diloco_blob.aggregate.merging import Computed, compute
from diloco_blob.aggregate.payloads import read_chunks
from diloco_blob.aggregate.replay.rounds import check_decision, read_round, reason_class
from diloco_blob.aggregate.replay.tensors import Tensors, first_difference, stored
from diloco_blob.aggregate.step import outer_layout
from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import Collected, Finding, Kept, Ledger
from diloco_blob.protocol.heads import newest_version, read_head
from diloco_blob.protocol.layout import fragment_layout, fragment_tensors
from diloco_blob.protocol.records import Commit, ObjectRef, Skipped
from diloco_blob.wire import Layout, codec_for, decode_payload, read_tensor_stream

REPLAY_PROMISES = ("decision", "rejections", "merge")
"""The promises that only a replay can find broken."""


class ReplayCounts(Struct, frozen=True):
    """What was recomputed: versions from 1 on, over all fragments."""

    recomputed: int = 0
    collected: int = 0
    """Whose contributions, or the version before, are not kept (`collect.keep_versions`)."""
    failed: int = 0
    """That should be recomputable and are not; each is a finding."""


class ReplayReport(Struct, frozen=True):
    """What a replay found."""

    findings: tuple[Finding, ...]
    counts: ReplayCounts

    @property
    def ok(self) -> bool:
        """Whether every version that is recomputable is what it should be."""
        return all(finding.level != "broken" for finding in self.findings)


def replay(ctx: Context) -> ReplayReport:
    """Recompute every version that is still recomputable, and compare it with what is in the bucket.

    Args:
        ctx: The run; its store is only read from.

    Returns:
        Every deviation, by fragment and version, and how many versions were recomputed.

    Raises:
        Unavailable, Denied: The store did not answer.
    """
    ledger, ends = Ledger(), {"recomputed": 0, "collected": 0, "failed": 0}
    for fragment in range(len(ctx.run.run.fragments)):
        kept = Kept(ctx.store, ctx.run, fragment)
        newest, first = newest_version(ctx.store, fragment), kept.horizon + 1
        ends["collected"] += first - 1
        for version in range(first, newest + 1):
            ends[_replay_version(ctx, fragment, version, kept, ledger)] += 1
    return ReplayReport(findings=ledger.report().findings, counts=ReplayCounts(**ends))


def _replay_version(ctx: Context, fragment: int, version: int, kept: Kept, ledger: Ledger) -> str:
    """Check one version; returns how that ended, by the names of `ReplayCounts`."""
    try:
        try:
            _check_version(ctx, fragment, version, kept, ledger)
        except NotFound as error:
            kept.check_missing(version - 1)
            raise Corrupt(error.message) from error
    except Collected:
        return "collected"
    except Corrupt as error:
        ledger.broken("merge", keys.commit(fragment, version), f"cannot be recomputed: {error.message}")
        return "failed"
    return "recomputed"


def _check_version(ctx: Context, fragment: int, version: int, kept: Kept, ledger: Ledger) -> None:
    head = read_head(ctx.store, ctx.run, fragment, version - 1)
    commit = read_head(ctx.store, ctx.run, fragment, version).commit
    assert commit is not None  # noqa: S101 - version 0 is not recomputed
    found = read_round(ctx, head)
    check_decision(ctx, found, ledger)
    close = found.closed.close
    # A discount that somebody made up may overflow; the result is then refused as not finite.
    with ExitStack() as files, np.errstate(over="ignore", invalid="ignore"):
        made = compute(ctx, head, close.chosen, close.discount, files)
        check_kept(kept, version, made.rejected, commit)
        if _check_rejected(made, commit, ledger):
            _check_merged(made, commit, ledger)
            _check_files(ctx, made, commit, ledger)


def check_kept(kept: Kept, version: int, rejected: tuple[Skipped, ...], commit: Commit) -> None:
    """A payload that was there then and is missing now may have been collected while we looked.

    Raises:
        Collected: It was.
    """
    recorded = {(entry.island, entry.seq, reason_class(entry.reason)) for entry in commit.rejected}
    if any((entry.island, entry.seq, reason_class(entry.reason)) not in recorded for entry in rejected):
        kept.check_missing(version - 1)


def _check_rejected(made: Computed, commit: Commit, ledger: Ledger) -> bool:
    """Whether the same contributions were rejected, so that the rest can be compared."""
    key = keys.commit(commit.fragment, commit.version)
    right = {(entry.island, entry.seq): entry.reason for entry in made.rejected}
    found = {(entry.island, entry.seq): entry.reason for entry in commit.rejected}
    for island, seq in sorted(right.keys() | found.keys()):
        one = (island, seq)
        if one not in right:
            ledger.broken(
                "rejections", key, f"{island} {seq} is rejected ({found[one]}), but its payload, as it is now, is sound"
            )
        elif one not in found:
            ledger.broken("rejections", key, f"{island} {seq} is merged, but it is to be rejected: {right[one]}")
        elif reason_class(right[one]) != reason_class(found[one]):
            ledger.broken("rejections", key, f"{island} {seq} is rejected as {found[one]!r}, but it is {right[one]!r}")
    return right.keys() == found.keys()


def _check_merged(made: Computed, commit: Commit, ledger: Ledger) -> None:
    """Weights after rejections and clipping factors: to the bit."""
    key = keys.commit(commit.fragment, commit.version)
    found = {(entry.island, entry.seq): entry for entry in commit.merged}
    for right in made.merged:
        entry = found.get((right.island, right.seq))
        if entry is None:
            ledger.broken("merge", key, f"{right.island} {right.seq} should be merged, and is not")
            continue
        for name in ("weight", "clip"):
            if getattr(entry, name) != getattr(right, name):
                ledger.broken(
                    "merge",
                    key,
                    f"{right.island} {right.seq} has {name} {getattr(entry, name)!r}, "
                    f"its close gives {getattr(right, name)!r}",
                )


def _check_files(ctx: Context, made: Computed, commit: Commit, ledger: Ledger) -> None:
    """Params and outer state byte for byte, the update by what it decodes to."""
    run = ctx.run.run
    layout = fragment_layout(run.tensors, commit.fragment)
    kept_layout = outer_layout(fragment_tensors(run.tensors, commit.fragment), run.settings)
    if _check_file(ctx, commit.weights.params, made.version.params, layout, ledger):
        # Else these differ too, for a reason that is told already.
        _check_figures(made, commit, ledger)
    _check_file(ctx, commit.outer, made.version.outer, kept_layout, ledger)
    if commit.update.digest == made.version.update.digest:
        return
    codec = codec_for(run.settings.down, commit.version)
    if not _report(
        commit.update,
        lambda: decode_payload(read_chunks(ctx.store, commit.update), layout, codec),
        decode_payload(made.version.update.chunks(), layout, codec),
        ledger,
    ):
        ledger.note("merge", commit.update.key, "is compressed otherwise here, to the same values (another zstd)")


def _check_figures(made: Computed, commit: Commit, ledger: Ledger) -> None:
    """What the commit says of weights that are what they should be."""
    key, new = keys.commit(commit.fragment, commit.version), made.version
    if commit.weights.digest != new.weights_digest:
        ledger.broken("merge", key, f"its weights have digest {new.weights_digest}, it says {commit.weights.digest}")
    if commit.step_norm != new.step_norm:
        ledger.broken("merge", key, f"its step has the norm {new.step_norm!r}, it says {commit.step_norm!r}")


def _check_file(ctx: Context, ref: ObjectRef, right: VersionFile, layout: Layout, ledger: Ledger) -> bool:
    if ref.digest == right.digest:
        return True
    different = _report(
        ref, lambda: stored(ctx.store, ref, layout), read_tensor_stream(right.chunks(), layout, right.size), ledger
    )
    if not different:
        ledger.broken("merge", ref.key, "its tensors are right, but in other bytes")
    return False


def _report(ref: ObjectRef, found: Callable[[], Tensors], right: Tensors, ledger: Ledger) -> bool:
    """Whether something differs; if so it is reported, with the first tensor that does.

    Raises:
        NotFound: The file is gone.
    """
    try:
        difference = first_difference(found(), right)
    except Corrupt as error:
        ledger.broken("merge", ref.key, f"its tensors cannot be compared: {error.message}")
        return True
    if difference is None:
        return False
    name, largest = difference
    ledger.broken(
        "merge",
        ref.key,
        f"its tensors are not what the close gives: tensor {name[:80]!r} differs by up to {largest:.3g}",
    )
    return True
