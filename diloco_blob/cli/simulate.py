"""`diloco-blob simulate protocol`: the protocol under fire, from one seed after the other."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from diloco_blob.core.errors import InvalidSettings

if TYPE_CHECKING:
    from diloco_blob.sim.protocol import Outcome

TRACE_LINES = 60
"""Of the trace of a failing seed that are printed unless all are asked for: the last."""

_EPILOG = """\
examples:
  diloco-blob simulate protocol --seeds 1000               a thousand histories
  diloco-blob simulate protocol --from 12 --seeds 1 --trace    one history, as it went

In a trace, `island-0#2` is the second process of the world, and runs island-0; `watcher` is an aggregator in a loop,
`function` one that an event or a timer started, `gc` and `sweeper` collect. In brackets: what befell a request.

Islands, aggregators, collectors: the code that runs in production, on a virtual clock and a store in memory. The seed
decides everything: settings, speeds, which requests are slow, refused, lost, cut short, repeated or late, who crashes,
stalls and comes back beside its replacement, and whose clock is wrong. An auditor looks at every effect on the bucket.
Prints the first seed that breaks a promise and the events that led there, exit code 1; else how often each fault was
injected, exit code 0. The same seed gives the same events, byte for byte.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("what", choices=["protocol"], help="what to simulate")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds (default 1000)")
    parser.add_argument("--from", type=int, default=0, metavar="S", dest="first", help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    parser.add_argument(
        "--trace", action="store_true", help="print what happened to the bucket and to whom, in order (with --seeds 1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code: 0 if every promise held for every seed, else 1.

    Raises:
        InvalidSettings: The numbers make no sense, or greenlet is not installed.
    """
    if args.seeds < 1 or args.first < 0 or args.jobs < 1:
        raise InvalidSettings("--seeds and --jobs must be at least 1, and --from at least 0")
    if args.trace and args.seeds != 1:
        raise InvalidSettings("--trace prints the events of one seed", "give --seeds 1 --from S")
    try:
        from diloco_blob.sim import campaign
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        raise InvalidSettings("simulating needs greenlet, which is not installed", "pip install greenlet") from error
    if args.trace:
        _print_lines(campaign.trace(args.first))
    tally = Tally()
    for outcome in campaign.outcomes(args.first, args.seeds, min(args.jobs, args.seeds)):
        tally.add(outcome)
        if tally.seeds % 100 == 0 and sys.stderr.isatty():
            print(f"\r{tally.seeds:,} seeds", end="", file=sys.stderr, flush=True)
        if not outcome.ok:
            break
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(tally.document())) + b"\n")
    else:
        if tally.failed is not None and not args.trace:
            _print_last_lines(tally.failed.seed, campaign.trace(tally.failed.seed))
        _print_lines(tally.lines())
    return 1 if tally.failed else 0


@dataclass
class Tally:
    """What happened in all seeds so far."""

    seeds: int = 0
    versions: int = 0
    contributions: int = 0
    effects: int = 0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed: "Outcome | None" = None

    def add(self, outcome: "Outcome") -> None:
        """One more seed."""
        self.seeds += 1
        self.versions += outcome.versions
        self.contributions += outcome.merged
        self.effects += outcome.num_effects
        self.events += outcome.num_events
        self.counts += outcome.counts
        if not outcome.ok:
            self.failed = outcome

    def document(self) -> dict[str, object]:
        """For programs."""
        names = ("seeds", "versions", "contributions", "effects", "events")
        failed = asdict(self.failed) | {"counts": dict(self.failed.counts)} if self.failed else None
        figures = {name: getattr(self, name) for name in names}
        return {"ok": not failed, **figures, "failed": failed, "counts": dict(sorted(self.counts.items()))}

    def lines(self) -> list[str]:
        """For people: how often each fault was injected, and the verdict."""
        lines = [f"{count:>12,}  {name}" for name, count in sorted(self.counts.items())]
        lines.append(
            f"{self.seeds:,} seeds, {self.versions:,} versions, {self.contributions:,} contributions merged, "
            f"{self.effects:,} writes and deletions looked at, {self.events:,} events"
        )
        if self.failed is None:
            return [*lines, "every promise held"]
        return [*lines, f"seed {self.failed.seed} breaks a promise: {self.failed.promise}: {self.failed.what}"]


def _print_last_lines(seed: int, lines: list[str]) -> None:
    num_left_out = len(lines) - TRACE_LINES
    if num_left_out > 0:
        print(f"... {num_left_out} events before; all: diloco-blob simulate protocol --from {seed} --seeds 1 --trace")
    _print_lines(lines[-TRACE_LINES:])


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
