"""dct_topk: the transform against its definition, its exactness, its geometry."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.core.errors import Corrupt
from diloco_blob.wire.codecs import DctTopK
from diloco_blob.wire.codecs.base import Scratch
from diloco_blob.wire.codecs.dct import Grid, _basis, grid_of, inverse, transform

SIDES = [1, 2, 3, 7, 8, 33, 64, 256]


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def exact_basis(size: int) -> np.ndarray:
    """The orthonormal type-II transform by its definition, in float64."""
    rows = [[np.cos(np.pi * (2 * j + 1) * i / (2 * size)) for j in range(size)] for i in range(size)]
    basis: np.ndarray = np.array(rows) * np.sqrt(2 / size)
    basis[0] /= np.sqrt(2)
    return basis


@pytest.mark.parametrize("height", SIDES)
@pytest.mark.parametrize("width", [1, 8, 33, 64])
def test_the_transform_is_the_definition_and_the_inverse_undoes_it(height: int, width: int) -> None:
    blocks = normal((2, 1, height, width))
    coefficients = transform(blocks, Scratch()).copy()
    expected = exact_basis(height) @ blocks.astype(np.float64) @ exact_basis(width).T
    unit = np.abs(blocks).max() * 2.0**-19
    assert np.abs(coefficients - expected).max() < unit * max(height, width) ** 0.5
    back = inverse(coefficients, Scratch())
    assert np.abs(back - blocks).max() < 2 * max(height, width) ** 0.5 * unit


@pytest.mark.parametrize("size", SIDES)
def test_every_partial_sum_is_an_integer_below_2_to_the_53(size: int) -> None:
    """The worst a sum can be, in any order: all terms of one sign, at the largest inputs that the scaling allows."""
    digits = 28 - (size - 1).bit_length()
    basis = np.abs(_basis(size)).astype(object)  # Python's integers
    largest_in = int(2**digits)
    first = max(int(sum(int(b) for b in row)) for row in basis) * largest_in
    assert first < 2**53
    # Frobenius norm of what goes into the second axis, times the longest row of the basis.
    row = max(float(np.sqrt(np.sum(_basis(size)[i] ** 2))) for i in range(size))
    column = max(float(np.sqrt(np.sum(_basis(size)[:, i] ** 2))) for i in range(size))
    gain = float(np.linalg.norm(_basis(size), 2)) / 2**24
    between = size * largest_in * gain + size / 2
    assert max(row, column) * between < 2**53


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_the_order_of_summation_does_not_matter(size: int) -> None:
    """The same integers added by Python, by a permutation of the terms, and by BLAS."""
    rng = np.random.default_rng(size)
    block = rng.standard_normal((size, size)).astype(np.float32) * np.exp(3 * rng.standard_normal((size, 1)))
    block = block.astype(np.float32)
    found = transform(block[None, None], Scratch())[0, 0].copy()
    digits = 28 - (size - 1).bit_length()
    exponent = int(np.frexp(np.abs(block).max())[1])
    whole = np.rint(np.ldexp(block.astype(np.float64), digits - exponent)).astype(np.int64)
    basis = _basis(size).astype(np.int64)
    half = np.rint((basis @ whole) / 2.0**24).astype(np.int64)  # int64: exact in any order
    order = rng.permutation(size)
    full = np.zeros((size, size))
    for term in order:  # one term after the other, in float64
        full += half[:, term, None].astype(np.float64) * basis[:, term].astype(np.float64)
    expected = np.ldexp(np.rint(full / 2.0**24), exponent - digits).astype(np.float32)
    assert found.tobytes() == expected.tobytes()


def test_no_entry_of_a_basis_depends_on_how_a_machine_rounds_a_cosine() -> None:
    """Before it is rounded to an integer, no entry is nearer to a half than a thousand times the error of `cos`."""
    for size in range(1, 257):
        index = np.arange(size)
        angles = np.outer(index, 2 * index + 1) % (4 * size)
        entries = np.cos(np.pi / (2 * size) * angles) * np.sqrt(2 / size) * 2.0**24
        entries[0] = np.sqrt(1 / size) * 2.0**24
        assert np.abs(entries - np.floor(entries) - 0.5).min() > 1000 * 2.0**24 * 2.0**-52
        assert (np.abs(_basis(size) - entries) <= 0.5).all()


def test_numbers_at_the_ends_of_fp32() -> None:
    for magnitude in (2.0**-149, 2.0**-130, 2.0**-100, 3.4e38):
        codec = DctTopK(chunk=64, keep=32, value_bits=8)
        values = (normal((8, 8)).clip(-1, 1) * magnitude).astype(np.float32)
        decoded = codec.decode(codec.encode(values), (8, 8))
        assert np.isfinite(decoded).all()
        assert ((decoded == 0) | (np.abs(decoded) >= 2.0**-126)).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 64), Grid((128, 64), 2, 1, 64, 64)),
        ((130, 65), Grid((130, 65), 3, 2, 44, 33)),
        ((65, 3, 7), Grid((65, 21), 2, 1, 33, 21)),
        ((200,), Grid((4, 64), 1, 1, 4, 64)),
        ((10,), Grid((1, 10), 1, 1, 1, 10)),
        ((), Grid((1, 1), 1, 1, 1, 1)),
        ((0, 4), Grid((0, 0), 0, 0, 0, 0)),
    ],
)
def test_how_tensors_are_cut(shape: tuple[int, ...], expected: Grid) -> None:
    found = grid_of(shape, 64)
    assert (found == expected) if 0 not in shape else (found.rows * found.columns == 0)


def test_a_single_wave_needs_a_single_coefficient() -> None:
    waves = exact_basis(64)[5][:, None] * exact_basis(64)[9][None, :]
    values = np.tile(waves, (2, 3)).astype(np.float32)
    codec = DctTopK(chunk=4096, keep=1, value_bits=8)
    decoded = codec.decode(codec.encode(values), values.shape)
    assert np.abs(decoded - values).max() < 2.0**-8 * np.abs(values).max()


def test_more_kept_coefficients_lose_less_and_all_the_blocks_are_in_their_places() -> None:
    hill = np.linspace(0, 40, 200) * np.linspace(1, 3, 150)[:, None]
    values = normal((150, 200)) + hill.astype(np.float32)
    errors = []
    for keep in (1, 8, 64, 512, 2048):
        codec = DctTopK(chunk=4096, keep=keep, value_bits=8)
        decoded = codec.decode(codec.encode(values), values.shape)
        errors.append(float(np.linalg.norm(decoded - values)))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.25 * np.linalg.norm(values)
    noise = 200.0**0.5 * 150.0**0.5
    assert errors[-1] < 1.1 * noise  # of half a level and less


def test_non_finite_values_are_refused() -> None:
    for bad in (np.nan, np.inf):
        values = normal((70, 70))
        values[69, 69] = bad
        with pytest.raises(Corrupt, match="non-finite"):
            DctTopK(chunk=4096, keep=4, value_bits=2).encode(values)


@given(st.binary(min_size=30, max_size=30), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=200)
def test_hostile_coefficients_stay_finite(noise: bytes, bits: int) -> None:
    """Scales near the largest fp32, all coefficients of one sign: the inverse ends at the largest fp32."""
    codec = DctTopK(chunk=16, keep=8, value_bits=bits)
    size = codec.parts((4, 4))["#dct"][1][0]
    part = codec.encode(np.full((4, 4), 3e38, np.float32) * np.sign(normal((4, 4))))["#dct"].copy()
    part[-4:] = np.frombuffer(noise[:4], np.uint8)
    assert part.size == size
    try:
        decoded = codec.decode({"#dct": part}, (4, 4))
    except Corrupt:
        return
    assert np.isfinite(decoded).all()
