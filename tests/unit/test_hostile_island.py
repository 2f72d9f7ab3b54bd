"""One hostile island of eight, end to end with a toy model: does the run still get where it was going?

Each island descends from the newest weights towards a common goal. The hostile one sends noise, 100 times as long as
its first progress, or its own progress times −10.
"""

from collections.abc import Callable

import numpy as np
import pytest

from diloco_blob.core.settings import Merge, Outer, Policy, Settings
from diloco_blob.protocol.audit import audit
from diloco_blob.testing.port import ArrayPort
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import FloatArray

Arrays = dict[str, FloatArray]
Attack = Callable[[Arrays, np.random.Generator], Arrays]

NUM_ISLANDS, HOSTILE, ROUNDS, STEPS = 8, 2, 8, 5
GARBAGE_NORM = 500.0
"""The honest islands' first progress is about 5 long."""

CLIP = Merge(weights="uniform", clip="median")
TRIMMED = Merge(rule="trimmed_mean")
BOTH = Merge(rule="trimmed_mean", clip="median")


def norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(np.sum(np.square(values, dtype=np.float64)) for values in arrays.values())))


def honest(deltas: Arrays, rng: np.random.Generator) -> Arrays:
    return deltas


def garbage(deltas: Arrays, rng: np.random.Generator) -> Arrays:
    noise = {name: np.asarray(rng.standard_normal(values.shape), np.float32) for name, values in deltas.items()}
    return {name: np.asarray(values * np.float32(GARBAGE_NORM / norm(noise))) for name, values in noise.items()}


def reversed_(deltas: Arrays, rng: np.random.Generator) -> Arrays:
    return {name: np.asarray(values * np.float32(-10)) for name, values in deltas.items()}


def distances(merge: Merge, attack: Attack) -> tuple[float, float]:
    """From the goal, before and after the run."""
    outer = Outer(optimizer="sgd", lr=1.0, momentum=0.0)
    toy = ToyRun(Settings(merge=merge, outer=outer, policy=Policy(islands=NUM_ISLANDS, quorum=NUM_ISLANDS)), seed=3)
    ports = [ArrayPort(100 + number, toy.shapes, toy.initial) for number in range(NUM_ISLANDS)]
    goal = np.random.default_rng(12345)  # As `ArrayPort` draws it.
    target = {name: np.asarray(goal.standard_normal(shape), np.float32) for name, shape in toy.shapes.items()}
    rng = np.random.default_rng(9)

    def distance() -> float:
        return norm({name: np.asarray(values - target[name]) for name, values in toy.params().items()})

    for number in range(NUM_ISLANDS):
        toy.join(f"island-{number}")
    before = distance()
    for version in range(ROUNDS):
        mark = toy.params()
        for number, port in enumerate(ports):
            port.write(mark)
            for _ in range(STEPS):
                port.train()
            deltas = {name: np.asarray(mark[name] - values) for name, values in port.weights.items()}
            deltas = attack(deltas, rng) if number == HOSTILE else deltas
            toy.send(f"island-{number}", deltas, base_version=version, step_to=10 * (version + 1))
        assert len(toy.aggregate().merged) == NUM_ISLANDS, "finite values are merged, not rejected"
    assert audit(toy.store).ok
    return before, distance()


@pytest.mark.parametrize("merge", [Merge(weights="uniform"), CLIP, TRIMMED, BOTH])
def test_without_an_attacker_all_of_them_arrive(merge: Merge) -> None:
    before, after = distances(merge, honest)
    assert after < before / 20


@pytest.mark.parametrize("attack", [garbage, reversed_])
def test_a_plain_mean_is_driven_away_from_the_goal(attack: Attack) -> None:
    before, after = distances(Merge(weights="uniform"), attack)
    assert after > 2 * before


@pytest.mark.parametrize("attack", [garbage, reversed_])
@pytest.mark.parametrize(("merge", "times"), [(CLIP, 3.0), (TRIMMED, 1.5), (BOTH, 1.5)])
def test_clipping_and_trimming_stay_near_the_honest_run(merge: Merge, times: float, attack: Attack) -> None:
    """An island clipped to the median still pulls with an eighth of the weight; a trimmed one hardly at all."""
    _, without = distances(Merge(weights="uniform"), honest)
    before, after = distances(merge, attack)
    assert after < before / 10
    assert after < times * without
