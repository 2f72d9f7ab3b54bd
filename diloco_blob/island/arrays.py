"""Dictionaries of fp32 arrays by tensor name, and the few operations an island does on them.

The training thread waits for most of these: they work in pieces that stay in the cache, and in memory that is there
already where nobody else needs what it held.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    points: Sequence[Mapping[str, np.ndarray]],
    to: Mapping[str, np.ndarray],
    since: Mapping[str, np.ndarray],
    owed: Mapping[str, np.ndarray] | None = None,
    *,
    into: Sequence[Arrays] = (),
) -> list[Arrays]:
    """Each point moved by the same shift: `point + (to − (since + owed))`, in fp32; each operation is rounded.

    One pass, with the shift only ever in the cache: fresh memory costs more than the arithmetic.

    Args:
        points: What is moved.
        to: Where the merged point lies now.
        since: Where it lay, but for what is owed.
        owed: None: nothing.
        into: The memory that the first results may take, which may be that of their points.
    """
    found: list[Arrays] = [{} for _ in points]
    shift = np.empty(_SPAN_VALUES, np.float32)
    for name, target in to.items():
        new, old = target.reshape(-1), since[name].reshape(-1)
        rest = owed[name].reshape(-1) if owed else None
        flats = [point[name].reshape(-1) for point in points]
        outs = [given[name].reshape(-1) for given in into]
        outs += [np.empty(new.size, np.float32) for _ in points[len(into) :]]
        for part in spans(new.size, _SPAN_VALUES):
            moved = shift[: new[part].size]
            if rest is None:
                np.subtract(new[part], old[part], out=moved)
            else:
                np.add(old[part], rest[part], out=moved)
                np.subtract(new[part], moved, out=moved)
            for flat, out in zip(flats, outs, strict=True):
                np.add(flat[part], moved, out=out[part])
        for result, out in zip(found, outs, strict=True):
            result[name] = out.reshape(target.shape)
    return found


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
