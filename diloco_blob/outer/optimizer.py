"""The outer optimizer: from a merged pseudo-gradient to a step of the global weights.

    buf ← μ·buf + Δ;   sgd: step = lr·buf;   nesterov: step = lr·(Δ + μ·buf);   params ← params − step

It is `torch.optim.SGD` with dampening 0, written out: elementwise, the same bits everywhere, μ and lr rounded
to fp32 first. Torch's `add(…, alpha=μ)` is a fused multiply-add, which does not round the product; Δ + μ·buf is
therefore computed in float64, where the product is exact, and rounded to fp32 once. That matters where the two
nearly cancel: a rounded product moved some of two million parameters by 4 ulps. So buffer and direction equal
torch's, and a parameter differs by at most one ulp a step (of the parameter or of its step, whichever is larger):
torch fuses θ − lr·d too, but here lr·d is a tensor of its own, rounded, since the downlink encodes it.
"""

import numpy as np

from diloco_blob.core.settings import Outer
from diloco_blob.wire.types import FloatArray


def outer_step(outer: Outer, delta: FloatArray, momentum: FloatArray | None) -> tuple[FloatArray, FloatArray | None]:
    """One step for one tensor; changes none of its arguments.

    Args:
        outer: Optimizer, learning rate lr, momentum μ.
        delta: Δ, the merged pseudo-gradient (older minus newer, so that this descends), fp32.
        momentum: buf after the step before; None at the first, or if μ = 0.

    Returns:
        What the caller subtracts from the parameters, and the new buf; None if μ = 0, when nothing need be
        stored.
    """
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    step = np.empty_like(delta)  # and `out=`: plain operators turn an array without dimensions into a scalar
    with np.errstate(over="ignore"):  # an infinite step is refused by whoever encodes or writes it
        if outer.momentum == 0.0:
            return np.multiply(delta, lr, out=step), None
        buf = delta.copy()
        if momentum is not None:
            np.multiply(momentum, mu, out=buf)
            np.add(buf, delta, out=buf)
        if outer.optimizer == "sgd":
            return np.multiply(buf, lr, out=step), buf
        wide = np.empty(delta.shape, np.float64)
        np.multiply(buf, mu, out=wide, dtype=np.float64)  # exact: 24 by 24 bits fit into 53
        np.add(wide, delta, out=wide)
        step[...] = wide
        return np.multiply(step, lr, out=step), buf
