"""The outer optimizer: by hand, by its sign, and against `torch.optim.SGD`."""

import numpy as np
import pytest
import torch

from diloco_blob.core.settings import Outer
from diloco_blob.outer.optimizer import Stepped, state_kinds
from diloco_blob.outer.optimizer import outer_step as full_step


def normal(seed: int, shape: tuple[int, ...] = (257,)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def outer_step(outer: Outer, delta: np.ndarray, buf: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """A step of the optimizers that remember at most a momentum."""
    step, state = full_step(outer, delta, {} if buf is None else {"momentum": buf}, 1)
    assert tuple(state) == state_kinds(outer)
    return step, state.get("momentum")


def run(outer: Outer, deltas: list[list[float]]) -> list[Stepped]:
    """The optimizer over several versions."""
    done: list[Stepped] = []
    for version, delta in enumerate(deltas, start=1):
        state = done[-1].state if done else {}
        done.append(full_step(outer, np.array(delta, np.float32), state, version))
        assert tuple(done[-1].state) == state_kinds(outer)
    return done


def torch_sgd(outer: Outer, params: torch.nn.Parameter) -> torch.optim.SGD:
    nesterov = outer.optimizer == "nesterov" and outer.momentum > 0
    return torch.optim.SGD([params], lr=outer.lr, momentum=outer.momentum, nesterov=nesterov, foreach=False)


def test_by_hand() -> None:
    one = np.ones(2, np.float32)
    nesterov = Outer(optimizer="nesterov", lr=0.5, momentum=0.5)
    step, buf = outer_step(nesterov, one, None)  # buf = 1, step = ½(1 + ½)
    assert (step.tolist(), buf.tolist()) == ([0.75] * 2, [1.0] * 2)
    step, buf = outer_step(nesterov, one, buf)  # buf = ½ + 1, step = ½(1 + ¾)
    assert (step.tolist(), buf.tolist()) == ([0.875] * 2, [1.5] * 2)
    step, buf = outer_step(Outer(optimizer="sgd", lr=0.5, momentum=0.5), one, one)
    assert (step.tolist(), buf.tolist()) == ([0.75] * 2, [1.5] * 2)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_lr_1_without_momentum_gives_the_pseudo_gradient_itself(optimizer: str) -> None:
    # One island, one exchange: mark − (mark − local) must be local. A learning rate applied twice would show here.
    step, buf = outer_step(Outer(optimizer=optimizer, lr=1.0, momentum=0.0), normal(0), None)
    assert step.tobytes() == normal(0).tobytes()
    assert buf is None


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_it_descends(optimizer: str) -> None:
    # Islands that moved towards 0 send older − newer, which has the sign of the weights: subtracting it shrinks them.
    weights, momentum = normal(1), None
    before = np.abs(weights).sum()
    for _ in range(5):
        local = weights * np.float32(0.9)
        step, momentum = outer_step(Outer(optimizer=optimizer), weights - local, momentum)
        weights = weights - step
    assert np.abs(weights).sum() < before


@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_shapes_are_kept_and_arguments_left_alone(shape: tuple[int, ...], momentum: float, optimizer: str) -> None:
    delta, buf = normal(0, shape).reshape(shape), np.asarray(normal(1, shape), np.float32)
    delta = np.asarray(delta, np.float32)
    before = delta.tobytes(), buf.tobytes()
    step, new = outer_step(Outer(optimizer=optimizer, momentum=momentum), delta, buf)
    assert isinstance(step, np.ndarray)
    assert (step.shape, step.dtype) == (shape, np.float32)
    assert new is None if momentum == 0 else (new.shape, new.dtype) == (shape, np.float32)
    assert (delta.tobytes(), buf.tobytes()) == before
    first, new = outer_step(Outer(optimizer=optimizer, momentum=momentum), delta, None)
    assert new is None or not np.shares_memory(new, delta)
    assert first.shape == shape


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.7, 0.0), (0.1, 0.99), (0.4, 0.5)])
def test_torch_sgd_to_one_ulp_a_step(optimizer: str, lr: float, momentum: float) -> None:
    outer = Outer(optimizer=optimizer, lr=lr, momentum=momentum)
    params = normal(99) * np.float32(10)
    theirs = torch.nn.Parameter(torch.from_numpy(params.copy()))
    sgd, buf = torch_sgd(outer, theirs), None
    for seed in range(300):
        delta = normal(seed) * np.float32(0.01)
        theirs.data.copy_(torch.from_numpy(params.copy()))  # every step starts from the same weights
        theirs.grad = torch.from_numpy(delta.copy())
        sgd.step()
        step, buf = outer_step(outer, delta, buf)
        params = params - step
        ulp = np.spacing(np.maximum(np.abs(params), np.abs(step)))
        assert (np.abs(params - theirs.detach().numpy()) <= ulp).all()
        if momentum:
            assert sgd.state[theirs]["momentum_buffer"].numpy().tobytes() == buf.tobytes()


def test_torch_sgd_over_a_whole_run() -> None:
    # Left alone for 300 steps, the two differ by far less than an ulp a step.
    outer = Outer()
    params = normal(99) * np.float32(10)
    theirs = torch.nn.Parameter(torch.from_numpy(params.copy()))
    sgd, buf = torch_sgd(outer, theirs), None
    largest = np.abs(params)
    for seed in range(300):
        delta = normal(seed) * np.float32(0.01)
        theirs.grad = torch.from_numpy(delta.copy())
        sgd.step()
        step, buf = outer_step(outer, delta, buf)
        params = params - step
        largest = np.maximum(largest, np.abs(params))
    assert (np.abs(params - theirs.detach().numpy()) <= 30 * np.spacing(largest)).all()


def test_delayed_nesterov_by_hand() -> None:
    outer = Outer(optimizer="delayed_nesterov", lr=0.5, momentum=0.5, delay=2)
    first, second, third, fourth = run(outer, [[1.0], [2.0], [4.0], [8.0]])
    assert first.step.tolist() == [0.5]  # lr·Δ alone
    assert first.state["gathered"].tolist() == [1.0]
    # buf = 1 + 2; step = ½·(2 + ½·3)
    assert (second.step.tolist(), second.state["momentum"].tolist()) == ([1.75], [3.0])
    assert second.state["gathered"].tolist() == [0.0]
    assert (third.step.tolist(), third.state["momentum"].tolist()) == ([2.0], [3.0])
    # buf = ½·3 + (4 + 8); step = ½·(8 + ½·13.5)
    assert (fourth.step.tolist(), fourth.state["momentum"].tolist()) == ([7.375], [13.5])


def test_delayed_nesterov_that_does_not_wait_is_nesterov() -> None:
    deltas = [normal(seed).tolist() for seed in range(5)]
    delayed = run(Outer(optimizer="delayed_nesterov", delay=1), deltas)
    nesterov = run(Outer(optimizer="nesterov"), deltas)
    assert [one.step.tobytes() for one in delayed] == [one.step.tobytes() for one in nesterov]


def test_rho_adaptive_by_hand() -> None:
    outer = Outer(optimizer="rho_adaptive", lr=1.0, momentum=0.9)
    half = 3**0.5 / 2
    deltas = [[1.0, 0.0], [0.5, half], [0.5, half], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
    steps = [one.step for one in run(outer, deltas)]
    assert steps[0].tolist() == [1.0, 0.0]  # nothing to agree with
    # ρ = ½: m = min(2·½, 0.9), step = Δ / (1 − 0.45)
    np.testing.assert_allclose(steps[1], np.array(deltas[1]) / 0.55, rtol=1e-6)
    np.testing.assert_allclose(steps[2], deltas[2], rtol=1e-6)  # ρ = 1: m = 0
    assert steps[3].tolist() == [0.0, 0.0]
    assert steps[4].tolist() == [0.0, 1.0]  # after zeros there is no direction
    np.testing.assert_allclose(steps[5], [0.0, -1.0 / 1.9], rtol=1e-6)  # ρ = −1: m = 0.9


def test_rho_adaptive_at_most_doubles_a_step() -> None:
    # 2(1 − ρ)·ρ is at most ½, where ρ = ½.
    outer = Outer(optimizer="rho_adaptive", lr=1.0, momentum=0.999)
    for angle in np.linspace(0, np.pi, 50):
        _, second = run(outer, [[1.0, 0.0], [float(np.cos(angle)), float(np.sin(angle))]])
        assert np.linalg.norm(second.step) <= 2.0 + 1e-6


@pytest.mark.parametrize("optimizer", ["delayed_nesterov", "rho_adaptive"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_the_others_keep_shapes_and_arguments(shape: tuple[int, ...], optimizer: str) -> None:
    outer, delta = Outer(optimizer=optimizer, delay=2), np.asarray(normal(0, shape), np.float32)
    state: dict[str, np.ndarray] = {}
    for version in range(1, 4):
        before = delta.tobytes(), {kind: array.tobytes() for kind, array in state.items()}
        step, new = full_step(outer, delta, state, version)
        assert (delta.tobytes(), {kind: array.tobytes() for kind, array in state.items()}) == before
        assert {array.shape for array in (step, *new.values())} == {shape}
        assert {array.dtype for array in (step, *new.values())} == {np.dtype(np.float32)}
        assert not any(np.shares_memory(array, delta) for array in new.values())
        state = new
