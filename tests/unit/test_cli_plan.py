"""What `launch` checks before it starts a process, and how it starts them."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from diloco_blob.cli.launch import BACK_S, Launch
from diloco_blob.cli.main import main
from diloco_blob.cli.plan import Plan, aggregator_commands, check, island_commands, new_run
from diloco_blob.cli.processes import State
from diloco_blob.cli.urls import absolute_url, command_line, default_workdir, folder_of
from diloco_blob.core.errors import Denied, InvalidSettings
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Settings, load_settings
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.layout import make_layout
from diloco_blob.store import open_store
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.toy import random_tensors


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never started')")
    return Plan(
        run=str(tmp_path / "run"),
        workdir=tmp_path / "run.work",
        script=script,
        arguments=("--steps", "5"),
        islands=3,
        aggregators=2,
        settings=None,
        export=None,
        max_restarts=10,
    )


def checked(plan: Plan) -> None:
    check(plan, open_store(plan.run, budget_s=1.0), SeededIds(0))


def create(plan: Plan, settings: Settings) -> None:
    shapes = {"w": (4,)}
    layout = make_layout([("w", (4,), "float32")], 1)
    create_run(open_store(plan.run), settings, layout, random_tensors(0, shapes), ids=SeededIds(0), created_by="x")


def test_a_good_plan_leaves_nothing_in_the_bucket(plan: Plan) -> None:
    checked(plan)
    assert list(open_store(plan.run).list("")) == []
    assert (plan.workdir / "logs").is_dir()


def test_no_script(plan: Plan) -> None:
    plan.script.unlink()
    with pytest.raises(InvalidSettings, match="there is no script"):
        checked(plan)


@pytest.mark.parametrize(
    ("settings", "message"), [("no-such-preset", "no preset"), ("/nowhere/x.toml", "cannot read settings")]
)
def test_wrong_settings(plan: Plan, settings: str, message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        checked(msgspec.structs.replace(plan, settings=settings))


def test_other_settings_than_the_runs(plan: Plan) -> None:
    create(plan, load_settings("diloco").resolved(3))
    checked(plan)
    checked(msgspec.structs.replace(plan, settings="diloco"))
    checked(msgspec.structs.replace(plan, settings="diloco", islands=7))  # islands come and go
    with pytest.raises(InvalidSettings) as refused:
        checked(msgspec.structs.replace(plan, settings="local-sgd"))
    assert " → " in refused.value.message
    assert "another --run URL" in refused.value.hint


def test_settings_for_more_islands_than_there_will_be(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[policy]\nquorum = 5\n")
    settings = msgspec.structs.replace(plan, settings=str(tmp_path / "run.toml"))
    with pytest.raises(InvalidSettings, match=r"with 3 islands, policy\.quorum \(5\)"):
        checked(settings)
    checked(msgspec.structs.replace(settings, islands=5))
    create(plan, load_settings(tmp_path / "run.toml").resolved(5))
    checked(settings)  # the run is there, and more islands may be elsewhere


def test_a_store_that_cannot_be_written_to(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Denied):
        checked(msgspec.structs.replace(plan, run=str(tmp_path / "file" / "run")))


def test_memory_is_not_shared_between_processes(plan: Plan) -> None:
    with pytest.raises(InvalidSettings, match="memory"):
        checked(msgspec.structs.replace(plan, run="memory://x"))


def test_nothing_is_started_on_a_mistake(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--islands", "2", "--run", plan.run]
    assert main([*words, "nowhere.py"]) == 2
    assert main([*words, "--settings", "nothing", str(plan.script)]) == 2
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main([*words, "--export", "model", str(plan.script)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 3
    assert captured.out == ""
    assert captured.err.endswith("config.json is there and not ours (give another --export folder)\n")
    assert not list(plan.workdir.glob("logs/*"))


def test_a_foreign_export_folder_is_found_before_anything_is_made(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("in the way")
    words = ["launch", "--islands", "2", "--run", plan.run, "--export", str(tmp_path / "model")]
    assert main([*words, str(plan.script)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "train.py"]


def test_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for folder in ("bin", "venv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "diloco-blob").touch(mode=0o755)
    for called, said in {
        "venv/bin/diloco-blob": "venv/bin/diloco-blob",
        str(tmp_path / "venv" / "diloco-blob"): "venv/diloco-blob",
        "/opt/my env/diloco-blob": "'/opt/my env/diloco-blob'",
        str(tmp_path / "bin" / "diloco-blob"): "diloco-blob",
        "/usr/bin/pytest": "diloco-blob",
    }.items():
        monkeypatch.setattr(sys, "argv", [called])
        assert command_line("verify", "my run") == f"{said} verify 'my run'"


def test_commands_of_the_islands(plan: Plan, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(plan, settings="/abs/run.toml")
    environ = {"PATH": "/bin", "DILOCO_SETTINGS": "/old.toml", "DILOCO_ISLAND": "old"}
    first, second, third = island_commands(settings, environ)
    assert first.name == "island-0"
    assert first.argv == (sys.executable, str(plan.script), "--steps", "5")
    expected = {
        "PATH": "/bin",
        "DILOCO_RUN": plan.run,
        "DILOCO_ISLAND": "island-0",
        "DILOCO_ISLANDS": "3",
        "DILOCO_SETTINGS": "/abs/run.toml",
        "DILOCO_CHECKPOINT_DIR": str(tmp_path / "run.work" / "checkpoints" / "island-0"),
        "PYTHONUNBUFFERED": "1",
    }
    assert {**expected, "OMP_NUM_THREADS": first.env["OMP_NUM_THREADS"]} == first.env
    assert 1 <= int(first.env["OMP_NUM_THREADS"]) <= max(1, (os.cpu_count() or 1) // 3)
    assert third.env["DILOCO_ISLAND"] == "island-2"
    assert second.log == tmp_path / "run.work" / "logs" / "island-1.log"
    assert "DILOCO_SETTINGS" not in island_commands(plan, environ)[0].env
    assert island_commands(plan, {"OMP_NUM_THREADS": "7"})[0].env["OMP_NUM_THREADS"] == "7"


def test_commands_of_the_aggregators(plan: Plan) -> None:
    first, second = aggregator_commands(plan, {})
    assert first.argv[1:] == ("-m", "diloco_blob.cli.main", "aggregate", plan.run, "--watch", "--json")
    assert first.endless
    assert second.name == "aggregator-1"


def test_where_things_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_workdir("demo/run") == tmp_path / "demo" / "run.work"
    assert default_workdir("demo/run/") == default_workdir("demo/run") == default_workdir("./demo/run")
    assert default_workdir("file:///data/my%20run") == Path("/data/my run.work")
    bucket = default_workdir("s3://bucket/a/run")
    assert bucket.parent == Path("diloco-runs")
    assert bucket.name.startswith("s3-bucket-a-run-")
    assert bucket != default_workdir("s3://bucket/a-run")
    assert default_workdir("s3://bucket/a/run/") == bucket
    assert absolute_url("s3://bucket/a/run/") == "s3://bucket/a/run"
    assert default_workdir("demo/..").name == f"{tmp_path.name}.work"
    for root in ("/", "file:///", "/tmp/.."):
        with pytest.raises(InvalidSettings, match="no place"):
            default_workdir(root)
    with pytest.raises(InvalidSettings, match="home"):
        default_workdir("~nosuchuser/run")
    assert absolute_url("demo/run") == str(tmp_path / "demo" / "run")
    assert absolute_url("gs://bucket/run") == "gs://bucket/run"
    assert folder_of("gs://bucket/run") is None


def test_a_run_that_nobody_named_gets_a_folder_of_its_own() -> None:
    clock = VirtualClock(start=0.0)
    assert new_run(clock, SeededIds(1)).startswith("diloco-runs/19700101-000000-")
    assert new_run(clock, SeededIds(1)) != new_run(clock, SeededIds(2))


@pytest.mark.parametrize(
    ("earlier", "now", "state", "elapsed_s", "back"),
    [
        ({}, None, State.RUNNING, 0.0, True),  # nobody was there before
        ({"island-0": 1}, None, State.RUNNING, 0.0, False),
        ({"island-0": 1}, {"island-0": 1}, State.RUNNING, 5.0, False),
        ({"island-0": 1}, {"island-0": 2}, State.RUNNING, 5.0, True),
        ({"island-0": 1}, {"island-0": 1}, State.DONE, 5.0, True),
        ({"island-0": 1}, {"island-0": 1}, State.RUNNING, BACK_S, True),
        ({"island-9": 4}, {"island-9": 4}, State.RUNNING, 0.0, True),  # another machine's; ours is new
    ],
)
def test_aggregators_of_a_launch_wait_for_the_islands_that_said_they_leave(
    earlier: dict[str, int], now: dict[str, int] | None, state: State, elapsed_s: float, back: bool
) -> None:
    """Else they believe it, and merge what one of them had sent alone."""
    launch = object.__new__(Launch)
    launch._earlier = earlier
    launch._islands = [SimpleNamespace(state=state, command=SimpleNamespace(name="island-0"))]  # type: ignore[list-item]
    views = [SimpleNamespace(name=name, generation=number) for name, number in (now or {}).items()]
    found = SimpleNamespace(status=SimpleNamespace(islands=views)) if now is not None else None
    launch._watcher = SimpleNamespace(latest=lambda: found)  # type: ignore[assignment]
    assert launch._are_back(elapsed_s) is back
