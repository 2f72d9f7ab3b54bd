"""Answers that are lost, cut or odd on a real socket, between the real SDKs and real servers."""

from collections.abc import Callable, Iterator

import pytest
import servers
from faultproxy import FaultProxy, WireFault

from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.store import ObjectStore, RetryingStore, open_backend
from diloco_blob.store.parts import PART_BYTES
from diloco_blob.testing.clock import VirtualClock

S3 = pytest.param("moto", marks=pytest.mark.xdist_group("moto"))
GCS = pytest.param("fake-gcs", marks=pytest.mark.xdist_group("fake-gcs"))
WRITES = {"moto": "PUT", "fake-gcs": "POST"}
"""How an upload goes over the wire."""


@pytest.fixture(params=[S3, GCS])
def server(request: pytest.FixtureRequest) -> servers.Server:
    found = request.getfixturevalue(f"{request.param.replace('-', '_')}_server")
    assert isinstance(found, servers.Server)
    return found


@pytest.fixture
def proxy(server: servers.Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def store(
    server: servers.Server,
    proxy: FaultProxy,
    server_url: Callable[[servers.Server], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ObjectStore]:
    url = server_url(server)
    for name in ("AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"):
        if name in server.env:
            monkeypatch.setenv(name, proxy.endpoint)
    backend = open_backend(url, clock=SystemClock(), ids=SeededIds(0))
    yield backend
    backend.close()


@pytest.fixture
def write(server: servers.Server) -> str:
    return WRITES[server.name]


@pytest.mark.parametrize("effect", ["refuse", "drop_answer"])
def test_the_backend_makes_one_attempt_and_admits_that_it_does_not_know(
    store: ObjectStore, proxy: FaultProxy, write: str, effect: str
) -> None:
    proxy.add(WireFault(write, effect))  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        store.put("commits/1", b"mine", if_absent=True)
    assert proxy.methods() == [write]


def test_a_create_whose_answer_was_lost_succeeded(store: ObjectStore, proxy: FaultProxy, write: str) -> None:
    proxy.add(WireFault(write, "drop_answer"))
    info = RetryingStore(store, VirtualClock(), SeededIds(1)).put("commits/1", b"mine", if_absent=True)
    assert info.size == 4
    assert proxy.methods() == [write, "GET"]
    assert store.get("commits/1")[0] == b"mine"


def test_a_create_is_settled_even_if_reading_it_back_fails_at_first(
    store: ObjectStore, proxy: FaultProxy, write: str
) -> None:
    proxy.add(WireFault(write, "drop_answer"), WireFault("GET", "refuse"))
    RetryingStore(store, VirtualClock(), SeededIds(1)).put("commits/1", b"mine", if_absent=True)
    # Lost answer, no reading back, a second create that is refused by the first one's object, reading back.
    assert proxy.methods() == [write, "GET", write, "GET"]


def test_a_create_that_never_arrived_is_made_again(store: ObjectStore, proxy: FaultProxy, write: str) -> None:
    proxy.add(WireFault(write, "refuse", times=2))
    RetryingStore(store, VirtualClock(), SeededIds(1)).put("commits/1", b"mine", if_absent=True)
    assert proxy.methods() == [write, "GET", write, "GET", write]


def test_a_create_that_lost_its_race_and_its_answer_has_lost(store: ObjectStore, proxy: FaultProxy, write: str) -> None:
    store.put("commits/1", b"theirs", if_absent=True)
    proxy.add(WireFault(write, "drop_answer"))
    with pytest.raises(Conflict):
        RetryingStore(store, VirtualClock(), SeededIds(1)).put("commits/1", b"mine", if_absent=True)


@pytest.mark.parametrize("size", [1000, PART_BYTES + 1000], ids=["one-request", "parts"])
def test_a_body_that_breaks_off_is_read_again(store: ObjectStore, proxy: FaultProxy, size: int) -> None:
    data = bytes(range(250)) * (size // 250)
    store.put("payload", data)
    proxy.add(WireFault("GET", "cut_body"))
    with pytest.raises(Unavailable):
        store.get("payload")
    proxy.add(WireFault("GET", "cut_body"))
    with pytest.raises(Unavailable):
        store.get_range("payload", 10, 100)
    proxy.add(WireFault("GET", "cut_body"))
    assert RetryingStore(store, VirtualClock(), SeededIds(1)).get("payload")[0] == data


def test_an_outage_is_ridden_out(store: ObjectStore, proxy: FaultProxy, write: str) -> None:
    clock = VirtualClock()
    for method in (write, "GET", "DELETE", "HEAD"):
        proxy.add(WireFault(method, "refuse", times=1000, active=lambda: clock.monotonic() < 60))
    retrying = RetryingStore(store, clock, SeededIds(1))
    retrying.put("a/1", b"mine", if_absent=True)
    assert clock.monotonic() >= 60
    assert retrying.get("a/1")[0] == b"mine"
    assert [info.key for info in retrying.list("a/")] == ["a/1"]


def test_an_outage_without_end_is_reported(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.add(WireFault("GET", "refuse", times=1000))
    with pytest.raises(Unavailable, match="did not answer"):
        RetryingStore(store, VirtualClock(), SeededIds(1)).get("a/1")
    with pytest.raises(Unavailable):
        next(store.list(""))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((500, Unavailable), (502, Unavailable), (503, Unavailable), (504, Unavailable), (429, Unavailable)),
        *((408, Unavailable), (409, Unavailable), (412, Conflict), (401, Denied), (403, Denied)),
        *((400, InvalidSettings),),
    ],
)
def test_what_each_status_means(
    store: ObjectStore, proxy: FaultProxy, write: str, status: int, expected: type[DilocoError]
) -> None:
    proxy.add(WireFault(write, "status", status=status))
    with pytest.raises(expected) as caught:
        store.put("commits/1", b"mine", if_absent=True)
    assert "\n" not in str(caught.value)
    assert proxy.methods() == [write]


def s3_error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>said so</Message></Error>".encode()


@pytest.mark.parametrize("server", [S3], indirect=True)
@pytest.mark.parametrize(
    ("status", "code", "expected", "said"),
    [
        (409, "ConditionalRequestConflict", Unavailable, "cannot answer now"),
        (503, "SlowDown", Unavailable, "SlowDown"),
        (400, "RequestTimeout", Unavailable, "RequestTimeout"),
        (400, "BadDigest", Unavailable, "BadDigest"),
        (403, "RequestTimeTooSkewed", Unavailable, "clock"),
        (403, "AccessDenied", Denied, "policy"),
        (403, "InvalidAccessKeyId", Denied, "credentials"),
        (404, "NoSuchBucket", NotFound, "no bucket 'lab'"),
        (501, "NotImplemented", InvalidSettings, "cannot do what the protocol needs"),
        (400, "InvalidRequest", InvalidSettings, "InvalidRequest"),
    ],
)
def test_what_each_s3_code_means(
    store: ObjectStore, proxy: FaultProxy, status: int, code: str, expected: type[DilocoError], said: str
) -> None:
    proxy.add(WireFault("PUT", "status", status=status, body=s3_error(code)))
    with pytest.raises(expected, match=said):
        store.put("commits/1", b"mine", if_absent=True)


@pytest.mark.parametrize("server", [S3], indirect=True)
def test_expired_credentials_are_read_again(
    store: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("commits/1", b"mine")
    proxy.add(WireFault("GET", "status", status=400, body=s3_error("ExpiredToken")))
    clock = VirtualClock()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    assert RetryingStore(store, clock, SeededIds(1)).get("commits/1")[0] == b"mine"


@pytest.mark.parametrize("server", [S3], indirect=True)
def test_a_page_of_a_proxy_is_no_answer(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.add(WireFault("GET", "status", status=200, body=b"<html>sign in to the wifi</html"))
    with pytest.raises(Unavailable):
        next(store.list(""))


def test_a_missing_bucket_is_named(store: ObjectStore, server: servers.Server) -> None:
    missing = open_backend(f"{server.scheme}://no-such-bucket/run", clock=SystemClock(), ids=SeededIds(0))
    with pytest.raises(NotFound, match="no bucket 'no-such-bucket'"):
        missing.put("run.json", b"1", if_absent=True)
    with pytest.raises(NotFound, match="no bucket 'no-such-bucket'"):
        next(missing.list(""), None)
    missing.close()


def test_a_server_that_is_not_there(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    nowhere = open_backend(store.url, clock=SystemClock(), ids=SeededIds(0))
    for attempt in (
        lambda: nowhere.get("a"),
        lambda: nowhere.head("a"),
        lambda: nowhere.put("a", b"", if_absent=True),
        lambda: nowhere.put("a", bytes(PART_BYTES + 1)),
        lambda: next(nowhere.list("")),
        lambda: next(nowhere.list_dirs("")),
        lambda: nowhere.delete("a"),
        nowhere.now,
    ):
        with pytest.raises(Unavailable):
            attempt()
    nowhere.close()


def test_nothing_is_sent_that_was_not_asked_for(store: ObjectStore, proxy: FaultProxy) -> None:
    """One request each: what the protocol's costs are computed from."""
    store.put("a", b"1", if_absent=True)
    store.get("a")
    store.get_range("a", 0, 1)
    store.head("a")
    store.delete("a")
    assert len(proxy.methods()) == 5
