"""How a store is opened, counted, broken on purpose and probed; keys and dates."""

import itertools
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.core.errors import Conflict, Denied, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.store import MeteredStore, ObjectInfo, RetryingStore, Usage, open_store
from diloco_blob.store.body import Body
from diloco_blob.store.dates import StoreDate
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.keys import split_bucket_url
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.parts import PART_BYTES, PartReader
from diloco_blob.store.probe import probe
from diloco_blob.testing.clock import VirtualClock


def fresh_memory() -> MemoryStore:
    return MemoryStore(f"memory://{uuid.uuid4().hex}")


# Opening


def test_each_kind_of_url_opens_its_store_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    urls = ["s3://bucket/run", "gs://bucket/run", f"file://{tmp_path}/run", str(tmp_path / "run"), "run", "memory://m"]
    for url in urls:
        store = open_store(url)
        assert store.url == url
        assert store.meter.usage() == Usage()
        store.close()
    assert [*tmp_path.iterdir()] == []


def test_two_who_open_the_same_memory_share_it() -> None:
    name = f"memory://{uuid.uuid4().hex}"
    open_store(name).put("a", b"1")
    assert open_store(name).get("a")[0] == b"1"
    with pytest.raises(NotFound):
        open_store(f"{name}x").get("a")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no URL"),
        ("  ", "no URL"),
        ("http://bucket/run", "no store for http:"),
        ("azure://bucket/run", "no store for azure:"),
        ("s3:bucket/run", "does not name a bucket"),
        ("s3://", "does not name a bucket"),
        ("s3:///run", "does not name a bucket"),
        ("gs://b", "does not name a bucket"),
        ("s3://bucket/a//b", "not allowed"),
        ("s3://bucket/../b", "not allowed"),
        ("s3://bucket/a b", "not allowed"),
        ("s3://bucket/a?region=x", "not allowed"),
        ("memory://", "memory://name"),
        ("memory:name", "memory://name"),
        ("file:run", "three slashes"),
    ],
)
def test_a_wrong_url_gets_one_line_with_the_remedy(url: str, says: str) -> None:
    with pytest.raises(InvalidSettings, match=says) as caught:
        open_store(url)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_bucket_urls_are_split() -> None:
    assert split_bucket_url("s3://bucket") == ("bucket", "")
    assert split_bucket_url("s3://bucket/") == ("bucket", "")
    assert split_bucket_url("gs://my.bucket-1/a/B_1/") == ("my.bucket-1", "a/B_1/")


@pytest.mark.parametrize(
    ("url", "module", "package", "backend"),
    [("s3://bucket", "boto3", "boto3", "s3"), ("gs://bucket", "google.auth", "google-cloud-storage", "gcs")],
)
def test_a_missing_sdk_is_named(
    url: str, module: str, package: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"diloco_blob.store.{backend}", raising=False)
    with pytest.raises(InvalidSettings) as caught:
        open_store(url)
    assert caught.value.hint == f"pip install {package}"


def test_no_sdk_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, diloco_blob.store as s; s.open_store('memory://m'); s.open_store('/tmp/nowhere')\n"
        "heavy = ('boto3', 'botocore', 'gcsfs', 'google.cloud', 'torch')\n"
        "sys.exit(','.join(name for name in heavy if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_no_credentials_are_denied_with_a_hint(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_", "STORAGE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store(url, clock=VirtualClock())
    with pytest.raises(Denied, match="no credentials for") as caught:
        store.get("run.json")
    assert caught.value.hint
    store.close()


# Counting


def test_requests_and_bytes_are_counted_also_of_those_that_fail() -> None:
    memory = fresh_memory()
    store = MeteredStore(FaultyStore(memory, [Fault("put", "lose_answer", key="lost"), Fault("delete", "refuse")]))
    store.put("a/1", b"123")
    before = store.usage()
    with pytest.raises(Unavailable):
        store.put("lost", b"12345")
    with pytest.raises(Conflict):
        store.put("a/1", b"1", if_absent=True)
    with pytest.raises(NotFound):
        store.get("nothing")
    with pytest.raises(Unavailable):
        store.delete("a/1")
    store.get("a/1")
    store.get_range("a/1", 0, 2)
    store.head("a/1")
    assert len([*store.list("")]) == 2
    assert [*store.list_dirs("")] == ["a"]
    expected = Usage(gets=3, heads=1, puts=2, lists=2, deletes=1, failed=2, bytes_up=6, bytes_down=5)
    assert store.usage().since(before) == expected
    assert expected.requests == 9


@pytest.mark.parametrize(("count", "requests"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (2500, 3)])
def test_a_listing_costs_a_request_for_each_thousand(count: int, requests: int) -> None:
    store = MeteredStore(fresh_memory())
    for number in range(count):
        store.put(f"{number}/x", b"")
    before = store.usage()
    assert len([*store.list("")]) == count
    assert store.usage().since(before).lists == requests
    assert len([*store.list_dirs("")]) == count
    assert store.usage().since(before).lists == 2 * requests


# Faults


def test_faults_hit_the_calls_that_they_name() -> None:
    passed: list[str] = []
    store = FaultyStore(
        fresh_memory(),
        [
            Fault("get", "truncate", key="^a", skip=1, times=2),
            Fault("put", "conflict_after", key="c$"),
            Fault("any", "delay", key="slow", hook=lambda: passed.append("slow")),
        ],
    )
    store.put("a", b"1234")
    assert [store.get("a")[0] for _ in range(4)] == [b"1234", b"12", b"12", b"1234"]
    with pytest.raises(Conflict):
        store.put("b/c", b"1", if_absent=True)
    assert store.get("b/c")[0] == b"1"
    store.put("slow", b"1")
    store.get("slow")
    assert passed == ["slow"]
    store.add(Fault("get_range", "truncate"), Fault("now", "refuse", error=lambda: Denied("no")))
    assert store.get_range("a", 0, 4) == b"12"
    with pytest.raises(Denied):
        store.now()


# Probing


class Overwriting(MemoryStore):
    """A gateway that answers 200 to *create if absent* and overwrites."""

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        del if_absent
        return super().put(key, data, metadata=metadata)


class RightOneByOne(MemoryStore):
    """A gateway that looks first and writes then."""

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        exists = [*self.list(key)]
        self.all_have_looked()
        if if_absent and exists:
            raise Conflict("exists")
        return super().put(key, data, metadata=metadata)

    def all_have_looked(self) -> None:
        """Wait until every racer has looked."""


class Skewed(MemoryStore):
    """A server whose disk and web server disagree about the time."""

    def now(self) -> float:
        return super().now() + 3600


class ListsNothing(MemoryStore):
    """A store whose listings lag."""

    def list(self, prefix: str, *, start_after: str = ""):  # type: ignore[no-untyped-def]
        del prefix, start_after
        return iter(())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Overwriting, "of 4 racing creates of one object succeeded"),
        (Skewed, "away from its own clock"),
        (ListsNothing, "a listing does not show"),
    ],
)
def test_a_store_that_cannot_carry_a_run_is_refused(kind: type[MemoryStore], says: str) -> None:
    store = kind(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(InvalidSettings, match=says) as caught:
        probe(store, SeededIds(0))
    assert "\n" not in str(caught.value)
    assert [*MemoryStore.list(store, "")] == []


def test_a_store_that_is_right_one_by_one_but_wrong_in_a_race_is_refused() -> None:
    looked = threading.Barrier(4)

    class Racy(RightOneByOne):
        def all_have_looked(self) -> None:
            looked.wait(10)

    with pytest.raises(InvalidSettings, match="4 of 4 racing creates"):
        probe(Racy(f"memory://{uuid.uuid4().hex}"), SeededIds(0))


def test_a_store_that_cannot_be_reached_is_not_called_unfit() -> None:
    store = FaultyStore(fresh_memory(), [Fault("any", "refuse", times=10**6)])
    with pytest.raises(Unavailable):
        probe(store, SeededIds(0))


def test_a_probe_of_a_store_that_is_not_there_says_so_in_a_few_lines_within_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    broken = FaultyStore(fresh_memory(), [Fault("any", "refuse", times=10**6)])
    store = RetryingStore(broken, clock, SeededIds(1), budget_s=20.0)
    with pytest.raises(Unavailable):
        probe(store, SeededIds(0))
    assert clock.monotonic() <= 20.0
    assert 1 <= len(caplog.messages) <= 5
    assert caplog.messages[0] == "could not head run.json, still trying: a fault on purpose"
    usage = store.meter.usage()
    assert usage.requests == usage.heads


def test_a_probe_tries_once_to_remove_what_it_wrote() -> None:
    clock = VirtualClock()
    broken = FaultyStore(fresh_memory(), [Fault("delete", "refuse", times=10**6)])
    store = RetryingStore(broken, clock, SeededIds(1))
    assert len(probe(store, SeededIds(0))) == 4
    assert (store.meter.usage().deletes, clock.monotonic()) == (1, 0.0)


def test_a_probe_needs_no_right_to_delete() -> None:
    store = FaultyStore(fresh_memory(), [Fault("delete", "refuse", error=lambda: Denied("no"))])
    assert probe(store, SeededIds(0))[0] == "4 racing creates of one object: one winner"


# Dates and parts


@given(
    start=st.floats(1.7e9, 1.8e9),
    waits=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    offset=st.floats(-1e6, 1e6),
)
def test_the_stores_now_is_right_to_a_second_and_never_goes_back(
    start: float, waits: list[float], offset: float
) -> None:
    clock = VirtualClock(start)
    date = StoreDate(clock)
    seen: list[float] = []
    for wait in waits:
        clock.advance(wait)
        true = clock.wall() + offset
        date.observe(float(int(true)))  # a Date header: whole seconds, cut off
        seen.append(date.now())
        assert true - 1.001 <= seen[-1] <= true + 1.001
    assert all(later >= earlier - 1e-3 for earlier, later in itertools.pairwise(seen))


def test_dates_are_read_from_headers_and_nonsense_is_passed_over() -> None:
    date = StoreDate(VirtualClock())
    date.observe_header(None)
    date.observe_header("yesterday")
    assert not date.known
    date.observe_header("Tue, 01 Dec 2026 04:48:05 GMT")
    assert date.now() == 1796100485.0


def test_parts_are_put_together_in_order_and_missing_bytes_are_noticed() -> None:
    data = bytes(range(256)) * ((2 * PART_BYTES + 512) // 256)
    reader = PartReader()
    whole = reader.read_rest("x", data[:100], len(data), lambda start, length: data[start : start + length])
    assert whole == data
    with pytest.raises(Unavailable, match="only 150 of 200 bytes of x"):
        reader.read_rest("x", data[:100], 200, lambda start, length: data[start : start + length // 2])
    with pytest.raises(Unavailable):
        reader.read_rest("x", data[:100], 99, lambda *_: b"")
    reader.close()
