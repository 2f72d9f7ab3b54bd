"""One suite for every store: what the protocol relies on, asked of each backend in the same words.

Real servers, no mocks. `DILOCO_TEST_S3_ENDPOINT` (with the usual AWS variables, and a bucket's name in
`DILOCO_TEST_S3_BUCKET`) adds one more S3 server to them.
"""

import multiprocessing
import os
import string
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import servers

from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import Conflict, Corrupt, NotFound
from diloco_blob.core.ids import SeededIds, SystemIds
from diloco_blob.store import ObjectStore, RetryingStore, open_backend
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.parts import PART_BYTES
from diloco_blob.store.probe import probe
from diloco_blob.testing.clock import VirtualClock

ENDPOINT = os.environ.get("DILOCO_TEST_S3_ENDPOINT")
SERVERS = ["seaweedfs", "moto", "fake-gcs", *(["endpoint"] if ENDPOINT else [])]
BACKENDS = ["memory", "folder", *SERVERS]


def grouped(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


@pytest.fixture(params=grouped(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(
    backend: str,
    request: pytest.FixtureRequest,
    server_url: Callable[[servers.Server], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    if backend == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if backend == "folder":
        return (tmp_path / "run").as_uri()
    if backend == "endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", ENDPOINT or "")
        return f"s3://{os.environ.get('DILOCO_TEST_S3_BUCKET', servers.BUCKET)}/test-{uuid.uuid4().hex}"
    return server_url(request.getfixturevalue(f"{backend.replace('-', '_')}_server"))


@pytest.fixture
def store(url: str) -> Iterator[ObjectStore]:
    backend = open_backend(url, clock=SystemClock(), ids=SystemIds())
    yield backend
    backend.close()


def keys(store: ObjectStore, prefix: str, start_after: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix, start_after=start_after))


def test_what_is_put_can_be_read(store: ObjectStore) -> None:
    put = store.put("a/b/c.json", b"hello")
    data, got = store.get("a/b/c.json")
    head = store.head("a/b/c.json")
    assert data == b"hello"
    assert put.key == got.key == head.key == "a/b/c.json"
    assert put.size == got.size == head.size == 5
    assert put.etag == got.etag == head.etag != ""


def test_an_object_may_be_empty(store: ObjectStore) -> None:
    store.put("empty", b"", if_absent=True)
    assert store.get("empty")[0] == b""
    assert store.head("empty").size == 0
    assert store.get_range("empty", 0, 10) == b""


def test_an_empty_object_can_be_read_again_and_again(store: ObjectStore) -> None:
    """A server may close the connection after it refused a range of nothing."""
    store.put("empty", b"")
    for _ in range(300):
        assert store.get("empty")[0] == b""


@pytest.mark.parametrize("size", [9 << 20, 2 * PART_BYTES + 12_345], ids=["one-request", "parts"])
def test_large_objects(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    assert store.put("large", data).size == size
    read, info = store.get("large")
    assert read == data
    assert info.size == store.head("large").size == size
    assert store.get_range("large", size - 5, 100) == data[-5:]


@pytest.mark.parametrize("size", [0, 100, 9 << 20, 2 * PART_BYTES + 12_345])
def test_a_file_can_be_put_again_and_again(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    with tempfile.TemporaryFile() as file:
        file.write(data)  # and stands at its end
        assert store.put("large", file).size == size
        assert store.get("large")[0] == data
        store.delete("large")
        faulty = FaultyStore(store, [Fault("put", "lose_answer")])
        assert RetryingStore(faulty, VirtualClock(), SeededIds(1)).put("large", file).size == size
        assert store.get("large")[0] == data


def test_a_file_can_be_created_only_once(store: ObjectStore) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"mine")
        faulty = FaultyStore(store, [Fault("put", "conflict_after")])
        RetryingStore(faulty, VirtualClock(), SeededIds(1)).put("created", file, if_absent=True)
        with pytest.raises(Conflict):
            store.put("created", file, if_absent=True)
    assert store.get("created")[0] == b"mine"


def test_a_record_of_the_largest_size_is_created_only_once(store: ObjectStore) -> None:
    data = os.urandom(8 << 20)
    store.put("large", data, if_absent=True)
    with pytest.raises(Conflict):
        store.put("large", data[::-1], if_absent=True)
    assert store.get("large")[0] == data


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (3, 4, b"3456"), (8, 5, b"89"), (10, 5, b""), (50, 5, b""), (2, 0, b"")],
)
def test_ranges(store: ObjectStore, start: int, length: int, expected: bytes) -> None:
    store.put("digits", b"0123456789")
    assert store.get_range("digits", start, length) == expected


def test_what_is_not_there_is_not_found(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    for key in ("nothing", "a/nothing", "nothing/at/all"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound, match=key):
            store.get_range(key, 0, 1)
        with pytest.raises(NotFound, match=key):
            store.get_range(key, 0, 0)
        with pytest.raises(NotFound, match=key):
            store.head(key)
    assert keys(store, "nothing/") == []
    assert [*store.list_dirs("nothing/")] == []


def test_a_plain_put_replaces(store: ObjectStore) -> None:
    store.put("key", b"old and longer")
    store.put("key", b"new")
    assert store.get("key")[0] == b"new"
    assert store.head("key").size == 3


def test_delete(store: ObjectStore, backend: str) -> None:
    store.put("a/b", b"1")
    store.put("a/c", b"2")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/there")
    assert keys(store, "") == ["a/c"]
    with pytest.raises(NotFound):
        store.get("a/b")
    store.put("a/b", b"again", if_absent=True)
    store.delete("a/b")
    store.delete("a/c")
    assert keys(store, "") == []
    if backend not in {"seaweedfs", "endpoint"}:  # SeaweedFS forgets an emptied folder a little later
        assert [*store.list_dirs("")] == []


def test_create_is_refused_if_the_object_exists(store: ObjectStore) -> None:
    store.put("created", b"first", if_absent=True)
    with pytest.raises(Conflict, match="created"):
        store.put("created", b"second", if_absent=True)
    with pytest.raises(Conflict):  # the same bytes are no excuse: only RetryingStore may conclude that they are its own
        store.put("created", b"first", if_absent=True)
    store.put("plain", b"first")
    with pytest.raises(Conflict):
        store.put("plain", b"second", if_absent=True)
    assert store.get("created")[0] == store.get("plain")[0] == b"first"


@pytest.mark.timeout(60)
def test_of_twenty_racing_creators_one_wins(store: ObjectStore) -> None:
    start = threading.Barrier(20)

    def create(number: int) -> int | None:
        start.wait()
        try:
            store.put("fragments/0000/closes/0000000001.json", b"%d" % number, if_absent=True)
        except Conflict:
            return None
        return number

    with ThreadPoolExecutor(20) as pool:
        winners = [number for number in pool.map(create, range(20)) if number is not None]
    assert len(winners) == 1
    assert store.get("fragments/0000/closes/0000000001.json")[0] == b"%d" % winners[0]


def test_listing(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "a/b/3", "ab/4", "c"):
        store.put(key, key.encode())
    assert keys(store, "") == ["a/1", "a/2", "a/b/3", "ab/4", "c"]
    assert keys(store, "a") == ["a/1", "a/2", "a/b/3", "ab/4"]
    assert keys(store, "a/") == ["a/1", "a/2", "a/b/3"]
    assert keys(store, "a/b/") == ["a/b/3"]
    assert keys(store, "a/", start_after="a/1") == ["a/2", "a/b/3"]
    assert keys(store, "a/", start_after="a/b/3") == []
    assert [info.size for info in store.list("a/b/")] == [5]
    assert all(info.etag for info in store.list(""))


def test_listing_folders(store: ObjectStore) -> None:
    for key in ("islands/b/x/1", "islands/b/y/2", "islands/a/1", "islands/loose", "other/1"):
        store.put(key, b"")
    assert sorted(store.list_dirs("islands/")) == ["a", "b"]
    assert sorted(store.list_dirs("")) == ["islands", "other"]
    assert sorted(store.list_dirs("islands/b/")) == ["x", "y"]
    assert [*store.list_dirs("islands/a/")] == []


def test_a_listing_has_all_pages(store: ObjectStore) -> None:
    names = [f"islands/{number:04d}/r" for number in range(1005)]  # a page has at most 1000
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda name: store.put(name, b""), names):
            pass
    assert keys(store, "islands/") == names
    assert sorted(store.list_dirs("islands/")) == [f"{number:04d}" for number in range(1005)]
    assert keys(store, "islands/", start_after=names[1]) == names[2:]


def test_every_character_that_keys_may_have(store: ObjectStore) -> None:
    key = f"{string.digits}/{string.ascii_lowercase}/_=-a.b..c/{'0' * 200}"
    store.put(key, b"1", if_absent=True)
    assert store.get(key)[0] == b"1"
    assert keys(store, "0123456789/") == [key]
    assert [*store.list_dirs("0123456789/")] == [string.ascii_lowercase]


@pytest.mark.parametrize(
    "key",
    [
        *(
            "",
            "/",
            "a/",
            "/a",
            "a//b",
            ".",
            "..",
            "a/../b",
            "../a",
            ".hidden",
            "a/.tmp",
            "A",
            "a b",
            "a\\b",
            "a\nb",
            "a\n",
        ),
        *("é", "a?b", "a%2fb", "a\0b", "0" * 201, "/".join(["abcdefghi"] * 60)),
    ],
)
def test_other_keys_are_refused(store: ObjectStore, key: str) -> None:
    attempts = [
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.delete(key),
    ]
    for attempt in attempts:
        with pytest.raises(Corrupt):
            attempt()


@pytest.mark.parametrize("prefix", ["/", "..", "../", "a//", ".tmp", "A"])
def test_other_prefixes_are_refused(store: ObjectStore, prefix: str) -> None:
    with pytest.raises(Corrupt):
        next(iter(store.list(prefix)), None)
    with pytest.raises(Corrupt):
        next(iter(store.list_dirs(prefix)), None)


def test_metadata_is_kept_where_the_store_keeps_any(store: ObjectStore, backend: str) -> None:
    store.put("plain", b"1", metadata={"island": "us-east-1a"})
    store.put("large", bytes(PART_BYTES + 1), metadata={"island": "us-east-1a"})
    expected = {} if backend == "folder" else {"island": "us-east-1a"}
    assert store.head("plain").metadata == expected
    assert store.head("large").metadata == expected


def test_objects_are_dated_by_the_clock_that_now_tells(store: ObjectStore) -> None:
    before = store.now()
    put = store.put("dated", b"1", if_absent=True)
    after = store.now()
    listed = next(iter(store.list("dated")))
    assert before <= after
    for info in (put, store.head("dated"), store.get("dated")[1], listed):
        assert before - 2 <= info.last_modified <= after + 2  # dates are whole seconds


def test_two_clients_of_one_url_see_the_same_objects(store: ObjectStore, url: str) -> None:
    other = open_backend(url, clock=SystemClock(), ids=SystemIds())
    store.put("a/b", b"1", if_absent=True)
    assert other.get("a/b")[0] == b"1"
    assert keys(other, "") == ["a/b"]
    other.delete("a/b")
    with pytest.raises(NotFound):
        store.head("a/b")
    other.close()


@pytest.mark.parametrize("effect", ["refuse", "lose_answer", "conflict_after"])
def test_a_create_survives_a_lost_request_or_answer(store: ObjectStore, effect: str) -> None:
    faulty = FaultyStore(store, [Fault("put", effect, key="receipts/")])  # type: ignore[arg-type]
    retrying = RetryingStore(faulty, VirtualClock(), SeededIds(1))
    info = retrying.put("receipts/1", b"mine", if_absent=True)
    assert (info.key, info.size) == ("receipts/1", 4)
    assert store.get("receipts/1")[0] == b"mine"
    with pytest.raises(Conflict):
        RetryingStore(store, VirtualClock(), SeededIds(2)).put("receipts/1", b"theirs", if_absent=True)


def test_a_lost_race_with_a_lost_answer_is_still_a_lost_race(store: ObjectStore) -> None:
    store.put("closes/1", b"theirs", if_absent=True)
    faulty = FaultyStore(store, [Fault("put", "refuse"), Fault("get", "refuse")])
    with pytest.raises(Conflict):
        RetryingStore(faulty, VirtualClock(), SeededIds(1)).put("closes/1", b"mine", if_absent=True)
    assert store.get("closes/1")[0] == b"theirs"


@pytest.mark.timeout(60)
def test_the_probe_accepts_the_store_and_leaves_nothing(store: ObjectStore) -> None:
    assert len(probe(store, SystemIds())) == 4
    assert keys(store, "") == []


def _read_in_child(store: ObjectStore) -> None:
    assert store.get("before/fork")[0] == b"1"
    store.put("after/fork", b"2")
    store.close()


@pytest.mark.parametrize("backend", grouped(["folder", *SERVERS]), indirect=True)
def test_a_store_can_be_used_after_a_fork(store: ObjectStore) -> None:
    store.put("before/fork", b"1")
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(store,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert store.get("after/fork")[0] == b"2"
