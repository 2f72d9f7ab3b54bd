"""The quality bench: the batched model is the workers' model, and every contender's run is a real one."""

import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "workers")]

from gpt import GPT  # noqa: E402 - from the folders named above
from muon import MuonAdamW  # noqa: E402
from quality import inner, results, training  # noqa: E402
from quality.__main__ import Queue  # noqa: E402
from quality.contenders import ALL, Contender  # noqa: E402
from quality.figure import write_figures  # noqa: E402
from quality.lockstep import Islands  # noqa: E402
from quality.model import SIZES, Stack  # noqa: E402
from quality.studies import QUICK, STUDIES, Study  # noqa: E402
from quality.summary import summary  # noqa: E402
from quality.svg import Series, axis, plot  # noqa: E402
from quality.table import write_table  # noqa: E402
from quality.training import Config, Flat, run, settings_of  # noqa: E402
from quality.tuning import config_of, search, start_of  # noqa: E402

TINY = SIZES["tiny"]
ROWS, BATCH = 3, 4


@pytest.fixture(autouse=True)
def few_held_out_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CURVE_BYTES", 1 << 11)
    monkeypatch.setattr(training, "FINAL_BYTES", 1 << 13)


@pytest.fixture
def stack() -> Stack:
    """Every row different, also where the model starts with zeros."""
    stack = Stack(TINY, ROWS, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        stack.flat.add_(0.1 * torch.randn(stack.flat.shape, generator=generator))
    return stack


def model_of(stack: Stack, row: int) -> GPT:
    model = GPT(TINY)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in stack.read(row).items()})
    return model


def some_text(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(256, (rows, BATCH, TINY.context + 1), generator=torch.Generator().manual_seed(3))


def gradient_of(stack: Stack, text: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(stack.loss(text).sum(), stack.flat)
    return gradient


def test_a_row_computes_what_the_workers_model_does(stack: Stack) -> None:
    text = some_text()
    losses, gradient = stack.loss(text).tolist(), gradient_of(stack, text)
    for row in range(ROWS):
        model = model_of(stack, row)
        loss = model.loss(text[row])
        loss.backward()  # type: ignore[no-untyped-call]
        assert losses[row] == pytest.approx(loss.item(), abs=1e-5)
        for slot, parameter in zip(stack.slots, model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(
                gradient[row, slot.start : slot.stop].view(slot.shape), parameter.grad, atol=1e-5, rtol=1e-4
            )


def test_it_starts_as_the_workers_model() -> None:
    fresh, model = Stack(TINY, 2, seed=5), GPT(TINY, seed=5)
    for name, parameter in model.named_parameters():
        assert np.array_equal(fresh.read(1)[name], parameter.detach().numpy())


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_a_row_steps_as_a_model_alone(stack: Stack, kind: inner.Inner) -> None:
    text, lr = some_text(), 3e-3
    models = [model_of(stack, row) for row in range(ROWS)]
    optimizer = inner.make(kind, stack)
    for _ in range(3):
        optimizer.step(gradient_of(stack, text), lr)
    for row, model in enumerate(models):
        alone = alone_optimizer(kind, model, lr)
        for _ in range(3):
            alone.zero_grad()
            model.loss(text[row]).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.CLIP)
            alone.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(stack.flat[row].detach(), expected, atol=2e-4, rtol=0)


def alone_optimizer(kind: inner.Inner, model: GPT, lr: float) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=inner.BETAS, weight_decay=inner.WEIGHT_DECAY)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr)
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.")]
    others = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    return MuonAdamW(hidden, others, lr=lr, muon_lr=lr * inner.MUON_LR_RATIO, weight_decay=inner.WEIGHT_DECAY)


def tiny_config(contender: Contender, **changes: object) -> Config:
    settings = contender.settings
    if settings is not None:
        few = (
            "topk" in str(settings.get("up.name")) or "up.cycle" in settings
        )  # what is sent of a version: more of them
        settings = settings | {"sync.sync_every": 4 if few else 12}
        if contender.outers:
            settings |= {"outer.lr": contender.outers[0][0], "outer.momentum": contender.outers[0][1]}
    config = Config(size="tiny", islands=2, steps=24, settings=settings, lr=contender.lr, inner=contender.inner)
    return msgspec.structs.replace(config, **changes)


@pytest.mark.parametrize("contender", ALL.values(), ids=list(ALL))
def test_every_contender_learns(contender: Contender) -> None:
    result = run(tiny_config(contender))
    assert result.bits is not None
    sparse = "topk" in str((contender.settings or {}).get("up.name"))
    assert result.bits < (7.9 if sparse else 7.5), "a model that knows nothing has 8"
    assert result.tokens == 2 * 24 * 8 * 16
    assert [step for step, _ in result.curve] == list(range(2, 25, 2))
    if contender.settings is None:
        assert result.traffic is None
        return
    assert result.traffic is not None
    settings = settings_of(contender.settings)
    assert result.traffic.versions >= 2 * settings.sync.num_fragments
    values = 2 * 2 * result.parameters  # of two islands in two rounds
    if settings.up.name == "fp32":
        assert 2.0 * values < result.traffic.payloads_up < 4.6 * values, "rows of bytes that never occur compress"
    assert result.traffic.records_up > 0
    assert result.traffic.records_down > 0


def test_the_same_run_twice() -> None:
    config = tiny_config(ALL["streaming"])
    first, second = run(config), run(config)
    assert (first.bits, first.curve, first.traffic) == (second.bits, second.curve, second.traffic)


def test_averaging_after_every_step_is_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain SGD, and no gradient clipped, the mean of the islands' weights is the step of the mean gradient."""
    monkeypatch.setattr(inner, "CLIP", math.inf)
    averaged: Flat = {**ALL["local-sgd-plain"].settings, "sync.sync_every": 1}  # type: ignore[dict-item]
    common = tiny_config(ALL["dp"], inner="sgd", lr=0.1)
    apart = msgspec.structs.replace(common, settings=averaged | {"outer.lr": 1.0, "outer.momentum": 0.0})
    one, other = run(common), run(apart)
    assert one.bits is not None
    assert one.bits == pytest.approx(other.bits, abs=1e-5)


def test_a_version_is_adopted_overlap_steps_after_it_was_sent() -> None:
    flat: Flat = {"sync.sync_every": 6, "sync.overlap": 2, "sync.num_fragments": 1}
    fresh = Stack(TINY, ROWS, seed=1)
    islands = Islands(settings_of(flat), fresh, seed=0, tokens=64)
    noise = torch.Generator().manual_seed(4)
    alike = []
    for step in range(1, 14):
        with torch.no_grad():
            fresh.flat.add_(0.01 * torch.randn(fresh.flat.shape, generator=noise))
        islands.after_step()
        if bool((fresh.flat == fresh.flat[0]).all()):
            alike.append(step)
            expected = islands.params()
            assert all(np.array_equal(array, expected[name]) for name, array in fresh.read(1).items())
    assert alike == [8], "sent after 6 and 12; the second is to be adopted after 14"


def test_a_run_that_diverges_is_a_result() -> None:
    result = run(tiny_config(ALL["diloco"], inner="sgd", lr=1e30))
    assert result.bits is None


def test_a_search_asks_for_as_many_points_as_it_may() -> None:
    best = (0.02, (0.7, 0.9))

    def bits(point: tuple[float, tuple[float, float] | None]) -> float:
        return abs(math.log(point[0] / best[0])) + (point[1] != best[1])

    for trials in (3, 6, 9):
        asked = []
        searching = search((0.01, (0.7, 0.6)), [(0.7, 0.9), (1.0, 0.0)], trials)
        point = next(searching)
        while True:
            asked.append(point)
            try:
                point = searching.send(bits(point))
            except StopIteration as stop:
                found = stop.value
                break
        assert len(asked) == len(set(asked)) == trials
        assert found == min(asked, key=bits)
    assert found == best


def test_every_study_names_valid_runs_and_reports_other_seeds_than_it_tunes_at() -> None:
    for study in STUDIES:
        assert 0 not in study.seeds
        for contender in study.contenders:
            config = config_of(study, contender, start_of(study, contender, {}), 1)
            if config.settings is not None:
                settings = settings_of(config.settings)
                assert config.steps % settings.sync.sync_every == 0


def test_a_queue_runs_what_is_missing_and_the_report_shows_it(tmp_path: Path) -> None:
    few = tuple(
        msgspec.structs.replace(c, settings=c.settings and c.settings | {"sync.sync_every": 12})
        for c in QUICK.contenders
    )
    short = Study("short", "24 steps", few, size="tiny", islands=2, steps=24, trials=2, seeds=(1, 2))
    longer = Study("longer", "48 steps", few, size="tiny", islands=2, steps=48, trials=1, seeds=(1,), follows=short)
    path = tmp_path / "results.jsonl"
    queue = Queue(path, 1, "cpu")
    queue.study(short, [few[0].name])
    for study in (short, longer):
        queue.study(study)
    known = results.read(path)
    assert len(known) == len(path.read_bytes().splitlines()) == len(few) * (2 + 2 + 1 + 1), "no run twice"
    before = path.read_bytes()
    queue.study(short)
    assert path.read_bytes() == before, "nothing is missing"
    one = summary(short, few[1], known)
    assert one is not None
    assert one.tuned
    assert len(one.bits) == 2
    write_table(tmp_path / "results.md", (short, longer), known, "a test")
    table = (tmp_path / "results.md").read_text()
    assert all(table.count(f"| {contender.title} |") == 2 for contender in few)
    write_figures(tmp_path, (short, longer), known)
    for name in ("loss_against_bytes", "gap_against_steps"):
        assert ET.fromstring((tmp_path / f"{name}.svg").read_text()).tag.endswith("svg")


def test_the_same_numbers_give_the_same_picture() -> None:
    def picture() -> str:
        series = [Series("a < b & c", [(1.0, 2.0), (1000.0, 1.5)]), Series("d", [(30.0, 1.7)], [(1.6, 1.8)])]
        points = [point for one in series for point in one.points]
        return plot("t", axis("x", [x for x, _ in points], log=True), axis("y", [y for _, y in points]), series)

    assert picture() == picture()
    assert len(ET.fromstring(picture()).findall(".//{*}circle")) == 3 + 2, "points, and the legend's"
