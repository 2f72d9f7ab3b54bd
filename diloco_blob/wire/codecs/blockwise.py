"""Signed integers with one scale a block: int8 and int4."""

import numpy as np

from diloco_blob.wire.codecs.base import FLOAT32_MAX, LEVELS, SCALE_MIN, Scratch, spans
from diloco_blob.wire.codecs.bits import pack
from diloco_blob.wire.codecs.blocks import BlockCodec, Place
from diloco_blob.wire.codecs.nibbles import spread, table
from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray, FloatArray

_OFFSET = 8
_TABLE = table(np.arange(16) - _OFFSET)
_ZEROS = _OFFSET | _OFFSET << 4


class Blockwise(BlockCodec):
    """Signed integers, symmetric about zero, with one fp32 scale for each block of consecutive values.

    Values are taken in row-major order. For a block with largest magnitude a, the scale is s = a / L with
    L = 127 (8 bits) or 7 (4 bits), and a value x becomes the level round(x / s), half to even. Error: at most
    s/2, up to the rounding of fp32. Zeros stay exact zeros. For 4 bits and blocks of 256 that is 4.125 bits a
    value, before zstd makes use of the levels' uneven frequencies.

    A block whose scale would be below 2⁻¹²⁶ gets that one: its values, all below 2⁻¹¹⁸, lose at most 2⁻¹²⁷ each,
    and neither a division by zero nor a subnormal product can occur.

    Parts, flat: `#scale` fp32, one a block; `#q` the levels, int8 each, or two in a byte: level + 8 of the
    even index in the low nibble, of the odd one in the high. The levels end in zeros up to a multiple of four
    bytes.

    Args:
        bits: 8 or 4.
        block: Values that share a scale; the last block of a tensor may be shorter.
    """

    suffix = LEVELS
    scale_type = "F32"

    def __init__(self, *, bits: int, block: int) -> None:
        super().__init__(block=block)
        self.name = f"int{bits}"
        self.code_bits = bits
        self.code_type = "I8" if bits == 8 else "U8"
        self._level_max = np.float32(2 ** (bits - 1) - 1)
        # One ulp below the largest fp32 / L: rounded up, L times the scale would be infinite.
        self._scale_max = np.nextafter(FLOAT32_MAX / self._level_max, np.float32(0))

    def _encode(self, piece: FloatArray, scale: AnyArray, codes: AnyArray, place: Place, scratch: Scratch) -> None:
        scaled = np.abs(piece, out=scratch.array("scaled", piece.shape))
        for (blocks, which), (values, _) in zip(self._blocks(scaled), self._blocks(piece), strict=True):
            scales = scale[which]
            np.max(blocks, axis=1, out=scales)  # a NaN anywhere comes through
            if not np.isfinite(scales).all():
                raise corrupt("non-finite", "a value is NaN or infinite")
            scales /= self._level_max
            np.clip(scales, SCALE_MIN, self._scale_max, out=scales)
            np.divide(values, scales[:, None], out=blocks)
        # The largest is a / fl(a / L), which is L up to an ulp: rint makes it L, so no level needs clipping.
        np.rint(scaled, out=scaled)
        if self.code_bits == 8:
            codes[place.span] = scaled
            return
        scaled += np.float32(_OFFSET)
        levels = scratch.array("levels", piece.shape, np.uint8)
        levels[:] = scaled
        pack(levels, 4, codes[place.span.start // 2 : -(-place.span.stop // 2)])

    def _pad(self, codes: AnyArray, count: int) -> None:
        if self.code_bits == 4:
            codes[-(-count // 2) :] = _ZEROS
            codes[count // 2 : -(-count // 2)] |= np.uint8(_OFFSET << 4)

    def _checked_scale(self, scale: AnyArray) -> FloatArray:
        with np.errstate(over="ignore", invalid="ignore"):  # near the largest fp32; a signalling NaN
            if not np.isfinite(scale * self._level_max).all():
                raise corrupt("non-finite", "the scale of a block is NaN or infinite, or makes values that are")
        if (scale < SCALE_MIN).any():
            raise corrupt("format", "the scale of a block is negative or too small")
        return scale

    def _check_codes(self, codes: AnyArray, count: int) -> None:
        if self.code_bits == 8:
            valid = codes.min(initial=0) >= -self._level_max and not codes[count:].any()
        else:
            padding = codes[-(-count // 2) :]
            valid = bool((padding == _ZEROS).all()) and (count % 2 == 0 or int(codes[count // 2]) >> 4 == _OFFSET)
            valid = valid and codes.min(initial=255) >= 16
            valid = valid and all((codes[span] & np.uint8(15)).all() for span in spans(codes.size))
        if not valid:
            raise corrupt("format", "a level is out of range, or padding is not zero")

    def _decode(self, codes: AnyArray, place: Place, out: FloatArray, scratch: Scratch) -> None:  # noqa: ARG002
        if self.code_bits == 8:
            out[:] = codes[place.span]
        else:
            spread(codes[place.span.start // 2 : -(-place.span.stop // 2)], _TABLE, out)
