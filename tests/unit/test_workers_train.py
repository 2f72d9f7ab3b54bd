"""The reference program around a stand-in for the island: schedule, calls, resuming, exit codes."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))
import train as program

from diloco_blob import DilocoError, Fenced, InvalidSettings

SMALL = (
    *("--steps", "6", "--batch", "2", "--context", "16", "--eval-batches", "2"),
    *("--layers", "1", "--width", "32", "--heads", "2"),
)


@dataclass
class StandIn:
    """What the program needs of an `Island`, without a bucket: it counts and notes what it is told."""

    state: dict[str, Any] = field(default_factory=dict)
    stop_at: int = -1
    raises: BaseException = field(default_factory=KeyboardInterrupt)
    steps: int = 0
    tokens: int = 0
    cursor: str = ""
    version: int = 0
    notes: list[Any] = field(default_factory=list)

    def __call__(self, run: str, *, model, optimizer, name, settings, model_config) -> Self:
        self.model, self.optimizer, self.joined = model, optimizer, (run, name, settings, model_config)
        self.lrs: list[float] = []
        return self

    def __enter__(self) -> Self:
        if self.state:
            self.model.load_state_dict(self.state["model"])
            self.optimizer.load_state_dict(self.state["optimizer"])
        return self

    def __exit__(self, *error: object) -> None:
        self.state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, *, tokens: int, loss: torch.Tensor, cursor: str) -> None:
        self.steps, self.tokens, self.cursor = self.steps + 1, self.tokens + tokens, cursor
        self.notes.append(float(loss))
        self.lrs.append(self.optimizer.param_groups[0]["lr"])
        if self.steps == self.stop_at:
            raise self.raises

    def record_eval(self, *, loss: float, bits_per_byte: float, sample: str) -> None:
        self.notes.append(("eval", loss, bits_per_byte, sample))

    def finish(self) -> None:
        self.notes.append("finish")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text").write_bytes(b"she sells sea shells by the sea shore. " * 200)
    return str(tmp_path / "text")


@pytest.fixture
def start(text, monkeypatch):
    """Run the program with a stand-in for the island; gives the exit code."""
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setenv("DILOCO_ISLANDS", str(os.cpu_count()))  # one thread each: tests run side by side
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program.torch.backends.mps, "is_available", lambda: False)

    def call(island: StandIn, *extra: str, name: str = "a") -> int:
        monkeypatch.setattr(program, "Island", island)
        monkeypatch.setattr(sys, "argv", ["train.py", "--run", "r", "--island", name, "--data", text, *SMALL, *extra])
        return program.main()

    return call


def losses(island: StandIn) -> list[float]:
    return [note for note in island.notes if isinstance(note, float)]


def test_steps_are_counted_and_finish_comes_before_the_last_evaluation(start, capsys):
    island = StandIn()
    assert start(island) == 0
    assert island.joined[:3] == ("r", "a", None)
    assert island.joined[3] == {"context": 16, "layers": 1, "width": 32, "heads": 2, "vocab": 256}
    assert (island.steps, island.tokens, island.cursor) == (6, 6 * 2 * 16, "6")
    before, *middle, finish, after = island.notes
    assert before[:3] == ("eval", pytest.approx(5.545, abs=1e-3), pytest.approx(8.0, abs=1e-5))
    assert all(isinstance(note, float) for note in middle)
    assert finish == "finish"
    assert after[2] < before[2]
    assert len(after[3]) > 100
    assert all(c.isprintable() or c == "\n" for c in after[3])
    joined, ended = capsys.readouterr().out.splitlines()
    assert joined == "a: joined r at version 0, step 0"
    assert ended.startswith("a: 6 steps, 192 bytes, ")


def test_it_says_how_far_it_is(start, capsys, monkeypatch):
    monkeypatch.setattr(program, "TELL_S", 0.0)
    island = StandIn()
    start(island)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a: step")]
    assert told[2] == f"a: step 3 of 6, loss {losses(island)[2]:.3f}, version 0"
    assert len(told) == 6
    start(island)
    assert "already at step 6 of 6 (--steps 12 goes on)" in capsys.readouterr().out


def test_model_learns(start):
    island = StandIn()
    start(island, "--steps", "80", "--batch", "4", "--eval-every", "30")
    bits = [note[2] for note in island.notes if isinstance(note, tuple)]
    assert len(bits) == 4
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_and_started_again_is_to_the_bit_as_never_stopped(start, capsys, optimizer):
    through, stopped = StandIn(), StandIn(stop_at=3)
    assert start(through, "--optimizer", optimizer) == 0
    assert start(stopped, "--optimizer", optimizer) == 130
    assert "same command resumes" in capsys.readouterr().err
    assert start(stopped, "--optimizer", optimizer) == 0
    assert losses(stopped) == losses(through)
    assert stopped.notes[-1] == through.notes[-1]
    names = through.state["model"]
    assert all(torch.equal(names[name], stopped.state["model"][name]) for name in names)


def test_learning_rate_goes_on_after_a_resume(start):
    through, stopped = StandIn(), StandIn(stop_at=3)
    start(through)
    seen = through.lrs
    start(stopped)
    first = stopped.lrs
    start(stopped)
    assert first + stopped.lrs == seen


def test_islands_read_different_text(start):
    a, b = StandIn(), StandIn()
    start(a, name="a")
    start(b, name="b")
    assert losses(a)[0] == losses(b)[0]  # the model knows nothing yet
    assert losses(a)[1:] != losses(b)[1:]


def test_learning_rate_rises_then_falls_to_a_tenth():
    assert program.lr_factor(0.025, 0.05) == pytest.approx(0.5)
    assert program.lr_factor(0.05, 0.05) == pytest.approx(1.0)
    assert program.lr_factor(0.525, 0.05) == pytest.approx(0.55)
    assert program.lr_factor(1.0, 0.05) == pytest.approx(0.1)
    assert program.lr_factor(1.5, 0.05) == pytest.approx(0.1)
    assert program.lr_factor(0.0, 0.0) == pytest.approx(1.0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_weight_is_trained_once(optimizer):
    model = program.GPT(program.GPTConfig())
    args = program.arguments(["--optimizer", optimizer])
    groups = program.make_optimizer(model, args).param_groups
    trained = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))


def test_cores_are_shared_between_the_islands(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(program.os, "cpu_count", lambda: 8)
    for islands in ("1", "3", "20", "0", ""):
        monkeypatch.setenv("DILOCO_ISLANDS", islands)
        assert program.pick_device("cpu") == torch.device("cpu")
    assert seen == [8, 2, 1, 8, 8]


def test_run_and_island_come_from_the_environment_unless_flags_say_otherwise(monkeypatch):
    monkeypatch.setenv("DILOCO_RUN", "s3://bucket/run")
    monkeypatch.setenv("DILOCO_ISLAND", "x")
    assert (program.arguments([]).run, program.arguments([]).island) == ("s3://bucket/run", "x")
    assert program.arguments(["--island", "y"]).island == "y"


@pytest.mark.parametrize(
    "error", [InvalidSettings("wrong words", "do this"), DilocoError("broken"), Fenced("taken over")]
)
def test_error_of_the_library_is_one_line_and_its_exit_code(start, capsys, error):
    assert start(StandIn(stop_at=2, raises=error)) == error.exit_code
    assert capsys.readouterr().err == f"train.py: {error}\n"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--data", "/no/such/place"], "/no/such/place"),
        (["--context", "5000"], "too little text"),
        (["--width", "30"], "width"),
        (["--batch", "0"], "--batch"),
        (["--warmup", "1"], "--warmup"),
        (["--island", ""], "DILOCO_ISLAND"),
        (["--device", "cuda"], "--device cuda"),
        (["--device", "mps"], "--device mps"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(start, capsys, extra, says):
    island = StandIn()
    assert start(island, *extra) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not island.notes


def test_started_with_nothing_says_what_is_missing():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
    script = Path(program.__file__)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "DILOCO_RUN" in done.stderr
    assert done.stderr.count("\n") == 1
