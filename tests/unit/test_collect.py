"""Garbage collection: what is kept is there, what is superfluous goes, whoever is killed, asleep or cut off."""

import contextlib
import logging
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.aggregate import STEPS
from diloco_blob.aggregate.collect import SWEEP_EVERY, Swept, sweep, sweep_probes
from diloco_blob.aggregate.context import Context, pass_on
from diloco_blob.core.errors import Corrupt, Denied, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Collect, Policy, Settings, Sync
from diloco_blob.island.catchup import fetch_params
from diloco_blob.island.inbox import Inbox
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.collecting import horizon, is_past, payload_file, version_file
from diloco_blob.protocol.heads import read_head
from diloco_blob.protocol.records import ObjectRef
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.body import Body
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.memory import forget
from diloco_blob.testing.fleet import Fleet
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import digest, weights_digest

COLLECTING = ("collect.begin", "collect.deleted", "collect.end")


class Killed(BaseException):
    """What SIGKILL is to a process: nobody catches it."""


def killer(step: str, times: int = 1) -> Callable[[str], None]:
    """Kills when a step is reached for that time."""
    left = [times]

    def at(reached: str) -> None:
        left[0] -= reached == step
        if reached == step and left[0] == 0:
            raise Killed

    return at


def toy_run(keep_versions: int = 2, **changes: object) -> ToyRun:
    policy = Policy(islands=2, quorum=2, takeover_s=0.0)
    toy = ToyRun(Settings(policy=policy, collect=Collect(keep_versions=keep_versions), **changes))  # type: ignore[arg-type]
    for name in "abc":
        toy.join(name)
    return toy


def round_of(toy: ToyRun, at: Callable[[str], None] = pass_on, store: ObjectStore | None = None) -> int:
    """Both islands contribute, and a version is made. Returns its number."""
    head = toy.head().version
    for name in "ab":
        toy.send(name, 2 * head + ord(name), base_version=head)
    return toy.aggregate(at=at, store=store, drain=True).version


def context(toy: ToyRun, store: ObjectStore | None = None, at: Callable[[str], None] = pass_on) -> Context:
    return Context(store=store or toy.store, run=toy.run, clock=toy.clock, ids=SeededIds(7), at=at)


def swept(toy: ToyRun, **options: bool) -> Swept:
    [found] = sweep(context(toy), **options)
    return found


def names(toy: ToyRun, prefix: str = "") -> set[str]:
    return {info.key for info in toy.store.list(prefix)}


def files(toy: ToyRun, version: int) -> set[str]:
    if version == 0:
        return {toy.run.run.fragments[0].params.key}
    commit = toy.commit(version)
    return {commit.weights.params.key, commit.outer.key, commit.update.key}


def needed(toy: ToyRun) -> set[str]:
    """Every object that must be there, by the words of docs/protocol.md."""
    head, keep_versions = toy.head().version, toy.settings.collect.keep_versions
    first = 0 if keep_versions == 0 or head < keep_versions else head - keep_versions + 1
    kept = set().union(*(files(toy, version) for version in range(first, head + 1)))
    for version in range(first + 1, head + 1):
        kept |= {part.key for one in toy.close(version).chosen for part in one.parts}
    return kept


# ---- what may go


def test_the_horizon_is_the_oldest_of_the_versions_that_are_kept() -> None:
    assert [horizon(head, 3) for head in range(7)] == [0, 0, 0, 1, 2, 3, 4]
    assert [horizon(head, 1) for head in range(3)] == [0, 1, 2]
    assert horizon(10**9, 0) == 0


def test_no_record_has_a_name_that_may_go() -> None:
    records = [
        keys.RUN,
        keys.close(0, 1),
        keys.commit(0, 1),
        keys.generation("a", 1),
        keys.receipt("a", 0, 1),
        keys.departure("a", 0, 1),
        keys.status("a"),
    ]
    for record in records:
        assert version_file(record) is None
        assert payload_file(record) is None
    name = "0" * 32
    assert version_file(keys.params(3, 4, name)) == ("params", 3, 4)
    assert version_file(keys.outer(3, 4, name)) == ("outer", 3, 4)
    assert version_file(keys.update(3, 4, name)) == ("updates", 3, 4)
    assert payload_file(keys.payload("a", 3, 4, 0, name)) == ("a", 3, 4)


def test_everything_that_a_run_creates_if_absent_has_a_name_that_may_not_go() -> None:
    created: set[str] = set()

    class Watching(FaultyStore):
        def put(
            self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
        ) -> ObjectInfo:
            if if_absent:
                created.add(key)
            return super().put(key, data, if_absent=if_absent, metadata=metadata)

    fleet = Fleet(Settings(sync=Sync(sync_every=4)), wrap=Watching)
    fleet.add_all()
    fleet.run(12)
    folders = {folder for key in created for folder in key.split("/")}
    assert {"run.json", "closes", "commits", "receipts", "generations", "departures", "probes"} <= folders
    for key in created:
        assert version_file(key) is None, key
        assert payload_file(key) is None, key


def test_a_name_is_past_only_if_it_is_that_islands_own_payload_up_to_its_watermark() -> None:
    name = keys.payload("a", 2, 7, 0, "0" * 32)
    assert is_past(name, "a", 2, 7)
    assert not is_past(name, "a", 2, 6)
    assert not is_past(name, "b", 2, 7)
    assert not is_past(name, "a", 1, 7)
    assert not is_past(keys.receipt("a", 2, 7), "a", 2, 7)


# ---- after a commit


@pytest.mark.parametrize("keep_versions", [1, 2, 3])
def test_exactly_what_is_needed_stays_with_all_records(keep_versions: int) -> None:
    toy = toy_run(keep_versions)
    kept_all = toy_run(0)
    for _ in range(6):
        round_of(toy)
        round_of(kept_all)
        assert {key for key in names(toy) if not key.endswith(".json")} == needed(toy)
    assert {key for key in names(toy) if key.endswith(".json")} == {
        key for key in names(kept_all) if key.endswith(".json")
    }
    assert toy.head().weights.digest == kept_all.head().weights.digest
    assert audit(toy.store).counts.collected == 7 - keep_versions


def test_a_run_that_keeps_everything_keeps_everything() -> None:
    toy = toy_run(0)
    steps: list[str] = []
    for _ in range(4):
        round_of(toy, steps.append)
    before = names(toy)
    assert list(sweep(context(toy))) == []
    assert names(toy) == before
    assert not set(steps) & set(COLLECTING)


def test_the_steps_of_a_collection_are_announced_in_order() -> None:
    toy = toy_run(1)
    steps: list[str] = []
    round_of(toy, steps.append)  # Version 0 has weights alone; two payloads.
    assert steps[STEPS.index("commit.after_put") :] == [
        "commit.after_put",
        "collect.begin",
        *["collect.deleted"] * 3,
        "collect.end",
    ]
    assert set(steps) == set(STEPS)


def test_skipped_rejected_and_unnamed_payloads_go_with_their_neighbours() -> None:
    toy = toy_run(1, sync=Sync(num_fragments=1))
    round_of(toy)
    toy.send("a", b"junk", base_version=1)
    toy.send("a", 1, base_version=1)
    toy.send("b", 2, base_version=9)  # Ahead of the head: skipped.
    toy.send("b", 3, base_version=1)
    unnamed = keys.payload("b", 0, 3, 0, "0" * 32)
    toy.store.put(unnamed, b"a payload whose sender was overtaken")
    toy.send("c", 4, base_version=1)
    pending = toy.send("c", 5, base_version=99)
    toy.store.put(keys.payload("c", 0, 3, 0, "0" * 32), b"a payload whose receipt is still to come")
    assert toy.aggregate(drain=True).version == 2
    assert [one.reason.split(":")[0] for one in toy.close(2).skipped] == ["malformed", "malformed"]
    assert len(toy.commit(2).rejected) == 1
    assert not names(toy, "islands/a/payloads/")
    assert not names(toy, "islands/b/payloads/")
    assert pending.parts[0].key not in names(toy)  # Skipped too.
    assert names(toy, "islands/c/payloads/") == {keys.payload("c", 0, 3, 0, "0" * 32)}
    assert audit(toy.store).ok


def test_a_receipt_cannot_make_the_collector_delete_what_is_not_its_payload() -> None:
    toy = toy_run(1)
    precious = "islands/a/payloads/0000/0000000009-0-" + "0" * 32 + ".safetensors.zst"
    stray = "islands/a/payloads/0000/notes.txt"
    for key in (precious, stray):
        toy.store.put(key, b"keep me")
        toy.send("a", 1, parts=(ObjectRef(key=key, digest="0" * 32, size=7),))
    round_of(toy)
    assert {precious, stray} <= names(toy)


@pytest.mark.parametrize("number", [1, 99])
def test_a_payload_with_another_number_than_its_receipt_is_skipped(number: int) -> None:
    """It would be collected by its own number: too early to recompute the version, or never."""
    toy = toy_run(2)
    for _ in range(3):
        round_of(toy)
    data = toy.payload(toy.initial)
    key = keys.payload("c", 0, number, 0, digest(data))
    toy.store.put(key, data)
    other = ObjectRef(key=key, digest=digest(data), size=len(data))
    for _ in range(2):
        toy.send("c", 5, base_version=3)
    toy.send("c", 5, base_version=3, parts=(other,))
    round_of(toy)
    assert [(one.island, one.seq, one.reason) for one in toy.close(4).skipped] == [
        ("c", 3, "malformed: a payload has another number than its receipt")
    ]
    round_of(toy)
    swept(toy)
    assert audit(toy.store).findings == ()


@pytest.mark.parametrize("error", [Unavailable, Denied])
@pytest.mark.parametrize("operation", ["delete", "list"])
def test_a_store_that_fails_fails_no_pass_and_the_sweep_finds_the_rest(
    error: type[Unavailable], operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    toy = toy_run(1)
    round_of(toy)
    toy.send("a", 1, base_version=9)
    fault = Fault(
        operation,  # type: ignore[arg-type]
        "refuse",
        key="payloads/|outer/",
        times=99,
        error=lambda: error("on purpose"),
    )
    with caplog.at_level(logging.WARNING, "diloco_blob.aggregate.collect"):
        assert round_of(toy, store=FaultyStore(toy.store, [fault])) == 2
    assert len([line for line in caplog.messages if "gc` will do it: on purpose" in line]) == 1
    left = {key for key in names(toy) if not key.endswith(".json")} - needed(toy)
    assert left
    assert audit(toy.store).ok
    assert sum(amount.objects for amount in swept(toy).deleted.values()) == len(left)
    assert {key for key in names(toy) if not key.endswith(".json")} == needed(toy)


def test_a_merge_that_lost_collects_nothing() -> None:
    toy = toy_run(1)
    round_of(toy)
    steps: list[str] = []

    def overtaken(step: str) -> None:
        steps.append(step)
        if step == "commit.before_put":
            assert toy.aggregate(drain=True).action == "merged"

    for name in "ab":
        toy.send(name, 3, base_version=1)
    assert toy.aggregate(at=overtaken, drain=True).action == "lost"
    assert not set(steps) & set(COLLECTING)


# ---- killed


@pytest.mark.parametrize("step", COLLECTING)
@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_collector_that_is_killed_leaves_what_a_sweep_finds(step: str, times: int) -> None:
    toy = toy_run(2)
    for _ in range(3):
        round_of(toy)
    if step != "collect.deleted" and times > 1:
        times = 1
    with pytest.raises(Killed):
        round_of(toy, killer(step, times))
    assert needed(toy) <= names(toy)
    assert audit(toy.store).ok
    round_of(toy)
    with pytest.raises(Killed):
        list(sweep(context(toy, at=killer(step))))
    assert needed(toy) <= names(toy)
    swept(toy)
    assert {key for key in names(toy) if not key.endswith(".json")} == needed(toy)
    assert audit(toy.store).counts.orphans == 0


def test_what_killed_collectors_left_goes_by_itself_in_the_end() -> None:
    toy = toy_run(1)
    for version in range(1, SWEEP_EVERY):
        with pytest.raises(Killed) if version % 8 == 0 else contextlib.nullcontext():
            round_of(toy, killer("collect.begin" if version % 8 == 0 else "never"))
    assert {key for key in names(toy) if not key.endswith(".json")} > needed(toy)
    assert round_of(toy) == SWEEP_EVERY
    assert {key for key in names(toy) if not key.endswith(".json")} == needed(toy)
    assert audit(toy.store).ok


@pytest.mark.parametrize("step", ["params.after_put", "outer.after_put", "update.after_put", "commit.before_put"])
def test_files_of_killed_merges_go_once_their_version_exists_and_not_before(step: str) -> None:
    toy = toy_run(3)
    round_of(toy)
    for name in "ab":
        toy.send(name, 9, base_version=1)
    with pytest.raises(Killed):
        toy.aggregate(at=killer(step), drain=True)
    other = keys.params(0, 2, "f" * 32)
    toy.store.put(other, b"of a merge with another library")
    begun = names(toy)
    assert sum(amount.objects for amount in swept(toy).deleted.values()) == 0
    assert names(toy) == begun
    assert toy.aggregate(drain=True).version == 2
    assert audit(toy.store).counts.orphans == 1  # The others have the very names that the commit gives them.
    assert swept(toy).deleted["params"].objects == 1
    assert other not in names(toy)
    assert needed(toy) <= names(toy)


def test_version_0_of_who_lost_the_race_to_create_the_run_goes() -> None:
    toy = toy_run(3)
    toy.store.put(keys.params(0, 0, "f" * 32), b"of an island that was second")
    assert swept(toy).deleted["params"].objects == 1
    assert names(toy, "fragments/") == files(toy, 0)


# ---- asleep


@pytest.mark.parametrize("step", COLLECTING[:2])
@pytest.mark.parametrize("by", ["sweep", "pass"])
def test_a_collector_that_sleeps_over_ten_versions_harms_nothing(step: str, by: str) -> None:
    toy = toy_run(2)
    for _ in range(4):
        round_of(toy)
    for key in ("1", "2", "3"):
        toy.store.put(keys.params(0, int(key), key * 32), b"left by a killed merge")
    slept = []

    def at(reached: str) -> None:
        if reached == step and not slept:
            slept.append(step)
            for _ in range(10):
                round_of(toy)

    if by == "sweep":
        list(sweep(context(toy, at=at)))
        assert toy.head().version == 14
    else:
        round_of(toy, at)
        assert toy.head().version == 15
    assert slept
    assert needed(toy) <= names(toy)
    assert audit(toy.store).ok


def test_a_sweeper_that_sleeps_between_its_list_and_what_it_deletes_harms_nothing() -> None:
    toy = toy_run(2)
    for _ in range(4):
        round_of(toy)
    for version in (1, 2, 4):
        toy.store.put(keys.params(0, version, "f" * 32), b"left by a killed merge")

    def sleep() -> None:
        for _ in range(10):
            round_of(toy)

    sleepy = FaultyStore(toy.store, [Fault("delete", "delay", hook=sleep)])
    [report] = sweep(context(toy, sleepy))
    assert report.deleted["params"].objects == 3
    assert toy.head().version == 14
    assert needed(toy) <= names(toy)
    assert audit(toy.store).ok


def test_a_merger_that_sleeps_over_the_collection_of_its_heads_files_ends_as_lost() -> None:
    for step in STEPS[STEPS.index("merge.begin") : STEPS.index("commit.after_put")]:
        toy = toy_run(1)
        round_of(toy)
        asleep = [True]

        def at(reached: str, step: str = step, toy: ToyRun = toy, asleep: list[bool] = asleep) -> None:
            if reached == step and asleep:
                asleep.clear()
                assert toy.aggregate(drain=True).action == "merged"
                for _ in range(2):
                    round_of(toy)
                assert not files(toy, 1) & names(toy)

        for name in "ab":
            toy.send(name, 3, base_version=1)
        assert toy.aggregate(at=at, drain=True).action == "lost"
        assert toy.head().version == 4
        swept(toy)
        assert {key for key in names(toy) if not key.endswith(".json")} == needed(toy)
        assert audit(toy.store).findings == ()


# ---- any interleaving

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["round", "late", "killed", "sweep", "killed sweep", "asleep", "dry"]),
        st.sampled_from([*STEPS[STEPS.index("merge.begin") :]]),
        st.integers(1, 5),
    ),
    max_size=14,
)


def attempt(action: Callable[[], object]) -> None:
    with contextlib.suppress(Killed):
        action()


@settings(max_examples=60, deadline=None)
@given(keep_versions=st.integers(1, 3), moves=MOVES)
def test_whatever_happens_all_that_is_needed_is_there(keep_versions: int, moves: list[tuple[str, str, int]]) -> None:
    toy = toy_run(keep_versions)
    for move, step, number in moves:
        play(toy, move, step, number)
        assert needed(toy) <= names(toy), (move, step, number)
    report = audit(toy.store)
    assert report.ok, report.findings
    swept(toy)
    left = {key for key in names(toy, "fragments/") if not key.endswith(".json")}
    beyond = {key for key in left if version_file(key)[2] > toy.head().version}  # type: ignore[index]
    assert left - beyond == {key for key in needed(toy) if key.startswith("fragments/")}
    assert audit(toy.store).ok
    forget(toy.store.url)


def play(toy: ToyRun, move: str, step: str, number: int) -> None:
    if move == "round":
        round_of(toy)
    elif move == "late":
        toy.send("c", number, base_version=max(0, toy.head().version - number))
    elif move == "killed":
        attempt(lambda: round_of(toy, killer(step, number)))
    elif move == "sweep":
        swept(toy)
    elif move == "killed sweep":
        attempt(lambda: list(sweep(context(toy, at=killer("collect.deleted", number)))))
    elif move == "dry":
        before = names(toy)
        swept(toy, dry_run=True)
        assert names(toy) == before
    else:
        asleep = [True]

        def at(reached: str) -> None:
            if reached == step and asleep:
                asleep.clear()
                for _ in range(number):
                    round_of(toy)

        round_of(toy, at)


# ---- sweep


def test_a_dry_run_deletes_nothing_and_says_what_the_real_one_then_deletes() -> None:
    toy = toy_run(2)
    for _ in range(5):
        attempt(lambda: round_of(toy, killer("collect.begin")))
    before = names(toy)
    announced = swept(toy, dry_run=True)
    assert names(toy) == before
    bytes_before = {info.key: info.size for info in toy.store.list("")}
    assert swept(toy) == announced
    gone = before - names(toy)
    assert sum(amount.objects for amount in announced.deleted.values()) == len(gone)
    assert sum(amount.bytes for amount in announced.deleted.values()) == sum(bytes_before[key] for key in gone)
    assert {kind: amount.objects for kind, amount in announced.deleted.items()} == {
        "params": 4,
        "outer": 3,
        "updates": 3,
        "payloads": 8,
    }
    assert (announced.version, announced.horizon) == (5, 4)
    assert sum(amount.objects for amount in swept(toy).deleted.values()) == 0


def test_each_fragment_has_its_own_horizon() -> None:
    toy = toy_run(1, sync=Sync(num_fragments=2))
    for version in range(3):
        toy.send("a", version, base_version=version)
        attempt(lambda: toy.aggregate(drain=True, at=killer("collect.begin")))
    reports = list(sweep(context(toy)))
    assert [(one.fragment, one.version, one.horizon) for one in reports] == [(0, 3, 3), (1, 0, 0)]
    assert toy.run.run.fragments[1].params.key in names(toy)
    assert audit(toy.store).ok


@pytest.mark.parametrize("key", [keys.commit(0, 3), keys.close(0, 3)])
@pytest.mark.parametrize("data", [None, b"{}"])
def test_of_a_damaged_run_nothing_is_deleted(key: str, data: bytes | None) -> None:
    toy = toy_run(2)
    for _ in range(4):
        attempt(lambda: round_of(toy, killer("collect.begin")))
    if data is None:
        toy.store.delete(key)
    else:
        toy.store.put(key, data)
    before = names(toy)
    if data is None and key == keys.commit(0, 3):  # Then version 2 is the newest that can be found: less may go.
        swept(toy)
        assert {*files(toy, 1), *files(toy, 2), *files(toy, 4)} <= names(toy)
        return
    with pytest.raises(Corrupt):
        swept(toy)
    assert names(toy) == before


def test_tests_of_the_store_that_were_left_go_after_a_day() -> None:
    toy = toy_run()
    toy.store.put(keys.PROBES + "0/race.json", b"{}")
    toy.clock.advance(86_399)
    toy.store.put(keys.PROBES + "1/race.json", b"{}")
    assert sweep_probes(context(toy)).objects == 0
    toy.clock.advance(1)
    assert sweep_probes(context(toy), dry_run=True).objects == 1
    assert sweep_probes(context(toy)).objects == 1
    assert names(toy, keys.PROBES) == {keys.PROBES + "1/race.json"}


# ---- readers


def follower(toy: ToyRun, store: ObjectStore, version: int) -> Inbox:
    inbox = Inbox(store, toy.run, "a", toy.clock, SeededIds(3))
    inbox.start(0, version, toy.params(version))
    return inbox


@pytest.mark.parametrize("what", ["updates/", "params/"])
def test_an_island_whose_versions_vanish_while_it_fetches_them_takes_a_newer_one(what: str) -> None:
    toy = toy_run(1)
    inbox_store = FaultyStore(toy.store)
    inbox = follower(toy, inbox_store, 0)
    round_of(toy)

    def collected() -> None:
        for _ in range(2):
            round_of(toy)

    if what == "params/":  # Without the update the params are fetched.
        inbox_store.add(Fault("get", "refuse", key="updates/", error=lambda: NotFound("gone")))
    inbox_store.add(Fault("get", "delay", key=what, hook=collected))
    inbox.pump()
    arrival = inbox.take(0)
    assert arrival is not None
    assert arrival.version == 3
    assert weights_digest(arrival.weights) == toy.commit(3).weights.digest


def test_a_joiner_whose_head_is_collected_takes_a_newer_one() -> None:
    toy = toy_run(1)
    round_of(toy)
    head = read_head(toy.store, toy.run, 0, 1)
    for _ in range(3):
        round_of(toy)
    found, arrays = fetch_params(toy.store, toy.run, head)
    assert found.version == 4
    assert weights_digest(arrays) == toy.commit(4).weights.digest


def test_a_fleet_ends_with_the_same_weights_whatever_is_collected() -> None:
    digests = set()
    for keep_versions in (0, 1):
        fleet = Fleet(Settings(sync=Sync(sync_every=4), collect=Collect(keep_versions=keep_versions)))
        fleet.add_all()
        fleet.run(40)
        report = audit(fleet.bare)
        assert report.ok
        assert (report.counts.collected > 5) == (keep_versions == 1)
        [head] = [weights_digest(island.port.weights) for island in fleet.islands[:1]]
        digests.add(head)
    assert len(digests) == 1
