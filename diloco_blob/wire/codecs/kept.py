"""The values that a sparse codec keeps of a chunk, in 1, 2, 4 or 8 bits each, signs included.

For a chunk's k kept values:

- 1 bit: ±m, m their mean magnitude.
- 2 bits: ±lo or ±hi: of all splits of the magnitudes by size, the one that loses least (the two groups' means).
- 4, 8 bits: levels −L to L times a scale, L = 7 or 127, as `int4` and `int8`.

Scales are bf16, one or two a chunk. So coded, a chunk never has more energy left than it had: means are the best that
a group can have, and a level is nearer to its value than 0 is.
"""

import numpy as np

from diloco_blob.wire.codecs.base import FLOAT32_MAX
from diloco_blob.wire.codecs.bits import Bytes, pack, unpack
from diloco_blob.wire.codecs.fewbits import coded_scales, decoded_scales
from diloco_blob.wire.codecs.plain import from_bf16
from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray, FloatArray

SCALE_MIN = 2.0**-96
"""What is smaller becomes 0. It leaves the cosine transform room above the subnormal numbers."""


class KeptValues:
    """Bits of k values a chunk.

    Args:
        k: How many.
        bits: 1, 2, 4 or 8.
    """

    def __init__(self, k: int, bits: int) -> None:
        self._k, self._bits = k, bits
        self._level_max = 2 ** (bits - 1) - 1 if bits >= 4 else 1
        self._scale_max = float(FLOAT32_MAX) / self._level_max
        self.num_scales = 2 if bits == 2 else 1
        """bf16 numbers a chunk."""
        self.planes = (1,) * bits if bits <= 2 else (bits,)
        """Bits of a value in each column: signs, then lo or hi; or levels."""

    def encode(self, values: FloatArray) -> tuple[AnyArray, list[AnyArray]]:
        """Scales (num, num_scales) as bf16 bit patterns, and the codes of each column, from values (num, k)."""
        magnitudes = np.abs(values)
        if self._bits == 1:
            scales = self._coded(np.cumsum(magnitudes, axis=1, dtype=np.float64)[:, -1:] / self._k)
            return scales, [values < 0]
        if self._bits == 2:
            scales = self._coded(_two_means(magnitudes))
            low, high = from_bf16(scales).T[:, :, None]
            return scales, [values < 0, magnitudes > low / 2 + high / 2]
        scales = self._coded(np.max(magnitudes, axis=1, keepdims=True) / np.float32(self._level_max))
        divisors = from_bf16(scales)
        divisors[divisors == 0] = np.inf
        levels = np.clip(np.rint(values / divisors), -self._level_max, self._level_max)
        return scales, [(levels + (self._level_max + 1)).astype(np.uint8)]

    def _coded(self, scales: AnyArray) -> AnyArray:
        return coded_scales(scales, SCALE_MIN, self._scale_max)

    def decode(self, scales: AnyArray, columns: list[AnyArray]) -> FloatArray:
        """The values (num, k) that `encode` has coded.

        Raises:
            Corrupt: `non-finite` or `format`.
        """
        decoded = decoded_scales(scales, SCALE_MIN, self._scale_max)
        if self._bits >= 4:
            if not columns[0].all():
                raise corrupt("format", "a level is out of range")
            return (columns[0].astype(np.float32) - np.float32(self._level_max + 1)) * decoded
        magnitudes = np.broadcast_to(decoded[:, :1], columns[0].shape)
        if self._bits == 2:
            if (decoded[:, 0] > decoded[:, 1]).any():
                raise corrupt("format", "the lower magnitude is above the higher one")
            magnitudes = np.where(columns[1], decoded[:, 1:], decoded[:, :1])
        return magnitudes * (np.float32(1) - np.float32(2) * columns[0].astype(np.float32))

    def pack(self, columns: list[AnyArray], out: list[Bytes]) -> None:
        """Write columns of codes as bits."""
        for codes, bits, packed in zip(columns, self.planes, out, strict=True):
            pack(codes.reshape(-1), bits, packed)

    def unpack(self, packed: list[Bytes], num: int) -> list[AnyArray]:
        """The columns of codes, (num, k) each. Corrupt (`format`) if their padding is not zero."""
        return [
            unpack(column, bits, num * self._k).reshape(num, self._k)
            for column, bits in zip(packed, self.planes, strict=True)
        ]


def _two_means(magnitudes: FloatArray) -> AnyArray:
    """The two means (num, 2), lower first, of the split of each row that leaves the least squared error.

    Sorted magnitudes have sums that are added up in their order (which `accumulate` promises). A split into a and b
    values with sums A and B leaves Σx² − A²/a − B²/b. With one value both means are that value.
    """
    k = magnitudes.shape[1]
    if k == 1:
        return np.repeat(magnitudes, 2, axis=1)
    sums = np.cumsum(np.sort(magnitudes, axis=1), axis=1, dtype=np.float64)
    below, above = sums[:, :-1], sums[:, -1:] - sums[:, :-1]
    sizes = np.arange(1.0, k)
    at = np.argmax(below * below / sizes + above * above / (k - sizes), axis=1)[:, None]  # the first of equal ones
    lows = np.take_along_axis(below, at, axis=1) / (at + 1)
    highs = np.take_along_axis(above, at, axis=1) / (k - 1 - at)
    return np.concatenate([lows, highs], axis=1)
