"""Encode, decode, accumulate and outer step on one thread, as a ratio to copying the same fp32 values.

CPU time of the calling thread, the best of several rounds, in each of which everything runs once: so other programs
count little. One tensor; values are Gaussian, seeded. A small tensor's copy stays in the CPU's cache, which makes its
ratios larger.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from diloco_blob.core.settings import Codec, Outer
from diloco_blob.outer import merge_tensor, outer_step
from diloco_blob.wire import codec_for

SEED = 0
CODEC = Codec(name="int4")
WIDTH = 1 << 10
MERGED = 2
"""Arrays of one merge; its time, divided by this, is that of one accumulation with its share of the last rounding."""


class Ratios(NamedTuple):
    """What was measured for one size."""

    parameters: int
    copy_s: float
    encode: float
    decode: float
    accumulate: float
    outer_step: float


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def ratios(parameters: int, rounds: int) -> Ratios:
    """Measure one size."""
    rng = np.random.default_rng(SEED)
    shape = (parameters // WIDTH, WIDTH)
    values, momentum = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
    target = np.empty_like(values)
    codec, outer = codec_for(CODEC, 1), Outer(optimizer="nesterov", lr=0.7, momentum=0.9)
    parts = codec.encode(values)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, values),
        "encode": lambda: codec.encode(values),
        "decode": lambda: codec.decode(parts, shape),
        "accumulate": lambda: merge_tensor("mean", [values] * MERGED, [1.0] * MERGED),
        "outer_step": lambda: outer_step(outer, values, {"momentum": momentum}, 2),
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            best[name] = min(best[name], cpu_s(work))
    copy_s = best["copy"]
    return Ratios(
        parameters=values.size,
        copy_s=copy_s,
        encode=best["encode"] / copy_s,
        decode=best["decode"] / copy_s,
        accumulate=best["accumulate"] / copy_s / MERGED,
        outer_step=best["outer_step"] / copy_s,
    )
