"""The GPT of `workers/gpt.py` for many islands at once: one tensor of parameters, a row for each island.

Why: small models one after another leave a processor idle between small operations; stacked, an operation does all
islands. Invariant: every row computes what `workers/gpt.py` computes with that row's weights (a test compares both).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows
from gpt import GPT, GPTConfig, norm, rotate
from torch import Tensor

SIZES = {
    "tiny": GPTConfig(context=16, layers=2, width=16, heads=2),
    "0.1M": GPTConfig(context=64, layers=2, width=64, heads=2),
    "0.8M": GPTConfig(context=64, layers=4, width=128, heads=4),
    "3M": GPTConfig(context=64, layers=4, width=256, heads=4),
}
"""14,336 parameters, for tests; 131,072, 851,968 and 3,276,800."""


class SquaredReLU(torch.autograd.Function):
    """max(h, 0)², with fewer passes over memory than autograd's own: a step spends most on the hidden layer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        """Square the positive part."""
        positive = h.clamp(min=0.0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """2 · max(h, 0) · gradient."""
        (positive,) = ctx.saved_tensors
        result: Tensor = (gradients[0] * positive).mul_(2.0)
        return result


def squared_relu(h: Tensor) -> Tensor:
    """max(h, 0)² of each value."""
    out: Tensor = SquaredReLU.apply(h)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a row."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """First place after it."""
        return self.start + int(np.prod(self.shape))


class Stack:
    """Models of one shape, one row of `flat` each.

    Args:
        config: Their shape.
        rows: How many models.
        seed: Of the initial weights, the same in every row.
        device: Where to compute.
    """

    def __init__(self, config: GPTConfig, rows: int, seed: int, device: str = "cpu") -> None:
        model = GPT(config, seed)
        self.config, self.rows = config, rows
        self.slots: list[Slot] = []
        parameters = dict(model.named_parameters())
        place = 0
        for name, parameter in parameters.items():
            self.slots.append(Slot(name, tuple(parameter.shape), place))
            place = self.slots[-1].stop
        one = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self.flat = one.repeat(rows, 1).to(device).requires_grad_()
        self._cos, self._sin = model.cos.to(device), model.sin.to(device)

    @property
    def num_parameters(self) -> int:
        """Of one model."""
        return self.slots[-1].stop

    def read(self, row: int) -> dict[str, np.ndarray]:
        """Copies of one model's tensors, fp32."""
        values = self.flat[row].detach().cpu().numpy()
        return {slot.name: values[slot.start : slot.stop].reshape(slot.shape).copy() for slot in self.slots}

    @torch.no_grad()
    def write(self, row: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Set some of one model's tensors."""
        for slot in self.slots:
            if slot.name in arrays:
                values = torch.from_numpy(np.ascontiguousarray(arrays[slot.name]))
                self.flat[row, slot.start : slot.stop] = values.flatten().to(self.flat.device)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of each model on its own text.

        Args:
            tokens: (rows, batch, time + 1) bytes.

        Returns:
            (rows,) losses; the gradient of their sum holds each model's own in its row.
        """
        scores = self._scores(tokens[..., :-1])
        losses = F.cross_entropy(scores.flatten(0, 1), tokens[..., 1:].flatten(), reduction="none")
        return losses.view(self.rows, -1).mean(1)

    def _scores(self, tokens: Tensor) -> Tensor:
        """Map (rows, batch, time) bytes to (rows, batch · time, vocab) scores."""
        rows, batch, time = tokens.shape
        config, width = self.config, self.config.width
        embed, *blocks, head = self._groups()
        offsets = torch.arange(rows, device=tokens.device)[:, None, None] * config.vocab
        x = norm(F.embedding(tokens + offsets, embed.reshape(-1, width)).view(rows, -1, width))
        cos, sin = self._cos[:time], self._sin[:time]
        for i in range(0, len(blocks), 4):
            qkv, out, up, down = blocks[i : i + 4]
            heads = (norm(x) @ qkv.mT).view(rows * batch, time, 3, config.heads, -1).permute(2, 0, 3, 1, 4)
            turned = norm(rotate(heads[:2], cos, sin))
            y = F.scaled_dot_product_attention(turned[0], turned[1], heads[2], is_causal=True)
            x = x + y.transpose(1, 2).reshape(rows, -1, width) @ out.mT
            x = x + squared_relu(norm(x) @ up.mT) @ down.mT
        return norm(x) @ head.mT

    def _groups(self) -> list[Tensor]:
        """All matrices, (rows, out, in) each; query, key and value of a block as one."""
        shapes: list[tuple[int, int]] = []
        for slot in self.slots:
            if slot.name.endswith(("key.weight", "value.weight")):  # neighbours of the query's
                shapes[-1] = (shapes[-1][0] + slot.shape[0], slot.shape[1])
            else:
                shapes.append((slot.shape[0], slot.shape[1]))
        pieces = torch.split(self.flat, [out * width for out, width in shapes], dim=1)
        return [piece.view(-1, *shape) for piece, shape in zip(pieces, shapes, strict=True)]
