"""The k largest magnitudes of each row: the same ones on every machine."""

import numpy as np

from diloco_blob.wire.codecs.base import Scratch
from diloco_blob.wire.types import AnyArray, FloatArray

_FOLDED = 4


def largest(magnitudes: FloatArray, k: int, scratch: Scratch) -> AnyArray:
    """Positions (num, k), rising in each row, of the k largest of each row; of equal ones those with lower positions.

    The k-th largest *value* of a row does not depend on how a sort treats equal ones, so that is what partitioning is
    asked for. To spare it most of the row: a row is folded, keeping the larger of two values, to a few times k maxima;
    the k-th largest of these cannot exceed the k-th largest of the row, so only what reaches it is partitioned.

    Args:
        magnitudes: (num, n), finite, ≥ 0; C-contiguous.
        k: 1 to n.
        scratch: For temporaries.
    """
    num, n = magnitudes.shape
    candidates = np.flatnonzero(
        np.greater_equal(
            magnitudes, _lower_bounds(magnitudes, k, scratch)[:, None], out=scratch.array("reach", (num, n), np.bool_)
        )
    )
    rows = candidates // n
    counts = np.bincount(rows, minlength=num)
    starts = np.cumsum(counts) - counts
    table = np.full((num, int(counts.max(initial=k))), -1, np.float32)
    values = magnitudes.reshape(-1)[candidates]
    table[rows, np.arange(candidates.size) - starts[rows]] = values
    thresholds = np.partition(table, table.shape[1] - k, axis=1)[:, table.shape[1] - k]
    kept: AnyArray = candidates[values >= thresholds[rows]]
    if kept.size > num * k:
        kept = _without_surplus(magnitudes, kept, thresholds, k)
    positions: AnyArray = kept.reshape(num, k) - np.arange(num)[:, None] * n
    return positions


def _lower_bounds(magnitudes: FloatArray, k: int, scratch: Scratch) -> FloatArray:
    folded = magnitudes
    while folded.shape[1] % 2 == 0 and folded.shape[1] >= 2 * _FOLDED * k:
        half = folded.shape[1] // 2
        halves = folded[:, :half], folded[:, half:]
        folded = np.maximum(*halves, out=scratch.array(f"folded{half}", (len(folded), half)))
    at = folded.shape[1] - k
    return np.asarray(np.partition(folded, at, axis=1)[:, at], np.float32)


def _without_surplus(magnitudes: FloatArray, kept: AnyArray, thresholds: FloatArray, k: int) -> AnyArray:
    """`kept`, without the last ones of those in a row that are equal to its threshold, so that k of each row stay."""
    num, n = magnitudes.shape
    rows = kept // n
    ties = magnitudes.reshape(-1)[kept] == thresholds[rows]
    surplus = np.bincount(rows, minlength=num) - k
    so_far = np.cumsum(ties)
    ends = np.cumsum(np.bincount(rows, minlength=num)) - 1
    behind = so_far[ends][rows] - so_far  # ties of the same row that lie behind
    chosen: AnyArray = kept[~(ties & (behind < surplus[rows]))]
    return chosen
