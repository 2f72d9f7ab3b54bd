"""Run whatever is missing, then write the table and the figures: see the package's docstring."""

import argparse
import platform
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch

from quality import results as stored
from quality.figure import write_figures
from quality.studies import QUICK, STUDIES, Study
from quality.table import write_table
from quality.training import Config, Result, run
from quality.tuning import Outcome, plan, start_of

HERE = Path(__file__).parent

Plan = Generator[Config, Result, None]


def work(config: Config, *, device: str, path: Path) -> Result:
    """One run in a process of the pool; its result is on disk before anybody hears of it."""
    torch.set_num_threads(1)
    result = run(config, device=device)
    stored.append(result, path)
    return result


class Queue:
    """Runs contenders' plans side by side: the next run of each in turn, so that all get on alike.

    Args:
        path: Where results are.
        processes: Runs at the same time.
        device: Where they compute.
    """

    def __init__(self, path: Path, processes: int, device: str) -> None:
        self._path, self._processes = path, processes
        self._work = partial(work, device=device, path=path)

    def study(self, study: Study, only: Iterable[str] = ()) -> None:
        """Run everything of a study that is missing."""
        known = stored.read(self._path)
        names = set(only)
        waiting: deque[tuple[Plan, Config]] = deque()
        for contender in study.contenders:
            if not names or contender.name in names:
                planned = plan(study, contender, start_of(study, contender, known), Outcome())
                self._advance(planned, next(planned), known, waiting)
        with ProcessPoolExecutor(self._processes) as pool:
            running: dict[Future[Result], Plan] = {}
            while waiting or running:
                while waiting and len(running) < self._processes:
                    planned, config = waiting.popleft()
                    if config.key in known:  # another contender's plan was the same run
                        self._advance(planned, config, known, waiting)
                    else:
                        running[pool.submit(self._work, config)] = planned
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    result = future.result()
                    known[result.key] = result
                    _tell(study, result)
                    self._advance(running.pop(future), result.config, known, waiting)

    @staticmethod
    def _advance(planned: Plan, config: Config, known: dict[str, Result], waiting: deque[tuple[Plan, Config]]) -> None:
        """Go through what is known already; queue the first run that is not."""
        while config.key in known:
            try:
                config = planned.send(known[config.key])
            except StopIteration:
                return
        waiting.append((planned, config))


def _tell(study: Study, result: Result) -> None:
    config = result.config
    bits = "diverged" if result.bits is None else f"{result.bits:.4f} bits per byte"
    flat = "data parallel" if config.settings is None else " ".join(f"{k}={v}" for k, v in config.settings.items())
    print(f"{study.name}: {bits}, lr {config.lr}, seed {config.seed}, {result.seconds} s: {flat}", flush=True)


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description="Held-out bits per byte at equal tokens, against bytes exchanged.")
    parser.add_argument("--quick", action="store_true", help="a few tiny runs, kept apart from the real results")
    parser.add_argument("--study", nargs="*", default=[], help=f"only these: {', '.join(s.name for s in STUDIES)}")
    parser.add_argument("--contender", nargs="*", default=[], help="only these")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time, one thread each")
    parser.add_argument("--device", default="cpu", help="where to compute")
    parser.add_argument("--report", action="store_true", help="run nothing; write table and figures of what is there")
    args = parser.parse_args()
    unknown = set(args.study) - {study.name for study in STUDIES}
    if unknown:
        sys.exit(f"no study {', '.join(sorted(unknown))}")
    folder = Path("quality-quick.work") if args.quick else HERE
    folder.mkdir(exist_ok=True)
    path = folder / stored.PATH.name
    studies = (QUICK,) if args.quick else STUDIES
    queue = Queue(path, args.processes, args.device)
    for study in studies:
        if not args.report and (not args.study or study.name in args.study):
            queue.study(study, args.contender)
            report(folder, path, studies)
    report(folder, path, studies)


def report(folder: Path, path: Path, studies: Sequence[Study]) -> None:
    """Write table and figures of what is there."""
    known = stored.read(path)
    write_table(folder / "results.md", studies, known, f"{platform.machine()}, torch {torch.__version__}")
    write_figures(folder, studies, known)


if __name__ == "__main__":
    main()
