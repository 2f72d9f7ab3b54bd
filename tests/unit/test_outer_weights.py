"""Staleness factors and weights against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.core.settings import Merge
from diloco_blob.outer.weights import Work, bounded_work, island_weights, staleness_factor

works = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 10_000), st.integers(0, 50)), min_size=1, max_size=20)
merges = st.builds(
    Merge,
    weights=st.sampled_from(["tokens", "tokens2_per_step", "uniform"]),
    staleness=st.sampled_from(["constant", "polynomial", "hinge"]),
    staleness_a=st.floats(0, 2000),
    staleness_b=st.floats(0, 20),
    discount=st.booleans(),
)


def weights_of(merge, items):
    """Of islands with one contribution each."""
    return island_weights(merge, [[Work(*item)] for item in items])


@pytest.mark.parametrize(
    ("merge", "factors"),
    [
        (Merge(staleness="constant"), [1, 1, 1, 1]),
        (Merge(staleness="polynomial", staleness_a=0.5), [1, 0.7071067811865476, 0.5773502691896258, 0.5]),
        (Merge(staleness="polynomial", staleness_a=1.0), [1, 1 / 2, 1 / 3, 1 / 4]),
        (Merge(staleness="polynomial", staleness_a=0.0), [1, 1, 1, 1]),
        (Merge(staleness="hinge", staleness_a=1.0, staleness_b=1.0), [1, 1, 1 / 2, 1 / 3]),
        (Merge(staleness="hinge", staleness_a=10.0, staleness_b=0.0), [1, 1 / 11, 1 / 21, 1 / 31]),
        (Merge(staleness="hinge", staleness_a=2.0, staleness_b=1.5), [1, 1, 1 / 2, 1 / 4]),
    ],
)
def test_factors_for_staleness_0_to_3(merge: Merge, factors: list[float]) -> None:
    assert [staleness_factor(merge, s) for s in range(4)] == pytest.approx(factors, rel=1e-15)


def test_weights_by_hand() -> None:
    items = [Work(tokens=100, steps=10, staleness=0), Work(tokens=300, steps=10, staleness=3)]
    fresh = Merge(staleness="constant")
    assert weights_of(fresh, items) == ([0.25, 0.75], 1.0)
    # 100 and 300 · ½: 2 to 3. Σ weight·factor / Σ weight = 250 / 400.
    stale = Merge(staleness="polynomial", staleness_a=0.5, discount=True)
    weights, discount = weights_of(stale, items)
    assert weights == pytest.approx([0.4, 0.6], rel=1e-15)
    assert discount == pytest.approx(0.625, rel=1e-15)
    # 100²/10 = 1000 and 300²/10 = 9000.
    assert weights_of(Merge(weights="tokens2_per_step", staleness="constant"), items)[0] == [0.1, 0.9]
    # 1 and ½.
    weights, discount = weights_of(Merge(weights="uniform"), items)
    assert weights == pytest.approx([2 / 3, 1 / 3], rel=1e-15)
    assert discount == 1.0


def test_a_round_of_equally_stale_work_is_weighted_as_if_fresh_but_discounted() -> None:
    merge = Merge(staleness="hinge", staleness_a=1.0, staleness_b=1.0, discount=True)
    weights, discount = weights_of(merge, [(10, 1, 4), (30, 1, 4)])
    assert weights == pytest.approx([0.25, 0.75], rel=1e-15)
    assert discount == pytest.approx(0.25, rel=1e-15)


def test_a_contribution_without_tokens_or_steps_counts_nothing_beside_others() -> None:
    assert weights_of(Merge(), [(0, 5, 0), (7, 5, 0)])[0] == [0.0, 1.0]
    assert weights_of(Merge(weights="tokens2_per_step"), [(9, 0, 0), (7, 5, 0)])[0] == [0.0, 1.0]


def test_all_without_weight_count_alike() -> None:
    for rule in ("tokens", "tokens2_per_step"):
        weights, discount = weights_of(Merge(weights=rule, discount=True), [(0, 0, 0)] * 4)
        assert (weights, discount) == ([0.25] * 4, 1.0)


def test_factors_that_underflow_leave_the_base_weights_and_no_step() -> None:
    merge = Merge(staleness="polynomial", staleness_a=5000.0, discount=True)
    assert staleness_factor(merge, 10) == 0.0
    assert weights_of(merge, [(10, 1, 10), (30, 1, 10)]) == ([0.25, 0.75], 0.0)


@given(merges, works)
def test_weights_always_sum_to_one(merge: Merge, items: list[tuple[int, int, int]]) -> None:
    weights, discount = weights_of(merge, items)
    assert math.fsum(weights) == pytest.approx(1.0, rel=1e-12)
    assert all(0.0 <= weight <= 1.0 for weight in weights)
    assert 0.0 <= discount <= 1.0
    assert merge.discount or discount == 1.0


@given(merges, works, st.randoms(use_true_random=False))
def test_weights_do_not_depend_on_the_order_of_arrival(
    merge: Merge, items: list[tuple[int, int, int]], random: object
) -> None:
    order = list(range(len(items)))
    random.shuffle(order)  # type: ignore[attr-defined]
    weights, discount = weights_of(merge, items)
    shuffled, same_discount = weights_of(merge, [items[i] for i in order])
    assert shuffled == [weights[i] for i in order]
    assert same_discount == discount


def test_nonsense_is_refused() -> None:
    for items in ([], [(1, 1, -1)], [(-1, 1, 0)]):
        with pytest.raises(ValueError, match="weights need"):
            weights_of(Merge(), items)
    with pytest.raises(ValueError, match="staleness"):
        staleness_factor(Merge(), -1)


def test_increments_of_one_island_count_as_one_piece_of_work() -> None:
    merge = Merge(staleness="polynomial", staleness_a=1.0)
    halves, whole = [Work(100, 5, 0), Work(100, 5, 0)], [Work(200, 10, 0)]
    assert island_weights(merge, [halves, whole])[0] == [0.5, 0.5]
    # Staleness 1 halves a factor: an island with one late and one fresh increment has (½ + 1) / 2 of its weight.
    weights, _ = island_weights(merge, [[Work(100, 5, 1), Work(100, 5, 0)], whole])
    assert weights == pytest.approx([3 / 7, 4 / 7], rel=1e-15)
    assert island_weights(Merge(weights="uniform", staleness="constant"), [halves, whole])[0] == [0.5, 0.5]
    # (200)²/10 = 4000 on both sides.
    assert island_weights(Merge(weights="tokens2_per_step", staleness="constant"), [halves, whole])[0] == [0.5, 0.5]


@given(merges, works)
def test_an_island_alone_has_weight_one_however_stale_its_work_is(
    merge: Merge, items: list[tuple[int, int, int]]
) -> None:
    assert island_weights(merge, [[Work(*item) for item in items]])[0] == [1.0]


def test_claims_are_cut_and_tokens_per_step_stay_what_they_are() -> None:
    assert bounded_work(Work(100, 10, 3), 100) == Work(100, 10, 3)
    assert bounded_work(Work(1000, 10, 3), 100) == Work(100, 1, 3)
    assert bounded_work(Work(300, 20, 0), 100) == Work(100, 7, 0)  # 6.67 steps, rounded up


@given(st.integers(1, 2**62), st.integers(1, 2**62), st.integers(1, 2**30), st.integers(1, 10_000))
def test_no_claim_weighs_more_than_an_interval_of_the_largest_steps(
    tokens: int, steps: int, tokens_per_step_max: int, sync_every: int
) -> None:
    """What is left of a receipt that passed (no more tokens than its steps allow), by every rule."""
    tokens = min(tokens, steps * tokens_per_step_max)
    limit = sync_every * tokens_per_step_max
    cut = bounded_work(Work(tokens, steps, 0), limit)
    assert cut.tokens == min(tokens, limit)
    assert 1 <= cut.steps <= steps
    assert cut.tokens <= cut.steps * tokens_per_step_max
    assert cut.tokens**2 <= cut.steps * limit * tokens_per_step_max


def test_under_trimmed_mean_all_islands_count_alike_and_staleness_only_discounts() -> None:
    items = [(100, 1, 0), (1, 1, 3)]
    for weights in ("tokens", "tokens2_per_step", "uniform"):
        rule = Merge(rule="trimmed_mean", weights=weights, staleness="polynomial", staleness_a=0.5)
        assert weights_of(rule, items) == ([0.5, 0.5], 1.0)
    discounted = Merge(rule="trimmed_mean", staleness="polynomial", staleness_a=0.5, discount=True)
    assert weights_of(discounted, items) == ([0.5, 0.5], 0.75)
