"""What every codec is, and what all of them need."""

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray, FloatArray, Shape

Parts: TypeAlias = Mapping[str, AnyArray]
"""What a tensor becomes: suffix → array, in the order in which a file holds them."""

PartShapes: TypeAlias = Mapping[str, tuple[str, Shape]]
"""What a tensor of some shape must become: suffix → (safetensors dtype, shape), in the same order."""

VALUES = ""
LEVELS = "#q"
SCALE = "#scale"
"""A part's name in a file is the tensor's name and this suffix. A suffix has its `#` first and no other, so
what follows the last `#` tells part from tensor, and no two parts of a model can get the same name, whatever
its tensors are called."""

SCALE_MIN = np.float32(2.0**-126)
"""The smallest normal fp32 (and bf16)."""

FLOAT32_MAX = np.finfo(np.float32).max

SPAN = 1 << 16
"""Values that are worked on at a time: what is made of them on the way stays in a core's cache."""


class TensorCodec(Protocol):
    """Bytes for one tensor at a time; stateless."""

    @property
    def name(self) -> str:
        """As in `Codec.name`."""

    def parts(self, shape: Shape) -> PartShapes:
        """What `encode` makes of a tensor of this shape: known before a byte of it is read."""

    def encode(self, values: FloatArray) -> Parts:
        """Encode. Raises Corrupt (`non-finite`) if a value is NaN or infinite."""

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """Decode parts that have the types and shapes of `self.parts(shape)`.

        Raises:
            Corrupt: `non-finite`: a value or scale is; `format`: something that `encode` never makes.
        """


def count_of(shape: Shape) -> int:
    """How many values a tensor of this shape has."""
    count = 1
    for size in shape:
        count *= size
    return count


def flat_of(values: FloatArray) -> FloatArray:
    """The values in row-major order; a copy only where they lie otherwise."""
    return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


def check_finite(values: AnyArray) -> None:
    """Raise Corrupt (`non-finite`) if one of `values` is NaN or infinite."""
    if not np.isfinite(values).all():
        raise corrupt("non-finite", "a value is NaN or infinite")


class Scratch:
    """Temporary arrays, used again for every piece: touching fresh memory costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, type], AnyArray] = {}

    def array(self, slot: str, shape: Shape, dtype: type = np.float32) -> AnyArray:
        """An array of this shape, C-contiguous, with any content; the one that `slot` had before becomes invalid."""
        count = count_of(shape)
        held = self._arrays.get((slot, dtype))
        if held is None or held.size < count:
            held = self._arrays[slot, dtype] = np.empty(count, dtype)
        return held[:count].reshape(shape)


def spans(count: int, length: int = SPAN) -> Iterator[slice]:
    """`count` things in pieces of `length`; the last may be shorter."""
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))
