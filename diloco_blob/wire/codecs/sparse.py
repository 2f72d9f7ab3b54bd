"""Of each chunk of values the largest: their positions, signs and magnitudes in a few bits (topk).

The layout of the bytes is shared with `dct`. It is one array of bytes a tensor, in columns, since a column of equal
things is what zstd can make smaller: scales, high parts of positions, low parts, then the values' columns.
"""

import numpy as np

from diloco_blob.wire.codecs.base import SPAN, Parts, PartShapes, Scratch, check_finite, count_of, flat_of
from diloco_blob.wire.codecs.bits import Bytes, Positions, num_bytes
from diloco_blob.wire.codecs.kept import KeptValues
from diloco_blob.wire.codecs.select import largest
from diloco_blob.wire.types import AnyArray, FloatArray, Shape

_BATCH = 1 << 14
"""About so many kept values are coded at a time."""


def kept_of(size: int, chunk: int, keep: int) -> int:
    """How many values are kept of a chunk of `size` where `keep` are of a full one."""
    return max(1, -(-size * keep // chunk))


class ChunkBytes:
    """Bytes of `num` chunks of n values each, of which k are kept.

    Args:
        num: Chunks.
        n: Values of a chunk.
        k: Kept ones.
        value_bits: Bits of a kept value.
    """

    def __init__(self, num: int, n: int, k: int, value_bits: int) -> None:
        self._num = num
        self._positions, self._values = Positions(n, k), KeptValues(k, value_bits)
        self._k = k
        widths = [
            16 * self._values.num_scales,
            self._positions.high_width,
            self._positions.low_width,
            *(k * bits for bits in self._values.planes),
        ]
        self._widths = widths
        """Bits of a chunk in each column."""
        self.num_bytes = sum(num_bytes(num, width) for width in widths)

    def write(self, positions: AnyArray, values: FloatArray, out: Bytes) -> None:
        """Code positions and values (num, k) each over all of `out`."""
        for start, stop in self._batches():
            scale_bytes, highs, lows, *planes = self._columns(out, start, stop)
            scales, codes = self._values.encode(values[start:stop])
            scale_bytes[:] = scales.astype("<u2").reshape(-1).view(np.uint8)
            self._positions.pack(positions[start:stop], highs, lows)
            self._values.pack(codes, planes)

    def read(self, data: Bytes) -> tuple[AnyArray, FloatArray]:
        """Positions (int64) and values (num, k) each, as `write` was given them, up to what coding loses.

        Raises:
            Corrupt: `non-finite` or `format`: bytes that `write` never makes.
        """
        positions = np.empty((self._num, self._k), np.int64)
        values = np.empty((self._num, self._k), np.float32)
        for start, stop in self._batches():
            scale_bytes, highs, lows, *planes = self._columns(data, start, stop)
            scales = scale_bytes.copy().view("<u2").reshape(stop - start, -1)
            values[start:stop] = self._values.decode(scales, self._values.unpack(planes, stop - start))
            positions[start:stop] = self._positions.unpack(highs, lows, stop - start)
        return positions, values

    def _batches(self) -> list[tuple[int, int]]:
        """Chunks that are coded together: multiples of eight, so that each column begins with a whole byte."""
        step = -(-_BATCH // self._k // 8) * 8
        return [(start, min(start + step, self._num)) for start in range(0, self._num, step)]

    def _columns(self, data: Bytes, start: int, stop: int) -> list[Bytes]:
        columns, at = [], 0
        for width in self._widths:
            columns.append(data[at + start * width // 8 : at + num_bytes(stop, width)])
            at += num_bytes(self._num, width)
        return columns


class TopK:
    """Of each chunk of consecutive values the `keep` largest, as SparseLoCo sends them (arXiv 2508.15706).

    The last chunk of a tensor may be shorter, and keeps its share, at least one. Of equal magnitudes the first are
    kept. All others become 0.

    One part, `#topk`: bytes for the full chunks, then for the shorter one; docs/format.md has them bit by bit. With 64
    of 4096 in 2 bits it is 84 bytes a chunk, 0.0205 a value.

    Args:
        chunk: Values of a chunk.
        keep: How many of them are kept.
        value_bits: Bits of each, its sign included: 1, 2, 4 or 8.
    """

    name = "topk"
    suffix = "#topk"

    def __init__(self, *, chunk: int, keep: int, value_bits: int) -> None:
        self._chunk, self._keep, self._value_bits = chunk, keep, value_bits

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        size = sum(bytes_.num_bytes for _, _, bytes_ in self._groups(count_of(shape)))
        return {self.suffix: ("U8", (size,))}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`."""
        flat = flat_of(values)
        out = np.empty(self.parts(values.shape)[self.suffix][1], np.uint8)
        at = 0
        for span, k, chunk_bytes in self._groups(flat.size):
            chunks = flat[span].reshape(-1, min(self._chunk, span.stop - span.start))
            positions, kept = self._select(chunks, k)
            chunk_bytes.write(positions, kept, out[at : at + chunk_bytes.num_bytes])
            at += chunk_bytes.num_bytes
        return {self.suffix: out}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        values = np.zeros(count_of(shape), np.float32)
        at = 0
        for span, _, chunk_bytes in self._groups(values.size):
            positions, kept = chunk_bytes.read(parts[self.suffix][at : at + chunk_bytes.num_bytes])
            chunk = min(self._chunk, span.stop - span.start)
            positions += np.arange(span.start, span.stop, chunk)[:, None]
            values[positions] = kept
            at += chunk_bytes.num_bytes
        return values.reshape(shape)

    def _groups(self, count: int) -> list[tuple[slice, int, ChunkBytes]]:
        """(values, kept of a chunk, bytes) of the full chunks, then of the shorter one."""
        full, rest = divmod(count, self._chunk)
        spans = [(slice(0, full * self._chunk), full, self._chunk)] if full else []
        if rest:
            spans.append((slice(full * self._chunk, count), 1, rest))
        groups = []
        for span, num, size in spans:
            k = kept_of(size, self._chunk, self._keep)
            groups.append((span, k, ChunkBytes(num, size, k, self._value_bits)))
        return groups

    @staticmethod
    def _select(chunks: FloatArray, k: int) -> tuple[AnyArray, FloatArray]:
        """Positions (int32) and values (num, k) of what is kept of chunks (num, n)."""
        num, n = chunks.shape
        positions, kept = np.empty((num, k), np.int32), np.empty((num, k), np.float32)
        step, scratch = max(1, SPAN // n), Scratch()
        for start in range(0, num, step):
            rows = slice(start, min(start + step, num))
            magnitudes = np.abs(chunks[rows], out=scratch.array("magnitudes", chunks[rows].shape))
            check_finite(np.max(magnitudes))
            positions[rows] = largest(magnitudes, k, scratch)
            kept[rows] = np.take_along_axis(chunks[rows], positions[rows], axis=1)
        return positions, kept
