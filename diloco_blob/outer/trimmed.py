"""The coordinate-wise trimmed mean (arXiv 1803.01498): a few islands cannot pull a value out of the others' range.

For each coordinate the values of all islands are sorted, k are left out at each end, and the rest is averaged, without
weights: whoever claims many tokens has no larger say. As long as at most k islands are hostile, each value of the
result lies between values that honest islands sent.

Values are sorted before they are added, so the order of the islands does not even decide a rounding. The sum starts
at +0, so a result of zero is +0, whichever zeros were sent.
"""

import math
from collections.abc import Sequence

import numpy as np

from diloco_blob.outer.norms import spans
from diloco_blob.wire.types import FloatArray

_SPAN_VALUES = 1 << 18
"""Of all islands together, sorted at a time: 1 MiB. Coordinates do not depend on each other, so it decides no bits."""

_PRODUCT_SLACK = 1e-9
"""0.07 · 100 is 7.000000000000001 in binary, and must not leave out an eighth island."""


def num_trimmed(trim: float, num: int) -> int:
    """How many of `num` values are left out at each end: min(⌈trim·num⌉, ⌊(num − 1)/2⌋), so that one or two stay."""
    return min(math.ceil(trim * num - _PRODUCT_SLACK), (num - 1) // 2)


def trimmed_mean(arrays: Sequence[FloatArray], trim: float) -> FloatArray:
    """Mean of each coordinate without the k largest and the k smallest of its n values.

    With one or two arrays nothing is left out. Sums are float64 and rounded to fp32 once, so n identical arrays give
    exactly that array.

    Memory: the n arrays, which must all be there at once (4·n bytes per value of the tensor), the result, and pieces
    of about 1 MiB (for more than 2¹⁸ arrays, one value of each).

    Args:
        arrays: Finite fp32 arrays of one shape, at least one.
        trim: Share left out at each end, in [0, ½).

    Returns:
        fp32, the shape of the arrays.
    """
    first, num = arrays[0], len(arrays)
    if any(array.shape != first.shape for array in arrays):
        raise ValueError(f"arrays of one tensor have one shape, got {sorted({array.shape for array in arrays})}")
    flats = [array.reshape(-1) for array in arrays]
    cut = num_trimmed(trim, num)
    out = np.empty(first.size, np.float32)
    for part in spans(first.size, max(1, _SPAN_VALUES // num)):
        values = np.stack([flat[part] for flat in flats])
        values.sort(axis=0)
        total = np.zeros(values.shape[1])
        for row in values[cut : num - cut]:
            total += row
        out[part] = total / (num - 2 * cut)
    return out.reshape(first.shape)
