"""Codecs with a scale for each block of consecutive values: what all of them share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from diloco_blob.wire.codecs.base import SCALE, SPAN, Parts, PartShapes, Scratch, count_of, flat_of
from diloco_blob.wire.codecs.bits import num_bytes
from diloco_blob.wire.tensorfile import DTYPES
from diloco_blob.wire.types import AnyArray, FloatArray, Shape

_PART_ALIGNMENT = 4
"""Parts are padded to a multiple of this: readers that map files need scales to be aligned."""

_ROWS = 8
"""Pieces begin at a multiple of this many values, so at a whole byte, however few bits a value has."""


class Place(NamedTuple):
    """Where a piece lies in its tensor."""

    span: slice
    size: int
    """Values of the tensor."""


class BlockCodec(ABC):
    """Values in row-major order, in blocks of `block`; the last block of a tensor may be shorter.

    Parts, flat: `#scale`, one a block; then the codes.

    Args:
        block: Values that share a scale.
    """

    name: str
    suffix: str
    """Of the part that holds the codes."""
    code_bits: int
    """Bits of a code."""
    code_type: str
    """safetensors type of the codes' part."""
    scale_type: str
    """safetensors type of the scales."""

    def __init__(self, *, block: int) -> None:
        self._block = block

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        count = count_of(shape)
        padded = -(-self._num_bytes(count) // _PART_ALIGNMENT) * _PART_ALIGNMENT
        return {SCALE: (self.scale_type, (-(-count // self._block),)), self.suffix: (self.code_type, (padded,))}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`."""
        flat = flat_of(values)
        shapes = self.parts(values.shape)
        scale = np.empty(shapes[SCALE][1], DTYPES[self.scale_type])
        codes = np.zeros(shapes[self.suffix][1], DTYPES[self.code_type])
        scratch = Scratch()
        for span in _pieces(flat.size, self._block):
            rows = slice(span.start // self._block, -(-span.stop // self._block))
            self._encode(flat[span], scale[rows], codes, Place(span, flat.size), scratch)
        self._pad(codes, flat.size)
        return {SCALE: scale, self.suffix: codes}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        count = count_of(shape)
        scale, codes = self._checked_scale(parts[SCALE]), parts[self.suffix]
        self._check_codes(codes, count)
        values, scratch = np.empty(count, np.float32), Scratch()
        for span in _pieces(count, self._block):
            self._decode(codes, Place(span, count), values[span], scratch)
            rows = slice(span.start // self._block, -(-span.stop // self._block))
            for blocks, which in self._blocks(values[span]):
                np.multiply(blocks, scale[rows][which, None], out=blocks)
        return values.reshape(shape)

    def _blocks(self, piece: AnyArray) -> Iterator[tuple[AnyArray, slice]]:
        """Views of a piece: its full blocks (num, block), then the shorter one (1, width); with which they are."""
        full, rest = divmod(piece.size, self._block)
        if full:
            yield piece[: full * self._block].reshape(full, self._block), slice(0, full)
        if rest:
            yield piece[full * self._block :].reshape(1, rest), slice(full, full + 1)

    def _num_bytes(self, count: int) -> int:
        """Bytes of the codes of `count` values, without padding."""
        return num_bytes(count, self.code_bits)

    @abstractmethod
    def _encode(self, piece: FloatArray, scale: AnyArray, codes: AnyArray, place: Place, scratch: Scratch) -> None:
        """Write the scales of a piece's blocks into `scale`, and its codes into their place in `codes`.

        Args:
            piece: The values of `place`; it begins with a block and at a multiple of eight values.
            scale: As `#scale` holds them.
            codes: The whole part.
            place: Where the piece lies in the tensor.
            scratch: For temporaries.
        """

    @abstractmethod
    def _pad(self, codes: AnyArray, count: int) -> None:
        """Give the codes behind the last value the content that readers expect, where it is not zero."""

    @abstractmethod
    def _checked_scale(self, scale: AnyArray) -> FloatArray:
        """The scales as fp32. Corrupt if one of them is not what `encode` writes."""

    @abstractmethod
    def _check_codes(self, codes: AnyArray, count: int) -> None:
        """Corrupt if a code is not what `encode` writes."""

    @abstractmethod
    def _decode(self, codes: AnyArray, place: Place, out: FloatArray, scratch: Scratch) -> None:
        """Write the values of `place` for scales of 1 into `out`."""


def _pieces(count: int, block: int) -> Iterator[slice]:
    """Spans of whole blocks, in the end with the shorter block."""
    length = max(_ROWS, SPAN // block // _ROWS * _ROWS) * block
    for start in range(0, count, length):
        yield slice(start, min(start + length, count))
