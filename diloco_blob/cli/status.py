"""`diloco-blob status`: how far a run is, from its bucket alone."""

import argparse
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from diloco_blob.cli.run_status import ENDED, Look, look, run_status
from diloco_blob.cli.urls import command_line
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import Tally
from diloco_blob.store import ObjectStore, open_store

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_S = 2.0
WATCH_PLAIN_S = 10.0
OVERDUE_S = 30.0
"""A round that could have been closed for so long has no aggregator."""

_EPILOG = """\
examples:
  diloco-blob status s3://bucket/run
  diloco-blob status demo/run --watch
  diloco-blob status gs://bucket/run --json | jq .eval.bits_per_byte

Needs nothing but the right to read the bucket, and sends a handful of small requests. Contributions are counted once
per fragment. Bytes per parameter are per island, parameter and round (version), with everything included that the
islands transferred.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    form.add_argument("--watch", action="store_true", help="show it again and again until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        DilocoError: There is no run at the URL, or it cannot be read.
    """
    store = open_store(args.url)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(run_status(store))) + b"\n")
        return 0
    from diloco_blob.cli.tables import make_console

    console = make_console()
    if not args.watch:
        console.print(_view(store, look(store)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    clock = SystemClock()
    found: Look = look(store)
    if not console.is_terminal:
        while True:
            console.print(_view(store, found))
            clock.sleep(WATCH_PLAIN_S)
            found = look(store, found)
            console.print()
    from rich.live import Live

    try:
        with Live(_view(store, found), console=console, auto_refresh=False, screen=True) as live:
            while True:
                clock.sleep(WATCH_S)
                found = look(store, found)
                live.update(_view(store, found), refresh=True)
    except KeyboardInterrupt:
        console.print(_view(store, found))
        return 0


def num_overdue(store: ObjectStore, found: Look) -> int:
    """Of how many islands work waits that any aggregator would have merged by now; 0 if one may yet be at it.

    Looks at the first fragment only: no request if it has a new version, else one HEAD for each island.
    """
    head, policy, now = found.heads[0], found.info.run.settings.policy, found.status.now
    if now <= head.created_at + OVERDUE_S:
        return 0
    arrived: dict[str, float] = {}
    for island in found.status.islands:
        next_one = head.tally.get(island.name, Tally()).consumed + 1
        try:
            arrived[island.name] = store.head(keys.receipt(island.name, head.fragment, next_one)).last_modified
        except NotFound:
            continue
    if not arrived or now <= max(arrived.values()) + policy.grace_s + OVERDUE_S:
        return 0
    all_here = all(island.name in arrived or island.state in ENDED for island in found.status.islands)
    in_time = all_here and len(arrived) >= policy.quorum_or_majority
    too_late = now > head.created_at + policy.deadline_s + OVERDUE_S and len(arrived) >= policy.min_contributions
    return len(arrived) if in_time or too_late else 0


def _view(store: ObjectStore, found: Look) -> "RenderableType":
    from rich.console import Group

    from diloco_blob.cli.tables import num_islands, plain, status_view

    view, overdue = status_view(found.status), num_overdue(store, found)
    if not overdue:
        return view
    how = command_line("aggregate", store.url, "--watch")
    waits = f"work of {num_islands(overdue)} waits for an aggregator: {how}"
    return Group(view, plain(""), plain(waits, style="yellow"))
