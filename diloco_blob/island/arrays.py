"""Dictionaries of fp32 arrays by tensor name, and the few operations an island does on them."""

from collections.abc import Iterable, Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
"""fp32 tensors by name, in the layout's order."""


def copied(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The same values in memory of their own."""
    return {name: array.copy() for name, array in arrays.items()}


def difference(minuend: Mapping[str, np.ndarray], subtrahend: Mapping[str, np.ndarray]) -> Arrays:
    """`minuend − subtrahend`, tensor by tensor, in fp32."""
    return {name: np.asarray(array - subtrahend[name]) for name, array in minuend.items()}


def total(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> Arrays:
    """`left + right`, tensor by tensor, in fp32."""
    return {name: np.asarray(array + right[name]) for name, array in left.items()}


def mixed(local: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], alpha: float) -> Arrays:
    """`α·local + (1−α)·new`, in fp32."""
    keep, take = np.float32(alpha), np.float32(1.0 - alpha)
    return {name: np.asarray(keep * array + take * new[name]) for name, array in local.items()}


def subset(arrays: Mapping[str, np.ndarray], names: Iterable[str]) -> Arrays:
    """The named tensors, in the order of `names`."""
    return {name: arrays[name] for name in names}
