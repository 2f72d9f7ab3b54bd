"""Fixtures for every test: real servers, started once in each pytest worker that needs them.

A test that uses one says so with `@pytest.mark.xdist_group("seaweedfs")` (or "moto", "fake-gcs"), so that all tests of
a server run in one worker and it is started once. `server_url` gives such a test its own empty place in the server's
bucket.
"""

import uuid
from collections.abc import Callable, Iterator

import pytest
import servers
from hypothesis import settings

settings.register_profile("default", deadline=None)  # how long an example takes depends on who else uses the machine
settings.load_profile("default")


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[servers.Server]:
    """SeaweedFS; see `servers.seaweedfs`."""
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[servers.Server]:
    """The server of moto; see `servers.moto`."""
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs_server() -> Iterator[servers.Server]:
    """fake-gcs-server; see `servers.fake_gcs`."""
    with servers.fake_gcs() as server:
        yield server


@pytest.fixture
def server_url(monkeypatch: pytest.MonkeyPatch) -> Callable[[servers.Server], str]:
    """Point the environment at a server and give the URL of an empty place in its bucket.

    Processes that the test starts inherit the environment.
    """

    def url(server: servers.Server) -> str:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        return f"{server.scheme}://{servers.BUCKET}/test-{uuid.uuid4().hex}"

    return url
