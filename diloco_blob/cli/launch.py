"""`diloco-blob launch`: N processes of the user's script as islands, aggregators beside them, until all are done.

torchrun's habit for a bucket. What is asked of the script: it joins the run of `DILOCO_RUN` as `DILOCO_ISLAND`, resumes
when it is started again, and leaves with 0 when it is done. Whatever dies is started again; Ctrl-C stops everything,
and the same command goes on from there.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
from msgspec import Struct

from diloco_blob.aggregate.report import FragmentReport
from diloco_blob.cli.lock import locked
from diloco_blob.cli.plan import Plan, aggregator_commands, check, island_commands, new_run
from diloco_blob.cli.processes import POLL_S, Child, State, stop_all
from diloco_blob.cli.progress import Board, Scene, make_board
from diloco_blob.cli.run_status import IslandView, RunStatus
from diloco_blob.cli.urls import RUNS, command_line, default_workdir, folder_of, short
from diloco_blob.cli.watcher import Watcher
from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import DilocoError, Fenced, InvalidSettings, NotFound
from diloco_blob.core.ids import Ids, SystemIds
from diloco_blob.store import open_store

STOP_S = 30.0
"""From SIGTERM to SIGKILL: time for an island to send what it has and to write its checkpoint."""
LOOK_S, LOOK_LOCAL_S = 5.0, 1.0
SHOW_S = 0.5
MAX_RESTARTS, MAX_OWN_RESTARTS = 10, 2
"""Without progress in between: of a process that signals kill, and of an island that ends by itself."""
BACK_S = 60.0
"""How long the aggregators of a launch wait for the islands of an earlier one to be back."""
PREFLIGHT_S = 20.0
"""How long a store may be silent before we say so instead of starting."""

_EPILOG = f"""\
examples:
  diloco-blob launch --islands 3 workers/train.py
  diloco-blob launch --islands 3 --run s3://bucket/run --settings streaming-diloco workers/train.py --steps 2000
  diloco-blob launch --islands 2 --run demo/run --export demo/model workers/train.py --data texts/

Words after SCRIPT are the script's own. Each island is a process `python SCRIPT ...` with these variables set:
  DILOCO_RUN             the run's URL                 DILOCO_ISLAND          island-0, island-1, ...
  DILOCO_ISLANDS         how many there are            DILOCO_SETTINGS        as given by --settings
  DILOCO_CHECKPOINT_DIR  a local folder of its own     OMP_NUM_THREADS        its share of the cores, unless set

What launch does for each exit code of a script:
  0                      done; it is not started again
  2                      the words or settings are wrong: all is stopped, with the last line of its log
  3                      another process has taken the island over: all is stopped
  any other, a signal    it is started again, and resumes
A traceback of diloco_blob's InvalidSettings or Fenced counts as 2 or 3; after one of Denied the island is given up.

An island that ends by itself {MAX_OWN_RESTARTS + 1} times in a row with no new step is given up, and so is any
process that dies {MAX_RESTARTS + 1} times without progress (an island with no new step, an aggregator with no new
version); --max-restarts N sets both. The others go on to the end, and then the exit code of all is 1. Ctrl-C stops all;
the same command resumes.

Logs and checkpoints are in --dir, which only one launch at a time can use: by default beside the run's folder, as
FOLDER.work, or under {RUNS}/ if the run is in a bucket. On another machine the same script joins with the
first two variables.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--islands", type=_at_least(1), required=True, metavar="N", help="how many islands to run here")
    add("--run", metavar="URL", help="s3://, gs://, file:// or a folder; without it, a fresh folder in diloco-runs/")
    add("--settings", metavar="FILE", help="settings of a new run: a .toml file, or the name of a preset")
    add("--aggregators", type=_at_least(0), default=1, metavar="N", help="aggregators beside them (default 1)")
    add("--export", type=Path, metavar="DIR", help="at the end, write the model there")
    add("--dir", type=Path, metavar="WORKDIR", help="where logs and checkpoints go")
    add(
        "--max-restarts",
        type=_at_least(0),
        metavar="N",
        help="restarts of a process without progress in between; see below",
    )
    add("script", metavar="SCRIPT", type=Path, help="your training script, for example workers/train.py")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        DilocoError: Something is wrong before the start, or a process ended so that starting it again cannot help.
    """
    clock, ids = SystemClock(), SystemIds()
    url = args.run or new_run(clock, ids)
    settings = args.settings
    plan = Plan(
        run=url,
        workdir=(args.dir or default_workdir(url)).absolute(),
        script=args.script.absolute(),
        arguments=tuple(args.arguments),
        islands=args.islands,
        aggregators=args.aggregators,
        settings=str(Path(settings).absolute()) if settings and settings.endswith(".toml") else settings,
        export=args.export,
        max_restarts=MAX_RESTARTS if args.max_restarts is None else args.max_restarts,
        max_own_restarts=MAX_OWN_RESTARTS if args.max_restarts is None else None,
    )
    if plan.export:
        from diloco_blob.cli.export import check_directory

        check_directory(plan.export, url, hint="give another --export folder")
    check(plan, open_store(url, budget_s=PREFLIGHT_S), ids)
    with locked(plan.workdir):
        return Launch(plan, clock, ids).run(fresh=args.run is None)


class _Outcome(Struct, frozen=True):
    """How the islands' work ended."""

    failure: DilocoError | None = None
    """Why nothing goes on."""
    signal: int = 0


class Launch:
    """One run of the command, from the first process to the summary.

    Args:
        plan: What to do; it has been checked.
        clock: Time.
        ids: Source of write ids, for the last pass of the aggregator.
    """

    def __init__(self, plan: Plan, clock: Clock, ids: Ids) -> None:
        self._plan = plan
        self._clock = clock
        self._ids = ids
        self._signals: list[int] = []
        self._islands = [
            Child(command, clock, plan.max_restarts, plan.max_own_restarts)
            for command in island_commands(plan, os.environ)
        ]
        self._aggregators = [
            Child(command, clock, plan.max_restarts) for command in aggregator_commands(plan, os.environ)
        ]
        self._earlier: dict[str, int] = {}
        """Starts of each island before this launch."""
        self._watcher = Watcher(open_store(plan.run), LOOK_LOCAL_S if folder_of(plan.run) else LOOK_S)

    @property
    def _children(self) -> list[Child]:
        return [*self._aggregators, *self._islands]

    def run(self, *, fresh: bool) -> int:
        """Run everything; returns the exit code.

        Args:
            fresh: Whether nobody named the run, so that the user has to be told where it is.

        Raises:
            DilocoError: It failed; all processes have been stopped.
        """
        started = self._clock.monotonic()
        restore = self._catch_signals()
        board = make_board()
        try:
            islands = f"{self._plan.islands} island{'' if self._plan.islands == 1 else 's'}"
            board.say(f"run {self._plan.run}: {islands}, logs in {short(self._plan.workdir)}/logs")
            self._watcher.start()
            found = self._watcher.latest()
            self._earlier = {island.name: island.generation for island in found.status.islands} if found else {}
            outcome = self._supervise(board, started)
            self._stop_rest(board, outcome)
            if outcome.signal == 0 and outcome.failure is None:
                self._drain(board)
                board.show(self._scene(self._clock.monotonic() - started))
                outcome = _Outcome(signal=self._signals[0] if self._signals else 0)
        finally:
            self._watcher.stop()
            board.close()
            # Nothing is left by now, unless an exception brought us here.
            stop_all(self._children, self._clock, 0.0)
            restore()
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.signal:
            where = f"; add --run {shlex.quote(self._plan.run)}" if fresh else ""
            print(f"stopped; what was sent is in the run, the same command resumes{where}", file=sys.stderr)
            return 128 + outcome.signal
        self._summarise(self._clock.monotonic() - started)
        given_up = [child.failure for child in self._children if child.failure is not None]
        if given_up:
            more = f"; and {len(given_up) - 1} more" if len(given_up) > 1 else ""
            raise DilocoError(f"{given_up[0].message}{more}", given_up[0].hint)
        return 0

    def _catch_signals(self) -> Callable[[], None]:
        """Note signals instead of dying from them; what was ignored (nohup) stays ignored. Returns what undoes it."""

        def note(number: int, _: FrameType | None) -> None:
            self._signals.append(number)

        wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        before = [(number, signal.signal(number, note)) for number in wanted]

        def restore() -> None:
            for number, handler in before:
                signal.signal(number, handler)

        return restore

    def _supervise(self, board: Board, started: float) -> _Outcome:
        """Keep every process running until all islands have ended, going on is no use, or a signal came."""
        for child in self._islands:
            self._start(child, board)
        waiting, shown = list(self._aggregators), 0.0
        while True:
            if self._signals:
                return _Outcome(signal=self._signals[0])
            if waiting and self._are_back(self._clock.monotonic() - started):
                for child in waiting:
                    self._start(child, board)
                waiting = []
            for child in self._children:
                event = child.poll()
                if event is None or child.state is State.DONE:
                    continue  # The board shows who is done.
                if child.failure is None:
                    board.say(f"{event.name} {event.text}")
                elif self._is_the_end(child):
                    return _Outcome(failure=child.failure)  # Whoever gets it says it.
                else:
                    board.say(event.text)
                    board.say(f"{event.name} IS GIVEN UP: the others go on, without it ({child.failure.hint})")
            if all(child.state in {State.DONE, State.FAILED} for child in self._islands):
                return _Outcome()
            now = self._clock.monotonic()
            if now - shown >= SHOW_S:
                self._note_progress()
                board.versions(self._watcher.new_lines())
                board.show(self._scene(now - started))
                shown = now
            self._clock.sleep(POLL_S)

    def _start(self, child: Child, board: Board) -> None:
        child.start()
        if not board.shows_pids:
            board.say(f"{child.command.name} is process {child.pid}")

    def _are_back(self, elapsed_s: float) -> bool:
        """Whether the islands that a launch before this one had are there again, or have had time enough.

        When that launch was stopped they said that they leave. An aggregator that starts before they are back would
        believe them, and merge what one of them had sent alone.
        """
        if not self._earlier or elapsed_s >= BACK_S:
            return True
        found = self._watcher.latest()
        now = {island.name: island.generation for island in found.status.islands} if found else {}
        return all(
            child.state in {State.DONE, State.FAILED}
            or now.get(child.command.name, 0) > self._earlier.get(child.command.name, -1)
            for child in self._islands
        )

    def _is_the_end(self, child: Child) -> bool:
        """Whether nothing can go on after a child has failed: a mistake, a take-over, or none of its kind is left."""
        kind = self._islands if child in self._islands else self._aggregators
        return isinstance(child.failure, InvalidSettings | Fenced) or all(one.state is State.FAILED for one in kind)

    def _note_progress(self) -> None:
        """Tell the children how far the run is: restarts count only while nothing comes of them."""
        found = self._watcher.latest()
        if found is None:
            return
        views = {island.name: island for island in found.status.islands}
        for island in self._islands:
            if view := views.get(island.command.name):
                island.got_to(view.steps, view.accepted)
        for aggregator in self._aggregators:
            aggregator.got_to(sum(head.version for head in found.heads))

    def _stop_rest(self, board: Board, outcome: _Outcome) -> None:
        """Stop what still runs: the aggregators after a good end, everything after another."""
        if outcome.signal:
            what = "Ctrl-C" if outcome.signal == signal.SIGINT else signal.Signals(outcome.signal).name
            again = "press again" if outcome.signal == signal.SIGINT else "again"
            board.say(f"{what}: stopping ({again} to kill at once)")
        known = len(self._signals)
        killed = stop_all(self._children, self._clock, STOP_S, hurry=lambda: len(self._signals) > known)
        for name in killed:
            board.say(f"{name} did not stop, and was killed")

    def _drain(self, board: Board) -> None:
        """What islands sent last is merged, however little it is."""
        from diloco_blob.cli.aggregate import drain, left_line

        self._watcher.stop()
        self._watcher.look_once()
        elsewhere = self._elsewhere()
        if elsewhere:
            board.say(f"{', '.join(elsewhere)} still at work elsewhere: the run goes on")
            return
        told: set[int] = set()
        found = self._watcher.latest()
        num_fragments = len(found.heads) if found else 0

        def tell(report: FragmentReport) -> None:
            if report.action == "elsewhere" and report.look_again_s and report.fragment not in told:
                told.add(report.fragment)
                board.say(f"{left_line(report, num_fragments)}: waiting for that, at most {report.look_again_s:.0f} s")

        try:
            left = drain(
                open_store(self._plan.run),
                clock=self._clock,
                ids=self._ids,
                stop=lambda: bool(self._signals),
                on_report=tell,
            )
        except NotFound:
            return  # The summary says so.
        for report in left:
            how = command_line("aggregate", self._plan.run, "--drain")
            board.say(f"{left_line(report, num_fragments)}: to merge what is left, {how}")
        self._watcher.look_once()
        board.versions(self._watcher.new_lines())

    def _elsewhere(self) -> list[str]:
        """Islands of the run that are at work, and not ours: to drain would be to close rounds in their faces."""
        found, ours = self._watcher.latest(), {child.command.name for child in self._islands}
        at_work = {"starting", "training", "waiting", "paused", "finishing"}
        islands = found.status.islands if found else ()
        return [island.name for island in islands if island.state in at_work and island.name not in ours]

    def _scene(self, elapsed_s: float) -> Scene:
        found = self._watcher.latest()
        told = {State.PAUSED, State.DONE, State.FAILED}
        return Scene(
            elapsed_s=elapsed_s,
            run=self._plan.run,
            status=self._without_earlier(found.status) if found else None,
            states={c.command.name: c.state.value for c in self._islands if c.state in told},
            restarts={c.command.name: c.restarts for c in self._islands},
            aggregators={
                c.command.name: c.state.value + (f" (restarts: {c.restarts})" if c.restarts else "")
                for c in self._aggregators
            },
            pids={c.command.name: c.pid for c in self._children},
            trouble=self._watcher.trouble(),
        )

    def _without_earlier(self, status: RunStatus) -> RunStatus:
        """What our islands said of themselves before this launch says nothing of now: they are starting."""
        ours = {child.command.name for child in self._islands}

        def now(island: IslandView) -> IslandView:
            if island.name not in ours or island.generation > self._earlier.get(island.name, 0):
                return island
            return msgspec.structs.replace(island, state="starting", generation=0)

        return msgspec.structs.replace(status, islands=tuple(now(island) for island in status.islands))

    def _summarise(self, elapsed_s: float) -> None:
        from diloco_blob.cli.export import export
        from diloco_blob.cli.run_status import run_status
        from diloco_blob.cli.tables import human_seconds, make_console, summary_view, versions

        store, console = open_store(self._plan.run), make_console()
        try:
            status = run_status(store)
        except NotFound:
            raise DilocoError(
                f"every island ended, but none created a run at {self._plan.run}",
                "does the script join the run of $DILOCO_RUN? See workers/train.py",
            ) from None
        restarts = sum(child.restarts for child in self._children)
        again = f", restarts: {restarts}" if restarts else ""
        console.print(f"run {self._plan.run}: {versions(status)} after {human_seconds(elapsed_s)}{again}")
        console.print(summary_view(status))
        console.print()
        if self._plan.export:
            console.print(f"model                    {export(store, self._plan.export)}", soft_wrap=True)
        console.print(f"audit it                 {command_line('verify', self._plan.run)}", soft_wrap=True)


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        return value

    return parse
