"""One run of one system: start it, watch what its workers write, kill one if asked to, measure, end everything.

The fault is the same for all: SIGKILL to every process of worker 1 in the middle of the round after `KILL_AFTER`
rounds, as if its machine had gone. A new process with nothing left of the old one loads its libraries, and joins when
worker 0 has completed `AWAY` more rounds. Whoever makes no progress is not waited for without end: the limits here are
the bench's, and what was cut off is said in the outcome.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from namespaces import Cell, Network
from task import Recipe

NUM_WORKERS = 2
KILLED = 1
KILL_AFTER, AWAY = 3, 3
START_LIMIT_S, RUN_LIMIT_S, FAULT_LIMIT_S = 180.0, 600.0, 900.0
STALL_S = 150.0
"""After the kill, worker 1 comes back at the latest when worker 0 has not completed a round for so long."""
AGAIN = "go-again"
"""The file that a worker which replaces a dead one waits for."""
_POLL_S, _END_S = 0.05, 20.0


class RunError(Exception):
    """A run that did not come to its end; the text says why."""


@dataclass
class Run:
    """A run that is up: where things are, and its processes."""

    folder: Path
    recipe: Recipe
    network: Network
    stack: ExitStack
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """For all processes, besides a bare environment."""

    @property
    def hub(self) -> Cell:
        """Where servers are."""
        return self.network.hub

    def cell(self, index: int) -> Cell:
        """Where worker `index` is."""
        return self.network.cells[f"worker-{index}"]

    def start(self, name: str, cell: Cell, words: list[str], env: Mapping[str, str] | None = None) -> None:
        """Start a process; its output goes to `<name>.log` in the run's folder."""
        bare = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        fixed = {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        log: IO[bytes] = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        whole = {**bare, **fixed, **self.env, **(env or {})}
        self.processes[name] = cell.start(words, env=whole, log=log, cwd=self.folder)

    def wait_for(self, file: str, limit_s: float = START_LIMIT_S) -> Path:
        """Wait until a file is there.

        Raises:
            RunError: It does not appear, or a process has ended meanwhile.
        """
        path, deadline = self.folder / file, monotonic() + limit_s
        while not path.exists():
            self.check_alive()
            if monotonic() > deadline:
                raise RunError(f"no {file} after {limit_s:g} s")
            sleep(_POLL_S)
        return path

    def check_alive(self) -> None:
        """See that nothing has ended with an error.

        Raises:
            RunError: A process has.
        """
        for name, process in self.processes.items():
            if process.poll():
                raise RunError(f"{name} ended with {process.returncode}: {last_line(self.folder / f'{name}.log')}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """What `worker-0`, `worker-1` or `server` has written down so far."""
        path = self.folder / f"{name}.events"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def has(self, name: str, event: str) -> bool:
        """Whether somebody has written down such an event."""
        return any(e["event"] == event for e in self.events(name))

    def rounds(self, index: int) -> int:
        """Rounds that worker `index` has completed."""
        return max((e["rounds"] for e in self.events(f"worker-{index}") if e["event"] == "round"), default=0)

    def stop(self, name: str) -> None:
        """End a process politely, then not."""
        process = self.processes.pop(name)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Fault:
    """Kills worker 1 and starts it again, when it is time."""

    def __init__(self, run: Run, replace: Callable[[int], None], come_back: Callable[[int], None]) -> None:
        self._run, self._replace, self._come_back = run, replace, come_back
        self.killed_s = self.back_s = 0.0
        self.stalled = False
        self._progress = (0, 0.0)

    def look(self, elapsed_s: float) -> None:
        """Do what is due; `elapsed_s` since all began."""
        survivor = self._run.rounds(1 - KILLED)
        if survivor != self._progress[0]:
            self._progress = (survivor, elapsed_s)
        if not self.killed_s:
            halves = [e["round"] for e in self._run.events(f"worker-{KILLED}") if e["event"] == "half"]
            if KILL_AFTER in halves:
                self._run.cell(KILLED).kill()
                gone = self._run.processes.pop(f"worker-{KILLED}")
                gone.wait()
                self._replace(KILLED)
                self.killed_s = elapsed_s
        elif not self.back_s:
            self.stalled = elapsed_s - max(self._progress[1], self.killed_s) > STALL_S
            if survivor >= KILL_AFTER + AWAY or self.stalled:
                let_go(self._run.folder, AGAIN, survivor)
                self._come_back(KILLED)
                self.back_s = elapsed_s


def let_go(folder: Path, name: str, rounds: int) -> None:
    """Let those go who wait for a file, and tell them the rounds that are over."""
    partial = folder / f"{name}.part"
    partial.write_text(str(rounds))
    partial.rename(folder / name)


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    said = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "(nothing)"


@contextmanager
def ended(run: Run) -> Iterator[None]:
    """At the end of the block no process of the run is left."""
    try:
        yield
    finally:
        for cell in run.network.all():
            cell.kill()
        for process in run.processes.values():
            process.wait()


def watch(run: Run, done: Callable[[], bool], fault: Fault | None) -> tuple[float, str]:
    """Wait for the end.

    Returns:
        Seconds, and why the run was cut off; empty if it was not.
    """
    start, limit = monotonic(), FAULT_LIMIT_S if fault else RUN_LIMIT_S
    let_go(run.folder, "go", 0)
    while True:
        elapsed = monotonic() - start
        if done():
            return elapsed, ""
        try:
            run.check_alive()
        except RunError as error:
            return elapsed, str(error)
        if elapsed > limit:
            at = ", ".join(f"worker {i} at round {run.rounds(i)}" for i in range(NUM_WORKERS))
            return elapsed, f"cut off after {limit:g} s: {at}"
        if fault:
            fault.look(elapsed)
        sleep(_POLL_S)
