"""`doctor` finds what is wrong with a store, says who may do what, and leaves nothing behind."""

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.aggregate.collect import sweep, sweep_probes
from diloco_blob.aggregate.context import Context
from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds, check_island_name
from diloco_blob.core.settings import Collect, Policy, Settings
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.doctor import Check, Examination, diagnose, exit_code
from diloco_blob.protocol.doctor.measuring import Stamp, estimate_skew, quantile
from diloco_blob.protocol.doctor.probes import MARK
from diloco_blob.store import ObjectInfo, ObjectStore, RetryingStore
from diloco_blob.store.body import Body, body_size
from diloco_blob.store.faulty import Fault, FaultyStore, Operation
from diloco_blob.store.memory import MemoryStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.toy import ToyRun

ALWAYS = 1_000_000
QUICK = Examination(racers=4, rounds=2, samples=3, transfer_bytes=1000)
NAMES = (
    *("credentials", "bucket", "run", "islands", "fragments", "probes"),
    *("role island", "role aggregator", "role creator", "role collector"),
    *("race", "consistency", "latency", "clock", "upload", "download", "exchange", "reliability", "cleanup"),
)


class Shop(MemoryStore):
    """A sound store with a virtual clock, which notes what is changed. The stores below are unsound in one way each."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(f"memory://{uuid.uuid4().hex}", clock=self.clock)
        self.changed: set[str] = set()

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        self.changed.add(key)
        return super().put(key, data, if_absent=if_absent, metadata=metadata)

    def delete(self, key: str) -> None:
        self.changed.add(key)
        super().delete(key)

    def names(self) -> list[str]:
        return [info.key for info in MemoryStore.list(self, "")]


class IgnoresTheCondition(Shop):
    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        del if_absent
        return super().put(key, data, metadata=metadata)


class ChecksThenActs(Shop):
    """Right one request at a time; in a race all look before any writes."""

    looked = threading.Barrier(QUICK.racers)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        if if_absent:
            if key in self.names():
                raise Conflict("it is there")
            if threading.current_thread() is not threading.main_thread():
                self.looked.wait(60)
        return super().put(key, data, metadata=metadata)


class HidesTheNewest(Shop):
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        yield from [*super().list(prefix, start_after=start_after)][:-1]


class ShowsTheDead(Shop):
    def delete(self, key: str) -> None:
        """Acknowledged, and nothing done."""


class Blanks(Shop):
    """Small objects are sound; of the one that is sent to measure it gives back zeros."""

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        data, info = super().get(key)
        return (bytes(len(data)) if len(data) == QUICK.transfer_bytes else data), info


class DatesAwry(Shop):
    def now(self) -> float:
        return super().now() + 31.0


class Slow(Shop):
    """0.2 s a put and 0.1 s a get or list, and 1 MB/s up, 4 MB/s down."""

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        self.clock.advance(0.2 + body_size(data) / 1e6)
        return super().put(key, data, if_absent=if_absent, metadata=metadata)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        data, info = super().get(key)
        self.clock.advance(0.1 + len(data) / 4e6)
        return data, info

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self.clock.advance(0.1)
        yield from super().list(prefix, start_after=start_after)


class Ahead:
    """The clock of a machine whose wall clock is wrong."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        return self._clock.wall() + self._seconds

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


def doctor(
    store: ObjectStore, how: Examination = QUICK, *, clock: Clock | None = None, seed: int = 0
) -> dict[str, Check]:
    clock = clock or VirtualClock()
    ids = SeededIds(seed)
    return {
        check.name: check for check in diagnose(RetryingStore(store, clock, ids, 5.0), clock=clock, ids=ids, how=how)
    }


def refusing(operation: Operation, key: str, error: Callable[[], DilocoError] = lambda: Denied("no")) -> Fault:
    return Fault(operation, "refuse", key=key, times=ALWAYS, error=error)


def broken(found: Mapping[str, Check]) -> set[str]:
    return {name for name, check in found.items() if check.verdict == "broken"}


def roles(found: Mapping[str, Check]) -> set[str]:
    ok = [name.partition("role ")[2] for name, check in found.items() if check.verdict == "ok"]
    return {role for role in ok if role}


# What is found


def test_a_sound_store_is_sound_in_this_order_and_is_left_as_it_was() -> None:
    shop = Shop()
    found = doctor(shop)
    assert tuple(found) == NAMES
    assert {check.verdict for check in found.values()} == {"ok"}
    assert exit_code([*found.values()]) == 0
    assert not any(check.hint for check in found.values())
    assert shop.changed
    assert shop.names() == []


@pytest.mark.parametrize(
    ("shop", "name", "said"),
    [
        (IgnoresTheCondition, "race", "4 of 4 creates of one name succeeded"),
        (ChecksThenActs, "race", "4 of 4 creates of one name succeeded"),
        (HidesTheNewest, "consistency", "lacks 1 of 5 objects"),
        (ShowsTheDead, "consistency", "still there right after it was deleted"),
        (Blanks, "upload", "came back as others"),
        (DatesAwry, "clock", "31 s away from its own answers"),
    ],
)
def test_an_unsound_store_is_found_out(shop: type[Shop], name: str, said: str) -> None:
    found = doctor(shop())
    assert broken(found) == {name}
    assert said in found[name].what
    assert found[name].hint
    assert exit_code([*found.values()]) == 1


def test_a_create_that_nobody_can_read_back_is_found_out() -> None:
    shop = Shop()
    store = FaultyStore(shop)
    # The tenth name is that of the first race: three under each prefix come before.
    lost = Fault("get", "refuse", key=f"^probes/{MARK}/.*/000010$", times=QUICK.racers, error=lambda: NotFound("no"))
    store.add(lost)
    found = doctor(store)
    assert broken(found) == {"race"}
    assert "could not be read right after it was created" in found["race"].what
    assert shop.names() == []


def test_a_store_that_does_not_answer_is_exit_4() -> None:
    found = doctor(FaultyStore(Shop(), [refusing("any", "", lambda: Unavailable("gone", "is it plugged in?"))]))
    assert list(found) == ["answer"]
    assert found["answer"].hint == "is it plugged in?"
    assert exit_code([*found.values()]) == 4


def test_one_that_goes_away_in_between_is_exit_4_and_is_not_waited_for_at_each_object() -> None:
    clock = VirtualClock()
    gone = [Fault("any", "refuse", key=MARK, skip=150, times=ALWAYS, error=lambda: Unavailable("gone"))]
    how = Examination(racers=2, rounds=1, samples=50, transfer_bytes=1000)
    found = doctor(FaultyStore(Shop(), gone), how, clock=clock)
    assert exit_code([*found.values()]) == 4
    assert found["cleanup"].verdict == "warning"
    assert found["cleanup"].figures["left_objects"] > 10
    assert clock.monotonic() <= 4 * 5.0  # Of what failed, and of the first deletion: each waits for 5 s at most.


@pytest.mark.parametrize(
    ("error", "name", "hint"),
    [
        (lambda: Denied("no credentials for x", "log in"), "credentials", "log in"),
        (lambda: Denied("x refused (SignatureDoesNotMatch: …)", "policy?"), "credentials", "secret is wrong"),
        (lambda: NotFound("there is no bucket 'x'", "create it"), "bucket", "create it"),
        (lambda: InvalidSettings("301", "the region?"), "answer", "the region?"),
    ],
)
def test_whoever_is_not_let_in_hears_why_and_nothing_is_written(
    error: Callable[[], DilocoError], name: str, hint: str
) -> None:
    shop = Shop()
    found = doctor(FaultyStore(shop, [refusing("list_dirs", "", error)]))
    assert broken(found) == {name}
    assert hint in found[name].hint
    assert exit_code([*found.values()]) == (2 if name == "answer" else 1)
    assert shop.changed == set()


def test_requests_that_had_to_be_repeated_are_counted() -> None:
    late = [Fault("get", "refuse", skip=10), Fault("put", "lose_answer", skip=20)]
    found = doctor(FaultyStore(Shop(), late))
    assert broken(found) == set()
    assert found["reliability"].verdict == "warning"
    assert found["reliability"].figures["repeated"] == 2


# Rights and roles


@pytest.mark.parametrize(
    ("faults", "can_be"),
    [
        ([refusing("put", "^(fragments|probes)/"), refusing("delete", "^(fragments|probes)/")], {"island"}),
        ([refusing("put", "^(islands|probes)/"), refusing("delete", "^(islands|probes)/")], {"aggregator"}),
        ([refusing("delete", "")], {"island", "aggregator", "creator"}),
        ([refusing("delete", "^islands/")], {"island", "aggregator", "creator"}),
        ([refusing("put", "^probes/")], {"island", "aggregator", "collector"}),
        ([refusing("put", "^(islands|probes)/")], {"aggregator", "collector"}),
    ],
)
def test_one_role_is_enough(faults: list[Fault], can_be: set[str]) -> None:
    found = doctor(FaultyStore(Shop(), faults))
    assert roles(found) == can_be
    assert broken(found) == set()
    lacking = {"island", "aggregator", "creator", "collector"} - can_be
    assert {found[f"role {role}"].verdict for role in lacking} == {"warning"}
    assert all(found[f"role {role}"].hint for role in lacking)
    assert found["reliability"].figures["repeated"] == 0, "what is refused is answered"
    assert found["race"].verdict == "ok", "what follows is tried where this credential may write"


@pytest.mark.parametrize(
    "faults",
    [
        [refusing("put", "")],
        [refusing("get", "")],
        [refusing("head", "")],
        [refusing("put", "^islands/"), refusing("get", "^islands/")],
    ],
)
def test_no_role_is_broken(faults: list[Fault]) -> None:
    found = doctor(FaultyStore(Shop(), faults))
    assert broken(found) >= {"role island", "role aggregator"}
    assert exit_code([*found.values()]) == 1


def test_a_collector_alone_trains_nothing() -> None:
    found = doctor(FaultyStore(Shop(), [refusing("put", "")]))
    assert roles(found) == {"collector"}
    assert found["race"].verdict == "warning"
    assert "upload" not in found


def test_an_island_is_tried_under_its_own_prefix_and_must_be_allowed_there() -> None:
    elsewhere = refusing("put", "^(?!islands/a/)")
    own = Examination(island="a", racers=2, rounds=1, samples=1, transfer_bytes=1000)
    shop = Shop()
    assert roles(doctor(FaultyStore(shop, [elsewhere]), own)) == {"island", "collector"}
    assert shop.names() == []
    # Of an aggregator this is a sound credential, of island a it is not.
    aggregator = [refusing("put", "^islands/")]
    assert broken(doctor(FaultyStore(Shop(), aggregator))) == set()
    assert broken(doctor(FaultyStore(Shop(), aggregator), own)) == {"role island"}
    with pytest.raises(InvalidSettings, match="island name"):
        doctor(Shop(), Examination(island="No!"))


def test_without_an_island_no_island_can_be_meant() -> None:
    with pytest.raises(InvalidSettings):
        check_island_name(MARK)


def test_who_may_not_list_may_not_train() -> None:
    found = doctor(FaultyStore(Shop(), [refusing("list", ""), refusing("list_dirs", "")]))
    assert found["credentials"].verdict == "warning"
    assert "role island" in broken(found)


@pytest.mark.parametrize(
    "changes",
    [{"racers": 1}, {"racers": 65}, {"rounds": 0}, {"samples": 0}, {"transfer_bytes": 0}, {"parameters": -1}],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidSettings):
        Examination(**changes)  # type: ignore[arg-type]


# Figures


def test_latency_throughput_and_what_they_mean_are_measured() -> None:
    shop = Slow()
    how = Examination(racers=2, rounds=1, samples=5, transfer_bytes=8_000_000, parameters=40_000_000)
    found = doctor(shop, how, clock=shop.clock)
    small = len('{"write_id":""}') + 32
    put_s, get_s = 0.2 + small / 1e6, 0.1 + small / 4e6
    assert found["latency"].figures == pytest.approx(
        {f"put_{kind}": put_s for kind in ("median_s", "p95_s")}
        | {f"get_{kind}": get_s for kind in ("median_s", "p95_s")}
        | {f"list_{kind}": 0.1 for kind in ("median_s", "p95_s")},
        abs=1e-6,
    )
    up, down = 8e6 / 8.2, 8e6 / 2.1
    assert found["upload"].figures["upload_bytes_per_s"] == pytest.approx(up)
    assert found["upload"].verdict == "warning"  # Less than 1 MB/s.
    assert found["download"].figures["download_bytes_per_s"] == pytest.approx(down)
    assert found["download"].verdict == "ok"
    assert found["exchange"].figures["up_s"] == pytest.approx(0.43 * 40e6 / up)
    assert found["exchange"].figures["down_s"] == pytest.approx(0.95 * 40e6 / down)
    assert found["exchange"].verdict == "ok"
    larger = doctor(Slow(), Examination(racers=2, rounds=1, samples=1, parameters=400_000_000), clock=shop.clock)
    assert larger["exchange"].verdict == "ok", "another clock than the store's: nothing took time"
    slow = Slow()
    how = Examination(racers=2, rounds=1, samples=1, parameters=400_000_000)
    assert doctor(slow, how, clock=slow.clock)["exchange"].verdict == "warning"


def test_the_run_says_how_many_parameters() -> None:
    toy = ToyRun()
    found = doctor(toy.store)
    assert found["exchange"].figures["parameters"] == sum(math.prod(shape) for shape in toy.shapes.values())
    assert "role creator" not in found


@pytest.mark.parametrize(("ahead_s", "verdict"), [(-120.0, "warning"), (-4.0, "ok"), (4.0, "ok"), (120.0, "warning")])
def test_a_clock_that_is_wrong_is_found(ahead_s: float, verdict: str) -> None:
    shop = Shop()
    shop.clock.advance(0.25)
    check = doctor(shop, clock=Ahead(shop.clock, ahead_s))["clock"]
    assert check.verdict == verdict
    assert check.figures["store_ahead_s"] == pytest.approx(-ahead_s, abs=check.figures["uncertainty_s"])
    assert check.figures["uncertainty_s"] <= 0.011
    assert ("behind" if ahead_s > 0 else "ahead of") in check.what


@given(
    ahead=st.floats(-1e4, 1e4),
    moments=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=20),
)
def test_the_true_skew_is_within_the_uncertainty(ahead: float, moments: list[tuple[float, float, float]]) -> None:
    stamps = [Stamp(1e6 + at, 1e6 + at + to + fro, float(math.floor(1e6 + at + to + ahead))) for at, to, fro in moments]
    skew = estimate_skew(stamps)
    assert skew is not None
    assert abs(skew.ahead_s - ahead) <= skew.uncertainty_s + 1e-6
    assert skew.uncertainty_s <= 0.5 + min(to + fro for _, to, fro in moments) / 2 + 1e-6


def test_no_stamps_tell_nothing() -> None:
    assert estimate_skew([]) is None


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(20, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([7.0], 0.95)) == (10.0, 19.0, 7.0)


# Leaving nothing, touching nothing


def test_every_name_is_marked_and_a_run_keeps_its_bytes() -> None:
    toy = ToyRun(Settings(policy=Policy(islands=1, quorum=1)))
    toy.join("a")
    toy.send("a", 0)
    before = {info.key: toy.store.get(info.key) for info in toy.store.list("")}
    changed: list[str] = []

    class Watched(FaultyStore):
        def put(self, key: str, data: Body, **options: object) -> ObjectInfo:  # type: ignore[override]
            changed.append(key)
            return super().put(key, data, **options)  # type: ignore[arg-type]

        def delete(self, key: str) -> None:
            changed.append(key)
            super().delete(key)

    doctor(Watched(toy.store), Examination(island="a", racers=2, rounds=1, samples=1, transfer_bytes=1000))
    assert {key.split("/")[0] for key in changed} == {"islands", "fragments", "probes"}
    assert all(f"/{MARK}/" in key for key in changed)
    assert {info.key: toy.store.get(info.key) for info in toy.store.list("")} == before


@pytest.mark.parametrize("operation", ["put", "get", "head", "list"])
@pytest.mark.parametrize("skip", [3, 8])
def test_ctrl_c_leaves_nothing(operation: Operation, skip: int) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    shop = Shop()
    with pytest.raises(KeyboardInterrupt):
        doctor(FaultyStore(shop, [Fault(operation, "delay", key=MARK, skip=skip, hook=interrupt)]))
    assert shop.changed
    assert shop.names() == []


def test_what_may_not_be_deleted_is_said_and_is_deleted_by_a_later_one() -> None:
    shop = Shop()
    found = doctor(FaultyStore(shop, [refusing("delete", "")]), clock=shop.clock)
    left = shop.names()
    assert found["cleanup"].verdict == "warning"
    assert found["cleanup"].figures["left_objects"] == len(left) > 0
    assert any(key in found["cleanup"].what for key in left)
    shop.clock.advance(86_000)  # An examination that is as young may be going on.
    doctor(shop, clock=shop.clock, seed=1)
    assert shop.names() == left
    shop.clock.advance(500)
    found = doctor(shop, clock=shop.clock, seed=2)
    assert f"and {len(left)} that earlier ones had left" in found["cleanup"].what
    assert shop.names() == []


def test_what_a_killed_examination_left_disturbs_no_run() -> None:
    """Twins, one with everything that an examination wrote still there: they decide, merge and collect alike."""
    toys = [ToyRun(Settings(policy=Policy(islands=2, quorum=2), collect=Collect(keep_versions=1))) for _ in range(2)]
    for seed, island in enumerate(("a", "newcomer", None)):
        how = Examination(island=island, racers=2, rounds=1, samples=2, transfer_bytes=1000)
        doctor(FaultyStore(toys[1].store, [refusing("delete", MARK)]), how, clock=toys[1].clock, seed=seed)
    left = {info.key for info in toys[1].store.list("") if MARK in info.key}
    assert {key.split(f"{MARK}/")[0] for key in left} == {
        *("islands/a/payloads/", "islands/newcomer/payloads/", "islands/", "fragments/", "probes/"),
    }
    histories = []
    for toy in toys:
        history: list[object] = []
        for name in "ab":
            toy.join(name)
        for version in range(3):
            toy.send("a", version, base_version=version)
            waiting = toy.aggregate()
            history.append((waiting.action, waiting.waiting_for, waiting.look_again_s))
            toy.send("b", 10 + version, base_version=version)
            merged = toy.aggregate(drain=True)
            history.append((merged.action, merged.version, merged.reason))
            history.append(toy.head().weights.digest)
        ctx = Context(store=toy.store, run=toy.run, clock=toy.clock, ids=toy.ids)
        history.append([swept.deleted for swept in sweep(ctx)])
        report = audit(toy.store)
        history.append((report.ok, {finding.promise for finding in report.findings} - {"layout"}))
        histories.append(history)
    assert histories[0] == histories[1]
    assert toys[1].head().version == 3
    kept = {info.key for info in toys[1].store.list("") if MARK in info.key}
    assert kept == left
    notes = [finding for finding in audit(toys[1].store).findings if finding.promise == "layout"]
    assert {(finding.where, finding.level) for finding in notes} == {(key, "note") for key in left}
    toys[1].clock.advance(90_000)
    ctx = Context(store=toys[1].store, run=toys[1].run, clock=toys[1].clock, ids=toys[1].ids)
    assert sweep_probes(ctx).objects == sum(key.startswith("probes/") for key in left)
