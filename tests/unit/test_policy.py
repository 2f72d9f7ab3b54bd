"""The round's policy: every rule at its boundary, and what must hold for every view."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.core.settings import Policy
from diloco_blob.protocol.policy import Decision, RoundView, active_islands, decide
from diloco_blob.protocol.records import Watermark

OPENED = 1_000.0
POLICY = Policy(islands=4, quorum=2, grace_s=10.0, deadline_s=100.0, min_contributions=1)


def view(now: float, arrivals: dict[str, float], active: str = "abcd", **rest: float) -> RoundView:
    """A round opened at 1000 s, with all times given as seconds after that."""
    return RoundView(
        now=OPENED + now,
        opened_at=OPENED,
        arrivals={name: OPENED + at for name, at in arrivals.items()},
        active=frozenset(active),
        **{name: OPENED + value for name, value in rest.items()},
    )


def test_nothing_arrived_is_never_due_and_only_an_arrival_can_change_that() -> None:
    for now in (0.0, 99.0, 100.0, 1e9):
        for drain in (False, True):
            assert decide(view(now, {}), POLICY, drain=drain) == Decision(reason=None, look_again_s=None)


def test_all_active_islands_close_the_round_at_once() -> None:
    assert decide(view(5, {"a": 1, "b": 2, "c": 3, "d": 5}), POLICY).reason == "all"
    assert decide(view(5, {"a": 1, "b": 2}, active="ab"), POLICY).reason == "all"


def test_all_needs_a_quorum_too() -> None:
    """The only active island must not become the source of truth before the deadline (lesson 54)."""
    alone = view(5, {"a": 1}, active="a")
    assert decide(alone, POLICY) == Decision(reason=None, look_again_s=95.0)


def test_a_stranger_does_not_stand_in_for_an_active_island() -> None:
    assert not decide(view(5, {"a": 4, "x": 5}, active="ab"), POLICY).due


@pytest.mark.parametrize(
    ("now", "due", "look"),
    [(12.0, False, 3.0), (14.999, False, 0.001), (15.0, True, None), (16.0, True, None)],
)
def test_grace_runs_from_the_arrival_that_made_the_quorum(now: float, due: bool, look: float | None) -> None:
    found = decide(view(now, {"a": 1, "b": 5}), POLICY)
    assert found.due is due
    assert found.reason == ("grace" if due else None)
    assert found.look_again_s == (None if look is None else pytest.approx(look))


def test_a_third_arrival_does_not_extend_the_grace() -> None:
    assert decide(view(15, {"a": 1, "b": 5, "c": 14.9}), POLICY).reason == "grace"


def test_work_from_before_the_round_opened_counts_from_its_opening() -> None:
    early = {"a": -50, "b": -40}
    assert decide(view(9.0, early), POLICY) == Decision(reason=None, look_again_s=1.0)
    assert decide(view(10.0, early), POLICY).reason == "grace"


@pytest.mark.parametrize(("now", "due"), [(99.999, False), (100.0, True), (1e6, True)])
def test_deadline_fires_for_one_island_alone_with_nobody_arriving_afterwards(now: float, due: bool) -> None:
    found = decide(view(now, {"a": 1}), POLICY)
    assert found.reason == ("deadline" if due else None)


def test_deadline_is_armed_by_the_opening_not_by_the_first_arrival() -> None:
    """A round that waits without bound for the second island is lesson 88."""
    assert decide(view(99.5, {"a": 20.0}), POLICY).look_again_s == pytest.approx(0.5)
    assert decide(view(100, {"a": 20.0}), POLICY).reason == "deadline"


def test_the_first_to_arrive_after_the_deadline_does_not_close_the_round_alone() -> None:
    """If training takes longer than the deadline, islands must not take turns at solo versions (lesson 40)."""
    assert decide(view(149, {"a": 149.0}), POLICY).look_again_s == POLICY.grace_s
    assert decide(view(149 + POLICY.grace_s, {"a": 149.0}), POLICY).reason == "deadline"


def test_deadline_needs_min_contributions() -> None:
    policy = Policy(islands=4, quorum=3, deadline_s=100.0, min_contributions=2)
    assert decide(view(500, {"a": 1}), policy) == Decision(reason=None, look_again_s=None)
    assert decide(view(500, {"a": 1, "b": 400}), policy).reason == "deadline"


def test_quorum_one_still_waits_for_the_other_active_island() -> None:
    """With quorum 1 two islands must not answer alternate versions for ever (lesson 40)."""
    policy = Policy(islands=2, quorum=1, grace_s=10.0, deadline_s=100.0)
    assert decide(view(3, {"a": 1}, active="ab"), policy) == Decision(reason=None, look_again_s=8.0)
    assert decide(view(3, {"a": 1, "b": 3}, active="ab"), policy).reason == "all"
    assert decide(view(11, {"a": 1}, active="ab"), policy).reason == "grace"


def test_quorum_one_and_no_grace_closes_at_once() -> None:
    assert decide(view(0, {"a": 0}), Policy(quorum=1, grace_s=0.0)).reason == "grace"


def test_drain_takes_whatever_is_there_and_prefers_the_ordinary_reason() -> None:
    assert decide(view(1, {"a": 1}), POLICY, drain=True).reason == "drain"
    assert decide(view(1, {"a": 1, "b": 1, "c": 1, "d": 1}), POLICY, drain=True).reason == "all"


def test_look_again_when_the_waiting_for_a_newcomer_ends() -> None:
    policy = Policy(islands=2, quorum=1, grace_s=50.0, deadline_s=100.0)
    assert decide(view(3, {"a": 1}, active="ab", active_changes_at=20), policy).look_again_s == 17.0
    # Without a quorum the end of the waiting would change nothing.
    assert decide(view(3, {"a": 1}, active="ab", active_changes_at=20), POLICY).look_again_s == 97.0


@pytest.mark.parametrize(("islands", "quorum"), [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (32, 17)])
def test_quorum_where_nobody_set_one(islands: int, quorum: int) -> None:
    assert Policy(islands=islands).quorum_or_majority == quorum
    assert Policy(islands=islands, quorum=islands or 7).quorum_or_majority == (islands or 7)


def test_a_backlog_closes_at_the_deadline_what_nothing_else_can() -> None:
    def found(now: float, arrivals: dict[str, float], *, drain: bool = False) -> Decision:
        return decide(replace(view(now, arrivals), blocked=True), policy, drain=drain)

    policy = Policy(islands=4, quorum=3, grace_s=10.0, deadline_s=100.0, min_contributions=2)
    for too_few in ({}, {"a": 1.0}):
        assert found(30, too_few) == Decision(reason=None, look_again_s=70.0)
        assert found(100, too_few).reason == "backlog"
    assert found(30, {}, drain=True).reason == "backlog"
    assert found(30, {"a": 1}, drain=True).reason == "drain"
    assert found(105, {"a": 1, "b": 99}) == Decision(reason=None, look_again_s=4.0)  # It is going to merge something.
    assert found(109, {"a": 1, "b": 99}).reason == "deadline"
    assert found(109, {"a": 1, "b": 2, "c": 3, "d": 4}).reason == "all"


# ---- who is waited for


def marks(**versions: int) -> dict[str, Watermark]:
    return {name: Watermark(seq=9, version=version) for name, version in versions.items()}


def active(head: int, watermarks: dict[str, Watermark], joined: dict[str, float], now: float = 0.0) -> set[str]:
    return set(
        active_islands(head_version=head, watermarks=watermarks, joined_at=joined, now=now, policy=POLICY).islands
    )


def test_active_is_who_contributed_to_the_last_versions() -> None:
    assert active(10, marks(a=10, b=8, c=7, d=1), {}) == {"a", "b"}
    assert active(2, marks(a=1, b=2), {}) == {"a", "b"}


def test_an_island_whose_receipts_were_all_skipped_is_not_waited_for() -> None:
    assert active(1, marks(a=1, bad=0), {}) == {"a"}


@pytest.mark.parametrize(("age", "waited_for"), [(0.0, True), (99.9, True), (100.0, False)])
def test_a_newcomer_is_waited_for_during_one_deadline(age: float, waited_for: bool) -> None:
    found = active_islands(
        head_version=5, watermarks=marks(a=5), joined_at={"new": OPENED}, now=OPENED + age, policy=POLICY
    )
    assert found.islands == ({"a", "new"} if waited_for else {"a"})
    assert found.changes_at == (OPENED + 100.0 if waited_for else math.inf)


def test_an_old_contributor_that_starts_again_is_not_a_newcomer() -> None:
    assert active(10, marks(a=10, b=1), {"b": 0.0}) == {"a"}


# ---- for every view

NAMES = st.sampled_from("abcdef")
TIMES = st.floats(min_value=-200, max_value=400, allow_nan=False)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    return Policy(
        quorum=draw(st.integers(1, 6)),
        grace_s=draw(st.sampled_from([0.0, 0.5, 10.0, 300.0])),
        deadline_s=draw(st.sampled_from([300.0, 400.0])),
        min_contributions=draw(st.integers(1, 3)),
    )


@st.composite
def views(draw: st.DrawFn) -> RoundView:
    now = draw(st.floats(min_value=0, max_value=500))
    arrivals = draw(st.dictionaries(NAMES, TIMES.map(lambda at: min(at, now))))
    changes_at = draw(st.one_of(st.just(math.inf), st.floats(min_value=0, max_value=500)))
    later = math.inf if math.isinf(changes_at) else OPENED + max(now + 0.01, changes_at)
    return RoundView(
        now=OPENED + now,
        opened_at=OPENED,
        arrivals={name: OPENED + at for name, at in arrivals.items()},
        active=draw(st.frozensets(NAMES)),
        active_changes_at=later,
        blocked=draw(st.booleans()),
    )


def at_time(seen: RoundView, now: float) -> RoundView:
    """The same round later, nobody having arrived; no newcomer's time having run out."""
    return replace(seen, now=now)


@given(views(), policies(), NAMES, st.floats(min_value=0, max_value=1), st.booleans())
def test_more_arrivals_never_make_a_due_round_not_due(
    seen: RoundView, policy: Policy, name: str, when: float, drain: bool
) -> None:
    if name in seen.arrivals:
        return
    arrived = seen.opened_at + when * (seen.now - seen.opened_at)
    more = replace(seen, arrivals={**seen.arrivals, name: arrived})
    if decide(seen, policy, drain=drain).reason not in {None, "backlog"}:
        assert decide(more, policy, drain=drain).due


@given(views(), policies(), st.floats(min_value=0, max_value=1e4), st.booleans())
def test_time_never_makes_a_due_round_not_due(seen: RoundView, policy: Policy, wait: float, drain: bool) -> None:
    if decide(seen, policy, drain=drain).due:
        assert decide(at_time(seen, seen.now + wait), policy, drain=drain).due


@given(views(), policies())
def test_not_due_says_exactly_when_time_alone_may_change_it(seen: RoundView, policy: Policy) -> None:
    found = decide(seen, policy)
    if found.due:
        assert found.look_again_s is None
        return
    if found.look_again_s is None:
        assert not decide(at_time(seen, seen.now + 1e6), policy).due
        return
    assert found.look_again_s >= 0
    assert not decide(at_time(seen, seen.now + found.look_again_s * 0.999), policy).due
    then = seen.now + found.look_again_s
    assert decide(at_time(seen, then), policy).due or then >= seen.active_changes_at


@given(views(), policies())
def test_whoever_waits_waits_no_longer_than_the_deadline(seen: RoundView, policy: Policy) -> None:
    """Or, if it has to arrive first, no longer than the grace."""
    newest = max(seen.arrivals.values(), default=0.0)
    late = at_time(seen, max(seen.now, seen.opened_at + policy.deadline_s, newest + policy.grace_s))
    assert decide(late, policy).due or len(seen.arrivals) < policy.min_contributions


@given(views(), policies())
def test_sleeping_as_told_reaches_every_deadline_in_few_looks(seen: RoundView, policy: Policy) -> None:
    now = seen.now
    for _ in range(4):
        found = decide(at_time(seen, now), policy)
        if found.due or found.look_again_s is None:
            return
        if now + found.look_again_s >= seen.active_changes_at:
            return
        now += found.look_again_s
    raise AssertionError("the caller would spin")


@given(views(), policies())
def test_order_of_the_arrivals_in_the_mapping_is_irrelevant(seen: RoundView, policy: Policy) -> None:
    turned = replace(seen, arrivals=dict(reversed(list(seen.arrivals.items()))))
    assert decide(seen, policy) == decide(turned, policy)


# ---- who has left


@pytest.mark.parametrize(
    ("islands", "known", "left", "arrived", "due"),
    [
        (3, 3, 0, "a", False),  # the majority of three is two
        (3, 3, 1, "a", False),  # two remain: both are the quorum
        (3, 3, 1, "ab", True),
        (3, 3, 2, "a", True),  # one remains, and is everybody
        (3, 40, 38, "a", False),  # many came and went; of those expected or known two remain
        (0, 2, 1, "a", True),
    ],
)
def test_islands_that_left_lower_the_quorum(islands: int, known: int, left: int, arrived: str, due: bool) -> None:
    policy = Policy(islands=islands, grace_s=50.0, deadline_s=100.0)
    seen = RoundView(
        now=OPENED + 2,
        opened_at=OPENED,
        arrivals=dict.fromkeys(arrived, OPENED + 1),
        active=frozenset(arrived),
        num_known=known,
        num_left=left,
    )
    assert decide(seen, policy).due == due
