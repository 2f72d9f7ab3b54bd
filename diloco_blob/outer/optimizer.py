"""The outer optimizer: from a merged pseudo-gradient Δ to a step of the global weights, params ← params − step.

    sgd                buf ← μ·buf + Δ;  step = lr·buf
    nesterov           buf ← μ·buf + Δ;  step = lr·(Δ + μ·buf)
    delayed_nesterov   gathered ← gathered + Δ;  step = lr·Δ, but at every `delay`-th version
                       buf ← μ·buf + gathered;  gathered ← 0;  step = lr·(Δ + μ·buf)
    rho_adaptive       ρ = cos(Δ, Δ before);  m = min(2·(1 − ρ), μ);  step = lr·Δ / (1 − m·ρ)

`sgd` and `nesterov` are `torch.optim.SGD` with dampening 0, written out: elementwise, the same bits everywhere, μ and
lr rounded to fp32 first. Torch's `add(…, alpha=μ)` is a fused multiply-add, which does not round the product; Δ + μ·buf
is therefore computed in float64, where the product is exact, and rounded to fp32 once. That matters where the two
nearly cancel: a rounded product moved some of two million parameters by 4 ulps. So buffer and direction equal
torch's, and a parameter differs by at most one ulp a step (of the parameter or of its step, whichever is larger):
torch fuses θ − lr·d too, but here lr·d is a tensor of its own, rounded, since the downlink encodes it.

`delayed_nesterov` is arXiv 2401.09135's, for rounds of few islands: momentum is renewed once in `delay` versions from
all that came in between, and applied then. Its g/N is our Δ. `rho_adaptive` scales the step by how much consecutive
pseudo-gradients of a tensor agree: what momentum would add up to, without its memory. 2·(1 − ρ)·ρ is at most ½, so
it at most doubles lr·Δ, where ρ = ½.

What an optimizer remembers of a tensor is a few fp32 arrays of the tensor's shape, by kind (`state_kinds`): the outer
state of a version. A kind that is missing, as at version 0, is all zeros.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diloco_blob.core.settings import Outer
from diloco_blob.outer.norms import dot, square_sum
from diloco_blob.wire.types import FloatArray


class Stepped(NamedTuple):
    """What an outer optimizer makes of one tensor."""

    step: FloatArray
    """What is subtracted from the parameters."""
    state: dict[str, FloatArray]
    """What it remembers: one array for each of `state_kinds`."""


def state_kinds(outer: Outer) -> tuple[str, ...]:
    """What the optimizer remembers of each tensor, in the order in which the outer state file holds it."""
    if outer.momentum == 0.0:
        return ()
    if outer.optimizer == "delayed_nesterov":
        return ("momentum", "gathered")
    return ("previous",) if outer.optimizer == "rho_adaptive" else ("momentum",)


def outer_step(outer: Outer, delta: FloatArray, state: Mapping[str, FloatArray], version: int) -> Stepped:
    """One step for one tensor; changes none of its arguments.

    Args:
        outer: Optimizer, learning rate lr, momentum μ.
        delta: Δ, the merged pseudo-gradient (older minus newer, so that this descends), fp32.
        state: What was remembered after the step before; empty at the first.
        version: The number of the version that this step makes: 1, 2, …

    Returns:
        An infinite step is possible; it is refused by whoever encodes or writes it.
    """
    with np.errstate(over="ignore"):
        if outer.momentum == 0.0:
            return Stepped(_scaled(delta, np.float32(outer.lr)), {})
        if outer.optimizer == "delayed_nesterov":
            return _delayed_nesterov(outer, delta, state, version)
        if outer.optimizer == "rho_adaptive":
            return _rho_adaptive(outer, delta, state)
        buf = _renewed(state.get("momentum"), np.float32(outer.momentum), delta)
        direction = buf if outer.optimizer == "sgd" else _ahead(delta, buf, np.float32(outer.momentum))
        return Stepped(_scaled(direction, np.float32(outer.lr)), {"momentum": buf})


def _delayed_nesterov(outer: Outer, delta: FloatArray, state: Mapping[str, FloatArray], version: int) -> Stepped:
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    buf, gathered = state.get("momentum"), _renewed(state.get("gathered"), np.float32(1.0), delta)
    if version % outer.delay:
        kept = np.zeros_like(delta) if buf is None else buf
        return Stepped(_scaled(delta, lr), {"momentum": kept, "gathered": gathered})
    buf = _renewed(buf, mu, gathered)
    return Stepped(_scaled(_ahead(delta, buf, mu), lr), {"momentum": buf, "gathered": np.zeros_like(delta)})


def _rho_adaptive(outer: Outer, delta: FloatArray, state: Mapping[str, FloatArray]) -> Stepped:
    previous = state.get("previous")
    rho = 0.0 if previous is None else _cosine(delta, previous)
    momentum = min(2.0 * (1.0 - rho), outer.momentum)
    factor = np.float32(outer.lr / (1.0 - momentum * rho))
    return Stepped(_scaled(delta, factor), {"previous": delta.copy()})


def _cosine(left: FloatArray, right: FloatArray) -> float:
    """To the same bits on every machine; 0 where one of them is all zeros."""
    norms = math.sqrt(square_sum(left)) * math.sqrt(square_sum(right))
    return min(max(dot(left, right) / norms, -1.0), 1.0) if norms > 0.0 else 0.0


def _scaled(values: FloatArray, factor: np.float32) -> FloatArray:
    # `out=`: plain operators turn an array without dimensions into a scalar.
    return np.multiply(values, factor, out=np.empty_like(values))


def _renewed(buf: FloatArray | None, mu: np.float32, delta: FloatArray) -> FloatArray:
    """μ·buf + Δ, the product rounded to fp32 as torch does."""
    if buf is None:
        return delta.copy()
    out = _scaled(buf, mu)
    return np.add(out, delta, out=out)


def _ahead(delta: FloatArray, buf: FloatArray, mu: np.float32) -> FloatArray:
    """Δ + μ·buf, rounded once."""
    wide = np.empty(delta.shape, np.float64)
    np.multiply(buf, mu, out=wide, dtype=np.float64)  # exact: 24 by 24 bits fit into 53
    np.add(wide, delta, out=wide)
    return wide.astype(np.float32)
