"""What went wrong once, or could: values that are not finite, zombies, stale checkpoints, impossible figures."""

import numpy as np
import pytest
import torch

from diloco_blob.core.errors import Corrupt, Fenced, InvalidSettings
from diloco_blob.core.settings import Codec, Outer, Policy, Settings, Sync
from diloco_blob.island.arrays import difference, mixed, total
from diloco_blob.island.binding import Island, TorchPort
from diloco_blob.island.checkpoint import load_checkpoint
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.heads import find_head, read_run
from diloco_blob.protocol.records import Receipt, decode
from diloco_blob.testing.fleet import Fleet
from diloco_blob.testing.port import ArrayPort

INT4 = Codec(name="int4", block=8, error_feedback=True)


def world(sync: Sync, tmp_path, *, islands: int = 2, quorum: int = 2, grace_s: float = 1000.0) -> Fleet:
    policy = Policy(islands=islands, quorum=quorum, grace_s=grace_s, deadline_s=1000.0)
    return Fleet(Settings(sync=sync, up=INT4, policy=policy), num_islands=islands, checkpoints=tmp_path)


def head_digest(fleet: Fleet) -> str:
    return find_head(fleet.bare, read_run(fleet.bare), 0).weights.digest


def receipts(fleet: Fleet) -> list[Receipt]:
    keys = [info.key for info in fleet.bare.list("islands/") if "/receipts/" in info.key]
    return [decode(fleet.bare.get(key)[0], Receipt) for key in sorted(keys)]


# ---- values that are not finite


def test_one_bad_batch_costs_one_interval_and_a_restart_goes_on(tmp_path):
    fleet = world(Sync(sync_every=10), tmp_path)
    fleet.add_all()
    for _ in range(30):
        fleet.tick(60)
    fleet.islands[1].port.weights["head"][0, 0] = np.nan
    with pytest.raises(Corrupt, match=r"island island-1, step \d+: head has a value that is NaN or infinite"):
        fleet.run(60)
    again = fleet.add("island-1")
    assert np.isfinite(again.port.weights["head"]).all()
    fleet.run(60)
    assert [island.core.steps for island in fleet.islands] == [60, 60]
    assert audit(fleet.bare).ok


def test_an_evaluation_that_is_not_finite_leaves_the_status_readable(tmp_path):
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    island = fleet.add("island-0")
    island.core.record_eval(3.0, 4.0)
    island.core.record_eval(float("nan"), float("nan"))
    assert island.core.status().last_eval.loss == 3.0


# ---- shapes


def test_arithmetic_keeps_arrays_without_dimensions_arrays():
    one, two = {"scale": np.array(1.0, np.float32)}, {"scale": np.array(2.0, np.float32)}
    for result in (difference(one, two), total(one, two), mixed(one, two, 0.5)):
        assert type(result["scale"]) is np.ndarray
        assert result["scale"].shape == ()
        assert result["scale"].dtype == np.float32


# ---- two processes of one island


def test_a_zombies_late_receipt_of_the_same_interval_is_recognised_and_not_sent_again(tmp_path):
    """The zombie passed the fence and stalls; the newer process resumes exactly from the same checkpoint."""
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    started = []

    def at(step: str) -> None:
        if step == "send.payload.before_put" and fleet.islands[0].core.steps == 20 and not started:
            started.append(fleet.add("island-0"))

    fleet.add("island-0", at=at)
    fleet.run(30)
    found = receipts(fleet)
    assert [(receipt.step_to - receipt.steps, receipt.step_to) for receipt in found] == [(0, 10), (10, 20), (20, 30)]
    assert [receipt.generation for receipt in found] == [1, 1, 2]
    assert audit(fleet.bare).ok


@pytest.mark.parametrize("meanwhile", [True, False])
@pytest.mark.parametrize("junk", [b"junk", b"", b"0" * (1 << 20)])
def test_junk_under_its_own_receipts_stops_no_island(junk, meanwhile, tmp_path):
    """Whoever has its credentials may have left it there: it has a number, is skipped, and the island goes on."""
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    fleet.add("island-0")
    while fleet.islands[0].core.steps < 15:
        fleet.tick(30)
    fleet.bare.put("islands/island-0/receipts/0000/0000000002.json", junk)
    if not meanwhile:
        fleet.add("island-0")
    fleet.run(30)
    names = [info.key[-15:] for info in fleet.bare.list("islands/island-0/receipts/")]
    assert names == [f"{seq:010d}.json" for seq in (1, 2, 3, 4)]
    report = audit(fleet.bare)
    assert (report.ok, report.counts.merged, report.counts.skipped) == (True, 3, 1), report.findings


def test_a_fenced_process_leaves_the_newer_ones_checkpoint_alone(tmp_path):
    undisturbed = world(Sync(sync_every=10), tmp_path / "undisturbed")
    undisturbed.add_all()
    undisturbed.run(60)
    fleet = world(Sync(sync_every=10), tmp_path / "disturbed")
    fleet.add_all()
    for _ in range(15):
        fleet.tick(60)
    zombie = fleet.islands[1]
    newer = fleet.add("island-1")
    while newer.core.steps < 37:
        fleet.tick(60)
    while zombie.core.outbox.empty():
        zombie.tick(0, 60)
        zombie.core.inbox.pump()
    with pytest.raises(Fenced):
        zombie.pump()
    run = read_run(fleet.bare).digest
    kept = load_checkpoint(tmp_path / "disturbed" / "island-1", run=run, island="island-1")
    assert kept is not None
    assert kept.state.steps == 30
    fleet.add("island-1")
    fleet.run(60)
    assert head_digest(fleet) == head_digest(undisturbed)


# ---- checkpoints that are older than the receipts


def test_a_residual_that_was_paid_is_not_owed_again(tmp_path):
    """With overlap, checkpoints are rarer than sends; one that is older than a receipt has an older residual too."""
    fleet = world(Sync(sync_every=10, overlap=1, adopt="carry"), tmp_path, islands=1, quorum=1, grace_s=0.0)
    island = fleet.add("island-0")
    for _ in range(44):  # the first send writes a checkpoint; the next thirty seconds do not
        fleet.tick(200)
    assert island.core.outbox.next_seq[0] == 5
    again = fleet.add("island-0")
    assert again.core.steps == 40
    assert again.core.outbox.feedback[0].export() == {}


def test_another_optimizer_than_the_checkpoints_starts_with_fresh_state():
    model = torch.nn.Linear(3, 3)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adamw.step()
    arrays, state = TorchPort(model, [adamw]).capture()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(Corrupt, match="AdamW"):
        TorchPort(model, [sgd]).restore(arrays, state)
    sgd.step()


def test_an_optimizer_whose_state_cannot_be_kept_is_one_line():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 3)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(InvalidSettings, match="LBFGS keeps state"):
        TorchPort(model, [optimizer]).capture()


# ---- figures


@pytest.mark.parametrize("tokens", [0, -1, 1.5, 10**30, "8", None])
def test_tokens_that_no_aggregator_would_accept_are_refused_where_they_are_said(tokens, tmp_path):
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    core = fleet.add("island-0").core
    with pytest.raises(InvalidSettings, match="tokens"):
        next(core.after_step(tokens))
    assert core.steps == 0


def test_tokens_may_be_a_tensor(tmp_path):
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    core = fleet.add("island-0").core
    next(core.after_step(torch.tensor(8)), None)
    assert (core.tokens, type(core.tokens)) == (8, int)


@pytest.mark.parametrize("cursor", [None, 7, "x" * 5000, "\ud800"])
def test_a_cursor_that_no_receipt_can_hold_is_refused(cursor, tmp_path):
    fleet = world(Sync(sync_every=10), tmp_path, islands=1, quorum=1)
    with pytest.raises(InvalidSettings, match="cursor"):
        next(fleet.add("island-0").core.after_step(8, cursor=cursor))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"run": ""}, "no run given"),
        ({"name": ""}, "no island name"),
        ({"name": "Big Name"}, "not allowed"),
        ({"model_config": {"dtype": torch.float32}}, "model_config"),
        ({"settings": "no-such-preset"}, "no preset"),
    ],
)
def test_wrong_words_are_one_line_before_anything_is_touched(words, match, monkeypatch, tmp_path):
    for variable in ("DILOCO_RUN", "DILOCO_ISLAND", "DILOCO_SETTINGS", "DILOCO_ISLANDS"):
        monkeypatch.delenv(variable, raising=False)
    model = torch.nn.Linear(2, 2)
    right = {"run": str(tmp_path / "run"), "name": "a", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(InvalidSettings, match=match):
        Island(**(right | words), model=model)
    assert list(tmp_path.iterdir()) == []


class Bf16Port(ArrayPort):
    """A model that can only hold bfloat16, and does not move any more: training has come to its end."""

    def __init__(self, seed, shapes=None, initial=None) -> None:
        super().__init__(seed, shapes, initial)
        self.exact = False
        self.write(self.weights)

    def train(self, lr: float = 0.1, noise: float = 0.3) -> float:  # noqa: ARG002 - as the port has it
        return 0.0

    def write(self, arrays) -> None:
        super().write({name: _to_bf16(array) for name, array in arrays.items()})


def _to_bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).to(torch.bfloat16).to(torch.float32).numpy()


@pytest.mark.parametrize("sync", [Sync(sync_every=4), Sync(sync_every=4, overlap=1, adopt="carry")])
def test_what_bfloat16_rounds_away_is_not_sent_as_progress(sync, monkeypatch, tmp_path):
    """Islands that do not move must not move the world, however their model rounds."""
    monkeypatch.setattr("diloco_blob.testing.fleet.ArrayPort", Bf16Port)
    policy = Policy(islands=2, quorum=2, grace_s=100.0, deadline_s=100.0)
    fleet = Fleet(Settings(sync=sync, policy=policy), num_islands=2)
    first = fleet.add_all()[0]
    first.port.weights["head"] = first.port.weights["head"] + np.float32(0.337)  # one real step, by one of them
    fleet.run(60)
    norms = [report.step_norm for report in fleet.reports]
    assert norms[0] > 0.5
    # From then on only momentum moves the world: it dies away as 0.9 to the power of the rounds.
    assert norms[-1] < 1.1 * norms[0] * 0.9 ** (len(norms) - 2)


def test_rounds_go_on_at_minimum_when_the_others_have_left(tmp_path):
    policy = Policy(islands=3, quorum=3, min_contributions=3, grace_s=5.0, deadline_s=20.0)
    fleet = Fleet(Settings(sync=Sync(sync_every=10), outer=Outer(momentum=0.0), policy=policy), num_islands=3)
    fleet.add_all()
    for island in fleet.islands[:2]:
        island.core.steps = 30
    fleet.run(60)
    assert [island.core.steps for island in fleet.islands] == [60, 60, 60]
