"""Merging one tensor over the islands of a round.

Two aggregators that merge the same close, on different machines, must write the same bytes. What IEEE 754
fixes is the result of one operation on given operands, so everything here is elementwise operations in a
fixed order. Norms use `norms.square_sum`, an order of our own.

Accumulation is in float64 and ends in one rounding to fp32. Before that rounding, n terms are off by at most
about n·2⁻⁵³·Σ|w·v|. So n identical arrays merge to exactly that array, and another order of the
same arrays changes a value by one rounding at most (if its terms do not cancel), and hardly ever: only
where the exact result is about halfway between two fp32 values. That is rare, but not with round weights:
with twentieths, one value in 130 of random tensors. The order is the close's, so even that cannot make two
aggregators differ.

Arrays come one after the other and are not kept: memory is one of them and one float64 accumulator (two for
`rda`). Only `trimmed_mean` needs all arrays of a tensor at once (`trimmed.py`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from diloco_blob.outer.norms import spans, square_sum
from diloco_blob.outer.sparse_mean import sparse_mean
from diloco_blob.outer.trimmed import trimmed_mean
from diloco_blob.wire.types import FloatArray

_Float64Array = npt.NDArray[np.float64]

_DIRECTION_NORM_MIN = 1e-12
"""A mean direction shorter than this says nothing: the islands' progress cancels, or is all zero."""


_SPAN_VALUES = 1 << 15
"""Worked through at a time, so that what is in between stays in the cache. It decides no bits."""


def merge_tensor(
    rule: Literal["mean", "rda", "trimmed_mean", "sparse_mean"],
    arrays: Iterable[FloatArray],
    weights: Sequence[float],
    *,
    embedding: bool = False,
    trim: float = 0.0,
) -> FloatArray:
    """Merge one tensor's pseudo-gradients.

    mean: Σ w·v / Σ w.

    rda, radial-directional averaging: (Σ w‖v‖ / Σ w) · φ(Σ w·φ(v) / Σ w) with φ(x) = x/‖x‖ and φ(0) = 0
    (arXiv 2604.21428, App. D.2; over the whole tensor, Euclidean). Pseudo-gradients of different islands are
    nearly orthogonal, so the norm of their mean shrinks like 1/√n; this norm does not. Where the mean
    direction is shorter than 1e-12, and for embeddings, whose pseudo-gradients are not near-orthogonal, it is
    the mean.

    sparse_mean: each coordinate over those that sent it, Σ w·v / Σ w·[v ≠ 0].

    trimmed_mean: each coordinate without its largest and smallest values, unweighted; embeddings too.

    Args:
        rule: As in `Merge.rule`.
        arrays: Finite fp32 arrays of one shape, one per island (the sum of its contributions, docs/decisions/0001),
            in the order of the close; each is read once.
        weights: One per array, not negative, with a positive sum.
        embedding: Whether this is an embedding (or the output layer): averaged plainly by mean and rda.
        trim: As in `Merge.trim`.

    Returns:
        fp32, the shape of the arrays. A value beyond fp32 (only rda can make one) becomes infinite: the codec
        of the downlink refuses it.
    """
    total = math.fsum(weights)
    if not total > 0.0 or min(weights) < 0.0:
        raise ValueError(f"weights must not be negative and must have a positive sum, got {list(weights)}")
    if rule == "trimmed_mean":
        return trimmed_mean([array for array, _ in zip(arrays, weights, strict=True)], trim)
    if rule == "sparse_mean":
        return sparse_mean(arrays, weights)
    if rule == "rda" and not embedding:
        return _radial_directional(arrays, [weight / total for weight in weights])
    mean = _Accumulator()
    for array, weight in zip(arrays, weights, strict=True):
        mean.add(array, weight / total)
    return mean.rounded()


def _radial_directional(arrays: Iterable[FloatArray], weights: Sequence[float]) -> FloatArray:
    mean, direction, radii = _Accumulator(), _Accumulator(), []
    for array, weight in zip(arrays, weights, strict=True):
        norm = math.sqrt(square_sum(array))
        radii.append(weight * norm)
        mean.add(array, weight)
        if norm > 0.0:
            direction.add(array, weight / norm)
    direction_norm = math.sqrt(square_sum(direction.total))
    if direction_norm < _DIRECTION_NORM_MIN:
        return mean.rounded()
    return direction.rounded(math.fsum(radii) / direction_norm)


class _Accumulator:
    """Σ factor·array in float64, in the order of the calls."""

    def __init__(self) -> None:
        self.total: _Float64Array = np.zeros(0)
        self._shape: tuple[int, ...] | None = None
        self._wide = np.empty(_SPAN_VALUES)

    def add(self, array: FloatArray, factor: float) -> None:
        first = self._shape is None
        if self._shape is None:
            self._shape = array.shape
            self.total = np.empty(array.size)
        if array.shape != self._shape:
            raise ValueError(f"arrays of one tensor have one shape, got {self._shape} and {array.shape}")
        flat = array.reshape(-1)
        for part in spans(flat.size, _SPAN_VALUES):
            total = self.total[part]
            wide = self._wide[: total.size]
            np.copyto(wide, flat[part])
            np.multiply(wide, factor, out=wide)
            np.add(0.0 if first else total, wide, out=total)  # 0 + −0 is +0

    def rounded(self, factor: float = 1.0) -> FloatArray:
        """factor·total, rounded once more to fp32."""
        out = np.empty(self.total.size, np.float32)
        with np.errstate(over="ignore"):
            for part in spans(out.size, _SPAN_VALUES):
                wide = self._wide[: out[part].size]
                np.multiply(self.total[part], factor, out=wide)
                out[part] = wide
        return out.reshape(self._shape or ())
