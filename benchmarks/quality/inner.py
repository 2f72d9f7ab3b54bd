"""The inner optimizers, on all islands at once: each row of the stack is one island's, and no row sees another.

AdamW and plain SGD are elementwise; Muon's matrices are a batch. The gradient of each row is clipped to norm 1.
"""

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from quality.model import Stack

Inner = Literal["adamw", "muon", "sgd"]

WARMUP = 0.05
"""Share of the steps in which the learning rate rises."""
CLIP = 1.0
WEIGHT_DECAY = 0.1
BETAS, EPS = (0.9, 0.95), 1e-8
MUON_LR_RATIO = 10 / 3
"""Muon's learning rate over AdamW's beside it: 0.02 with 6e-3, as in `workers/train.py`."""


def lr_factor(step: int, steps: int) -> float:
    """Rise linearly to 1, then follow a cosine down to a tenth at the last step; `step` counts from 0."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - 1 - warmup)))


class Optimizer(Protocol):
    """An inner optimizer of a stack."""

    def step(self, gradient: Tensor, lr: float) -> None:
        """Move every row along its own gradient."""


def make(inner: Inner, stack: Stack) -> Optimizer:
    """The optimizer of this name."""
    kinds: dict[Inner, type[AdamW | Muon | SGD]] = {"adamw": AdamW, "muon": Muon, "sgd": SGD}
    return kinds[inner](stack)


def clipped(gradient: Tensor) -> Tensor:
    """Scale, in place, each row that is longer than `CLIP` down to it."""
    norms = gradient.norm(dim=1, keepdim=True)
    return gradient.mul_((CLIP / (norms + 1e-6)).clamp_(max=1.0))


class SGD:
    """Plain SGD: no momentum, no weight decay."""

    def __init__(self, stack: Stack) -> None:
        self._flat = stack.flat

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """See `Optimizer.step`."""
        self._flat.add_(clipped(gradient), alpha=-lr)


class AdamW:
    """AdamW (arXiv 1711.05101), by torch, on one tensor that holds every island's parameters."""

    def __init__(self, stack: Stack) -> None:
        self._flat = stack.flat
        self._adam = torch.optim.AdamW(
            [self._flat], lr=0.0, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, gradient: Tensor, lr: float) -> None:
        """See `Optimizer.step`."""
        self._adam.param_groups[0]["lr"] = lr
        self._flat.grad = clipped(gradient)
        self._adam.step()
        self._flat.grad = None


class Muon:
    """Muon for the hidden matrices, AdamW for embedding and output: `workers/muon.py` with a batch dimension."""

    def __init__(self, stack: Stack) -> None:
        self._adam = AdamW(stack)
        self._flat = stack.flat
        self._slots = [slot for slot in stack.slots if slot.name.startswith("blocks.")]
        self._momentum = torch.zeros_like(self._flat)

    @torch.no_grad()
    def step(self, gradient: Tensor, lr: float) -> None:
        """See `Optimizer.step`."""
        gradient = clipped(gradient)
        self._momentum.mul_(0.95).add_(gradient)
        direction = gradient.add(self._momentum, alpha=0.95)
        before = {slot: self._flat[:, slot.start : slot.stop].clone() for slot in self._slots}
        self._adam.step(gradient, lr)
        muon_lr = lr * MUON_LR_RATIO
        for slot, weights in before.items():  # what AdamW did to the hidden matrices is taken back
            update = orthogonalized(direction[:, slot.start : slot.stop].reshape(-1, *slot.shape)).flatten(1)
            length = max(1.0, slot.shape[0] / slot.shape[1]) ** 0.5
            weights.mul_(1 - muon_lr * WEIGHT_DECAY).add_(update, alpha=-muon_lr * length)
            self._flat[:, slot.start : slot.stop] = weights


def orthogonalized(matrices: Tensor) -> Tensor:
    """Push all singular values of each matrix towards 1: five Newton-Schulz steps with Jordan's coefficients."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x: Tensor = matrices if wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT
