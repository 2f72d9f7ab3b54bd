"""The loop around the pass: it sleeps as it was told, rides out outages, and stops."""

import logging
from typing import Any

import pytest

from diloco_blob.aggregate import FragmentReport, aggregate, watch
from diloco_blob.core.errors import Corrupt, Denied, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.metered import MeteredStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.toy import ToyRun

POLICY = Policy(islands=2, quorum=2, grace_s=3.0, deadline_s=20.5)


class Script(VirtualClock):
    """A clock that does something at set times, when it is slept past them."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[tuple[float, Any]] = []
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept.append(seconds)
        while self.plan and self.plan[0][0] <= self.monotonic():
            self.plan.pop(0)[1]()


def toy_run(num_fragments: int = 1) -> tuple[ToyRun, Script]:
    clock = Script()
    return ToyRun(Settings(policy=POLICY, sync=Sync(num_fragments=num_fragments)), clock=clock), clock


def watched(toy: ToyRun, until_s: float, store: ObjectStore | None = None, **options: object) -> list[FragmentReport]:
    """Everything that was reported until a moment."""
    reports: list[FragmentReport] = []
    watch(
        store or toy.store,
        clock=toy.clock,
        ids=SeededIds(3),
        stop=lambda: toy.clock.monotonic() >= until_s,
        on_report=reports.append,
        **options,  # type: ignore[arg-type]
    )
    return reports


def test_it_closes_at_the_deadline_to_the_moment() -> None:
    toy, clock = toy_run()
    clock.plan = [(2.0, lambda: toy.send("a", 1))]
    reports = watched(toy, 40.0)
    [merged] = [report for report in reports if report.action == "merged"]
    assert merged.reason == "deadline"
    assert toy.close(1).closed_at - toy.run.created_at == POLICY.deadline_s
    assert max(clock.slept) <= 1.0
    assert 0.5 in clock.slept  # The last bit before the deadline.


def test_rounds_follow_each_other_without_a_pause() -> None:
    toy, _ = toy_run()
    for name in "aabb":
        toy.send(name, 1)
    reports = watched(toy, 1.0)
    assert [report.action for report in reports] == ["merged", "waiting"]
    assert len(toy.commit(1).merged) == 4


def test_polls_are_spaced_as_asked() -> None:
    toy, clock = toy_run()
    watched(toy, 10.0, poll_s=2.5)
    assert clock.slept == [2.5] * 4


def test_all_fragments_or_one() -> None:
    toy, _ = toy_run(num_fragments=3)
    for number in range(3):
        for name in "ab":
            toy.send(name, number, fragment=number)
    watched(toy, 1.0, fragment=1)
    assert [toy.head(number).version for number in range(3)] == [0, 1, 0]
    watched(toy, 3.0)
    assert [toy.head(number).version for number in range(3)] == [1, 1, 1]


def test_drain() -> None:
    toy, clock = toy_run()
    toy.send("a", 1)
    reports = watched(toy, 5.0, drain=lambda: clock.monotonic() >= 2.0)
    assert [report.reason for report in reports if report.action == "merged"] == ["drain"]
    assert toy.close(1).closed_at - toy.run.created_at == 2.0


def test_an_outage_is_ridden_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    toy, _ = toy_run()
    caplog.set_level(logging.WARNING)
    broken = FaultyStore(toy.store, [Fault("any", "refuse", skip=7, times=12)])
    toy.send("a", 1)
    toy.send("b", 1)
    watched(toy, 30.0, store=broken)
    assert toy.head().version == 1
    messages = [record.message for record in caplog.records if record.name.endswith("watch")]
    assert [message.split(",")[0].split(":")[0] for message in messages] == [
        "the store does not answer",
        "the store answers again",
    ]


def test_an_outage_at_the_very_start_is_ridden_out_too() -> None:
    toy, _ = toy_run()
    toy.send("a", 1)
    toy.send("b", 1)
    watched(toy, 9.0, store=FaultyStore(toy.store, [Fault("any", "refuse", times=3)]))
    assert toy.head().version == 1


def test_what_will_not_get_better_is_raised() -> None:
    toy, _ = toy_run()
    with pytest.raises(Denied):
        watched(toy, 9.0, store=FaultyStore(toy.store, [Fault("list_dirs", "refuse", error=lambda: Denied("no"))]))
    toy.store.put(keys.close(0, 1), b"{}")
    with pytest.raises(Corrupt):
        watched(toy, 9.0)


def test_no_run_is_an_error_or_waited_for() -> None:
    toy, clock = toy_run()
    run = toy.store.get(keys.RUN)[0]
    empty = MemoryStore("memory://watch-empty", clock=clock)
    with pytest.raises(NotFound, match="no run"):
        watched(toy, 9.0, store=empty)
    clock.plan = [(3.0, lambda: empty.put(keys.RUN, run))]
    assert {report.action for report in watched(toy, 5.0, store=empty, wait_for_run=True)} == {"waiting"}
    assert watched(toy, 0.0, store=empty, wait_for_run=True) == []


def test_hints_make_a_long_history_cheap() -> None:
    toy, _ = toy_run()
    for base in range(40):
        for name in "ab":
            toy.send(name, base, base_version=base)
        toy.aggregate()
    metered, hints = MeteredStore(toy.store), {0: 0}
    for expected in (13, 3):
        before = metered.usage()
        aggregate(metered, clock=toy.clock, ids=SeededIds(0), run=toy.run, hints=hints)
        assert metered.usage().since(before).heads <= expected
        assert hints == {0: 40}


# ---- what it remembers


def listing_times(toy: ToyRun, until_s: float, **options: object) -> list[float]:
    """When the islands were listed."""
    times: list[float] = []
    store = FaultyStore(
        toy.store,
        [Fault("list_dirs", "delay", times=10_000, hook=lambda: times.append(toy.clock.monotonic()))],
    )
    watched(toy, until_s, store=store, **options)
    return times


@pytest.mark.parametrize(("deadline_s", "every_s"), [(5.0, 1.0), (200.0, 4.0), (600.0, 10.0), (86_400.0, 10.0)])
def test_islands_are_listed_for_all_fragments_and_seldom_while_rounds_are_open(
    deadline_s: float, every_s: float
) -> None:
    clock = Script()
    policy = Policy(islands=2, quorum=2, grace_s=3.0, deadline_s=deadline_s)
    toy = ToyRun(Settings(policy=policy, sync=Sync(num_fragments=4)), clock=clock)
    toy.send_raw("a", b"no receipt, but somebody is there")
    times = listing_times(toy, 60.5, poll_s=0.25)
    assert times == [every_s * number for number in range(int(60 / every_s) + 1)]


def test_until_somebody_has_contributed_every_pass_lists_once() -> None:
    clock = Script()
    policy = Policy(islands=2, quorum=2, grace_s=3.0, deadline_s=600.0)
    toy = ToyRun(Settings(policy=policy, sync=Sync(num_fragments=4)), clock=clock)
    clock.plan = [(1.2, lambda: [toy.join(name) for name in "ab"]), (3.1, lambda: toy.send("a", 1, fragment=2))]
    assert listing_times(toy, 15.0, poll_s=0.5) == [0.5 * number for number in range(8)] + [13.5]


def test_the_first_version_is_made_as_soon_as_all_have_contributed() -> None:
    toy, clock = patient_run()
    clock.plan = [(1.0, lambda: [toy.join(name) for name in "ab"]), (2.0, lambda: toy.send("a", 1))]
    clock.plan += [(2.5, lambda: toy.send("b", 2))]
    watched(toy, 3.0, poll_s=0.25)
    assert toy.close(1).closed_at - toy.run.created_at == 2.5


def test_a_newcomer_that_no_list_has_shown_yet_is_in_the_close_that_it_is_in_time_for() -> None:
    toy, clock = patient_run()
    toy.send("a", 1)
    clock.plan = [(3.5, lambda: (toy.send("b", 2), toy.send("c", 3)))]
    assert listing_times(toy, 9.75, poll_s=0.25) == [0.0]  # Only a is known: b completes no quorum yet.
    assert toy.head().version == 0
    assert listing_times(toy, 20.0, poll_s=0.25) == [9.75, 19.75]
    assert [entry.island for entry in toy.close(1).chosen] == ["a", "b", "c"]

    clock.plan = [(26.0, lambda: [toy.send(name, 1, base_version=1) for name in "abcd"])]
    assert listing_times(toy, 27.0, poll_s=0.25) == [20.0, 26.0]  # The second for d, who is new.
    assert toy.close(2).closed_at - toy.run.created_at == 26.0
    assert [entry.island for entry in toy.close(2).chosen] == ["a", "b", "c", "d"]


def test_a_newcomer_that_only_started_is_waited_for() -> None:
    toy, clock = patient_run()
    toy.send("a", 1)
    toy.send("b", 1)
    clock.plan = [
        (2.0, lambda: toy.join("late")),
        (4.0, lambda: [toy.send(name, 2, base_version=1) for name in "ab"]),
    ]
    reports = watched(toy, 6.0)
    assert toy.head().version == 1
    assert reports[-1].waiting_for == ("late",)


def patient_run() -> tuple[ToyRun, Script]:
    """The islands are listed every 10 s; two make a quorum."""
    clock = Script()
    return ToyRun(Settings(policy=Policy(islands=2, quorum=2, grace_s=30.0, deadline_s=600.0)), clock=clock), clock


CUT_OFF = {
    "while merging": Fault("head", "refuse", key="payloads/", times=3),
    "before the commit": Fault("put", "refuse", key="commits/", times=3),
    "answer to the close lost": Fault("put", "lose_answer", key="closes/"),
    "close refused by itself": Fault("put", "conflict_after", key="closes/"),
}


@pytest.mark.parametrize("fault", CUT_OFF.values(), ids=CUT_OFF)
def test_its_own_close_is_merged_as_soon_as_the_store_answers(fault: Fault) -> None:
    toy, _ = toy_run(num_fragments=2)
    for number in range(2):
        for name in "ab":
            toy.send(name, number, fragment=number)
    reports = watched(toy, 5.0, store=FaultyStore(toy.store, [fault]))
    merged = [report for report in reports if report.action == "merged"]
    assert {(report.fragment, report.version, report.takeover) for report in merged} == {(0, 1, False), (1, 1, False)}
    assert not any(report.action == "elsewhere" for report in reports)
    for number in range(2):
        toy.audit(number)


def test_a_close_of_another_process_is_waited_for_and_so_is_ones_own_by_a_pass_that_keeps_nothing() -> None:
    toy, clock = toy_run()
    toy.send("a", 1)
    toy.send("b", 1)
    ids = SeededIds(5)
    broken = FaultyStore(toy.store, [Fault("head", "refuse", key="payloads/")])
    with pytest.raises(Unavailable):
        aggregate(broken, clock=clock, ids=ids, run=toy.run)
    [report] = aggregate(toy.store, clock=clock, ids=ids, run=toy.run)
    assert (report.action, report.look_again_s) == ("elsewhere", POLICY.takeover_s)
    reports = watched(toy, POLICY.takeover_s - 1)
    assert {report.action for report in reports} == {"elsewhere"}
    assert [report.takeover for report in watched(toy, POLICY.takeover_s + 1) if report.action == "merged"] == [True]


def test_a_fragment_that_the_run_does_not_have_is_refused() -> None:
    toy, _ = toy_run(num_fragments=2)
    for number in (-1, 2):
        with pytest.raises(InvalidSettings, match="fragments 0 to 1"):
            aggregate(toy.store, clock=toy.clock, ids=SeededIds(0), fragment=number)
    assert [report.fragment for report in aggregate(toy.store, clock=toy.clock, ids=SeededIds(0))] == [0, 1]
