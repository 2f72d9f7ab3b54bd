"""Children: when they are started again and when not, and what is said about them."""

import os
import sys
import time
from pathlib import Path

import pytest

from diloco_blob.cli.processes import LINE_CHARS_MAX, PAUSE_MAX_S, QUICK_S, Child, Command, Event, State, stop_all
from diloco_blob.core.errors import InvalidSettings
from diloco_blob.testing.clock import VirtualClock


def make(tmp_path: Path, code: str, *, max_restarts: int = 3, endless: bool = False) -> tuple[Child, VirtualClock]:
    clock = VirtualClock()
    command = Command(
        name="x",
        argv=(sys.executable, "-c", code),
        env=dict(os.environ),
        log=tmp_path / "logs" / "x.log",
        endless=endless,
    )
    return Child(command, clock, max_restarts), clock


def next_event(child: Child) -> Event:
    """Poll until the process has ended or is started again; virtual time stands still."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        event = child.poll()
        if event is not None:
            return event
        time.sleep(0.01)
    raise AssertionError("nothing happened")


def test_done(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "print('fine')")
    child.start()
    assert next_event(child).text == "done"
    assert child.state is State.DONE
    assert child.last_line() == "fine"
    assert child.poll() is None


def test_pauses_double_while_it_dies_quickly(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(1)", max_restarts=8)
    child.start()
    pauses = []
    while child.state is not State.FAILED:
        text = next_event(child).text
        if child.state is State.PAUSED:
            pauses.append(float(text.split("again in ")[1].split(" s")[0]))
            assert child.poll() is None
            clock.sleep(pauses[-1])
            assert next_event(child).text == f"started again (restart {len(pauses)} of 8)"
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_MAX_S, PAUSE_MAX_S]
    assert child.failure is not None
    assert child.failure.exit_code == 1
    assert "after 8 restarts" in child.failure.message


def test_after_a_long_life_it_is_started_at_once(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(3)")
    child.start()
    clock.sleep(QUICK_S + 1)
    assert next_event(child).text == "ended with exit code 3, again at once"
    event = child.poll()
    assert event is not None
    assert event.text == "started again (restart 1 of 3)"
    stop_all([child], clock, 0.0)


def test_an_endless_process_that_ends_is_started_again(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "", endless=True)
    child.start()
    assert next_event(child).text == "ended with exit code 0, again in 0.5 s"


@pytest.mark.parametrize("endless", [False, True])
def test_exit_code_2_ends_it(tmp_path: Path, endless: bool) -> None:
    child, _ = make(tmp_path, "import sys; sys.exit(print('wrong word') or 2)", endless=endless)
    child.start()
    next_event(child)
    assert child.state is State.FAILED
    assert isinstance(child.failure, InvalidSettings)
    assert child.failure.message == "x ended with exit code 2: wrong word"


@pytest.mark.parametrize(
    "words",
    [
        "train.py: island x was started again by another process (start 2, this one is 1) (this one stops)",
        "diloco_blob.core.errors.Fenced: island x was started again by another process",
    ],
)
def test_a_fenced_island_ends(tmp_path: Path, words: str) -> None:
    child, _ = make(tmp_path, f"print({words!r}); raise SystemExit(1)")
    child.start()
    next_event(child)
    assert child.failure is not None
    assert child.failure.message.startswith("x was taken over by a newer process: ")


def test_the_last_line_is_that_of_the_newest_process_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").write_text("from an earlier start\n")
    child, _ = make(tmp_path, "raise SystemExit(1)")
    child.start()
    assert next_event(child).text == "ended with exit code 1, again in 0.5 s"
    long, _ = make(tmp_path, "print('a' * 100_000); print(); print(' '); raise SystemExit(2)")
    long.start()
    next_event(long)
    assert long.last_line() == "a" * LINE_CHARS_MAX


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    child, _ = make(tmp_path, "")
    with pytest.raises(InvalidSettings, match="cannot start x with its log at"):
        child.start()


def test_stopping_a_child_that_has_just_ended_or_waits(tmp_path: Path) -> None:
    ended, clock = make(tmp_path, "")
    ended.start()
    pid = ended.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    waiting, _ = make(tmp_path, "raise SystemExit(1)")
    waiting.start()
    next_event(waiting)
    assert stop_all([ended, waiting], clock, 0.0) == []
    assert (ended.state, waiting.state) == (State.STOPPED, State.STOPPED)
    assert waiting.poll() is None
