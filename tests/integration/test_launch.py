"""`launch` with real processes: it finishes, survives kills, stops cleanly, and says in one line what went wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("toy_worker.py")
SETTINGS = """
[sync]
sync_every = 5
[policy]
grace_s = 2.0
deadline_s = 20.0
takeover_s = 1.0
"""


class Launched:
    """A running `launch`, its output, and the processes below it."""

    def __init__(self, folder: Path, *words: str, islands: int = 2, worker: tuple[str, ...] = ()) -> None:
        self.folder = folder
        settings = folder / "settings.toml"
        settings.write_text(SETTINGS)
        self.run = folder / "run"
        self.work = folder / words[words.index("--dir") + 1] if "--dir" in words else folder / "run.work"
        self.logs = self.work / "logs"
        number = len(list(folder.glob("out-*.txt")))
        self.out = (folder / f"out-{number}.txt").open("w")
        launch = ("launch", "--islands", str(islands), "--run", str(self.run), "--settings", str(settings))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diloco_blob.cli.main", *launch, *words, str(WORKER), *worker],
            stdout=self.out,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )

    def wait(self, timeout: float = 90) -> int:
        return self.process.wait(timeout)

    def text(self) -> str:
        return Path(self.out.name).read_text()

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def children(self) -> list[int]:
        return descendants(self.process.pid)

    def until(self, condition: Callable[[], object], timeout: float = 60) -> None:
        until(lambda: condition() or self.process.poll() is not None, timeout)
        assert self.process.poll() is None, self.text()

    def pid_of(self, name: str) -> int:
        """Of a child, by the log that it writes to."""
        for pid in self.children():
            try:
                if Path(f"/proc/{pid}/fd/1").readlink().name == f"{name}.log":
                    return pid
            except OSError:
                continue
        return 0


def until(condition: Callable[[], object], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below one, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco_blob.cli.main", *map(str, words)], capture_output=True, text=True, cwd=folder
    )


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(*words: str, **options: object) -> Launched:
        started.append(Launched(tmp_path, *words, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        left = one.children()
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        for pid in left:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        one.out.close()


def test_it_runs_to_the_end_and_sums_up(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch("--export", "model", worker=("--steps", "20"))
    assert launched.wait() == 0, launched.text()
    text = launched.text()
    assert re.search(r"version 1: island-0 0\.500, island-1 0\.500", text)
    assert re.search(r"\] island-1 is process \d+\n", text)
    assert text.count("island-0 done") == 1
    assert "held-out bits per byte   8.000 at version 0, 2.500 at version 4" in text
    assert "per island and round" in text
    assert "a sample [bold]of[/bold] text" in text  # others' text is no markup
    assert "\x1b" not in text  # nor does it, or we, steer what is no terminal
    assert (tmp_path / "model" / "model.safetensors").exists()
    verified = command("verify", launched.run, folder=tmp_path)
    assert verified.returncode == 0, verified.stdout
    status = json.loads(command("status", launched.run, "--json", folder=tmp_path).stdout)
    assert {island["name"]: island["state"] for island in status["islands"]} == {"island-0": "done", "island-1": "done"}
    assert status["totals"]["accepted"] == 8
    assert launched.log("island-0").count("step 20") == 1
    assert '"action":"merged"' in launched.log("aggregator-0")


def test_the_same_command_on_a_finished_run_ends_quickly(launch: Callable[..., Launched]) -> None:
    assert launch(worker=("--steps", "5")).wait() == 0
    again = launch(worker=("--steps", "5"))
    assert again.wait(30) == 0, again.text()


def test_a_killed_island_is_started_again(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch(worker=("--steps", "20", "--kill-at", "7"))
    assert launched.wait() == 0, launched.text()
    assert re.search(r"island-0 was killed by SIGKILL; starting it again now\n", launched.text())
    assert "restarts: 1" in launched.text()
    assert command("verify", launched.run, folder=tmp_path).returncode == 0
    status = json.loads(command("status", launched.run, "--json", folder=tmp_path).stdout)
    assert [island["steps"] for island in status["islands"]] == [20, 20]
    assert status["islands"][0]["generation"] == 2


def test_a_killed_aggregator_is_started_again(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch(worker=("--steps", "60", "--step-s", "0.05"))
    launched.until(lambda: "version 1:" in launched.text())
    os.kill(launched.pid_of("aggregator-0"), signal.SIGKILL)
    audited = command("verify", launched.run, folder=tmp_path)  # a run that goes on may be audited too
    assert audited.returncode == 0, audited.stdout
    assert launched.wait() == 0, launched.text()
    assert "aggregator-0 was killed by SIGKILL" in launched.text()
    assert re.search(r"aggregator-0 is process \d+ now \(restart 1 of 10\)", launched.text())
    assert command("verify", launched.run, folder=tmp_path).returncode == 0


def test_two_aggregators_do_no_harm(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch("--aggregators", "2", worker=("--steps", "20"))
    assert launched.wait() == 0, launched.text()
    assert command("verify", launched.run, folder=tmp_path).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_leaves_no_process_and_the_same_command_resumes(
    launch: Callable[..., Launched], number: signal.Signals, code: int
) -> None:
    launched = launch(worker=("--steps", "30", "--step-s", "0.1"))
    launched.until(lambda: "version 1:" in launched.text())
    children = launched.children()
    assert len(children) == 3
    os.kill(launched.process.pid, number)
    assert launched.wait(40) == code, launched.text()
    assert not any(alive(pid) for pid in children)
    assert "the same command resumes" in launched.text()
    resumed = launch(worker=("--steps", "30", "--step-s", "0.01"))
    assert resumed.wait() == 0, resumed.text()
    # It went on; it did not begin again.
    assert launched.log("island-0").count(" step 3\n") == 1


def test_children_do_not_survive_a_killed_launcher(launch: Callable[..., Launched]) -> None:
    launched = launch(worker=("--steps", "1000", "--step-s", "0.1"))
    launched.until(lambda: "step 1" in launched.log("island-1") and len(launched.children()) == 3)
    children = launched.children()
    launched.process.kill()
    launched.process.wait()
    until(lambda: not any(alive(pid) for pid in children), 10)


def test_a_second_signal_kills_the_stubborn_and_their_children(launch: Callable[..., Launched]) -> None:
    launched = launch(worker=("--stubborn",), islands=1)
    launched.until(lambda: "stubborn" in launched.log("island-0"))
    launched.until(lambda: len(launched.children()) == 3)
    children = launched.children()
    os.kill(launched.process.pid, signal.SIGINT)
    launched.until(lambda: "Ctrl-C: stopping (press again to kill at once)" in launched.text())
    os.kill(launched.process.pid, signal.SIGINT)
    assert launched.wait(20) == 130
    assert "island-0 did not stop, and was killed" in launched.text()
    assert not any(alive(pid) for pid in children)


def test_exit_code_2_is_not_tried_again(launch: Callable[..., Launched]) -> None:
    launched = launch(worker=("--exit", "2"))
    assert launched.wait(30) == 2, launched.text()
    errors = [line for line in launched.text().splitlines() if "error" in line]
    assert len(errors) == 1
    assert re.match(
        r"diloco-blob: error: island-[01] ended with exit code 2: these are the last words \(log: .*\.log\)", errors[0]
    )
    assert "Traceback" not in launched.text()


def test_a_fenced_island_is_not_tried_again(launch: Callable[..., Launched]) -> None:
    words = "toy_worker: island island-0 was started again by another process (start 2, this one is 1)"
    launched = launch(worker=("--exit", "3", "--last-words", words), islands=1)
    assert launched.wait(30) == 3
    assert f"error: island-0 was taken over by a newer process: {words}" in launched.text()
    assert "again" not in launched.text().replace(words, "")


def test_restarts_are_bounded(launch: Callable[..., Launched]) -> None:
    launched = launch("--max-restarts", "2", worker=("--exit", "1"), islands=1)
    assert launched.wait(30) == 1
    text = launched.text()
    assert "again now" in text
    assert "again in 1 s" in text
    assert text.count("after 2 restarts") == 1
    words = "island-0 ended with exit code 1, after 2 restarts without progress: these are the last words"
    assert f"error: {words}" in text


def test_an_island_that_is_given_up_does_not_stop_the_others(launch: Callable[..., Launched], tmp_path: Path) -> None:
    launched = launch("--max-restarts", "1", worker=("--steps", "20", "--fail", "island-1"), islands=3)
    assert launched.wait() == 1, launched.text()
    text = launched.text()
    assert "island-1 ended with exit code 1, after 1 restart without progress: these are the last words" in text
    assert "island-1 IS GIVEN UP: the others go on" in text
    assert "held-out bits per byte" in text  # the summary
    assert text.splitlines()[-1].startswith("diloco-blob: error: island-1 ended with exit code 1")
    assert launched.log("island-0").count("step 20") == 1
    assert command("verify", launched.run, folder=tmp_path).returncode == 0


def test_an_island_that_gets_further_each_time_is_never_given_up(launch: Callable[..., Launched]) -> None:
    launched = launch("--max-restarts", "1", worker=("--steps", "20", "--kill-every", "7"), islands=1)
    assert launched.wait() == 0, launched.text()
    assert "restarts: 2" in launched.text()


def test_a_second_launch_in_the_same_folder_is_refused(launch: Callable[..., Launched]) -> None:
    first = launch(worker=("--steps", "1000000", "--step-s", "0.1"), islands=1)
    first.until(lambda: "step 1" in first.log("island-0"))
    second = launch(worker=("--steps", "20"), islands=1)
    assert second.wait(30) == 2
    assert second.text().startswith(f"diloco-blob: error: another launch (process {first.process.pid}) is at work in ")
    assert second.text().count("\n") == 1
    assert first.process.poll() is None


def test_what_an_earlier_launch_left_is_not_shown_as_now(launch: Callable[..., Launched]) -> None:
    first = launch(worker=("--steps", "10"))
    assert first.wait() == 0, first.text()
    again = launch(worker=("--steps", "20", "--step-s", "0.05"))
    assert again.wait() == 0, again.text()
    shown = [line for line in again.text().splitlines() if re.search(r"island-\d done: step 10", line)]
    assert shown == []


def test_the_command_to_verify_with_can_be_pasted(tmp_path: Path) -> None:
    done = command("launch", "--islands", "1", "--run", "my run", WORKER, "--steps", "5", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" -m diloco_blob.cli.main verify 'my run'")


def test_a_script_that_joins_nothing_is_told_so(launch: Callable[..., Launched]) -> None:
    launched = launch(worker=("--exit", "0"), islands=1)
    assert launched.wait(30) == 1
    assert "none created a run" in launched.text()


def test_islands_elsewhere_are_not_closed_out(launch: Callable[..., Launched]) -> None:
    first = launch(worker=("--steps", "5"))
    assert first.wait() == 0, first.text()
    path = first.run / "islands" / "island-0" / "status.json"
    status = json.loads(path.read_text())
    other = first.run / "islands" / "elsewhere-1"
    other.mkdir()
    (other / "status.json").write_text(json.dumps({**status, "island": "elsewhere-1", "state": "training"}))
    again = launch(worker=("--steps", "5"))
    assert again.wait() == 0, again.text()
    assert "elsewhere-1 still at work elsewhere: the run goes on" in again.text()


def test_two_launches_of_one_run_end_with_one_line(launch: Callable[..., Launched]) -> None:
    """The newer one wins; the older is fenced and stops, and does not start a war of restarts."""
    older = launch("--dir", "older.work", worker=("--steps", "1000000", "--step-s", "0.1"), islands=1)
    older.until(lambda: "version 1:" in older.text())
    newer = launch("--dir", "newer.work", worker=("--steps", "20"), islands=1)
    assert older.wait(60) == 3, older.text() + newer.text()
    assert "error: island-0 was taken over by a newer process" in older.text()
    assert newer.wait() == 0, newer.text()
