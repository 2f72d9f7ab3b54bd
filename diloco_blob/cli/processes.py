"""The processes that `launch` keeps running: start, watch, start again, stop.

Each child has its own session, so that Ctrl-C in a terminal reaches it only through us, and its own log file, to which
each start appends. A child that dies is started again by the same command: at once if it had lived for a while,
otherwise after a pause that doubles. It is not started again when that cannot help: exit code 0 (done), exit code 2
(the words or settings are wrong), exit code 3 (a newer process has taken its island over), a traceback of an error of
ours that says the same, or when it died too often without having got any further in between: a few times by itself,
many times by signals. Signals go to process ids that we have not reaped yet, so they cannot reach a stranger who got
the number later.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from msgspec import Struct

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Denied, DilocoError, Fenced, InvalidSettings

QUICK_S = 10.0
"""A child that lived shorter than this died quickly."""
PAUSE_S = 0.5
"""Before a child that died quickly is started again; doubles each time."""
PAUSE_MAX_S = 30.0
POLL_S = 0.1
TAIL_BYTES = 16_384
LINE_CHARS_MAX = 600

_BY_SIGNAL = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a program that a signal has stopped, and that had time to say so."""
_GUARD = Path(__file__).with_name("guard.py")
_RAISED = re.compile(rf"{re.escape(DilocoError.__module__)}\.(\w+): ")
"""How the last line of a traceback begins, of a script that lets an error of ours pass: Python then exits with 1."""


class State(Enum):
    """What a child is doing."""

    RUNNING = "running"
    PAUSED = "restarting"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


class Command(Struct, frozen=True):
    """How a child is started, each time."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    endless: bool = False
    """Whether it only ends when told to (an aggregator): an exit code of 0 is then no reason not to start it again."""


class Event(Struct, frozen=True):
    """Something about a child that a person wants to know."""

    name: str
    text: str


class Child:
    """One process and its successors.

    Args:
        command: How to start it.
        clock: Time for pauses.
        max_restarts: How often it may be started again without having got any further in between.
        max_own_restarts: The same, while it ends by itself and no signal kills it; `max_restarts` by default.
    """

    def __init__(self, command: Command, clock: Clock, max_restarts: int, max_own_restarts: int | None = None) -> None:
        self.command = command
        self.state = State.PAUSED
        self.restarts = 0
        """In all."""
        self.failure: DilocoError | None = None
        self._clock = clock
        self._max_restarts = max_restarts
        self._max_own_restarts = max_restarts if max_own_restarts is None else min(max_restarts, max_own_restarts)
        self._best: tuple[int, ...] = ()
        self._in_vain = 0
        self._own_ends = 0
        """How often in a row it has ended by itself without having got any further."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._quick = 0
        self._log_offset = 0

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return self._process.pid if self._process else None

    def got_to(self, *figures: int) -> None:
        """Take note how far its work is, by figures that rise: if one is higher than ever, restarts count anew."""
        best = tuple(map(max, figures, self._best or figures))
        if best != self._best:
            self._best = best
            paused = self.state is State.PAUSED
            self._in_vain, self._own_ends = int(self.restarts > 0 and paused), min(self._own_ends, int(paused))

    def start(self) -> None:
        """Start the process, its output appended to the log.

        Raises:
            InvalidSettings: The log cannot be written, or the interpreter cannot be started.
        """
        argv = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), *self.command.argv]
        try:
            self.command.log.parent.mkdir(parents=True, exist_ok=True)
            with self.command.log.open("ab") as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(  # noqa: S603 - the user's own script is what we are asked to run
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(self.command.env),
                    start_new_session=True,
                )
        except OSError as error:
            raise InvalidSettings(
                f"cannot start {self.command.name} with its log at {self.command.log}: {error.strerror or error}"
            ) from error
        self._started_at = self._clock.monotonic()
        self.state = State.RUNNING

    def poll(self) -> Event | None:
        """Look after the process: notice its end, start it again when it is time."""
        if self.state is State.PAUSED and self._clock.monotonic() >= self._start_at:
            self.start()
            own = self._own_ends > 0 and self._max_own_restarts < self._max_restarts
            count, most = (self._own_ends, self._max_own_restarts) if own else (self._in_vain, self._max_restarts)
            return Event(self.command.name, f"is process {self.pid} now (restart {count} of {most})")
        if self.state is not State.RUNNING:
            return None
        code = self._reap()
        return None if code is None else self._ended(code)

    def last_line(self) -> str:
        """The last line for people that the newest process wrote to its log; empty if it wrote none."""
        lines = [line for line in self._tail() if not line.startswith("{")]
        return lines[-1][:LINE_CHARS_MAX] if lines else ""

    def _tail(self) -> list[str]:
        try:
            with self.command.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset, log.tell() - TAIL_BYTES))
                text = log.read(TAIL_BYTES).decode(errors="replace").replace("\0", "")  # holes that a crash left
        except OSError:
            return []
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _why_silent(self) -> str:
        """Why the log has no last words, if that is because nothing can be written there (a full disk); else empty."""
        try:
            with self.command.log.open("ab", buffering=0) as log:
                log.write(b"launch: it ended without a word\n")
        except OSError as error:
            return f"nothing can be written to its log: {error.strerror or error}"
        return ""

    def terminate(self) -> None:
        """Ask the process to stop (SIGTERM); never start it again."""
        if self._process is not None:
            # Not Popen.send_signal, which would reap a child that has ended already.
            os.kill(self._process.pid, signal.SIGTERM)
        elif self.state is State.PAUSED:
            self.state = State.STOPPED

    def kill(self) -> None:
        """End the process and all that it started (SIGKILL to its process group)."""
        if self._process is not None:
            _kill_group(self._process.pid)

    def gone(self) -> bool:
        """After `terminate` or `kill`: whether the process has ended."""
        if self._process is not None and self._reap() is not None:
            self.state = State.STOPPED
        return self._process is None

    def _reap(self) -> int | None:
        """The exit code if the process has ended; what it left of its process group ends with it."""
        assert self._process is not None  # noqa: S101 - only called while there is one
        if hasattr(os, "waitid"):
            # Look without reaping: until it is reaped its number cannot become anybody else's.
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            _kill_group(self._process.pid)
        code = self._process.poll()
        if code is not None:
            self._process = None
        return code

    def _ended(self, code: int) -> Event:
        name = self.command.name
        if code == 0 and not self.command.endless:
            self.state = State.DONE
            return Event(name, "done")
        how, hint = _how(code), f"log: {self.command.log}"
        raised, said = self._last_words() if code > 0 else ("", "")  # whoever is killed has none
        if code == InvalidSettings.exit_code or raised == InvalidSettings.__name__:
            return self._fail(InvalidSettings(f"{name} {how}{said}", hint))
        if code == Fenced.exit_code or raised == Fenced.__name__:
            return self._fail(Fenced(f"{name} was taken over by a newer process{said}", hint))
        if raised == Denied.__name__:
            return self._fail(Denied(f"{name} {how}{said}", hint))
        self._own_ends = self._own_ends + 1 if code > 0 and code not in _BY_SIGNAL else 0
        if self._in_vain >= self._max_restarts or self._own_ends > self._max_own_restarts:
            times = f"{self._in_vain} restart{'' if self._in_vain == 1 else 's'}"
            return self._fail(
                DilocoError(
                    f"{name} {how}, after {times} without progress{said}", f"{hint}; --max-restarts allows more"
                )
            )
        now = self._clock.monotonic()
        self._quick = self._quick + 1 if now - self._started_at < QUICK_S else 0
        pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** (self._quick - 1)) if self._quick else 0.0
        self.restarts += 1
        self._in_vain += 1
        self._start_at = now + pause
        self.state = State.PAUSED
        again = f"in {pause:.0f} s" if pause >= 1.0 else "now"
        return Event(name, f"{how}{said}; starting it again {again}")

    def _last_words(self) -> tuple[str, str]:
        """Of a process that ended by itself: what error of ours it let pass, if any, and what to say."""
        if not self._tail():
            reason = self._why_silent()
            return "", f"; {reason}" if reason else ""
        line = self.last_line()
        found = _RAISED.match(line)
        raised, line = (found[1], line[found.end() :]) if found else ("", line)
        if not raised and any((said := _RAISED.match(line)) and said[1] == Fenced.__name__ for line in self._tail()):
            raised = Fenced.__name__  # it may have gone on to say goodbye
        return raised, f": {line}" if line else ""

    def _fail(self, failure: DilocoError) -> Event:
        self.state = State.FAILED
        self.failure = failure
        return Event(self.command.name, failure.message)


def stop_all(
    children: Sequence[Child], clock: Clock, grace_s: float, hurry: Callable[[], bool] = lambda: False
) -> list[str]:
    """Stop every child: SIGTERM to all, time to finish, SIGKILL to those that are left.

    Args:
        children: Whom.
        clock: Time.
        grace_s: How long they have between the two.
        hurry: Whether to wait no longer; asked again and again.

    Returns:
        Names of those that had to be killed.
    """
    for child in children:
        child.terminate()
    until = clock.monotonic() + grace_s
    left = _still_there(children)
    while left and clock.monotonic() < until and not hurry():
        clock.sleep(POLL_S)
        left = _still_there(left)
    for child in left:
        child.kill()
    killed = [child.command.name for child in left]
    while left:
        clock.sleep(POLL_S)
        left = _still_there(left)
    return killed


def _still_there(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if not child.gone()]


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _kill_group(pid: int) -> None:
    # Nobody may be left in the group; macOS answers EPERM for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
