"""Who has left is not waited for, and who was started again is: a departure counts while its start is the newest."""

from typing import Any

import pytest

from diloco_blob.core.settings import Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import FORMAT, Close, Departure, Generation, decode, encode
from diloco_blob.store.metered import MeteredStore
from diloco_blob.testing.fleet import Fleet
from diloco_blob.testing.toy import ToyRun

POLICY = Policy(islands=3, quorum=3, grace_s=20.0, deadline_s=1000.0, takeover_s=5.0)


def fleet_at_work() -> Fleet:
    fleet = Fleet(Settings(sync=Sync(sync_every=10), policy=POLICY), num_islands=3)
    fleet.add_all()
    for _ in range(30):
        fleet.tick(100)
    return fleet


def stop_all(fleet: Fleet) -> list[str]:
    """Ctrl-C: everybody leaves, one after the other, while an aggregator goes on for a while."""
    names = [island.name for island in fleet.islands]
    for island in list(fleet.islands):
        island.core.end("stopped")
        fleet.islands.remove(island)
        fleet.aggregate()
    for _ in range(4):
        fleet.aggregate()
    return names


def merged_names(fleet: Fleet, since: int) -> list[set[str]]:
    return [{item.island for item in report.merged} for report in fleet.reports[since:]]


def test_islands_that_were_all_stopped_and_started_again_are_merged_together() -> None:
    fleet = fleet_at_work()
    names = stop_all(fleet)
    before = len(fleet.reports)
    for slowness, name in enumerate(names, start=1):  # The first to arrive is far ahead of the others.
        fleet.add(name, slowness=slowness)
    for _ in range(70):
        fleet.tick(100)
    after = merged_names(fleet, before)
    assert after[:2] == [set(names)] * 2
    assert [report.reason for report in fleet.reports[before:]][:2] == ["all", "all"]


def test_who_comes_back_alone_waits_for_nobody_else() -> None:
    fleet = fleet_at_work()
    names = stop_all(fleet)
    before = len(fleet.reports)
    fleet.add(names[1])
    started = fleet.clock.monotonic()
    for _ in range(60):
        fleet.tick(100)
    assert merged_names(fleet, before)[:4] == [{names[1]}] * 4
    assert fleet.clock.monotonic() - started < POLICY.grace_s
    assert last_close(fleet).left == (names[0], names[2])


def last_close(fleet: Fleet) -> Close:
    newest = max(info.key for info in fleet.bare.list("fragments/0000/closes/"))
    return decode(fleet.bare.get(newest)[0], Close)


# ---- one by one


def toy_run() -> ToyRun:
    """Three islands have contributed once, and a has contributed again."""
    toy = ToyRun(Settings(policy=POLICY))
    for name in "abc":
        toy.join(name)
        toy.send(name, 1)
    assert toy.aggregate().action == "merged"
    toy.send("a", 2, base_version=1)
    return toy


def depart(toy: ToyRun, name: str, number: int, **changes: Any) -> None:
    fields: dict[str, Any] = {"generation": 1, "fragment": 0, "seq": number, "island": name, "run": toy.run.digest}
    record = Departure(format=FORMAT, write_id=toy.ids.fresh(), **{**fields, **changes})
    toy.store.put(keys.departure(name, 0, number), encode(record), if_absent=True)


def start_again(toy: ToyRun, island: str, generation: int) -> None:
    record = Generation(FORMAT, toy.run.digest, toy.ids.fresh(), island, generation, "toy", 1)
    toy.store.put(keys.generation(island, generation), encode(record), if_absent=True)


def test_a_departure_counts_while_its_start_is_the_newest() -> None:
    toy = toy_run()
    depart(toy, "b", 1)
    assert toy.aggregate().waiting_for == ("c",)
    start_again(toy, "b", 2)
    assert toy.aggregate().waiting_for == ("b", "c")
    toy.send("c", 3, base_version=1)
    assert toy.aggregate().waiting_for == ("b",)


@pytest.mark.parametrize("changes", [{"run": "0" * 32}, {"island": "c"}, {"seq": 2}, {"fragment": 1}])
def test_a_departure_that_is_not_what_its_name_says_does_not_count(changes: dict[str, Any]) -> None:
    toy = toy_run()
    depart(toy, "b", 1, **changes)
    toy.store.put(keys.departure("c", 0, 1), b"")
    assert toy.aggregate().waiting_for == ("b", "c")


def test_what_a_close_noted_is_asked_again_only_while_the_island_is_active() -> None:
    toy = toy_run()
    depart(toy, "b", 1)
    depart(toy, "c", 1)
    assert toy.aggregate().reason == "all"
    assert toy.close(2).left == ("b", "c")
    used = []
    for version in range(2, 6):
        toy.send("a", version + 1, base_version=version)
        meter = MeteredStore(toy.store)
        assert toy.aggregate(store=meter, hints={0: version}).reason == "all"
        used.append((meter.usage().gets, meter.usage().heads))
        assert toy.close(version + 1).left == ("b", "c")
    (gets, heads), active = used[-1], POLICY.active_versions - 1  # They are in version 1, and silent since version 2.
    assert used == [(gets + 2, heads + 4)] * active + [(gets, heads)] * (len(used) - active)


def test_who_came_back_and_is_not_heard_of_lowers_the_quorum_again_once_it_is_no_longer_active() -> None:
    """As an island does that is started again, finds that it has done all its steps, and finishes."""
    toy = toy_run()
    for name in "bc":
        depart(toy, name, 1)
        start_again(toy, name, 2)
    reasons = []
    for version in range(1, 6):
        assert toy.aggregate(hints={0: version}).version in {version, version + 1}
        if toy.head().version == version:
            toy.clock.sleep(POLICY.deadline_s)
            toy.aggregate()
        reasons.append(toy.close(version + 1).reason)
        toy.send("a", version + 2, base_version=version + 1)
    assert reasons == ["deadline"] * POLICY.active_versions + ["all"] * (5 - POLICY.active_versions)
