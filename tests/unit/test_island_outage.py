"""A store that is down: islands train on, hold a bounded amount, pause aloud, go on, and lose nothing."""

import logging
import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from diloco_blob.core.errors import Unavailable
from diloco_blob.core.settings import Codec, Outer, Policy, Settings, Sync
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import Receipt, decode
from diloco_blob.store.metered import MeteredStore
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.fleet import Fleet
from diloco_blob.testing.port import ArrayPort

WRITES = frozenset({"put", "delete"})
ALL = WRITES | {"get", "get_range", "head", "list", "list_dirs"}

WAYS = [
    Sync(sync_every=10, pause_after=1000),
    Sync(sync_every=12, num_fragments=4, pause_after=1000),
    Sync(sync_every=10, overlap=3, adopt="overwrite", pause_after=1000),
    Sync(sync_every=10, overlap=3, adopt="mix", num_fragments=2, pause_after=1000),
    Sync(sync_every=10, overlap=3, adopt="carry", pause_after=1000, max_in_flight=1),
    Sync(sync_every=12, overlap=1, adopt="carry", num_fragments=4, pause_after=1000),
]


@dataclass
class Line:
    """The way to the bucket: which operations get no answer now."""

    down: frozenset[str] = frozenset()

    def wrap(self, inner):
        line = self

        class Store:
            url = inner.url

            def __getattr__(self, name):
                if name in line.down:
                    raise Unavailable("the line is dead")
                return getattr(inner, name)

        return Store()


@dataclass
class DownFleet(Fleet):
    """A fleet whose clients give up soon, so that an outage takes few virtual seconds of each request."""

    line: Line = field(default_factory=Line)

    def __post_init__(self) -> None:
        self.wrap = self.line.wrap
        super().__post_init__()

    def store(self) -> RetryingStore:
        return RetryingStore(MeteredStore(self.wrap(self.bare)), self.clock, self.ids, budget_s=0.2)

    def islands_alone(self, steps: int) -> None:
        """A tick in which no aggregator lives."""
        self.tick(steps, aggregators=0)


def world(sync: Sync, *, islands: int = 2, checkpoints=None, **rest) -> DownFleet:
    policy = Policy(
        islands=islands,
        quorum=islands,
        grace_s=2.0,
        deadline_s=4.0,
        takeover_s=1.0,
        max_staleness=50,
    )
    return DownFleet(Settings(sync=sync, policy=policy, **rest), num_islands=islands, checkpoints=checkpoints)


def intervals(fleet: Fleet, island: str, fragment: int = 0) -> list[tuple[int, int]]:
    """The steps of each receipt: after, to."""
    names = [info.key for info in fleet.bare.list(f"islands/{island}/receipts/{fragment:04d}/")]
    found = [decode(fleet.bare.get(name)[0], Receipt) for name in sorted(names)]
    return [(receipt.step_to - receipt.steps, receipt.step_to) for receipt in found]


def covers(found: list[tuple[int, int]], steps: int) -> bool:
    """Whether every step is in exactly one interval."""
    return [0, *(to for _, to in found)] == [*(after for after, _ in found), steps]


@pytest.mark.parametrize("sync", WAYS, ids=lambda s: f"{s.adopt}-{s.overlap}-{s.num_fragments}")
def test_islands_train_through_an_outage_with_bounded_memory_and_lose_nothing(sync):
    fleet = world(sync)
    fleet.add_all()
    while min(island.core.steps for island in fleet.islands) < 25:
        fleet.tick(400)
    before = [island.core.steps for island in fleet.islands]
    fleet.line.down = ALL
    for _ in range(10_000):
        fleet.islands_alone(400)
        for island in fleet.islands:
            for p, trajectory in enumerate(island.core.trajectories):
                assert island.core.outbox.unsent(p) <= sync.max_in_flight
                assert sum(item.seq is None for item in trajectory.in_flight) <= sync.max_in_flight
        if min(island.core.steps for island in fleet.islands) >= before[0] + 5 * sync.sync_every:
            break
    assert all(
        island.core.steps >= now + 5 * sync.sync_every - 1 for island, now in zip(fleet.islands, before, strict=True)
    )
    assert all(not island.core.outbox.empty() for island in fleet.islands)
    fleet.line.down = frozenset()
    fleet.run(400)
    for island in fleet.islands:
        assert island.core.steps == 400
        for p in range(sync.num_fragments):
            found = intervals(fleet, island.name, p)
            assert max(to - after for after, to in found) > sync.sync_every, "gathered while nothing could be sent"
            if sync.overlap == 0 or sync.adopt == "carry":
                assert covers(found, 400)
    report = audit(fleet.bare)
    assert report.ok
    assert report.counts.pending == 0


@pytest.mark.parametrize("overlap", [0, 3])
def test_an_island_alone_trains_as_if_there_had_been_no_outage(overlap):
    sync = Sync(sync_every=10, overlap=overlap, adopt="carry", pause_after=1000)
    plain = {"up": Codec(), "down": Codec(), "outer": Outer(optimizer="sgd", lr=1.0, momentum=0.0)}
    fleet = world(sync, islands=1, **plain)
    island = fleet.add("island-0")
    while not island.done or island.waiting is not None:
        fleet.line.down = ALL if 15 <= island.core.steps < 57 else frozenset()
        fleet.tick(95, aggregators=0 if fleet.line.down else 1)
    assert covers(intervals(fleet, "island-0"), 95)
    alone = ArrayPort(1000, None, ArrayPort(0).weights)
    for _ in range(95):
        alone.train()
    for name, array in alone.weights.items():
        np.testing.assert_allclose(island.port.weights[name], array, atol=1e-5)


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("down", [ALL, WRITES], ids=["silent", "read-only"])
def test_it_pauses_once_and_aloud_and_goes_on_when_sending_works_again(overlap, down, caplog):
    fleet = world(Sync(sync_every=10, overlap=overlap, adopt="carry", pause_after=3), islands=1)
    island = fleet.add("island-0")
    while island.core.steps < 25:
        fleet.tick(10_000)
    fleet.line.down = down
    while island.core.state != "paused":
        fleet.islands_alone(10_000)
    steps = island.core.steps
    for _ in range(100):
        fleet.islands_alone(10_000)
    assert island.core.steps == steps
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 1
    assert re.match(r"island island-0 paused: memory://fleet-\d+ ", said[0])
    assert "the line is dead" in said[0]
    assert ("has not answered for " if down is ALL else "answers, but nothing can be sent: ") in said[0]
    fleet.line.down = frozenset()
    for _ in range(200):  # no aggregator lives: that the store takes something is enough
        fleet.islands_alone(10_000)
        if island.core.steps > steps:
            break
    assert island.core.steps > steps
    assert [r.getMessage() for r in caplog.records].count("island island-0 goes on: the store answers again") == 1
    while island.core.state != "paused":  # but it pauses again if nobody merges
        fleet.islands_alone(10_000)
    assert "paused: no version for 3 deadlines" in caplog.text
    steps = island.core.steps + 40
    fleet.run(steps)
    assert covers(intervals(fleet, "island-0"), steps)
    assert audit(fleet.bare).ok


@pytest.mark.parametrize("overlap", [0, 3])
def test_versions_that_arrive_do_not_throw_away_what_there_was_no_room_for(overlap):
    """Only this island's writes fail: the others go on making versions, which it could adopt."""
    fleet = world(Sync(sync_every=10, overlap=overlap, adopt="overwrite", pause_after=1000, max_in_flight=1))
    island = fleet.add("island-0")
    fleet.wrap = lambda store: store
    other = fleet.add("island-1")
    while island.core.steps < 25:
        fleet.tick(400)
    fleet.line.down = WRITES
    steps, versions = island.core.steps, other.core.version
    for _ in range(10_000):
        fleet.tick(400)
        trajectory = island.core.trajectories[0]
        if island.core.steps > 50 and trajectory.steps > 0:
            assert island.core.steps - trajectory.steps == trajectory.in_flight[-1].step_to, "nothing was thrown away"
        if island.core.steps >= steps + 60 and other.core.version > versions + 3:
            break
    assert other.core.version > versions + 3
    fleet.line.down = frozenset()
    fleet.run(400)
    found = intervals(fleet, "island-0")
    assert max(to - after for after, to in found) > 30
    if overlap == 0:
        assert covers(found, 400)
    assert audit(fleet.bare).ok


def test_finish_waits_for_a_bounded_time_and_says_what_is_lost():
    fleet = world(Sync(sync_every=10, pause_after=200), islands=1)
    island = fleet.add("island-0")
    while island.core.steps < 17:
        fleet.tick(20)
    fleet.line.down = ALL
    fleet.tick_s = 10.0
    with pytest.raises(Unavailable, match=r"taken nothing for 807 s; the last 10 steps of island island-0") as raised:
        fleet.run(20, aggregators=0)
    assert raised.value.exit_code == 4
    island.core.end("failed", raised.value.message)  # and does not wait for the store to be told so


def test_an_island_that_starts_while_the_store_is_down_is_refused_with_a_code_of_its_own():
    fleet = world(Sync(), islands=1)
    fleet.line.down = ALL
    with pytest.raises(Unavailable, match="the line is dead") as raised:
        fleet.add("island-0")
    assert raised.value.exit_code == 4


def test_finish_is_in_time_when_the_store_comes_back():
    fleet = world(Sync(sync_every=10, overlap=1, adopt="carry"), islands=1)
    island = fleet.add("island-0")
    while island.core.steps < 17:
        fleet.tick(25)
    fleet.line.down = ALL
    for _ in range(300):
        fleet.islands_alone(25)
    fleet.line.down = frozenset()
    fleet.run(25)
    assert covers(intervals(fleet, "island-0"), 25)
    assert island.core.state == "done"


@pytest.mark.parametrize("overlap", [0, 1])
def test_one_checkpoint_waits_at_most_and_a_restart_after_the_outage_fits(overlap, tmp_path):
    sync = Sync(sync_every=10, overlap=overlap, adopt="carry", pause_after=1000, max_in_flight=4)
    fleet = world(sync, islands=1, checkpoints=tmp_path)
    island = fleet.add("island-0")
    while island.core.steps < 15:
        fleet.tick(400)
    fleet.line.down = ALL
    while island.core.steps < 80:
        fleet.islands_alone(400)
        assert island.core.outbox.notes() <= 1
    fleet.line.down = frozenset()
    while island.core.steps < 115:
        fleet.tick(400)
    again = fleet.add("island-0")
    assert again.core.steps == (110 if overlap == 0 else 10)  # with overlap they are thirty seconds apart
    fleet.run(200)
    found = intervals(fleet, "island-0")
    assert found[0][0] == 0
    assert found[-1][1] == 200
    assert audit(fleet.bare).ok


def test_a_status_that_needs_the_stores_time_does_not_end_the_training():
    fleet = world(Sync(sync_every=10), islands=1)
    island = fleet.add("island-0")
    fleet.line.down = frozenset({"now"})
    island.core.reporter.write()
    assert list(fleet.bare.list("islands/island-0/status")) == []


def test_a_receipt_whose_answer_was_lost_before_an_outage_is_known_again_after_it():
    """Tried anew with another write id it would look like another process's, and this one would give up as fenced."""
    fleet = world(WAYS[0], islands=1)
    real_put, lost = fleet.bare.put, []

    def put(key, data, **words):
        info = real_put(key, data, **words)
        if "/receipts/" in key and not lost:
            lost.append(key)
            fleet.line.down = ALL
            raise Unavailable("the answer is lost")
        return info

    fleet.bare.put = put
    fleet.add_all()
    while not lost:
        fleet.islands_alone(30)
    for _ in range(20):
        fleet.islands_alone(30)
    fleet.line.down = frozenset()
    fleet.run(30)
    assert [info.key for info in fleet.bare.list("islands/island-0/receipts/")] == [
        f"islands/island-0/receipts/0000/{seq:010d}.json" for seq in (1, 2, 3)
    ]
    assert audit(fleet.bare).ok
