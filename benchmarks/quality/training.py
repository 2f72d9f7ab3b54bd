"""One run of the bench: train, look at held-out text on the way, count bytes.

Data parallel sees the same tokens: one model, each step the batches of all islands. Invariant: a configuration
determines its result but for the last bits of the machine's arithmetic.
"""

import hashlib
import math
from functools import cache
from time import perf_counter, process_time
from typing import Any

import msgspec
import torch
from data import held_out_batches, load, train_batch
from msgspec import Struct
from torch import Tensor

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Settings
from quality.inner import Inner, lr_factor, make
from quality.lockstep import Diverged, Islands, Traffic
from quality.model import SIZES, Stack

METHOD = 1
"""Raised when the bench itself changes what a configuration means: its older results count no longer."""
CURVE_POINTS = 12
CURVE_BYTES, FINAL_BYTES = 1 << 14, 1 << 17
"""Held-out bytes that are looked at on the way and at the end, evenly spread over the held-out text."""
TEXT_BYTES_MAX = 20_000_000
EVAL_BATCH = 32

Flat = dict[str, int | float | str | bool]
"""Settings by dotted name."""


class Config(Struct, frozen=True, kw_only=True):
    """All that determines a run."""

    size: str
    islands: int
    steps: int
    settings: Flat | None
    """What differs from the library's defaults; None: data parallel."""
    lr: float
    inner: Inner = "adamw"
    batch: int = 8
    """Sequences of one island's step."""
    seed: int = 0
    method: int = METHOD

    @property
    def key(self) -> str:
        """Names this configuration: 16 hex digits."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]


class Result(Struct, frozen=True, kw_only=True):
    """What came of a run."""

    key: str
    config: Config
    bits: float | None
    """Held-out bits per byte of the final weights; None: not finite, or the run could not go on."""
    curve: tuple[tuple[int, float | None], ...]
    """Held-out bits per byte on a smaller sample, after so many steps."""
    tokens: int
    parameters: int
    traffic: Traffic | None
    seconds: float
    cpu_seconds: float


def settings_of(flat: Flat) -> Settings:
    """Settings from dotted names. Raises msgspec.ValidationError if one is unknown or not allowed."""
    nested: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, _, field = name.partition(".")
        nested.setdefault(section, {})[field] = value
    return msgspec.convert(nested, Settings)


def run(config: Config, *, device: str = "cpu") -> Result:
    """Do one run."""
    wall, cpu = perf_counter(), process_time()
    trainer = _Trainer(config, device)
    curve: list[tuple[int, float | None]] = []
    marks = {round(config.steps * k / CURVE_POINTS) for k in range(1, CURVE_POINTS + 1)}
    bits = None
    try:
        for step in range(config.steps):
            trainer.step(step)
            if step + 1 in marks:
                curve.append((step + 1, trainer.held_out(CURVE_BYTES)))
                if curve[-1][1] is None:
                    break
        else:
            trainer.finish()
            bits = trainer.held_out(FINAL_BYTES)
    except (Corrupt, Diverged):
        bits = None
    return Result(
        key=config.key,
        config=config,
        bits=bits,
        curve=tuple(curve),
        tokens=config.islands * config.steps * config.batch * SIZES[config.size].context,
        parameters=trainer.stack.num_parameters,
        traffic=trainer.islands.traffic() if trainer.islands else None,
        seconds=round(perf_counter() - wall, 1),
        cpu_seconds=round(process_time() - cpu, 1),
    )


class _Trainer:
    """Models, data and, unless it is data parallel, islands of one run."""

    def __init__(self, config: Config, device: str) -> None:
        self._config, self._device = config, device
        self._shape = SIZES[config.size]
        self._text, self._held_out = _text()
        rows = 1 if config.settings is None else config.islands
        self.stack = Stack(self._shape, rows, config.seed, device)
        self._global = Stack(self._shape, 1, config.seed, device)
        self._optimizer = make(config.inner, self.stack)
        self.islands: Islands | None = None
        if config.settings is not None:
            tokens = config.batch * self._shape.context
            self.islands = Islands(settings_of(config.settings), self.stack, config.seed, tokens)

    def step(self, step: int) -> None:
        """One inner step of everybody, and what follows it."""
        losses = self.stack.loss(self._batch(step))
        (gradient,) = torch.autograd.grad(losses.sum(), self.stack.flat)
        self._optimizer.step(gradient, self._config.lr * lr_factor(step, self._config.steps))
        if self.islands:
            self.islands.after_step()

    def finish(self) -> None:
        """Let islands send and merge what is left."""
        if self.islands:
            self.islands.finish()

    @torch.no_grad()
    def held_out(self, num_bytes: int) -> float | None:
        """Bits per byte of the global weights; None if not finite."""
        self._global.write(0, self.islands.params() if self.islands else self.stack.read(0))
        num_batches = num_bytes // (EVAL_BATCH * self._shape.context)
        batches = held_out_batches(self._held_out, num_batches, batch=EVAL_BATCH, context=self._shape.context)
        losses = [float(self._global.loss(batch[None].to(self._device))) for batch in batches]
        bits = sum(losses) / len(losses) / math.log(2)
        return bits if math.isfinite(bits) else None

    def _batch(self, step: int) -> Tensor:
        """Every island's sequences, (rows, batch, context + 1)."""
        config = self._config
        batches = [
            train_batch(self._text, f"{config.seed}/{i}", step, batch=config.batch, context=self._shape.context)
            for i in range(config.islands)
        ]
        tokens = torch.cat(batches)[None] if self.stack.rows == 1 else torch.stack(batches)
        return tokens.to(self._device)


@cache
def _text() -> tuple[Tensor, Tensor]:
    return load([], TEXT_BYTES_MAX)
