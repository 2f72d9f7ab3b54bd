"""Small codes in few bits, and back, a piece at a time; and sorted positions as Elias-Fano codes.

Bits fill a byte from its lowest to its highest, and a number's bits come lowest first. A run of codes ends in zero
bits up to a whole byte; readers refuse anything else there.
"""

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray

Bytes = npt.NDArray[np.uint8]


def num_bytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return -(-count * bits // 8)


def pack(codes: AnyArray, bits: int, out: Bytes) -> None:
    """Write codes (flat, contiguous; bool or uint8, beyond 8 bits uint16) as `bits` bits each, 0 to 16, over `out`."""
    if bits == 1:
        out[:] = np.packbits(codes, bitorder="little")
    elif bits == 8:
        out[:] = codes
    elif bits == 4:
        half = codes.size // 2
        pairs = codes[: 2 * half].view("<u2")  # low byte: even index
        np.bitwise_or(pairs, pairs >> np.uint16(4), out=out[:half], casting="unsafe")
        out[half:] = codes[2 * half :]
    elif bits:
        planes = np.empty((codes.size, bits), np.uint8)
        for bit in range(bits):
            planes[:, bit] = (codes >> bit) & 1
        out[:] = np.packbits(planes.reshape(-1), bitorder="little")


def unpack(packed: Bytes, bits: int, count: int) -> AnyArray:
    """The `count` codes of `bits` bits that `packed` holds: uint8 (up to 8 bits) or uint16.

    Raises:
        Corrupt: `format`: the bits behind the last code are not zero.
    """
    check_padding(packed, bits * count)
    if bits == 8:
        return packed
    if bits == 4:
        codes = np.empty(2 * packed.size, np.uint8)
        np.bitwise_and(packed, 15, out=codes[::2])
        np.right_shift(packed, 4, out=codes[1::2])
        return codes[:count]
    planes = np.unpackbits(packed, count=bits * count, bitorder="little")
    if bits == 1:
        return planes
    values: AnyArray = np.zeros(count, np.uint8 if bits <= 8 else np.uint16)
    for bit in range(bits):
        np.bitwise_or(values, planes[bit::bits].astype(values.dtype) << values.dtype.type(bit), out=values)
    return values


def check_padding(packed: Bytes, num_bits: int) -> None:
    """Raise Corrupt (`format`) if a bit of `packed` behind the first `num_bits` is set."""
    whole, rest = divmod(num_bits, 8)
    tail = packed[whole:]
    if tail.any() and (int(tail[0]) >> rest or tail[1:].any()):
        raise corrupt("format", "padding is not zero")


class Positions:
    """k sorted, different positions below n, as an Elias-Fano code: about 2 + log2(n/k) bits each.

    With l = ⌊log2(n/k)⌋, a position's l low bits are written as they are. Its high part h = position >> l sets bit
    h + i of a vector of k + ((n − 1) >> l) bits, i being the position's rank from 0. 64 of 4096 take
    6 + 127/64 bits each, where the logarithm of the number of choices is 7.4 bits each (Elias 1974, Fano 1971).

    Args:
        n: Above every position; at most 65536.
        k: How many, 1 to n.
    """

    def __init__(self, n: int, k: int) -> None:
        self._n, self._k = n, k
        self._low_bits = (n // k).bit_length() - 1
        self.high_width = k + ((n - 1) >> self._low_bits)
        """Bits of the vector."""
        self.low_width = k * self._low_bits
        """Bits of all low parts."""

    def pack(self, positions: AnyArray, highs: Bytes, lows: Bytes) -> None:
        """Write positions (num, k), sorted in each row, over all of `highs` and `lows`."""
        num = len(positions)
        ranks = np.arange(self._k) + np.arange(num)[:, None] * self.high_width
        vector = np.zeros(num * self.high_width, np.uint8)
        vector[(positions >> self._low_bits) + ranks] = 1
        pack(vector, 1, highs)
        rest = positions & ((1 << self._low_bits) - 1)
        pack(rest.astype(np.uint8 if self._low_bits <= 8 else np.uint16).reshape(-1), self._low_bits, lows)

    def unpack(self, highs: Bytes, lows: Bytes, num: int) -> AnyArray:
        """The positions (num, k) that `pack` wrote, int64.

        Raises:
            Corrupt: `format`: a vector without exactly k ones, positions that do not rise or reach n, padding.
        """
        ones: AnyArray = np.flatnonzero(unpack(highs, 1, num * self.high_width))
        starts = np.arange(num)[:, None] * self.high_width
        if ones.size != num * self._k:
            raise corrupt("format", "the number of positions is wrong")
        ones = ones.reshape(num, self._k)
        ones -= starts
        if ones[:, 0].min(initial=0) < 0 or ones[:, -1].max(initial=0) >= self.high_width:
            raise corrupt("format", "the number of positions in a chunk is wrong")
        ones -= np.arange(self._k)
        positions = ones << self._low_bits
        if self._low_bits:
            positions |= unpack(lows, self._low_bits, num * self._k).reshape(num, self._k)
        if (positions[:, 1:] <= positions[:, :-1]).any() or positions[:, -1].max(initial=0) >= self._n:
            raise corrupt("format", "positions do not rise, or lie outside of their chunk")
        return positions
