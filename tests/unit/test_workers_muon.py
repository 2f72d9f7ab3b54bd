"""Muon and AdamW in one optimizer: each against its definition, and its state through a state_dict."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "workers"))
from muon import MuonAdamW, orthogonalize


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(matrix: torch.Tensor, other: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter, MuonAdamW]:
    weights = nn.Parameter(matrix.clone()), nn.Parameter(other.clone())
    return *weights, MuonAdamW(weights[:1], weights[1:], lr=0.01, muon_lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
def test_orthogonalize_keeps_the_directions_and_levels_the_singular_values(shape):
    matrix = random(*shape)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    levelled = u.T @ orthogonalize(matrix) @ vt.T
    diagonal = levelled.diagonal()
    assert float(diagonal.min()) > 0.5
    assert float(diagonal.max()) < 1.3  # Jordan's coefficients overshoot on purpose
    torch.testing.assert_close(levelled, diagonal.diag(), atol=1e-4, rtol=0)


def test_orthogonalize_of_nothing_is_nothing():
    assert torch.equal(orthogonalize(torch.zeros(4, 8)), torch.zeros(4, 8))


def test_muon_steps_follow_its_published_formula():
    start = random(24, 8)
    matrix, _, optimizer = make(start, random(4))
    expected, momentum = start.clone(), torch.zeros(24, 8)
    for k in range(3):
        gradient = random(24, 8, seed=k + 1)
        matrix.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + gradient
        direction = orthogonalize(gradient + 0.95 * momentum)
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * 3**0.5 * direction
    torch.testing.assert_close(matrix.detach(), expected)


def test_the_rest_follows_torch_adamw():
    start = random(8, 3)
    _, other, optimizer = make(random(4, 4), start)
    reference = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for k in range(20):
        other.grad, reference.grad = random(8, 3, seed=k + 1), random(8, 3, seed=k + 1)
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(other.detach(), reference.detach(), atol=1e-6, rtol=1e-5)


def test_state_dict_carries_on_to_the_bit():
    def go_on(weights, optimizer, seeds):
        for k in seeds:
            for weight in weights:
                weight.grad = random(*weight.shape, seed=k)
            optimizer.step()

    *through, optimizer = make(random(6, 4), random(5))
    go_on(through, optimizer, range(3))
    *resumed, fresh = make(through[0].detach(), through[1].detach())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which would share tensors
    assert all(isinstance(value, torch.Tensor) for state in fresh.state.values() for value in state.values())
    go_on(through, optimizer, range(3, 6))
    go_on(resumed, fresh, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))
