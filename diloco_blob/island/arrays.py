"""Dictionaries of fp32 arrays by tensor name, and the few operations an island does on them.

The training thread waits for most of these: they work in pieces that stay in the cache, and in memory that is there
already where nobody else needs what it held.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from diloco_blob.outer.norms import spans

Arrays = dict[str, np.ndarray]
"""fp32 tensors by name, in the layout's order."""

_SPAN_VALUES = 1 << 15
"""A piece. It decides no bits."""


class Difference(Mapping[str, np.ndarray]):
    """`minuend − subtrahend`, tensor by tensor, in fp32, computed by whoever asks for a tensor, each time anew.

    Args:
        minuend: Nobody may write to it any more.
        subtrahend: The same names; nobody may write to it either.
    """

    def __init__(self, minuend: Mapping[str, np.ndarray], subtrahend: Mapping[str, np.ndarray]) -> None:
        self._minuend = minuend
        self._subtrahend = subtrahend

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self._minuend[name] - self._subtrahend[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._minuend)

    def __len__(self) -> int:
        return len(self._minuend)


def copied(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The same values in memory of their own."""
    return {name: array.copy() for name, array in arrays.items()}


def difference(minuend: Mapping[str, np.ndarray], subtrahend: Mapping[str, np.ndarray]) -> Arrays:
    """`minuend − subtrahend`, tensor by tensor, in fp32."""
    return dict(Difference(minuend, subtrahend))


def total(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> Arrays:
    """`left + right`, tensor by tensor, in fp32."""
    return {name: np.asarray(array + right[name]) for name, array in left.items()}


def translated(
    point: Mapping[str, np.ndarray], to: Mapping[str, np.ndarray], since: Mapping[str, np.ndarray]
) -> Arrays:
    """`point + (to − since)`, in fp32; both operations are rounded."""
    return {
        name: _translated(array, to[name], since[name], np.empty(array.size, np.float32))
        for name, array in point.items()
    }


def translate(point: Arrays, to: Mapping[str, np.ndarray], since: Mapping[str, np.ndarray]) -> Arrays:
    """The same, in the memory of `point`: fresh memory costs more than the arithmetic."""
    return {name: _translated(array, to[name], since[name], array.reshape(-1)) for name, array in point.items()}


def _translated(point: np.ndarray, to: np.ndarray, since: np.ndarray, out: np.ndarray) -> np.ndarray:
    before, new, old, shift = point.reshape(-1), to.reshape(-1), since.reshape(-1), np.empty(_SPAN_VALUES, np.float32)
    for part in spans(out.size, _SPAN_VALUES):
        moved = np.subtract(new[part], old[part], out=shift[: new[part].size])
        np.add(before[part], moved, out=out[part])
    return out.reshape(point.shape)


def mix(local: Arrays, new: Mapping[str, np.ndarray], alpha: float) -> Arrays:
    """`α·local + (1−α)·new`, in fp32, in the memory of `local`."""
    keep, take = np.float32(alpha), np.float32(1.0 - alpha)
    return {name: _mixed(array, new[name], keep, take) for name, array in local.items()}


def _mixed(local: np.ndarray, new: np.ndarray, keep: np.float32, take: np.float32) -> np.ndarray:
    flat, other, share = local.reshape(-1), new.reshape(-1), np.empty(_SPAN_VALUES, np.float32)
    for part in spans(flat.size, _SPAN_VALUES):
        values = flat[part]
        np.multiply(values, keep, out=values)
        np.add(values, np.multiply(other[part], take, out=share[: values.size]), out=values)
    return flat.reshape(local.shape)


def mixed(local: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], alpha: float) -> Arrays:
    """The same, in memory of its own."""
    return mix(copied(local), new, alpha)


def subset(arrays: Mapping[str, np.ndarray], names: Iterable[str]) -> Arrays:
    """The named tensors, in the order of `names`."""
    return {name: arrays[name] for name in names}


def first_not_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """The first tensor that has a value that is NaN or infinite, if any has."""
    finite = np.empty(_SPAN_VALUES, np.bool_)
    for name, array in arrays.items():
        flat = array.reshape(-1)
        for part in spans(flat.size, _SPAN_VALUES):
            values = flat[part]
            if not np.isfinite(values, out=finite[: values.size]).all():
                return name
    return None
