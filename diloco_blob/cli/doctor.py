"""`diloco-blob doctor`: can a run be trained at this URL, by whom, how fast, and what is to be done if not?"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from diloco_blob.cli.urls import folder_of
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol.doctor import Check, Examination, diagnose, exit_code
from diloco_blob.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

BUDGET_S = 10.0
"""How long a request that is not answered is repeated: a run would wait longer, a person would not."""

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}
_WIDTH = len("role aggregator")

_EPILOG = """\
examples:
  diloco-blob doctor s3://bucket/run                       before the first island is started
  diloco-blob doctor s3://bucket/run --island us-east-1a   with that island's own credential, on its machine
  diloco-blob doctor gs://bucket/run --json | jq .ok

Asks in order: is the store there and are we known to it; what may this credential do under each prefix, and which roles
can it play; does 'create if absent' hold in a race; is what was written seen at once; how fast is it, and what does its
clock say. Prints a line for each, with what to do about it. A credential that can only be an island, or only an
aggregator, is sound. Run it where the island or the aggregator will run, beside a run that goes on if you like: it
writes small objects (and one of --megabytes) with /_doctor/ in their names, deletes them, and touches nothing of a run.
Exit code 0: a run can be trained there. 1: something is broken. 2: the words are wrong. 4: the store does not answer.
What each check means: docs/doctor.md.
"""


class _Document(Struct):
    """What `--json` prints."""

    url: str
    ok: bool
    roles: list[str]
    """Those that this credential can play."""
    checks: list[Check]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    default = Examination()
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run, there or not: s3://, gs://, file:// or a folder")
    parser.add_argument("--island", metavar="NAME", help="test as this island: its own prefix, and it must be allowed")
    parser.add_argument("--racers", type=int, default=default.racers, metavar="N", help="creates at once (default 8)")
    parser.add_argument("--rounds", type=int, default=default.rounds, metavar="N", help="races (default 3)")
    parser.add_argument("--samples", type=int, default=default.samples, metavar="N", help="timed requests (default 20)")
    parser.add_argument("--megabytes", type=float, default=8.0, metavar="MB", help="sent and fetched (default 8)")
    parser.add_argument(
        "--parameters",
        type=float,
        default=0,
        metavar="N",
        help="of your model, such as 125e6 (default: the run's, or 1e8)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        InvalidSettings: The URL or a number makes no sense.
    """
    try:
        transfer_bytes, parameters = int(args.megabytes * 1e6), int(args.parameters)
    except (OverflowError, ValueError) as error:
        raise InvalidSettings("--megabytes and --parameters must be finite numbers") from error
    how = Examination(
        island=args.island,
        racers=args.racers,
        rounds=args.rounds,
        samples=args.samples,
        transfer_bytes=transfer_bytes,
        parameters=parameters,
    )
    clock, ids = SystemClock(), SystemIds()
    store = open_store(args.url, clock=clock, ids=ids, budget_s=BUDGET_S)
    checks: list[Check] = []
    found = diagnose(store, clock=clock, ids=ids, how=how)
    with _stopped_by_sigterm(), _no_new_folders(args.url), contextlib.closing(store), contextlib.closing(found):
        for check in found:
            checks.append(check)
            if not args.json:
                _print(check)
    code = exit_code(checks)
    if args.json:
        document = _Document(store.url, code == 0, _roles(checks), checks)
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    else:
        print(_verdict(checks))
    return code


def _print(check: Check) -> None:
    from diloco_blob.cli.tables import make_console, plain

    line = plain(f"{check.verdict:<8} ", style=_STYLES[check.verdict])
    line.append_text(plain(f"{check.name:<{_WIDTH}} ", style="bold"))
    line.append_text(plain(check.what))
    if check.hint:
        line.append_text(plain(f" → {check.hint}", style="italic"))
    make_console().print(line, soft_wrap=True)
    sys.stdout.flush()


def _roles(checks: list[Check]) -> list[str]:
    names = [check.name.partition("role ") for check in checks if check.verdict == "ok"]
    return [role for _, found, role in names if found]


def _verdict(checks: list[Check]) -> str:
    broken = [check.name for check in checks if check.verdict == "broken"]
    if broken:
        return f"a run can NOT be trained here like this: {', '.join(broken)}"
    warnings = sum(check.verdict == "warning" for check in checks)
    rest = f"; {warnings} warning{'' if warnings == 1 else 's'} above" if warnings else ""
    return f"a run can be trained here; this credential can be: {', '.join(_roles(checks))}{rest}"


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block by an exception, so that what was written is deleted."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _no_new_folders(url: str) -> Iterator[None]:
    """Remove the folders that were not there before, if they are empty: they are for the run to make."""
    new: list[Path] = []
    folder = folder_of(url)
    while folder is not None and folder.absolute().parent != folder.absolute() and not folder.absolute().exists():
        new.append(folder.absolute())
        folder = folder.absolute().parent
    try:
        yield
    finally:
        for made in new:
            with contextlib.suppress(OSError):
                made.rmdir()
