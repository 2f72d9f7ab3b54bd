"""Sums of squares with bits of their own definition, and the pieces in which long arrays are worked through.

numpy does not promise in which order `sum` adds, and BLAS (`dot`, `norm`) does change it: OpenBLAS gives other last
bits on Haswell than on Sapphire Rapids. What a merge depends on (`rda`, clipping) must be the same bits on every
machine, so it uses this order.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

LANES = 8192
"""A power of two. Part of the definition of a norm's bits: changing it changes what `rda` and clipping give."""


def square_sum(values: npt.NDArray[np.floating]) -> float:
    """Σ x² in float64, to the same bits on every machine.

    Value i (in row-major order) goes to lane i mod 8192; each lane is summed in order, then lanes are added pairwise,
    the upper half to the lower half, until one is left. Squares of fp32 values are exact in float64, so only
    additions round.

    Args:
        values: fp32 or float64, any shape.
    """
    return dot(values, values)


def dot(left: npt.NDArray[np.floating], right: npt.NDArray[np.floating]) -> float:
    """Σ left·right in float64, in the order of `square_sum`.

    Args:
        left: fp32 or float64, any shape.
        right: The same shape.
    """
    flat, other = left.reshape(-1), right.reshape(-1)
    lanes = np.zeros(LANES)
    for part in spans(flat.size):
        wide = flat[part].astype(np.float64)
        np.multiply(wide, wide if left is right else other[part], out=wide)
        lanes[: wide.size] += wide
    width = LANES
    while width > 1:
        width //= 2
        lanes[:width] += lanes[width : 2 * width]
    return float(lanes[0])


def spans(count: int, length: int = LANES) -> Iterator[slice]:
    """Pieces of `length` values, by default so short that temporaries stay in the cache."""
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))
