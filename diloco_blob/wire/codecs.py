"""Codecs: an fp32 tensor as fewer bytes, and back.

What a codec decodes *is* what was sent: the sender subtracts it from its residual, the aggregator merges it,
and on the downlink it is the new version. So decoding gives the same bits on every machine. It uses
elementwise IEEE operations only (no BLAS, no reduction but max), and what is multiplied keeps
out of the subnormal range, where CPUs that flush to zero would differ.

Encoding refuses what is not finite: one NaN would reach every island.
"""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np

from diloco_blob.core.settings import Codec
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

_SCALE_MIN = np.float32(2.0**-126)
"""The smallest normal fp32. A block whose scale would be smaller gets this one: its values, all below 2⁻¹¹⁸,
lose at most 2⁻¹²⁷ each, and neither a division by zero nor a subnormal product can occur."""

_PART_ALIGNMENT = 4
"""Level arrays are padded to a multiple of this: readers that map files need fp32 to be aligned."""


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


def codec_for(settings: Codec) -> TensorCodec:
    """The codec that `settings` asks for."""
    if settings.name == "fp32":
        return Fp32()
    if settings.name == "bf16":
        return Bf16()
    return Blockwise(bits=8 if settings.name == "int8" else 4, block=settings.block)


class Fp32:
    """The values themselves, to the bit."""

    name = "fp32"

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return {VALUES: ("F32", shape)}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`. The array is not copied."""
        return {VALUES: _finite(values)}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:  # noqa: ARG002 - as the protocol has it
        """See `TensorCodec.decode`. The array is not copied."""
        return _finite(parts[VALUES])


class Bf16:
    """The upper half of each fp32, rounded to nearest even: relative error at most 2⁻⁸.

    Below 2⁻¹²⁶, where fp32 and bf16 are subnormal, the error is at most 2⁻¹³⁴, which may be the whole value.

    A finite value that would round to infinity (above 3.3895e38) becomes the largest finite one instead.
    """

    name = "bf16"

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return {VALUES: ("BF16", shape)}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`. The array of a part holds bit patterns, as uint16."""
        bits = np.array(_finite(values), dtype="<f4", order="C").reshape(-1).view(np.uint32)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        upper = (bits >> np.uint32(16)).astype("<u2")
        upper[(upper & np.uint16(0x7FFF)) == np.uint16(0x7F80)] -= np.uint16(1)
        return {VALUES: upper.reshape(values.shape)}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        bits = parts[VALUES].reshape(-1).astype(np.uint32) << np.uint32(16)
        return _finite(bits.view(np.float32).reshape(shape))


class Blockwise:
    """Signed integers, symmetric about zero, with one fp32 scale for each block of consecutive values.

    Values are taken in row-major order. For a block with largest magnitude a, the scale is s = a / L with
    L = 127 (8 bits) or 7 (4 bits), and a value x becomes the level round(x / s), half to even. Error: at most
    s/2, up to the rounding of fp32. Zeros stay exact zeros. For 4 bits and blocks of 256 that is 4.125 bits a
    value, before zstd makes use of the levels' uneven frequencies.

    Parts, flat: `#scale` fp32, one a block; `#q` the levels, int8 each, or two in a byte: level + 8 of the
    even index in the low nibble, of the odd one in the high. The levels end in zeros up to a multiple of four
    bytes.

    Args:
        bits: 8 or 4.
        block: Values that share a scale; the last block of a tensor may be shorter.
    """

    def __init__(self, *, bits: int, block: int) -> None:
        self.name = f"int{bits}"
        self._bits = bits
        self._block = block
        self._level_max = np.float32(2 ** (bits - 1) - 1)
        # One ulp below the largest fp32 / L: rounded up, L times the scale would be infinite.
        self._scale_max = np.nextafter(np.finfo(np.float32).max / self._level_max, np.float32(0))

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        count = _count(shape)
        num_bytes = -(-count * self._bits // 8)
        padded = -(-num_bytes // _PART_ALIGNMENT) * _PART_ALIGNMENT
        return {
            SCALE: ("F32", (-(-count // self._block),)),
            LEVELS: ("I8" if self._bits == 8 else "U8", (padded,)),
        }

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`."""
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        shapes = self.parts(values.shape)
        scale = np.empty(shapes[SCALE][1], np.float32)
        levels = np.zeros(shapes[LEVELS][1][0] * 8 // self._bits, np.int8)
        for rows, span, width in self._blocks(flat.size):
            levels[span] = self._quantise(flat[span].reshape(-1, width), scale[rows]).reshape(-1)
        return {SCALE: scale, LEVELS: levels if self._bits == 8 else _pack(levels)}

    def _quantise(self, blocks: FloatArray, scale: FloatArray) -> FloatArray:
        """Levels of `blocks` (num, width), as fp32; writes their scales into `scale` (num,)."""
        magnitude = np.abs(blocks)
        np.max(magnitude, axis=1, out=scale)  # a NaN anywhere comes through
        if not np.isfinite(scale).all():
            raise corrupt("non-finite", "a value is NaN or infinite")
        scale /= self._level_max
        np.clip(scale, _SCALE_MIN, self._scale_max, out=scale)
        scaled = np.divide(blocks, scale[:, None], out=magnitude)
        # The largest is a / fl(a / L), which is L up to an ulp: rint makes it L, so no level needs clipping.
        return np.rint(scaled, out=scaled)

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        scale, levels = parts[SCALE], parts[LEVELS]
        if not np.isfinite(scale).all():
            raise corrupt("non-finite", "the scale of a block is NaN or infinite")
        if (scale < _SCALE_MIN).any():
            raise corrupt("format", "the scale of a block is negative or too small")
        if self._bits == 4:
            levels = _unpack(levels)
        if levels.min(initial=0) < -self._level_max:
            raise corrupt("format", "a level is out of range")
        values = np.empty(_count(shape), np.float32)
        with np.errstate(over="ignore"):  # a scale near the largest fp32: found below
            for rows, span, width in self._blocks(values.size):
                out = values[span].reshape(-1, width)
                np.multiply(levels[span].reshape(-1, width), scale[rows, None], out=out)
        return _finite(values.reshape(shape))

    def _blocks(self, count: int) -> list[tuple[slice, slice, int]]:
        """(scales, values, values in each block): the full blocks, then the last one if it is shorter."""
        full, rest = divmod(count, self._block)
        split = full * self._block
        spans = [(slice(0, full), slice(0, split), self._block)] if full else []
        return spans + ([(slice(full, full + 1), slice(split, count), rest)] if rest else [])


def _pack(levels: AnyArray) -> AnyArray:
    """An even number of int8 levels (−8…7) → half as many bytes."""
    pairs = (levels + np.int8(8)).view("<u2")  # low byte: even index
    packed: AnyArray = ((pairs | (pairs >> np.uint16(4))) & np.uint16(0xFF)).astype(np.uint8)
    return packed


_NIBBLES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1).astype(np.int8) - np.int8(8)
_PAIRS = np.ascontiguousarray(_NIBBLES).view(np.uint16).reshape(256)


def _unpack(packed: AnyArray) -> AnyArray:
    """The inverse of `_pack`, by table."""
    levels: AnyArray = _PAIRS[packed].view(np.int8)
    return levels


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _finite(values: FloatArray) -> FloatArray:
    if not np.isfinite(values).all():
        raise corrupt("non-finite", "a value is NaN or infinite")
    return values
