"""Clipping to the median norm: by hand, and for any norms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.outer.clip import clip_factors

# Pseudo-gradients are fp32 values up to 10⁹, in tensors of up to 2³⁴: no norm is beyond these.
norms = st.lists(st.one_of(st.just(0.0), st.floats(1e-45, 1e15)), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("given_norms", "factors"),
    [
        ([3.0], [1.0]),
        ([2.0, 8.0], [1.0, 0.25]),
        ([8.0, 2.0], [0.25, 1.0]),
        ([1.0, 2.0, 4.0], [1.0, 1.0, 0.5]),
        ([1.0, 2.0, 3.0, 200.0], [1.0, 1.0, 2 / 3, 0.01]),
        ([5.0, 5.0, 5.0], [1.0, 1.0, 1.0]),
        ([0.0], [1.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        # No progress is no measure of how much is usual.
        ([0.0, 7.0], [1.0, 1.0]),
        ([0.0, 0.0, 0.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0, 0.5]),
    ],
)
def test_by_hand(given_norms: list[float], factors: list[float]) -> None:
    assert clip_factors(given_norms) == factors


@given(norms)
def test_nobody_is_longer_than_the_median_and_nobody_is_lengthened(given_norms: list[float]) -> None:
    factors = clip_factors(given_norms)
    assert all(0.0 < factor <= 1.0 for factor in factors)
    positive = sorted(norm for norm in given_norms if norm > 0.0)
    if not positive:
        assert set(factors) == {1.0}
        return
    median = positive[(len(positive) - 1) // 2]
    for norm, factor in zip(given_norms, factors, strict=True):
        assert factor == 1.0 if norm <= median else norm * factor == pytest.approx(median, rel=1e-15)


@given(norms, st.integers(0, 10**6))
def test_the_order_of_the_islands_makes_no_difference(given_norms: list[float], seed: int) -> None:
    turn = seed % len(given_norms)
    turned = given_norms[turn:] + given_norms[:turn]
    factors = clip_factors(given_norms)
    assert clip_factors(turned) == factors[turn:] + factors[:turn]


@given(st.lists(st.floats(1.0, 2.0), min_size=4, max_size=9), st.lists(st.floats(1e-9, 1e15), max_size=3))
def test_a_minority_cannot_raise_the_bound_beyond_honest_norms(honest: list[float], hostile: list[float]) -> None:
    factors = clip_factors(honest + hostile)
    clipped = [norm * factor for norm, factor in zip(honest + hostile, factors, strict=True)]
    assert max(clipped) <= max(honest) * (1 + 1e-15)
