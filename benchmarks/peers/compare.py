"""Peers in one run: the same model, data, seeds and steps through every system, and what each cost.

    make bench-peers
    python benchmarks/peers/compare.py --seeds 0 --only hivemind torchft --no-fault

Two workers on this machine, each in a network namespace of its own, so that every byte that it sends or receives is
counted whoever sent it. Each system runs as its authors' documentation or examples run it (see `worker_*.py`), in a
virtual environment of its own. A second run of each loses worker 1 to SIGKILL for three rounds. Linux and root.

Writes `results.json`, of which each finished run is a part at once, and `results.md`. Runs that are in `results.json`
already are not repeated, unless --again.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import namespaces
import numpy as np
import tables
import venvs
from scenario import NUM_WORKERS, STALL_S, Fault, Run, RunError, ended, last_line, watch
from systems import SYSTEMS, System
from task import Evaluator, Recipe, digest, weights, write_task

HERE = Path(__file__).resolve().parent
_EXIT_S = 30.0


def measure(system: System, recipe: Recipe, folder: Path, *, fault: bool) -> dict[str, Any]:
    """One run of a system.

    Returns:
        What `results.json` has of it.
    """
    write_task(folder, recipe)
    names = [f"worker-{i}" for i in range(NUM_WORKERS)] + list(system.extra_cells)
    with ExitStack() as stack:
        net = stack.enter_context(namespaces.network(names))
        run = Run(folder, recipe, net, stack)
        stack.enter_context(ended(run))
        outcome: dict[str, Any] = {"system": system.name, "seed": recipe.seed, "fault": fault}
        try:
            system.prepare(run)
            for index in range(NUM_WORKERS):
                system.start_worker(run, index)
            wait_until_ready(system, run)
        except RunError as error:
            return {**outcome, "failed": str(error)}
        before = {name: cell.link_bytes() for name, cell in net.cells.items()}
        system.begin(run)
        watcher = Fault(run, partial(system.replace, run), partial(system.come_back, run)) if fault else None
        seconds, cut_off = watch(run, lambda: system.is_done(run), watcher)
        after = {name: cell.link_bytes() for name, cell in net.cells.items()}
        outcome |= {"seconds": round(seconds, 1), "cut_off": cut_off, "load": round(os.getloadavg()[0], 1)}
        if watcher:
            times = {"killed_s": round(watcher.killed_s, 1), "back_s": round(watcher.back_s, 1)}
            outcome |= {**times, "stalled": watcher.stalled, "stall_limit_s": STALL_S}
        if system.networked:
            outcome["link"] = {
                name: {"down": after[name][0] - before[name][0], "up": after[name][1] - before[name][1]}
                for name in net.cells
            }
        wait_for_exit(run)
        outcome |= results_of(system, run)
        begun = {worker["initial"] for worker in outcome["workers"]}
        assert begun == {digest(weights(recipe.model()))}, f"{system.name} began with other weights: {begun}"
        if system.bucket:
            run.stop("hub_s3")
            asked = json.loads((folder / "requests.json").read_text())
            names_of = {cell.address: name for name, cell in net.cells.items()}
            outcome["requests"] = {names_of.get(address, address): said for address, said in asked.items()}
        return outcome


def wait_until_ready(system: System, run: Run) -> None:
    """Wait until all workers have loaded everything.

    Raises:
        RunError: One has ended, or takes too long.
    """
    deadline = monotonic() + 180.0
    while not system.is_ready(run):
        run.check_alive()
        if monotonic() > deadline:
            raise RunError("not ready after 180 s")
        sleep(0.05)


def wait_for_exit(run: Run) -> None:
    """Let workers that have finished close what they have open."""
    deadline = monotonic() + _EXIT_S
    for index in range(NUM_WORKERS):
        process = run.processes.get(f"worker-{index}")
        while process and run.has(f"worker-{index}", "finished") and process.poll() is None and monotonic() < deadline:
            sleep(0.05)


def results_of(system: System, run: Run) -> dict[str, Any]:
    """Losses of what the workers and the system left, and what the workers wrote down."""
    evaluator = Evaluator(run.folder)
    found: dict[str, Any] = {"workers": []}
    for index in range(NUM_WORKERS):
        events = run.events(f"worker-{index}")
        path = run.folder / f"worker-{index}.npz"
        at = [(e["down"], e["up"]) for e in events if e["event"] == "round"]
        found["workers"].append(
            {
                "loss": evaluator.loss(dict(np.load(path))) if path.exists() else None,
                "rounds": run.rounds(index),
                "rounds_trained": len(at),
                "said": [e[key] for e in events for key in ("said", "participants") if key in e],
                "round_bytes": [[b[0] - a[0], b[1] - a[1]] for a, b in pairwise(at)],
                "initial": next((e["initial"] for e in events if e["event"] == "ready"), None),
                "first_batch": next((e["first_batch"] for e in events if e["event"] == "ready"), None),
                "joined": [e["rounds"] for e in events if e["event"] == "joined"],
                "last_line": last_line(run.folder / f"worker-{index}.log"),
            }
        )
    kept = system.global_weights(run)
    found["global_loss"] = evaluator.loss(kept) if kept else None
    return found


def machine() -> dict[str, Any]:
    """Where and when."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and data; medians are shown")
    add("--fault-seeds", type=int, nargs="+", default=[0], help="of the runs that lose a worker")
    add("--only", nargs="+", metavar="SYSTEM", choices=[s.name for s in SYSTEMS], help="these systems alone")
    add("--no-fault", action="store_true", help="no runs that lose a worker")
    add("--again", action="store_true", help="repeat runs that results.json has")
    pyenv = Path.home() / ".pyenv/versions/3.12.1/bin/python"
    found = shutil.which("python3.12") or (str(pyenv) if pyenv.exists() else None)
    add("--python312", default=found, metavar="PATH", help="a Python 3.12 for gradientmail")
    add("--results", type=Path, default=HERE, metavar="FOLDER", help="where results.json and results.md are")
    add("--keep", type=Path, metavar="FOLDER", help="keep the runs' folders (logs, events) there")
    return parser.parse_args(argv)


def main() -> int:
    """Do all runs that are asked for."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces and processes are taken away
    if reason := namespaces.why_not():
        print(f"bench-peers: {reason}", file=sys.stderr)
        return 1
    wanted = [s for s in SYSTEMS if not args.only or s.name in args.only]
    for system in wanted:
        reason = venvs.ensure(system.venv, args.python312)
        about: dict[str, Any] = {"skipped": {system.name: reason}}
        if not reason:
            about = {"skipped": {system.name: ""}, "versions": {system.name: venvs.versions(system.venv)}}
        keep_results(args.results, about)
        if reason:
            print(f"{system.name}: skipped, {reason}", flush=True)
            continue
        plan = [(seed, False) for seed in args.seeds]
        if system.networked and not args.no_fault:
            plan += [(seed, True) for seed in args.fault_seeds]
        for seed, fault in plan:
            if args.again or not find(read_results(args.results), system.name, seed, fault=fault):
                outcome = do(system, Recipe(seed=seed), args.keep, fault=fault)
                keep_results(args.results, {"machine": machine(), "recipe": Recipe().__dict__}, outcome)
                print(tables.line(outcome), flush=True)
    print((args.results / "results.md").read_text())
    return 0


def read_results(folder: Path) -> dict[str, Any]:
    """What `results.json` has."""
    path = folder / "results.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": [], "skipped": {}}
    return found


def find(results: dict[str, Any], name: str, seed: int, *, fault: bool) -> list[dict[str, Any]]:
    """The run of a system with a seed, if it is there."""
    return [r for r in results["runs"] if (r["system"], r["seed"], r["fault"]) == (name, seed, fault)]


def keep_results(folder: Path, about: dict[str, Any], outcome: dict[str, Any] | None = None) -> None:
    """Add to `results.json` and write `results.md` again; another bench may have added to it meanwhile."""
    results = read_results(folder)
    for key, value in about.items():
        results[key] = {**results.get(key, {}), **value}
    results["rules"] = {system.name: system.rule for system in SYSTEMS}
    results["skipped"] = {name: reason for name, reason in results["skipped"].items() if reason}
    if outcome:
        old = find(results, outcome["system"], outcome["seed"], fault=outcome["fault"])
        results["runs"] = [r for r in results["runs"] if r not in old] + [outcome]
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(tables.text(results))


def do(system: System, recipe: Recipe, keep: Path | None, *, fault: bool) -> dict[str, Any]:
    """One run in a folder that is taken away afterwards, unless it is to be kept."""
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        name = f"{system.name}-{recipe.seed}{'-fault' if fault else ''}".replace(" ", "-")
        folder = Path(keep.absolute() if keep else temporary, name)
        shutil.rmtree(folder, ignore_errors=True)
        return measure(system, recipe, folder, fault=fault)


if __name__ == "__main__":
    sys.exit(main())
