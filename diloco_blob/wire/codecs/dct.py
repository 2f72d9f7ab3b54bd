"""Of each square of a matrix the largest coefficients of its cosine transform (dct_topk).

DeMo's "fast components" (arXiv 2411.19870): energy that is spread over neighbouring weights gathers in few
coefficients. Error feedback works on the weights, so what is not sent is what DeMo keeps in its momentum.

**Exactness.** BLAS adds in an order that depends on the CPU, and fused multiply-adds round less often. Neither can
matter where every sum is an integer below 2⁵³ in magnitude, so that is what the transform is made of. N is the longer
side of a square, D = 28 − ⌈log₂ N⌉. Values become integers X, |X| ≤ 2^D, relative to a power of two above the
square's largest magnitude; the orthonormal basis (type II) becomes integers A = round(2²⁴·basis). By Cauchy and
Schwarz any part of a sum Σ A·X over a row or column is, in magnitude, at most ‖A_row‖·‖X_column‖ ≤ (2²⁴ + √N/2)·√N·2^D
< 2⁵³. After the first axis the result is divided by 2²⁴ (exact) and rounded to integers (elementwise). The whole of
them has a norm of at most N·2^D·(1 + 2⁻²⁰) + N/2, so any part of a sum over the second axis is at most
(2²⁴ + √N/2)·(N·2^D·(1 + 2⁻²⁰) + N/2) < 2⁵²·(1 + 2⁻¹⁵) < 2⁵³. The inverse is the same with A transposed; its input is
bounded in the same way, whatever a file says.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.codecs.base import FLOAT32_MAX, SPAN, Parts, PartShapes, Scratch, check_finite, count_of
from diloco_blob.wire.codecs.select import largest
from diloco_blob.wire.codecs.sparse import ChunkBytes, kept_of
from diloco_blob.wire.types import FloatArray, Shape

Wide = npt.NDArray[np.float64]

_BASIS_BITS = 24
_SUM_BITS = 28
"""Bits of the values and of log₂ N together."""


class Grid(NamedTuple):
    """How a tensor is cut: `rows` × `columns` blocks of `height` × `width` over a matrix, the edges padded with 0."""

    matrix: tuple[int, int]
    rows: int
    columns: int
    height: int
    width: int


def grid_of(shape: Shape, side: int) -> Grid:
    """The first dimension times the rest, each cut evenly into as few pieces of at most `side` as it takes.

    A tensor with one dimension is laid out in rows of `side`, without any a single value.
    """
    count = count_of(shape)
    if len(shape) > 1:
        matrix = (shape[0], count // shape[0] if shape[0] else 0)
    else:
        matrix = (-(-count // side), min(side, count))
    if 0 in matrix:
        return Grid(matrix, 0, 0, 0, 0)
    rows, columns = (-(-size // side) for size in matrix)
    return Grid(matrix, rows, columns, -(-matrix[0] // rows), -(-matrix[1] // columns))


class DctTopK:
    """Of each square of √chunk × √chunk the `keep` largest coefficients of its orthonormal type-II cosine transform.

    Squares at the edges of a small or uneven matrix are smaller (all of a tensor are equal) and keep their share, at
    least one. One part, `#dct`, laid out as that of `TopK`, a square being a chunk of coefficients in row-major order.

    Args:
        chunk: Coefficients of a square: a square number.
        keep: How many of them are kept.
        value_bits: Bits of each, its sign included: 1, 2, 4 or 8.
    """

    name = "dct_topk"
    suffix = "#dct"

    def __init__(self, *, chunk: int, keep: int, value_bits: int) -> None:
        self._side = round(chunk**0.5)
        self._chunk, self._keep, self._value_bits = chunk, keep, value_bits

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return {self.suffix: ("U8", (self._layout(shape)[2].num_bytes,))}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`."""
        grid, k, chunk_bytes = self._layout(values.shape)
        num, n = grid.rows * grid.columns, grid.height * grid.width
        positions, kept = np.empty((num, k), np.int32), np.empty((num, k), np.float32)
        padded, scratch = _padded(values, grid), Scratch()
        for blocks, which in _batches(padded, grid):
            coefficients = transform(blocks, scratch).reshape(-1, n)
            found = largest(np.abs(coefficients, out=scratch.array("magnitudes", coefficients.shape)), k, scratch)
            positions[which] = found
            kept[which] = np.take_along_axis(coefficients, found, axis=1)
        out = np.empty(chunk_bytes.num_bytes, np.uint8)
        chunk_bytes.write(positions, kept, out)
        return {self.suffix: out}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        grid, _, chunk_bytes = self._layout(shape)
        positions, kept = chunk_bytes.read(parts[self.suffix])
        padded = np.empty((grid.rows * grid.height, grid.columns * grid.width), np.float32)
        scratch = Scratch()
        for blocks, which in _batches(padded, grid):
            coefficients = scratch.array("coefficients", (which.size, grid.height * grid.width))
            coefficients[:] = 0.0
            np.put_along_axis(coefficients, positions[which], kept[which], axis=1)
            blocks[...] = inverse(coefficients.reshape(blocks.shape), scratch)
        return _unpadded(padded, grid, shape)

    def _layout(self, shape: Shape) -> tuple[Grid, int, ChunkBytes]:
        grid = grid_of(shape, self._side)
        n = max(1, grid.height * grid.width)
        k = kept_of(n, self._chunk, self._keep)
        return grid, k, ChunkBytes(grid.rows * grid.columns, n, k, self._value_bits)


def _padded(values: FloatArray, grid: Grid) -> FloatArray:
    """The matrix of `grid`, with zeros up to whole blocks; a copy only where it must be."""
    height, width = grid.rows * grid.height, grid.columns * grid.width
    if values.size == height * width and values.ndim > 1:
        return np.asarray(values, np.float32).reshape(height, width)
    padded = np.zeros((height, width), np.float32)
    if values.ndim > 1:
        padded[: grid.matrix[0], : grid.matrix[1]] = values.reshape(grid.matrix)
        return padded
    flat = np.zeros(grid.matrix[0] * grid.matrix[1], np.float32)
    flat[: values.size] = values.reshape(-1)
    padded[: grid.matrix[0], : grid.matrix[1]] = flat.reshape(grid.matrix)
    return padded


def _unpadded(padded: FloatArray, grid: Grid, shape: Shape) -> FloatArray:
    inside = padded[: grid.matrix[0], : grid.matrix[1]]
    if len(shape) > 1:
        return np.ascontiguousarray(inside).reshape(shape)
    return inside.reshape(-1)[: count_of(shape)].reshape(shape)


def _batches(matrix: FloatArray, grid: Grid) -> Iterator[tuple[FloatArray, npt.NDArray[np.int64]]]:
    """Views (r, c, height, width) of some blocks of a matrix, and their numbers (r · c), row-major in the grid."""
    if not matrix.size:
        return
    blocks = matrix.reshape(grid.rows, grid.height, grid.columns, grid.width).transpose(0, 2, 1, 3)
    numbers = np.arange(grid.rows * grid.columns).reshape(grid.rows, grid.columns)
    across = min(grid.columns, max(1, SPAN // (grid.height * grid.width)))
    down = max(1, SPAN // (grid.height * grid.width) // across)
    for row in range(0, grid.rows, down):
        for column in range(0, grid.columns, across):
            where = (slice(row, row + down), slice(column, column + across))
            yield blocks[where], numbers[where].reshape(-1)


def transform(blocks: FloatArray, scratch: Scratch) -> FloatArray:
    """Coefficients of blocks (…, height, width), in the same shape; beyond fp32 the largest fp32.

    The result is valid until the next call with this scratch.

    Raises:
        Corrupt: `non-finite`: a value is.
    """
    return _both_axes(blocks, _basis(blocks.shape[-2]), _basis(blocks.shape[-1]), scratch)


def inverse(coefficients: FloatArray, scratch: Scratch) -> FloatArray:
    """Values of coefficients (…, height, width): the other direction of `transform`, in everything else like it."""
    return _both_axes(coefficients, _basis(coefficients.shape[-2]).T, _basis(coefficients.shape[-1]).T, scratch)


def _both_axes(blocks: FloatArray, left: Wide, right: Wide, scratch: Scratch) -> FloatArray:
    """The product left · block · rightᵀ, in integers; see the module's docstring."""
    peaks = np.max(np.abs(blocks, out=scratch.array("blocks", blocks.shape)), axis=(-2, -1))
    check_finite(peaks)
    digits = _SUM_BITS - (max(len(left), len(right)) - 1).bit_length()
    exponents = np.frexp(peaks)[1].astype(np.int64)[..., None, None]
    whole: Wide = scratch.array("whole", blocks.shape, np.float64)
    np.multiply(blocks, np.ldexp(1.0, digits - exponents), out=whole, dtype=np.float64)
    np.rint(whole, out=whole)
    half: Wide = np.matmul(left, whole, out=scratch.array("half", blocks.shape, np.float64))
    half *= 2.0**-_BASIS_BITS
    np.rint(half, out=half)
    np.matmul(half.reshape(-1, len(right)), right.T, out=whole.reshape(-1, len(right)))
    whole *= 2.0**-_BASIS_BITS
    np.rint(whole, out=whole)
    whole *= np.ldexp(1.0, exponents - digits)
    np.clip(whole, -FLOAT32_MAX, FLOAT32_MAX, out=whole)
    result: FloatArray = scratch.array("result", blocks.shape)
    result[...] = whole
    return result


@lru_cache(maxsize=64)
def _basis(size: int) -> Wide:
    """round(2²⁴·c·cos(π·(2j + 1)·i / 2n)), (n, n), row i the i-th frequency; c = √(1/n) for i = 0, else √(2/n)."""
    index = np.arange(size)
    angles = np.outer(index, 2 * index + 1) % (4 * size)
    basis = np.cos(np.pi / (2 * size) * angles) * np.sqrt(2 / size)
    basis[0] = np.sqrt(1 / size)
    whole: Wide = np.rint(basis * 2.0**_BASIS_BITS)
    whole.setflags(write=False)
    return whole
