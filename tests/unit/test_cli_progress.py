"""What `launch` shows: rarely on pipes, in place on terminals, and always what the bucket says."""

import io

import pytest
from rich.console import Console

from diloco_blob.cli.progress import PLAIN_EVERY_S, LiveBoard, PlainBoard, Scene, make_board
from diloco_blob.cli.run_status import RunStatus, run_status
from diloco_blob.cli.watcher import Watcher
from diloco_blob.core.errors import Unavailable
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import FORMAT, IslandStatus, encode
from diloco_blob.testing.toy import ToyRun


def status_at(toy: ToyRun, step: int, state: str = "training") -> RunStatus:
    record = IslandStatus(
        format=FORMAT,
        run=toy.run.digest,
        island="a",
        generation=1,
        state=state,
        steps=step,
        tokens=64 * step,
        version=0,
        versions_behind=1,
        loss=1.25,
        tokens_per_s=1200.0,
        staleness=0,
        requests=1,
        requests_by_class={},
        bytes_up=1,
        bytes_down=1,
        wait_s=0.0,
        train_s=1.0,
        written_at=0.0,
    )
    toy.store.put(keys.status("a"), encode(record))
    return run_status(toy.store)


def scene(elapsed_s: float, status: RunStatus | None, **changes: object) -> Scene:
    fields: dict[str, object] = {
        "elapsed_s": elapsed_s,
        "run": "demo/run",
        "status": status,
        "states": {},
        "restarts": {"a": 0},
        "aggregators": {"aggregator-0": "running"},
    }
    return Scene(**{**fields, **changes})  # type: ignore[arg-type]


def test_plain_lines_are_rare_and_only_about_changes(capsys: pytest.CaptureFixture[str]) -> None:
    toy, board = ToyRun(), PlainBoard()
    toy.join("a")
    board.show(scene(0.0, None))
    for second in range(25):
        board.show(scene(float(second), status_at(toy, second)))
    for second in range(25, 60):
        board.show(scene(float(second), status_at(toy, 24)))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "[   0.0 s] a training: step 0, loss 1.250, 1.2 k tokens/s, version 0, 1 behind",
        "[  10.0 s] a training: step 10, loss 1.250, 1.2 k tokens/s, version 0, 1 behind",
        "[  20.0 s] a training: step 20, loss 1.250, 1.2 k tokens/s, version 0, 1 behind",
        "[  30.0 s] a training: step 24, loss 1.250, 1.2 k tokens/s, version 0, 1 behind",
    ]
    assert PLAIN_EVERY_S == 10.0


def test_an_island_that_has_not_said_anything_gets_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    toy, board = ToyRun(), PlainBoard()
    toy.join("b")
    board.show(scene(0.0, status_at(toy, 5)))
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines()] == ["a"]


def test_what_launch_knows_of_an_island_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    toy, board = ToyRun(), PlainBoard()
    board.show(scene(0.0, status_at(toy, 5), states={"a": "restarting"}))
    assert "a restarting: step 5" in capsys.readouterr().out


def test_trouble_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    board = PlainBoard()
    for second in range(5):
        board.show(scene(float(second), None, trouble="the bucket does not answer"))
    assert capsys.readouterr().out.count("does not answer") == 1


def test_a_pipe_gets_plain_lines() -> None:
    assert isinstance(make_board(), PlainBoard)


def test_the_live_view() -> None:
    toy = ToyRun()
    file = io.StringIO()
    board = LiveBoard(Console(file=file, width=100, force_terminal=True, color_system=None))
    try:
        board.show(scene(0.0, None))
        board.say("something [bold]happened[/bold]")
        board.versions([f"version {number}: a 1.000" for number in range(1, 9)])
        board.show(scene(75.0, status_at(toy, 5), restarts={"a": 2}, trouble="no answer"))
    finally:
        board.close()
    text = file.getvalue()
    assert "waiting for the first island to create the run" in text
    assert "something [bold]happened[/bold]" in text
    last = text[text.rindex("demo/run") :]
    assert "1 min 15 s" in last
    assert "version 8: a 1.000" in last
    assert "version 3: a" not in last
    assert "no answer" in last
    [row] = [line for line in last.splitlines() if line.startswith("a ")]
    assert row.split() == ["a", "training", "5", "1.2", "k", "1.250", "0", "1", "0", "2"]


def test_process_ids_where_there_is_room() -> None:
    toy = ToyRun()
    for width, shown in ((100, True), (80, False)):
        file = io.StringIO()
        board = LiveBoard(Console(file=file, width=width, force_terminal=True, color_system=None))
        try:
            assert board.shows_pids is shown
            board.show(scene(0.0, status_at(toy, 5), pids={"a": 4711, "aggregator-0": 4712}))
        finally:
            board.close()
        assert ("4711" in file.getvalue()) is shown
        assert "aggregator-0 running (process 4712)" in file.getvalue()


def test_an_island_is_done_when_its_last_word_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    toy, board = ToyRun(), PlainBoard()
    board.show(scene(0.0, status_at(toy, 5)))
    board.show(scene(0.5, status_at(toy, 5), states={"a": "done"}))
    for second in (1.0, 2.0):
        board.show(scene(second, status_at(toy, 6, "done"), states={"a": "done"}))
    assert [line.split()[4:7] for line in capsys.readouterr().out.splitlines()] == [
        ["training:", "step", "5,"],
        ["done:", "step", "6,"],
    ]


def test_the_watcher_tells_each_version_once() -> None:
    toy = ToyRun()
    toy.join("a")
    toy.send("a", 1)
    toy.aggregate(drain=True)
    watcher = Watcher(toy.store, interval_s=60.0)
    watcher.start()
    assert watcher.new_lines() == []  # it was there before
    for version in (1, 2):
        toy.send("a", version, base_version=version)
        toy.aggregate(drain=True)
    watcher.look_once()
    assert watcher.new_lines() == ["version 2: a 1.000", "version 3: a 1.000"]
    watcher.look_once()
    assert watcher.new_lines() == []
    watcher.stop()


def test_the_watcher_waits_for_a_run_and_survives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyRun()
    data, _ = toy.store.get(keys.RUN)
    toy.store.delete(keys.RUN)
    watcher = Watcher(toy.store, interval_s=60.0)
    watcher.look_once()
    assert (watcher.latest(), watcher.trouble()) == (None, "")
    toy.store.put(keys.RUN, data)
    toy.join("a")
    toy.send("a", 1)
    toy.aggregate(drain=True)
    watcher.look_once()
    assert watcher.latest() is not None
    assert watcher.new_lines() == ["version 1: a 1.000"]  # the run began while we watched

    def fail(*_: object) -> None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr("diloco_blob.cli.watcher.look", fail)
        watcher.look_once()
    assert watcher.trouble() == "the store is away"
    assert watcher.latest() is not None
    watcher.look_once()
    assert watcher.trouble() == ""
