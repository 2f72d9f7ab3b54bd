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
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from diloco_blob.core.settings import Outer
from diloco_blob.outer.norms import dot, spans, square_sum
from diloco_blob.wire.types import FloatArray


class Stepped(NamedTuple):
    """What an outer optimizer makes of one tensor."""

    step: FloatArray
    """What is subtracted from the parameters."""
    state: dict[str, FloatArray]
    """What it remembers: one array for each of `state_kinds`."""


_Rule: TypeAlias = Callable[[FloatArray, Mapping[str, FloatArray]], Stepped]
"""A piece of Δ, and what is remembered of it → its step."""

_SPAN_VALUES = 1 << 15
"""A piece: what is in between stays in the cache. It decides no bits."""


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
    flat, old = delta.reshape(-1), {kind: values.reshape(-1) for kind, values in state.items()}
    step = np.empty(flat.size, np.float32)
    new = {kind: np.empty(flat.size, np.float32) for kind in state_kinds(outer)}
    with np.errstate(over="ignore"):
        rule = _rule(outer, flat, old, version)
        for part in spans(flat.size, _SPAN_VALUES):
            piece = rule(flat[part], {kind: values[part] for kind, values in old.items()})
            step[part] = piece.step
            for kind, values in piece.state.items():
                new[kind][part] = values
    return Stepped(step.reshape(delta.shape), {kind: values.reshape(delta.shape) for kind, values in new.items()})


def in_turn(
    taken: npt.NDArray[np.bool_], lr: float, delta: FloatArray, old: Mapping[str, FloatArray], stepped: Stepped
) -> Stepped:
    """The step of a tensor of which only some values are sent: only their momentum moves on, by one of their turns.

    Args:
        taken: Which values have their turn.
        lr: Outer learning rate.
        delta: Δ. Where it is not a value's turn it is 0, but for late contributions of another turn: then the step is
            lr·Δ, without momentum.
        old: What was remembered before the step.
        stepped: The step as `outer_step` makes it for all values.
    """
    zero = np.float32(0.0)
    return Stepped(
        np.where(taken, stepped.step, np.float32(lr) * delta),
        {kind: np.where(taken, values, old.get(kind, zero)) for kind, values in stepped.state.items()},
    )


def _rule(outer: Outer, delta: FloatArray, state: Mapping[str, FloatArray], version: int) -> _Rule:
    """The step of any piece of a tensor, once what depends on all of it is known."""
    if outer.momentum == 0.0:
        return lambda piece, _: Stepped(piece * np.float32(outer.lr), {})
    if outer.optimizer == "rho_adaptive":
        factor = _rho_factor(outer, delta, state.get("previous"))
        return lambda piece, _: Stepped(piece * factor, {"previous": piece})
    if outer.optimizer == "delayed_nesterov":
        return partial(_delayed_nesterov, outer, version)
    return partial(_momentum, outer)


def _momentum(outer: Outer, delta: FloatArray, state: Mapping[str, FloatArray]) -> Stepped:
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    buf = _renewed(state.get("momentum"), mu, delta)
    return Stepped((buf if outer.optimizer == "sgd" else _ahead(delta, buf, mu)) * lr, {"momentum": buf})


def _delayed_nesterov(outer: Outer, version: int, delta: FloatArray, state: Mapping[str, FloatArray]) -> Stepped:
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    buf, gathered = state.get("momentum"), _renewed(state.get("gathered"), np.float32(1.0), delta)
    if version % outer.delay:
        kept = np.zeros_like(delta) if buf is None else buf
        return Stepped(delta * lr, {"momentum": kept, "gathered": gathered})
    buf = _renewed(buf, mu, gathered)
    return Stepped(_ahead(delta, buf, mu) * lr, {"momentum": buf, "gathered": np.zeros_like(delta)})


def _rho_factor(outer: Outer, delta: FloatArray, previous: FloatArray | None) -> np.float32:
    rho = 0.0 if previous is None else _cosine(delta, previous)
    momentum = min(2.0 * (1.0 - rho), outer.momentum)
    return np.float32(outer.lr / (1.0 - momentum * rho))


def _cosine(left: FloatArray, right: FloatArray) -> float:
    """To the same bits on every machine; 0 where one of them is all zeros."""
    norms = math.sqrt(square_sum(left)) * math.sqrt(square_sum(right))
    return min(max(dot(left, right) / norms, -1.0), 1.0) if norms > 0.0 else 0.0


def _renewed(buf: FloatArray | None, mu: np.float32, delta: FloatArray) -> FloatArray:
    """μ·buf + Δ, the product rounded to fp32 as torch does."""
    return delta if buf is None else buf * mu + delta


def _ahead(delta: FloatArray, buf: FloatArray, mu: np.float32) -> FloatArray:
    """Δ + μ·buf, rounded once."""
    wide = buf.astype(np.float64)
    wide *= np.float64(mu)  # exact: 24 by 24 bits fit into 53
    wide += delta.astype(np.float64)
    return wide.astype(np.float32)
