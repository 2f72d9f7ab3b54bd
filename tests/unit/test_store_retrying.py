"""The one retry layer, in virtual time: what is tried again, for how long, and how a create of unknown outcome ends."""

import itertools
import logging
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.core.errors import Conflict, Corrupt, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.store import RetryingStore
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.memory import MemoryStore
from diloco_blob.testing.clock import VirtualClock

KEY = "fragments/0000/closes/0000000001.json"


def fresh_memory() -> MemoryStore:
    return MemoryStore(f"memory://{uuid.uuid4().hex}")


def retrying(*faults: Fault, clock: VirtualClock | None = None, seed: int = 0) -> tuple[RetryingStore, MemoryStore]:
    memory = fresh_memory()
    return RetryingStore(FaultyStore(memory, faults), clock or VirtualClock(), SeededIds(seed)), memory


@given(seed=st.integers(0, 2**32), outage_s=st.floats(0, 75))
def test_an_outage_of_a_minute_is_ridden_out_whatever_the_jitter(seed: int, outage_s: float) -> None:
    clock = VirtualClock()

    class Outage(MemoryStore):
        def head(self, key: str):  # type: ignore[no-untyped-def]
            if clock.monotonic() < outage_s:
                raise Unavailable("out")
            return super().head(key)

    store = Outage(f"memory://{uuid.uuid4().hex}")
    store.put("a", b"1")
    assert RetryingStore(store, clock, SeededIds(seed)).head("a").size == 1
    assert clock.monotonic() <= 90


@given(seed=st.integers(0, 2**32))
def test_an_outage_without_end_is_reported_within_the_budget(seed: int) -> None:
    clock = VirtualClock()
    store, _ = retrying(Fault("get", "refuse", times=10**6), clock=clock, seed=seed)
    with pytest.raises(Unavailable, match="a fault on purpose"):
        store.get("a")
    assert 80 <= clock.monotonic() <= 90
    assert 10 <= store.meter.usage().gets <= 60
    assert store.meter.usage().failed == store.meter.usage().gets


def test_waits_grow_and_are_spread_over_their_whole_range() -> None:
    waits: list[float] = []

    class Recording(VirtualClock):
        def sleep(self, seconds: float) -> None:
            waits.append(seconds)
            super().sleep(seconds)

    store, _ = retrying(Fault("get", "refuse", times=10**6), clock=Recording(), seed=7)
    with pytest.raises(Unavailable):
        store.get("a")
    assert waits[0] <= 0.5
    assert waits[1] <= 1.0
    assert max(waits) <= 10.0
    assert min(waits[5:]) < 3.0 < 7.0 < max(waits[5:])


def test_an_outage_is_said_at_once_and_then_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    said: list[float] = []
    store, _ = retrying(Fault("any", "refuse", times=10**6), clock=clock)
    logging.getLogger("diloco_blob.store.retrying").addFilter(heard := lambda _: said.append(clock.monotonic()) or True)
    try:
        for key in "abc":
            with pytest.raises(Unavailable):
                store.head(key)
    finally:
        logging.getLogger("diloco_blob.store.retrying").removeFilter(heard)
    assert caplog.messages[0] == "could not head a, still trying: a fault on purpose"
    assert said[0] == 0.0
    assert all(later - earlier >= 5.0 for earlier, later in itertools.pairwise(said))
    assert 10 <= len(said) <= 55


def test_a_large_upload_has_a_larger_budget() -> None:
    clock = VirtualClock()

    def breaks_after_100_s() -> Unavailable:
        clock.advance(100)
        return Unavailable("broke")

    store, memory = retrying(Fault("put", "refuse", times=3, error=breaks_after_100_s), clock=clock)
    store.put("large", bytes(30_000_000))
    assert memory.head("large").size == 30_000_000
    memory.delete("large")


@pytest.mark.parametrize("error", [Denied, NotFound, Corrupt, InvalidSettings, Conflict])
def test_answers_are_not_retried(error: type[DilocoError]) -> None:
    clock = VirtualClock()
    store, _ = retrying(Fault("head", "refuse", error=lambda: error("said so")), clock=clock)
    with pytest.raises(error, match="said so"):
        store.head("a")
    assert store.meter.usage().heads == 1
    assert clock.monotonic() == 0


def test_every_operation_is_retried() -> None:
    store, memory = retrying(*[Fault("any", "refuse", skip=2 * n) for n in range(8)])
    store.put("d/a", b"123")
    assert store.get("d/a")[0] == b"123"
    assert store.get_range("d/a", 1, 1) == b"2"
    assert store.head("d/a").size == 3
    assert [info.key for info in store.list("")] == ["d/a"]
    assert [*store.list_dirs("")] == ["d"]
    assert store.now() > 0
    store.delete("d/a")
    assert [*memory.list("")] == []
    usage = store.meter.usage()
    assert (usage.puts, usage.gets, usage.heads, usage.lists, usage.deletes) == (2, 4, 2, 4, 2)


@pytest.mark.parametrize("effect", ["refuse", "lose_answer", "conflict_after"])
def test_a_create_ends_well_however_its_answer_was_lost(effect: str) -> None:
    store, memory = retrying(Fault("put", effect))  # type: ignore[arg-type]
    assert store.put(KEY, b"mine", if_absent=True).key == KEY
    assert memory.get(KEY)[0] == b"mine"


def test_a_create_after_another_writer_is_a_conflict_and_costs_one_reading() -> None:
    store, memory = retrying()
    memory.put(KEY, b"theirs")
    with pytest.raises(Conflict, match="another writer created"):
        store.put(KEY, b"mine", if_absent=True)
    assert (store.meter.usage().puts, store.meter.usage().gets) == (1, 1)


def test_a_refusal_without_an_object_is_tried_again() -> None:
    """As by a store that answers 412 to a race that nobody won, or whose object was deleted in between."""
    store, memory = retrying(Fault("put", "refuse", error=lambda: Conflict("so it says")))
    store.put(KEY, b"mine", if_absent=True)
    assert memory.get(KEY)[0] == b"mine"


def test_an_outcome_that_cannot_be_read_is_never_guessed() -> None:
    store, memory = retrying(Fault("put", "lose_answer", times=10**6), Fault("get", "refuse", times=10**6))
    with pytest.raises(Unavailable):
        store.put(KEY, b"mine", if_absent=True)
    assert memory.get(KEY)[0] == b"mine"  # and it is not deleted either


def test_a_create_that_may_not_be_read_back_is_denied() -> None:
    store, _ = retrying(Fault("put", "lose_answer"), Fault("get", "refuse", error=lambda: Denied("write-only")))
    with pytest.raises(Denied):
        store.put(KEY, b"mine", if_absent=True)


faults = st.lists(
    st.sampled_from(
        [
            ("put", "refuse"),
            ("put", "lose_answer"),
            ("put", "conflict_after"),
            ("get", "refuse"),
            ("get", "lose_answer"),
        ]
    ),
    max_size=8,
)


@given(script=faults, rival_before=st.none() | st.integers(0, 5), seed=st.integers(0, 99))
def test_what_a_create_reports_is_what_is_in_the_store(
    script: list[tuple[str, str]], rival_before: int | None, seed: int
) -> None:
    """Under any faults, and with another writer who comes before the n-th request."""
    memory = fresh_memory()
    counter = itertools.count()

    class Rivalled(FaultyStore):
        def put(self, key, data, *, if_absent=False, metadata=None):  # type: ignore[no-untyped-def]
            self.maybe_rival()
            return super().put(key, data, if_absent=if_absent, metadata=metadata)

        def get(self, key):  # type: ignore[no-untyped-def]
            self.maybe_rival()
            return super().get(key)

        def maybe_rival(self) -> None:
            if next(counter) == rival_before and not [*memory.list(KEY)]:
                memory.put(KEY, b"theirs", if_absent=True)

    store = Rivalled(memory, [Fault(operation, effect) for operation, effect in script])  # type: ignore[arg-type]
    try:
        RetryingStore(store, VirtualClock(), SeededIds(seed), budget_s=60).put(KEY, b"mine", if_absent=True)
        outcome = b"mine"
    except Conflict:
        outcome = b"theirs"
    assert memory.get(KEY)[0] == outcome


@pytest.mark.parametrize("read", ["get", "get_range"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_answer_that_ends_early_is_asked_for_again(read: str, times: int) -> None:
    store, memory = retrying(Fault(read, "truncate", times=times))  # type: ignore[arg-type]
    memory.put(KEY, b"0123456789")
    found = store.get(KEY)[0] if read == "get" else store.get_range(KEY, 2, 5)
    assert found == (b"0123456789" if read == "get" else b"23456")


@pytest.mark.parametrize(("start", "length", "expected"), [(0, 99, b"0123456789"), (7, 3, b"789"), (7, 4, b"789")])
def test_the_end_of_an_object_is_no_early_end(start: int, length: int, expected: bytes) -> None:
    store, memory = retrying()
    memory.put(KEY, b"0123456789")
    assert store.get_range(KEY, start, length) == expected
    assert store.meter.usage().gets == 1


def test_half_a_record_is_never_taken_for_another_writers() -> None:
    """A create whose answer was lost is read back, and the reading is cut short."""
    store, memory = retrying(Fault("put", "lose_answer"), Fault("get", "truncate"))
    store.put(KEY, b"my own bytes", if_absent=True)
    assert memory.get(KEY)[0] == b"my own bytes"


def test_who_needs_only_some_names_does_not_hold_them_all() -> None:
    """Whoever may write names can write millions of them."""
    given = itertools.count()

    class Endless(MemoryStore):
        """A double: its listing has no end."""

        def list_dirs(self, prefix: str):  # type: ignore[no-untyped-def]
            assert prefix == "islands/"
            return (f"island-{number}" for number in given)

    store = RetryingStore(Endless(f"memory://{uuid.uuid4().hex}"), VirtualClock(), SeededIds(0))
    names = list(itertools.islice(store.list_dirs("islands/"), 150_000))
    assert names == [f"island-{number}" for number in range(150_000)]
    assert next(given) <= 150_002
