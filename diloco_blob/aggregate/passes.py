"""One pass: find the head, close the round if it is due, merge what was closed, collect what that made garbage."""

import logging
from collections.abc import Callable

from diloco_blob.aggregate.closing import ClosedRound, OpenRound, close_round
from diloco_blob.aggregate.collect import collect_after_commit
from diloco_blob.aggregate.context import Context, pass_on
from diloco_blob.aggregate.merging import merge
from diloco_blob.aggregate.report import FragmentReport
from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.ids import Ids
from diloco_blob.protocol.heads import Head, RunInfo, find_head, read_run
from diloco_blob.store.base import ObjectStore

_LOG = logging.getLogger(__name__)


def aggregate(
    store: ObjectStore,
    *,
    clock: Clock,
    ids: Ids,
    run: RunInfo | None = None,
    fragment: int | None = None,
    hints: dict[int, int] | None = None,
    drain: bool = False,
    at: Callable[[str], None] = pass_on,
) -> list[FragmentReport]:
    """Merge whatever is due, once. Keeps nothing: anyone may call it, at any time, twice at once, and kill it anywhere.

    Args:
        store: The run's store, with retries.
        clock: Measures how long merges take; decides nothing.
        ids: Source of write ids.
        run: `run.json`, if the caller has read it before.
        fragment: Only this one; all of them by default.
        hints: Versions that are known to exist, by fragment; brought up to date. Saves requests, never decides.
        drain: No more contributions will come: close any round that has some.
        at: Told of each step (`context.STEPS`); for tests.

    Returns:
        What was done to each fragment, and when to look again.

    Raises:
        NotFound: There is no run at this URL.
        InvalidSettings: The run has no such fragment.
        Unavailable, Denied: The store did not answer, or refused; nothing was decided that is not in it.
        Corrupt: A record or file of the run itself is damaged.
    """
    ctx = Context(store=store, run=run or read_run(store), clock=clock, ids=ids, at=at)
    hints = {} if hints is None else hints
    reports = []
    for number in fragments_of(ctx.run, fragment):
        report = advance(ctx, number, hint=hints.get(number, 0), drain=drain)
        hints[number] = report.version
        reports.append(report)
    return reports


def fragments_of(run: RunInfo, fragment: int | None) -> range:
    """The fragments that a pass looks at.

    Raises:
        InvalidSettings: The run has no such fragment.
    """
    count = len(run.run.fragments)
    if fragment is None:
        return range(count)
    if not 0 <= fragment < count:
        raise InvalidSettings(f"there is no fragment {fragment}", f"this run has fragments 0 to {count - 1}")
    return range(fragment, fragment + 1)


def advance(ctx: Context, fragment: int, *, hint: int = 0, drain: bool = False) -> FragmentReport:
    """One pass over one fragment: at most one version is made. See `aggregate`."""
    head = find_head(ctx.store, ctx.run, fragment, hint=hint)
    ctx.at("head.found")
    closed = close_round(ctx, head, drain=drain)
    if isinstance(closed, OpenRound):
        return FragmentReport(
            fragment=fragment,
            version=head.version,
            action="waiting",
            look_again_s=closed.look_again_s,
            arrived=closed.arrived,
            waiting_for=closed.waiting_for,
            tokens=head.commit.tokens if head.commit else 0,
        )
    if not closed.ours:
        left_s = closed.closed_at + ctx.run.run.settings.policy.takeover_s - ctx.store.now()
        if left_s > 0.0:
            return _elsewhere(head, closed, left_s)
    return _merge(ctx, head, closed)


def _elsewhere(head: Head, closed: ClosedRound, left_s: float) -> FragmentReport:
    return FragmentReport(
        fragment=head.fragment,
        version=head.version,
        action="elsewhere",
        look_again_s=left_s,
        reason=closed.close.reason,
        skipped=closed.close.skipped,
        tokens=head.commit.tokens if head.commit else 0,
    )


def _merge(ctx: Context, head: Head, closed: ClosedRound) -> FragmentReport:
    outcome = merge(ctx, head, closed)
    commit = outcome.commit
    report = FragmentReport(
        fragment=head.fragment,
        version=commit.version,
        action="merged" if outcome.ours else "lost",
        look_again_s=0.0,  # More may have come meanwhile.
        reason=closed.close.reason,
        merged=commit.merged,
        skipped=closed.close.skipped,
        rejected=commit.rejected,
        tokens=commit.tokens,
        step_norm=commit.step_norm,
        merge_s=commit.merge_s,
        takeover=not closed.ours,
    )
    where = {"run": ctx.store.url, "fragment": head.fragment, "version": commit.version}
    _LOG.info(
        "fragment %d version %d %s: %d merged, %d skipped, %d rejected (%s)",
        *(head.fragment, commit.version, report.action, len(commit.merged)),
        *(len(report.skipped), len(commit.rejected), report.reason),
        extra=where,
    )
    for entry in (*report.skipped, *commit.rejected):
        _LOG.warning("contribution %d of %s is not merged: %s", entry.seq, entry.island, entry.reason, extra=where)
    if outcome.ours:
        collect_after_commit(ctx, commit)
    return report
