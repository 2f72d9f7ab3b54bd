"""Comparing a version's files tensor by tensor: one tensor of each in memory, whatever their size."""

import math
from collections.abc import Iterator

import numpy as np

from diloco_blob.aggregate.payloads import read_chunks
from diloco_blob.outer import square_sum
from diloco_blob.protocol.records import ObjectRef
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import FloatArray, Layout, read_tensor_stream

Tensors = Iterator[tuple[str, FloatArray]]


def stored(store: ObjectStore, ref: ObjectRef, layout: Layout) -> Tensors:
    """The tensors of params or outer state in a store, in layout order.

    Raises:
        NotFound: There is no such object.
        Corrupt: It is not what `ref` or the layout says.
    """
    return read_tensor_stream(read_chunks(store, ref), layout, ref.size)


def first_difference(found: Tensors, right: Tensors) -> tuple[str, float] | None:
    """The first tensor whose bits differ, and by how much at most; None if there is none."""
    difference = None
    for (name, one), (_, other) in zip(found, right, strict=True):
        # Read on to the end: only there is it certain that the bytes are those that the record names.
        if difference is None and one.tobytes() != other.tobytes():
            difference = name, float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))
    return difference


def distance(one: Tensors, other: Tensors) -> float:
    """L2 norm of the difference over all tensors."""
    return math.sqrt(
        math.fsum(
            square_sum(np.asarray(left.astype(np.float64) - right.astype(np.float64)))
            for (_, left), (_, right) in zip(one, other, strict=True)
        )
    )
