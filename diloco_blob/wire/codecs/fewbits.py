"""One to four bits a value and a bf16 scale a block: sign, int2, fp4. They are made for error feedback."""

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.codecs.base import FLOAT32_MAX, Scratch
from diloco_blob.wire.codecs.bits import check_padding, num_bytes, pack
from diloco_blob.wire.codecs.blocks import BlockCodec, Place
from diloco_blob.wire.codecs.nibbles import spread, table
from diloco_blob.wire.codecs.plain import from_bf16, to_bf16
from diloco_blob.wire.codecs.sums import row_sums
from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray, FloatArray

_TOP_BIT = np.uint32(1 << 31)


def coded_scales(scales: AnyArray, smallest: float, largest: float) -> AnyArray:
    """bf16 bit patterns of scales (float64 or fp32, ≥ 0): 0 below `smallest`, at most `largest` rounded down.

    Raises:
        Corrupt: `non-finite`: one of them is.
    """
    if not np.isfinite(scales).all():
        raise corrupt("non-finite", "a value is NaN or infinite")
    clipped = np.minimum(scales, largest).astype(np.float32)
    clipped[clipped < np.float32(smallest)] = 0.0
    return np.minimum(to_bf16(clipped), _below(largest))


def decoded_scales(coded: AnyArray, smallest: float, largest: float) -> FloatArray:
    """The fp32 values of bf16 scales.

    Raises:
        Corrupt: `non-finite`, or `format`: one of them is negative, above 0 and below `smallest`, or above `largest`.
    """
    scales = from_bf16(coded)
    if not np.isfinite(scales).all():
        raise corrupt("non-finite", "a scale is NaN or infinite")
    if np.signbit(scales).any() or ((scales > 0) & (scales < smallest)).any() or (coded > _below(largest)).any():
        raise corrupt("format", "a scale is negative, too small or too large")
    return scales


def _below(largest: float) -> np.uint16:
    """The bf16 bit pattern of the largest bf16 that is not above `largest`."""
    return np.uint16(int(np.float32(largest).view(np.uint32)) >> 16)


class _Bf16Scaled(BlockCodec):
    """Blocks with bf16 scales; a scale of 0 stands for a block of zeros."""

    scale_type = "BF16"
    code_type = "U8"
    scale_min = 2.0**-126
    scale_max = float(FLOAT32_MAX)

    def _pad(self, codes: AnyArray, count: int) -> None:
        """Codes end in zero bits already."""

    def _checked_scale(self, scale: AnyArray) -> FloatArray:
        return decoded_scales(scale, self.scale_min, self.scale_max)

    def _write_scale(self, scale: AnyArray, scales: AnyArray) -> FloatArray:
        """Round the scales to what is sent, write that to `scale`, and give its fp32 values."""
        scale[:] = coded_scales(scales, self.scale_min, self.scale_max)
        return from_bf16(scale)


class _Planes(_Bf16Scaled):
    """A plane of bits for each bit of a code: signs, 1 where a value is below 0; then those of a subclass.

    A plane is ⌈n/8⌉ bytes, and its bits behind the last value are zero. Planes lie one behind the other.
    """

    def _num_bytes(self, count: int) -> int:
        return self.code_bits * num_bytes(count, 1)

    def _plane(self, codes: AnyArray, plane: int, place: Place) -> AnyArray:
        start = plane * num_bytes(place.size, 1)
        return codes[start + place.span.start // 8 : start + num_bytes(place.span.stop, 1)]

    def _check_codes(self, codes: AnyArray, count: int) -> None:
        for plane in range(self.code_bits):
            check_padding(self._plane(codes, plane, Place(slice(0, count), count)), count)
        check_padding(codes, 8 * self._num_bytes(count))

    def _encode(self, piece: FloatArray, scale: AnyArray, codes: AnyArray, place: Place, scratch: Scratch) -> None:
        magnitudes = np.abs(piece, out=scratch.array("magnitudes", piece.shape))
        rest = scratch.array("rest", piece.shape, np.bool_)
        for (blocks, which), (marks, _) in zip(self._blocks(magnitudes), self._blocks(rest), strict=True):
            means = row_sums(blocks, scratch) / blocks.shape[1]  # a NaN or infinity anywhere comes through
            self._quantise(blocks, means, scale[which], marks)
        if self.code_bits == 2:
            pack(rest, 1, self._plane(codes, 1, place))
        pack(np.less(piece, 0, out=rest), 1, self._plane(codes, 0, place))

    @abstractmethod
    def _quantise(self, blocks: FloatArray, means: AnyArray, scale: AnyArray, marks: npt.NDArray[np.bool_]) -> None:
        """Write the scales of blocks of magnitudes (num, width) whose means are given, and the second plane."""


class Sign(_Planes):
    """One bit a value: s where it is not below 0, −s where it is; s is the mean magnitude of the block.

    The scale that loses least: ‖x − C(x)‖² = ‖x‖² − ‖x‖₁²/n (1-bit SGD; EF-SGD, arXiv 1901.09847), up to its rounding
    to bf16. Parts: `#scale` bf16, one a block; `#sign` the bits.

    Args:
        block: Values that share a scale.
    """

    name = "sign"
    suffix = "#sign"
    code_bits = 1

    def _quantise(self, blocks: FloatArray, means: AnyArray, scale: AnyArray, marks: npt.NDArray[np.bool_]) -> None:  # noqa: ARG002
        self._write_scale(scale, means)

    def _decode(self, codes: AnyArray, place: Place, out: FloatArray, scratch: Scratch) -> None:  # noqa: ARG002
        _take_rows(_SIGNS, self._plane(codes, 0, place), out)


class Int2(_Planes):
    """Two bits a value: ±s or ±3s, s being 0.7 times the mean magnitude of the block; 3s above a magnitude of 2s.

    Four levels lose less than −1, 0, 1 with the best scale: of a Gaussian 12% of the energy instead of 19%. The best
    factor is 0.62 for Gaussian and 0.77 for Laplace values, and the curve is flat: 0.7 is within 5% of the best error
    energy for both (`tests/unit/test_wire_fewbits.py`).

    Parts: `#scale` bf16, one a block; `#q2` the plane of signs, then of the bits that are 1 for 3s.

    Args:
        block: Values that share a scale.
    """

    name = "int2"
    suffix = "#q2"
    code_bits = 2
    scale_max = float(FLOAT32_MAX) / 3
    factor = 0.7

    def _quantise(self, blocks: FloatArray, means: AnyArray, scale: AnyArray, marks: npt.NDArray[np.bool_]) -> None:
        means *= self.factor
        scales = self._write_scale(scale, means)
        np.greater(blocks, 2 * scales[:, None], out=marks)
        marks[scales == 0] = False

    def _decode(self, codes: AnyArray, place: Place, out: FloatArray, scratch: Scratch) -> None:
        magnitudes = scratch.array("magnitudes", out.shape)
        _take_rows(_MAGNITUDES, self._plane(codes, 1, place), magnitudes)
        _take_rows(_SIGNS, self._plane(codes, 0, place), out)
        np.multiply(out, magnitudes, out=out)


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
_SIGNS = 1 - 2 * _BITS
_MAGNITUDES = 1 + 2 * _BITS
"""Byte → the eight values that its bits stand for."""


def _take_rows(rows: FloatArray, packed: AnyArray, out: FloatArray) -> None:
    """Write the values of each byte into `out`, the last of which may be cut short."""
    whole = out.size // 8
    if whole:
        np.take(rows, packed[:whole], axis=0, out=out[: 8 * whole].reshape(whole, 8), mode="clip")
    if out.size % 8:
        out[8 * whole :] = rows[packed[whole]][: out.size % 8]


class Fp4(_Bf16Scaled):
    """Four bits a value, E3M0: a sign and a level L of 0 to 7; sign·2^(L − 7)·s, and 0 where L is 0.

    The format of Streaming DiLoCo (arXiv 2501.18512), with a scale s a block, the largest magnitude. A magnitude goes
    to the nearer level: up from 1.5·2^k. Below 0.75·2⁻⁶·s it becomes 0. The error is at most a third of the
    value, or the whole of it where it becomes 0; for the largest it may be 2⁻⁸ of it more, since s is rounded to bf16.

    Parts: `#scale` bf16, one a block; `#e3m0` two codes in a byte, the even index in the low nibble: L, plus 8 if the
    value is below 0; never 8 alone.

    Args:
        block: Values that share a scale.
    """

    name = "fp4"
    suffix = "#e3m0"
    code_bits = 4
    scale_min = 2.0**-119  # the smallest level is still normal

    def _encode(self, piece: FloatArray, scale: AnyArray, codes: AnyArray, place: Place, scratch: Scratch) -> None:
        scaled = np.abs(piece, out=scratch.array("scaled", piece.shape))
        for (blocks, which), (values, _) in zip(self._blocks(scaled), self._blocks(piece), strict=True):
            scales = self._write_scale(scale[which], np.max(blocks, axis=1))
            scales[scales == 0] = np.inf
            np.divide(values, scales[:, None], out=blocks)
        # Half a unit is added to the mantissa, so that the exponent is that of the nearer power of two.
        words = scaled.view(np.uint32)
        words += np.uint32(1 << 22)
        short = scratch.array("short", piece.shape, np.uint16)
        np.right_shift(words, np.uint32(23), out=short, casting="unsafe")  # sign and exponent
        levels = scratch.array("levels", piece.shape, np.uint8)
        np.bitwise_and(short, np.uint16(255), out=levels, casting="unsafe")
        np.maximum(levels, _EXPONENT_0, out=levels)
        levels -= _EXPONENT_0
        signs = scratch.array("signs", piece.shape, np.uint8)
        np.right_shift(short, np.uint16(5), out=signs, casting="unsafe")
        signs &= np.uint8(8)
        signs *= levels > 0
        levels |= signs
        pack(levels, 4, codes[place.span.start // 2 : num_bytes(place.span.stop, 4)])

    def _check_codes(self, codes: AnyArray, count: int) -> None:
        check_padding(codes, 4 * count)
        if _NEGATIVE_ZERO[codes].any():
            raise corrupt("format", "a code is minus zero")

    def _decode(self, codes: AnyArray, place: Place, out: FloatArray, scratch: Scratch) -> None:  # noqa: ARG002
        spread(codes[place.span.start // 2 : num_bytes(place.span.stop, 4)], _E3M0, out)


_EXPONENT_0 = np.uint8(127 - 7)
_POWERS = np.concatenate([[0.0], 2.0 ** np.arange(-6, 1)])
_E3M0 = table(np.concatenate([_POWERS, -_POWERS]))
_NEGATIVE_ZERO = (np.arange(256) & 15 == 8) | (np.arange(256) >> 4 == 8)
