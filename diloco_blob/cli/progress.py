"""How `launch` shows what is going on: a live view on a terminal, plain lines everywhere else."""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from diloco_blob.cli.run_status import ENDED, IslandView, RunStatus
from diloco_blob.cli.tables import human_count, human_seconds, islands_table, make_console, plain, versions

PLAIN_EVERY_S = 10.0
"""An island gets a plain line no more often than this."""

WIDE = 100
"""Columns from which on the live table has room for process ids."""
_VERSIONS_SHOWN = 5


class Scene(Struct, frozen=True):
    """What is to be shown at one moment."""

    elapsed_s: float
    run: str
    status: RunStatus | None
    """None while there is no run."""
    states: Mapping[str, str]
    """What `launch` itself knows of its islands, where that says more than their own word: restarting, done, …"""
    restarts: Mapping[str, int]
    aggregators: Mapping[str, str]
    """State of each aggregator process, with its restarts."""
    pids: Mapping[str, int | None] = {}
    """Of islands and aggregators; None while there is no process."""
    trouble: str = ""
    """Why the bucket cannot be looked at."""


class Board(Protocol):
    """Where progress is shown."""

    @property
    def shows_pids(self) -> bool:
        """Whether `show` tells the process ids, so that nobody needs to say them."""

    def say(self, text: str) -> None:
        """Tell something once: a process died, a file was written."""

    def versions(self, lines: Sequence[str]) -> None:
        """Tell of new versions."""

    def show(self, scene: Scene) -> None:
        """Show the present state."""

    def close(self) -> None:
        """Show nothing more."""


def make_board() -> Board:
    """The board for our stdout."""
    console = make_console()
    return LiveBoard(console) if console.is_terminal and not console.is_dumb_terminal else PlainBoard()


class LiveBoard:
    """A table that is drawn again in place; what is told once scrolls by above it."""

    def __init__(self, console: Console) -> None:
        self._lines: deque[str] = deque(maxlen=_VERSIONS_SHOWN)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    @property
    def shows_pids(self) -> bool:
        """See `Board.shows_pids`: if there is room."""
        return self._live.console.width >= WIDE

    def say(self, text: str) -> None:
        """See `Board.say`."""
        self._live.console.print(plain(text))

    def versions(self, lines: Sequence[str]) -> None:
        """See `Board.versions`; the newest stay in view."""
        self._lines.extend(lines)

    def show(self, scene: Scene) -> None:
        """See `Board.show`."""
        self._live.update(self._view(scene), refresh=True)

    def close(self) -> None:
        """See `Board.close`."""
        self._live.stop()

    def _view(self, scene: Scene) -> RenderableType:
        parts: list[RenderableType] = [_headline(scene), Text("")]
        if scene.status is None:
            parts.append(Text("waiting for the first island to create the run", style="dim"))
        else:
            pids = scene.pids if self.shows_pids else None
            parts.append(islands_table(scene.status, scene.restarts, scene.states, pids))
        aggregators = ", ".join(
            f"{name} {state}" + (f" (process {pid})" if (pid := scene.pids.get(name)) else "")
            for name, state in scene.aggregators.items()
        )
        parts += [Text(""), Text(aggregators or "no aggregator here", style="dim")]
        parts += [plain(line) for line in self._lines]
        if scene.trouble:
            parts.append(plain(scene.trouble, style="yellow"))
        return Group(*parts)


class PlainBoard:
    """A line when something changes, for logs and pipes."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._shown: dict[str, tuple[float, str, int]] = {}
        self._trouble = ""

    @property
    def shows_pids(self) -> bool:
        """See `Board.shows_pids`: they are told once."""
        return False

    def say(self, text: str) -> None:
        """See `Board.say`."""
        print(f"[{self._elapsed_s:6.1f} s] {plain(text).plain}", flush=True)

    def versions(self, lines: Sequence[str]) -> None:
        """See `Board.versions`."""
        for line in lines:
            self.say(line)

    def show(self, scene: Scene) -> None:
        """See `Board.show`."""
        self._elapsed_s = scene.elapsed_s
        if scene.trouble and scene.trouble != self._trouble:
            self.say(scene.trouble)
        self._trouble = scene.trouble
        for island in scene.status.islands if scene.status else ():
            if island.generation == 0:
                continue  # It has not said anything yet.
            state = scene.states.get(island.name, island.state)
            if state == "done" and island.state not in ENDED:
                continue  # Its last word is not here yet.
            before = self._shown.get(island.name, (-PLAIN_EVERY_S, "", -1))
            due = scene.elapsed_s - before[0] >= PLAIN_EVERY_S or state == "done"
            if due and (state, island.steps) != before[1:]:
                self._shown[island.name] = (scene.elapsed_s, state, island.steps)
                self.say(_island_line(island, state))

    def close(self) -> None:
        """See `Board.close`."""
        sys.stdout.flush()


def _headline(scene: Scene) -> Text:
    where = f"  {versions(scene.status)}" if scene.status else ""
    return Text.assemble(plain(scene.run, style="bold"), f"{where}  {human_seconds(scene.elapsed_s)}")


def _island_line(island: IslandView, state: str) -> str:
    loss = "" if island.loss is None else f", loss {island.loss:.3f}"
    behind = f", {island.versions_behind} behind" if island.versions_behind else ""
    speed = f", {human_count(island.tokens_per_s)} tokens/s" if island.tokens_per_s else ""
    return f"{island.name} {state}: step {island.steps}{loss}{speed}, version {island.version}{behind}"
