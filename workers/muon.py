"""Muon for the hidden matrices and AdamW for all else, as one optimizer with one `state_dict`.

Muon (Keller Jordan 2024, kellerjordan.github.io/posts/muon): Nesterov momentum, whose nearest orthogonal
matrix is the step. As inner optimizer of DiLoCo it is MuLoCo (arXiv 2505.23725). What `train.py` uses.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def orthogonalize(matrix: Tensor) -> Tensor:
    """Push all singular values of a matrix towards 1: five Newton-Schulz steps with Jordan's coefficients."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x: Tensor = (matrix if wide else matrix.T).to(torch.bfloat16 if matrix.is_cuda else matrix.dtype)
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)


class MuonAdamW(Optimizer):
    """Muon for `matrices` with learning rate `muon_lr`, AdamW for `others` with learning rate `lr`."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        lr: float,
        muon_lr: float,
        weight_decay: float,
    ) -> None:
        groups = [
            {"params": list(matrices), "muon": True, "lr": muon_lr, "momentum": 0.95},
            {"params": list(others), "muon": False, "lr": lr, "betas": (0.9, 0.95), "eps": 1e-8},
        ]
        super().__init__(groups, {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """Make one step with the gradients that are there."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    (self._muon if group["muon"] else self._adam)(weight, weight.grad, group)

    def _muon(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        direction = orthogonalize(gradient.add(buffer, alpha=group["momentum"]))
        weight.add_(direction, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)

    def _adam(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        (beta1, beta2), t = group["betas"], float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**t)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**t))
