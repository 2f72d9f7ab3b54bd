"""`diloco-blob status`: how far a run is, from its bucket alone."""

import argparse
import signal
import sys

import msgspec

from diloco_blob.cli.run_status import Look, look, run_status
from diloco_blob.core.clock import SystemClock
from diloco_blob.store import open_store

WATCH_S = 2.0
WATCH_PLAIN_S = 10.0

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
    from diloco_blob.cli.tables import make_console, status_view

    console = make_console()
    if not args.watch:
        console.print(status_view(run_status(store)))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    clock = SystemClock()
    found: Look = look(store)
    if not console.is_terminal:
        while True:
            console.print(status_view(found.status))
            clock.sleep(WATCH_PLAIN_S)
            found = look(store, found)
            console.print()
    from rich.live import Live

    try:
        with Live(status_view(found.status), console=console, auto_refresh=False, screen=True) as live:
            while True:
                clock.sleep(WATCH_S)
                found = look(store, found)
                live.update(status_view(found.status), refresh=True)
    except KeyboardInterrupt:
        console.print(status_view(found.status))
        return 0
