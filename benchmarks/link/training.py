"""What is trained, the same for islands and for DistributedDataParallel: model, data, optimizer, held-out loss.

The GPT of `workers/` with 3,276,800 parameters on Python's own text, one thread, batch 4 × 64 bytes on each of two
islands, AdamW with a constant learning rate after a warm-up: the loss after a step does not depend on how many will
follow. An island and a rank of the same number see the same data.
"""

import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workers"))
from data import held_out_batches, load, train_batch
from gpt import GPT, GPTConfig

SEED = 0
BATCH = 4
CONFIG = GPTConfig(context=64, layers=4, width=256, heads=4)
LR, WARMUP_STEPS = 3e-3, 20
_HELD_OUT_BATCHES = 4  # of 16 sequences


class Training:
    """Model, optimizer and data of one island or rank."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)
        self._text, held_out = load([], 20_000_000)
        self._stream = f"{SEED}/island-{number}"
        self._held_out = list(held_out_batches(held_out, _HELD_OUT_BATCHES, batch=16, context=CONFIG.context))
        self.model = GPT(CONFIG, SEED)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return BATCH * CONFIG.context

    def batch(self, step: int) -> Tensor:
        """The data of a step, counted from 0."""
        return train_batch(self._text, self._stream, step, batch=BATCH, context=CONFIG.context)

    def update(self, step: int) -> None:
        """Clip, step, and forget the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP_STEPS)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inner_step(self, step: int) -> Tensor:
        """One step of an island; returns the loss in nats."""
        loss = self.model.loss(self.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        self.update(step)
        return loss.detach()

    def bare_step(self, num_steps: int) -> tuple[float, float]:
        """Median seconds of a step that exchanges nothing, by the clock and by the processor's.

        Afterwards the weights are as before, and the optimizer is fresh.
        """
        before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        times = list(_timed(self, num_steps))
        self.model.load_state_dict(before)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)

    @torch.no_grad()
    def bits_per_byte(self) -> float:
        """Held-out loss."""
        losses = [float(self.model.loss(batch)) for batch in self._held_out]
        return sum(losses) / len(losses) / math.log(2)


def _timed(training: Training, num_steps: int) -> Iterator[tuple[float, float]]:
    for step in range(num_steps):
        wall, cpu = perf_counter(), process_time()
        training.inner_step(step)
        yield perf_counter() - wall, process_time() - cpu
