"""`diloco-blob aggregate`: the pass that the functions in the cloud run, from a command line; once or in a loop."""

import argparse
import logging
import signal
import sys
from collections.abc import Callable

import msgspec

from diloco_blob.aggregate import FragmentReport, aggregate, watch
from diloco_blob.cli.lines import version_line
from diloco_blob.cli.urls import folder_of
from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import NotFound, Unavailable
from diloco_blob.core.ids import Ids, SystemIds
from diloco_blob.protocol.heads import read_run
from diloco_blob.store import ObjectStore, open_store

POLL_S = 1.0
POLL_LOCAL_S = 0.25
"""A folder costs nothing to look at."""

DRAIN_VERSIONS_MAX = 200
"""Of each fragment, so that a drain ends even if islands go on contributing; a close takes several of each at once."""
DRAIN_MARGIN_S = 30.0
"""Longer than `takeover_s` that a drain waits for a version of another aggregator: by then it is ours to merge."""

_EPILOG = """\
examples:
  diloco-blob aggregate s3://bucket/run                    one pass over every fragment (what a timer calls)
  diloco-blob aggregate s3://bucket/run --watch            passes until Ctrl-C or SIGTERM; waits for the run to begin
  diloco-blob aggregate s3://bucket/run --drain            the islands are gone: merge all that is left

Anyone may run it, at any time, twice at once, and kill it anywhere: it keeps nothing, and the bucket decides. It prints
a line for each version that it makes: who is in it with what weight, who is stale, who was left out and why.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="one pass (the default)")
    form.add_argument("--watch", action="store_true", help="one pass after the other")
    parser.add_argument("--fragment", type=int, metavar="N", help="only this fragment")
    parser.add_argument("--drain", action="store_true", help="no more contributions will come: close what is open")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for programs")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        DilocoError: There is no run at the URL (unless --watch), or going on would not help.
    """
    # What is skipped or rejected stands in the lines that we print.
    logging.getLogger("diloco_blob.aggregate.passes").setLevel(logging.ERROR)
    store, clock, ids = open_store(args.url), SystemClock(), SystemIds()
    printer = Printer(as_json=args.json, all_actions=not args.watch)
    if args.watch:
        return _watch(args, store, clock, ids, printer)
    info = read_run(store)
    printer.num_fragments = len(info.run.fragments)
    if args.drain:
        left = drain(store, clock=clock, ids=ids, stop=lambda: False, on_report=printer, fragment=args.fragment)
        for report in left:
            print(f"diloco-blob: {left_line(report, printer.num_fragments)}", file=sys.stderr)
        return 1 if left else 0
    for report in aggregate(store, clock=clock, ids=ids, run=info, fragment=args.fragment):
        printer(report)
    return 0


class Printer:
    """Prints reports, one line each.

    Args:
        as_json: Whether a line is a JSON object (a `FragmentReport`) instead of text.
        all_actions: Whether passes that made no version are told of too.
    """

    def __init__(self, *, as_json: bool, all_actions: bool) -> None:
        self.num_fragments = 1
        self._as_json = as_json
        self._all_actions = all_actions

    def __call__(self, report: FragmentReport) -> None:
        """Print one report, if it is one to be told of."""
        if report.action != "merged" and not self._all_actions:
            return
        print(msgspec.json.encode(report).decode() if self._as_json else self._line(report), flush=True)

    def _line(self, report: FragmentReport) -> str:
        if report.action in {"merged", "lost"}:
            line = version_line(
                report.fragment,
                self.num_fragments,
                report.version,
                report.merged,
                report.skipped,
                report.rejected,
            )
            how = f"{report.reason}{', taken over' if report.takeover else ''}"
            return f"{line} [{how}]" if report.action == "merged" else f"{line} [another aggregator was first]"
        if report.action == "elsewhere":
            return left_line(report, self.num_fragments)
        where = f"fragment {report.fragment} " if self.num_fragments > 1 else ""
        arrived = ", ".join(report.arrived) or "nobody"
        missing = f", waiting for {', '.join(report.waiting_for)}" if report.waiting_for else ""
        again = "" if report.look_again_s is None else f"; look again in {report.look_again_s:.0f} s"
        return f"{where}version {report.version}, round open: {arrived} arrived{missing}{again}"


def left_line(report: FragmentReport, num_fragments: int) -> str:
    """What is still to be merged of a fragment, by the last report of it; a run with one fragment does not name it."""
    where = f"fragment {report.fragment} " if num_fragments != 1 else ""
    if report.action == "elsewhere":
        return f"{where}version {report.version + 1} is closed; another aggregator is merging it"
    return f"{where}version {report.version} was merged, and islands go on contributing"


def drain(
    store: ObjectStore,
    *,
    clock: Clock,
    ids: Ids,
    stop: Callable[[], bool],
    on_report: Callable[[FragmentReport], None],
    fragment: int | None = None,
) -> tuple[FragmentReport, ...]:
    """Merge everything that the islands left, however little it is.

    Ends when nothing is pending; what another aggregator closed and does not merge is ours after `takeover_s`.

    Args:
        store: The run's store.
        clock: Waits for another aggregator that is at it.
        ids: Source of write ids.
        stop: Asked between passes; True ends it.
        on_report: Given each report as it comes.
        fragment: Only this one; all of them by default.

    Returns:
        The last report of each fragment of which something may be left; empty if all is merged, or it was told to stop.

    Raises:
        NotFound: There is no run at this URL.
    """
    info, hints = read_run(store), dict[int, int]()
    patience_s = info.run.settings.policy.takeover_s + DRAIN_MARGIN_S
    num_versions, moved_at = 0, clock.monotonic()
    while not stop():
        left = []
        for report in aggregate(store, clock=clock, ids=ids, run=info, fragment=fragment, hints=hints, drain=True):
            on_report(report)
            if report.action != "waiting":
                left.append(report)
        if not left:
            return ()
        waits_s = [report.look_again_s or 0.0 for report in left if report.action == "elsewhere"]
        if len(waits_s) < len(left):
            num_versions, moved_at = num_versions + 1, clock.monotonic()
        elif clock.monotonic() > moved_at + patience_s:
            return tuple(left)
        else:
            clock.sleep(min(POLL_S, *waits_s))
        if num_versions >= DRAIN_VERSIONS_MAX:
            return tuple(left)
    return ()


def _watch(args: argparse.Namespace, store: ObjectStore, clock: Clock, ids: Ids, printer: Printer) -> int:
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _: received.append(signum))
    try:
        printer.num_fragments = len(read_run(store).run.fragments)
    except Unavailable:
        pass  # `watch` says so, and goes on asking
    except NotFound as error:
        print(f"diloco-blob: waiting for a run at {store.url}: {error.message}", file=sys.stderr, flush=True)

    def on_report(report: FragmentReport) -> None:
        printer.num_fragments = max(printer.num_fragments, report.fragment + 1)
        printer(report)

    watch(
        store,
        clock=clock,
        ids=ids,
        stop=lambda: bool(received),
        on_report=on_report,
        fragment=args.fragment,
        poll_s=POLL_LOCAL_S if folder_of(args.url) else POLL_S,
        drain=lambda: args.drain,
        wait_for_run=True,
    )
    return 130 if signal.SIGINT in received else 0
