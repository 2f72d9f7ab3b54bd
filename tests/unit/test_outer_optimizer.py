"""The outer optimizer: by hand, by its sign, and against `torch.optim.SGD`."""

import numpy as np
import pytest
import torch

from diloco_blob.core.settings import Outer
from diloco_blob.outer.optimizer import outer_step


def normal(seed: int, shape: tuple[int, ...] = (257,)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


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
