"""Children: when they are started again and when not, and what is said about them."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from diloco_blob.cli.processes import LINE_CHARS_MAX, PAUSE_MAX_S, QUICK_S, Child, Command, Event, State, stop_all
from diloco_blob.core.errors import Denied, DilocoError, Fenced, InvalidSettings
from diloco_blob.testing.clock import VirtualClock


def make(
    tmp_path: Path, code: str, *, max_restarts: int = 3, own: int | None = None, endless: bool = False
) -> tuple[Child, VirtualClock]:
    clock = VirtualClock()
    command = Command(
        name="x",
        argv=(sys.executable, "-c", code),
        env=dict(os.environ),
        log=tmp_path / "logs" / "x.log",
        endless=endless,
    )
    return Child(command, clock, max_restarts, own), clock


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
            found = re.fullmatch(r"ended with exit code 1; starting it again (?:now|in (\d+) s)", text)
            assert found is not None
            pauses.append(float(found[1] or 0.5))
            assert child.poll() is None
            clock.sleep(pauses[-1])
            assert next_event(child).text == f"is process {child.pid} now (restart {len(pauses)} of 8)"
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_MAX_S, PAUSE_MAX_S]
    assert child.failure is not None
    assert child.failure.exit_code == 1
    assert "after 8 restarts without progress" in child.failure.message


def test_after_a_long_life_it_is_started_at_once(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(4)")
    child.start()
    clock.sleep(QUICK_S + 1)
    assert next_event(child).text == "ended with exit code 4; starting it again now"
    event = child.poll()
    assert event is not None
    assert event.text == f"is process {child.pid} now (restart 1 of 3)"
    stop_all([child], clock, 0.0)


def test_an_endless_process_that_ends_is_started_again(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "", endless=True)
    child.start()
    assert next_event(child).text == "ended with exit code 0; starting it again now"


@pytest.mark.parametrize("endless", [False, True])
def test_exit_code_2_ends_it(tmp_path: Path, endless: bool) -> None:
    child, _ = make(tmp_path, "import sys; sys.exit(print('wrong word') or 2)", endless=endless)
    child.start()
    next_event(child)
    assert child.state is State.FAILED
    assert isinstance(child.failure, InvalidSettings)
    assert child.failure.message == "x ended with exit code 2: wrong word"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('last words'); sys.exit(3)",
        "from diloco_blob.core.errors import Fenced; raise Fenced('taken over')",  # Python ends with 1
        "from diloco_blob.core.errors import Fenced\nimport atexit\natexit.register(print, 'bye')\nraise Fenced('x')",
    ],
)
def test_a_fenced_island_ends(tmp_path: Path, code: str) -> None:
    child, _ = make(tmp_path, code)
    child.start()
    next_event(child)
    assert isinstance(child.failure, Fenced)
    assert child.failure.message.startswith("x was taken over by a newer process: ")


@pytest.mark.parametrize("error", [InvalidSettings, Denied])
def test_a_traceback_of_an_error_that_stays_is_not_tried_again(tmp_path: Path, error: type[DilocoError]) -> None:
    name = error.__name__
    child, _ = make(tmp_path, f"from diloco_blob.core.errors import {name}; raise {name}('so it is', 'do that')")
    child.start()
    next_event(child)
    assert type(child.failure) is error
    assert child.failure.message == "x ended with exit code 1: so it is (do that)"


def test_an_island_that_ends_by_itself_is_given_up_sooner(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(1)", max_restarts=10, own=2)
    child.start()
    for progress in (1, 2, 2):
        child.got_to(progress)
        next_event(child)
        clock.sleep(PAUSE_MAX_S)
        next_event(child)
    next_event(child)
    assert child.failure is not None
    assert child.failure.message == "x ended with exit code 1, after 2 restarts without progress"


def test_restarts_are_counted_against_their_own_bound(tmp_path: Path) -> None:
    code = "import os, sys; os.path.exists('DIES') and sys.exit(1); os.kill(os.getpid(), 9)".replace(
        "DIES", str(tmp_path / "dies")
    )
    child, clock = make(tmp_path, code, max_restarts=10, own=2)
    child.start()
    told = []
    for number in range(5):
        next_event(child)
        clock.sleep(PAUSE_MAX_S)
        if number == 2:
            (tmp_path / "dies").touch()
        told.append(next_event(child).text.partition("restart ")[2])
    stop_all([child], clock, 0.0)
    assert told == ["1 of 10)", "2 of 10)", "3 of 10)", "1 of 2)", "2 of 2)"]


def test_whoever_is_killed_has_no_last_words(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "import os; print('step 7', flush=True); os.kill(os.getpid(), 9)", own=0)
    child.start()
    assert next_event(child).text == "was killed by SIGKILL; starting it again now"


def test_json_is_not_shown_to_people(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "print('out of luck'); print('{\"action\": \"merged\"}'); raise SystemExit(1)")
    child.start()
    assert next_event(child).text == "ended with exit code 1: out of luck; starting it again now"


def test_words_that_only_sound_like_it_are_no_takeover(tmp_path: Path) -> None:
    child, _ = make(tmp_path, "print('fenced: was started again by another process'); raise SystemExit(1)")
    child.start()
    next_event(child)
    assert child.failure is None


def test_progress_makes_restarts_count_anew(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(1)", max_restarts=2)
    child.start()
    for progress in (5, 9, 9, 7):  # dying at the same step again is no progress, nor is falling back
        child.got_to(progress)
        next_event(child)
        if child.state is State.FAILED:
            break
        clock.sleep(PAUSE_MAX_S)
        next_event(child)
    assert child.restarts == 3
    assert child.failure is not None
    assert child.failure.message == "x ended with exit code 1, after 2 restarts without progress"


def test_progress_that_is_seen_only_after_the_end_counts(tmp_path: Path) -> None:
    child, clock = make(tmp_path, "raise SystemExit(1)", max_restarts=2)
    child.start()
    for steps, merged in ((5, 0), (5, 1), (4, 2), (6, 2)):
        next_event(child)
        child.got_to(steps, merged)
        clock.sleep(PAUSE_MAX_S)
        assert next_event(child).text == f"is process {child.pid} now (restart 1 of 2)"
    stop_all([child], clock, 0.0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_log_on_a_full_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").symlink_to("/dev/full")
    child, _ = make(tmp_path, "print('nobody reads this', flush=True)", max_restarts=0)
    child.start()
    event = next_event(child)
    assert "; nothing can be written to its log: No space left on device" in event.text


def test_the_last_line_is_that_of_the_newest_process_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").write_text("from an earlier start\n")
    child, _ = make(tmp_path, "raise SystemExit(1)")
    child.start()
    assert next_event(child).text == "ended with exit code 1; starting it again now"
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
