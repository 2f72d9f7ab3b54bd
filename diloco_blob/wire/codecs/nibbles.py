"""Two codes in a byte, decoded by a table of the 256 pairs."""

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.types import AnyArray, FloatArray

Table = npt.NDArray[np.uint64]


def table(values: AnyArray) -> Table:
    """The table for 16 values: byte → the two fp32 values, of the low nibble first, as one word."""
    pairs = np.stack([values[np.arange(256) & 15], values[np.arange(256) >> 4]], axis=1).astype(np.float32)
    return np.ascontiguousarray(pairs).view(np.uint64).reshape(256)


def spread(packed: AnyArray, pairs: Table, out: FloatArray) -> None:
    """Write the values of `packed` into `out`, which may have one less than two a byte."""
    if out.size % 2 == 0 and out.size:
        np.take(pairs, packed, out=out.view(np.uint64), mode="clip")
    else:
        out[:] = pairs[packed].view(np.float32)[: out.size]
