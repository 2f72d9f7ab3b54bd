"""The mean over those islands that sent a coordinate, for sparse contributions.

Each island of n sends the few coordinates that matter most to it. Divided by all n, a coordinate that one of them sent
moves by 1/n of what it asked for, and a sparse run crawls; divided by those that sent it, it moves by all of it
(SparseLoCo, arXiv 2508.15706, averages so). Where everybody sends everything it is the mean.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from diloco_blob.outer.norms import spans
from diloco_blob.wire.types import FloatArray


def sparse_mean(arrays: Iterable[FloatArray], weights: Sequence[float]) -> FloatArray:
    """Σ w·v / Σ w·[v ≠ 0], coordinate by coordinate; 0 where nobody sent anything.

    Args:
        arrays: fp32, of one shape, in the order of the close; each is read once.
        weights: One per array, not negative.

    Returns:
        fp32: sums in float64 in the order of `arrays`, one division, rounded once. A weight of 0 sends nothing.
    """
    total: npt.NDArray[np.float64] | None = None
    senders, shape = np.zeros(0), ()
    for array, weight in zip(arrays, weights, strict=True):
        if total is None:
            shape = array.shape
            total, senders = np.zeros(array.size), np.zeros(array.size)
        if array.shape != shape:
            raise ValueError(f"arrays of one tensor have one shape, got {shape} and {array.shape}")
        flat = array.reshape(-1)
        for part in spans(flat.size):
            wide = flat[part].astype(np.float64)
            senders[part] += (wide != 0.0) * weight
            np.multiply(wide, weight, out=wide)
            total[part] += wide
    if total is None:
        raise ValueError("there is nothing to average")
    out = np.zeros(total.size, np.float32)
    for part in spans(out.size):
        sent = senders[part] > 0.0
        out[part][sent] = total[part][sent] / senders[part][sent]
    return out.reshape(shape)
