"""Passes over and over, for whoever has a process to spare: a laptop, a VM beside the islands, a container.

Nothing of it is needed: a timer that calls `aggregate` does the same. The loop sleeps until time alone may change
something, at most `poll_s`, since an arrival may at any moment; and it rides out outages of the store. What it keeps
saves requests and waiting, and decides nothing: the heads' versions, the islands' names, and which closes it made, so
that it goes on with its own at once where a pass that kept nothing would wait for whoever made them.
"""

import logging
from collections.abc import Callable

from diloco_blob.aggregate.context import Context, pass_on
from diloco_blob.aggregate.passes import advance, fragments_of
from diloco_blob.aggregate.report import FragmentReport
from diloco_blob.aggregate.roster import Roster, watch_age_max_s
from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import NotFound, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.protocol.heads import RunInfo, read_run
from diloco_blob.store.base import ObjectStore

_LOG = logging.getLogger(__name__)


def watch(
    store: ObjectStore,
    *,
    clock: Clock,
    ids: Ids,
    stop: Callable[[], bool],
    on_report: Callable[[FragmentReport], None],
    run: RunInfo | None = None,
    fragment: int | None = None,
    poll_s: float = 1.0,
    drain: Callable[[], bool] = lambda: False,
    wait_for_run: bool = False,
    at: Callable[[str], None] = pass_on,
) -> None:
    """Aggregate until told to stop.

    Args:
        store: The run's store, with retries.
        clock: Sleeps between passes.
        ids: Source of write ids.
        stop: Asked before each pass over a fragment; True ends the loop.
        on_report: Given each report as it comes.
        run: `run.json`, if the caller has read it before.
        fragment: Only this one; all of them by default.
        poll_s: Longest sleep, in seconds.
        drain: Asked before each pass whether no more contributions will come.
        wait_for_run: Wait for the run to be created instead of raising NotFound.
        at: Told of each step; for tests.

    Raises:
        NotFound: There is no run at this URL.
        Denied, Corrupt: Going on would not help.
    """
    outage = _Outage(store.url)
    run = run or _first_read(store, clock, stop, poll_s, outage, wait_for_run=wait_for_run)
    if run is None:
        return
    roster = Roster(age_max_s=watch_age_max_s(run.run.settings.policy.deadline_s))
    ctx = Context(store=store, run=run, clock=clock, ids=ids, at=at, roster=roster)
    hints: dict[int, int] = {}
    while not stop():
        sleep_s = poll_s
        draining = drain()
        ctx.roster.begin_pass()
        for number in fragments_of(run, fragment):
            if stop():
                return
            try:
                report = advance(ctx, number, hint=hints.get(number, 0), drain=draining)
            except Unavailable as error:
                outage.met(error)
                continue
            outage.over()
            hints[number] = report.version
            if report.look_again_s is not None:
                sleep_s = min(sleep_s, report.look_again_s)
            on_report(report)
        if sleep_s > 0.0:
            clock.sleep(sleep_s)


def _first_read(
    store: ObjectStore,
    clock: Clock,
    stop: Callable[[], bool],
    poll_s: float,
    outage: "_Outage",
    *,
    wait_for_run: bool,
) -> RunInfo | None:
    while not stop():
        try:
            return read_run(store)
        except NotFound:
            if not wait_for_run:
                raise
        except Unavailable as error:
            outage.met(error)
        clock.sleep(poll_s)
    return None


class _Outage:
    """Says once that the store does not answer, and once that it does again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._on = False

    def met(self, error: Unavailable) -> None:
        if not self._on:
            _LOG.warning("the store does not answer, still trying: %s", error, extra={"run": self._url})
        self._on = True

    def over(self) -> None:
        if self._on:
            _LOG.warning("the store answers again", extra={"run": self._url})
        self._on = False
