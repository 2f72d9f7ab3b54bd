"""The trimmed mean: by hand, against exact fractions, whatever the order, and what hostile islands can do to it."""

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.outer.merge import merge_tensor
from diloco_blob.outer.trimmed import num_trimmed, trimmed_mean

values = st.floats(width=32, min_value=-1e9, max_value=1e9)
stacks = st.integers(1, 9).flatmap(
    lambda num: hnp.arrays(np.float32, st.tuples(st.just(num), st.integers(0, 20)), elements=values)
)
trims = st.sampled_from([0.0, 0.1, 0.125, 0.25, 0.34, 0.49])


def column(*items: float, trim: float) -> float:
    return float(trimmed_mean([np.array([item], np.float32) for item in items], trim)[0])


@pytest.mark.parametrize(
    ("trim", "num", "expected"),
    [
        (0.125, 1, 0), (0.125, 2, 0), (0.125, 3, 1), (0.125, 8, 1), (0.125, 9, 2), (0.125, 16, 2),
        (0.49, 3, 1), (0.49, 4, 1), (0.49, 5, 2), (0.49, 100, 49),
        (0.0, 9, 0), (0.07, 100, 7), (0.29, 100, 29), (1e-6, 9, 1),
    ],
)  # fmt: skip
def test_how_many_are_left_out(trim: float, num: int, expected: int) -> None:
    assert num_trimmed(trim, num) == expected


def test_by_hand() -> None:
    assert column(5, trim=0.25) == 5.0
    assert column(1, 4, trim=0.25) == 2.5
    assert column(1, 4, 1e9, trim=0.125) == 4.0
    assert column(-1e9, 1, 2, 6, 1e9, trim=0.2) == 3.0
    assert column(1, 2, 3, 4, 5, 6, 7, 100, trim=0.25) == 4.5
    assert column(1, 2, 3, 4, 5, 6, 7, 100, trim=0.0) == 16.0


def test_weights_and_embeddings_make_no_difference() -> None:
    arrays = [np.array([value, -value], np.float32) for value in (1, 2, 3, 4, 400)]
    for embedding in (False, True):
        for weights in ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1e9]):
            merged = merge_tensor("trimmed_mean", arrays, weights, embedding=embedding, trim=0.125)
            assert merged.tolist() == [3.0, -3.0]


@given(stacks, trims)
@settings(deadline=None)
def test_it_is_the_mean_of_what_is_kept_rounded_once(stack: np.ndarray, trim: float) -> None:
    cut = num_trimmed(trim, len(stack))
    found = trimmed_mean(list(stack), trim)
    for index, value in enumerate(found.tolist()):
        kept = sorted(stack[:, index].tolist())[cut : len(stack) - cut]
        exact = sum(map(Fraction, kept)) / len(kept)
        # Half a unit of the result, and what float64 sums of terms that cancel may lose.
        error = Fraction(float(np.spacing(np.float32(abs(value))))) / 2 * (1 + Fraction(1, 10**6))
        assert abs(Fraction(value) - exact) <= error + sum(map(abs, map(Fraction, kept))) * Fraction(16, 2**53)


@given(stacks, trims, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_islands_decides_no_bit(stack: np.ndarray, trim: float, random: object) -> None:
    order = list(range(len(stack)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert trimmed_mean(list(stack[order]), trim).tobytes() == trimmed_mean(list(stack), trim).tobytes()


def test_signed_zeros_decide_no_bit_either() -> None:
    zeros = [np.array([zero], np.float32) for zero in (0.0, -0.0, -0.0)]
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        assert trimmed_mean([zeros[i] for i in order], 0.125).tobytes() == bytes(4)


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3), elements=values), st.integers(1, 70), trims)
@settings(deadline=None)
def test_identical_arrays_merge_to_that_array(array: np.ndarray, num: int, trim: float) -> None:
    found = trimmed_mean([array] * num, trim)
    assert found.shape == array.shape
    assert (found == array).all()


@given(stacks.filter(lambda stack: len(stack) >= 3), trims, st.data())
@settings(deadline=None)
def test_hostile_islands_cannot_leave_the_range_of_the_others(
    stack: np.ndarray, trim: float, data: st.DataObject
) -> None:
    num_hostile = num_trimmed(trim, len(stack))
    hostile = data.draw(hnp.arrays(np.float32, (num_hostile, stack.shape[1]), elements=values))
    honest = stack[num_hostile:]
    found = trimmed_mean([*hostile, *honest], trim)
    assert (honest.min(axis=0) <= found).all()
    assert (found <= honest.max(axis=0)).all()


@pytest.mark.parametrize("span", [1, 7, 100, 1 << 18])
def test_the_size_of_the_pieces_decides_no_bit(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.random.default_rng(seed).standard_normal((31, 41)).astype(np.float32) for seed in range(5)]
    expected = trimmed_mean(arrays, 0.125).tobytes()
    monkeypatch.setattr("diloco_blob.outer.trimmed._SPAN_VALUES", span)
    assert trimmed_mean(arrays, 0.125).tobytes() == expected


@pytest.mark.parametrize("num", [3, 48])
def test_memory_beyond_the_arrays_is_the_result_and_a_few_pieces(num: int) -> None:
    size = 1 << 20
    arrays = [np.full(size, seed, np.float32) for seed in range(num)]
    tracemalloc.start()
    trimmed_mean(arrays, 0.125)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A piece is 2¹⁸ fp32 values of all islands, twice while it is sorted; its float64 sum and mean are at most that.
    assert peak < 4 * size + 6 * (1 << 20)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="one shape"):
        trimmed_mean([np.zeros(3, np.float32), np.zeros(4, np.float32)], 0.125)
    with pytest.raises(ValueError, match="zip"):
        merge_tensor("trimmed_mean", [np.zeros(3, np.float32)], [0.5, 0.5], trim=0.1)
