"""Islands on a thin link, beside DistributedDataParallel on the same link: how long each waits, and for what loss.

    make bench-link            or            sudo .venv/bin/python benchmarks/link/bench.py [--rates 100 --delays 50]

Needs Linux, root (network namespaces and a TUN device), and for all cases about half an hour on two quiet cores. Every
case that is done goes into `results.json` in the folder of this program at once, in place of an earlier one of the same
name; `report.py` makes `results.md` of it at the end.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, strftime
from typing import Any

import torch
from cases import CODECS, MODES, run_ddp, run_islands, run_probe
from network import HERE, Link, why_not
from report import write_report

STEPS = 250
CURVE_STEPS = 250
_CANNOT = 77
"""Exit code where the machine does not allow namespaces: what test programs end with that skip themselves."""
KINDS = ("probe", "curve", "ddp", "islands")
RESULTS = HERE / "results.json"
Case = tuple[str, Callable[[], dict[str, Any]]]


def planned(args: argparse.Namespace) -> Iterator[Case]:
    """The cases that were asked for, each with its name."""
    if "curve" in args.kinds:
        yield "DDP, loss by step", partial(run_ddp, Link(1000, 1), args.steps or CURVE_STEPS)
    for rate in args.rates:
        for delay in args.delays:
            link = Link(rate, delay)
            if "probe" in args.kinds:
                yield f"probe, {link.name}", partial(run_probe, link)
            if "ddp" in args.kinds:
                yield f"DDP, {link.name}", partial(run_ddp, link)
            if "islands" in args.kinds:
                for mode in args.modes:
                    for codec in args.codecs:
                        name = f"islands, {mode}, {codec}, {link.name}"
                        yield name, partial(run_islands, link, mode, codec, args.steps or STEPS)


def machine() -> str:
    """What this was measured on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )


def keep(path: Path, name: str, case: dict[str, Any]) -> None:
    """Put a case into the file."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[name] = {**case, "at": strftime("%Y-%m-%d %H:%M:%S"), "machine": machine()}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Run the cases one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[10.0, 100.0, 1000.0], help="Mbit/s")
    add("--delays", type=float, nargs="+", default=[1.0, 50.0], help="ms, one way")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    add("--codecs", nargs="+", choices=tuple(CODECS), default=list(CODECS))
    add("--steps", type=int, default=0, help="inner steps of an island, and of the training with DDP")
    add("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are taken away then, too
    if reason := why_not():
        print(f"bench.py: {reason}", file=sys.stderr)
        return _CANNOT
    for name, run in planned(args):
        start = perf_counter()
        keep(args.results, name, run())
        print(f"{name}: done in {perf_counter() - start:.0f} s", flush=True)
    print(write_report(args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
