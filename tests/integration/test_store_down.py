"""A real store that dies and comes back: islands ride it out, commands say so, and nothing half-written is read."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import boto3
import pytest
import servers
from commands import cli
from faultproxy import FaultProxy, WireFault

from diloco_blob.cli.main import main
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import DilocoError, NotFound, Unavailable
from diloco_blob.core.ids import SystemIds
from diloco_blob.store import ObjectStore, open_backend, open_store
from diloco_blob.store.parts import PART_BYTES

WORKER = Path(__file__).with_name("toy_worker.py")
SETTINGS = """
[sync]
sync_every = 10
overlap = 1
adopt = "carry"
pause_after = 2
[policy]
quorum = 2
grace_s = 2.0
deadline_s = 2.0
takeover_s = 2.0
max_staleness = 100
"""
WATCH = """
import sys
from functools import partial
from diloco_blob.cli import aggregate, main
aggregate.open_store = partial(aggregate.open_store, budget_s=1.0)
sys.exit(main.main(["aggregate", sys.argv[1], "--watch"]))
"""
"""As the command is, but it gives an operation up after a second, not after 90."""
PUTS = """
import sys
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.store import open_backend
store = open_backend(sys.argv[1], clock=SystemClock(), ids=SystemIds())
for number in range(10_000):
    store.put(f"objects/{number:04d}", bytes([number % 251]) * (32 << 20), if_absent=number % 2 == 0)
"""
WAIT_S = 60.0

pytestmark = pytest.mark.xdist_group("mortal-seaweedfs")


@pytest.fixture(scope="module")
def outage() -> Iterator[servers.Outage]:
    with servers.mortal_seaweedfs() as found:
        yield found


@contextlib.contextmanager
def process(words: list[str], log: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours, its output in a file; it does not outlive the block."""
    out: IO[bytes]
    with log.open("wb") as out:
        started = subprocess.Popen([sys.executable, *words], stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def backend(url: str) -> ObjectStore:
    """A client without retries."""
    return open_backend(url, clock=SystemClock(), ids=SystemIds())


def wait_for(what: Callable[[], object]) -> None:
    """Return when it is so; fail if that takes too long."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def step_of(log: Path) -> int:
    return max((int(number) for number in re.findall(r" step (\d+)", log.read_text())), default=0)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_islands_and_aggregator_ride_out_an_outage(
    outage: servers.Outage, server_url: Callable[[servers.Server], str], tmp_path: Path
) -> None:
    url = server_url(outage.server)
    settings = tmp_path / "run.toml"
    settings.write_text(SETTINGS)
    logs = [tmp_path / "island-0.log", tmp_path / "island-1.log"]
    watch_log = tmp_path / "watch.log"
    words = [str(WORKER), "--steps", "300", "--step-s", "0.05"]
    env = {"DILOCO_RUN": url, "DILOCO_SETTINGS": str(settings), "DILOCO_ISLANDS": "2", "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        islands = []
        for number, log in enumerate(logs):
            own = {"DILOCO_ISLAND": f"island-{number}", "DILOCO_CHECKPOINT_DIR": str(tmp_path / f"checkpoint-{number}")}
            islands.append(stack.enter_context(process(words, log, **env, **own)))
        watcher = stack.enter_context(process(["-c", WATCH, url], watch_log))
        wait_for(lambda: all(step_of(log) >= 30 for log in logs))
        before = [step_of(log) for log in logs]
        outage.begin()
        wait_for(lambda: all(" paused: " in log.read_text() for log in logs))
        wait_for(lambda: "the store does not answer, still trying" in watch_log.read_text())
        paused = [step_of(log) for log in logs]
        assert all(now >= then + 20 for now, then in zip(paused, before, strict=True)), "they trained on before"
        outage.end()
        for island in islands:
            assert island.wait(WAIT_S) == 0, "\n".join(log.read_text()[-3000:] for log in logs)
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(WAIT_S) == 0
    for log in logs:
        said = log.read_text()
        assert re.search(rf"paused: {url} has not answered for \d+ s; last error: .*127\.0\.0\.1", said)
        # Once for the store; with so little patience, also where another island or the aggregator is slower to be back.
        causes = re.findall(r" paused: (?:s3://\S+ (has not answered)|(no version) for)", said)
        assert [store for store, _ in causes if store] == ["has not answered"]
        assert len(causes) == said.count(" paused: ") == said.count(" goes on: ")
    assert watch_log.read_text().count("the store does not answer, still trying") == 1
    assert watch_log.read_text().count("the store answers again") == 1
    drained = cli("aggregate", url, "--drain", folder=tmp_path)
    assert drained.returncode == 0, drained.stderr
    verified = cli("verify", url, folder=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert " 0 skipped, 0 rejected, 0 pending" in verified.stdout


def test_commands_exit_with_4_when_nobody_answers_and_watch_goes_on(
    outage: servers.Outage,
    server_url: Callable[[servers.Server], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url = server_url(outage.server)
    outage.begin()
    try:
        for command, *words in (["aggregate", "--once"], ["aggregate", "--drain"], ["verify"], ["status"], ["gc"]):
            short = partial(open_store, budget_s=0.5)
            monkeypatch.setattr(f"diloco_blob.cli.{command}.open_store", short)
            assert main([command, url, *words]) == 4, command
            said = capsys.readouterr().err.splitlines()
            assert said[-1].startswith("diloco-blob: error: ")
        with process(["-c", WATCH, url], tmp_path / "log") as watcher:
            wait_for(lambda: "the store does not answer, still trying" in (tmp_path / "log").read_text())
            watcher.send_signal(signal.SIGTERM)
            assert watcher.wait(WAIT_S) == 0
    finally:
        outage.end()


# ---- half-written objects


def test_an_upload_that_is_cut_off_leaves_nothing(
    outage: servers.Outage, server_url: Callable[[servers.Server], str]
) -> None:
    """One request whose body ends early, and one object in parts of which one never arrives."""
    url = server_url(outage.server)
    store = backend(url)
    server = outage.server
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        region_name="us-east-1",
    )
    where = {"Bucket": servers.BUCKET, "Key": url.rpartition("/")[2] + "/cut"}
    signed = urlsplit(client.generate_presigned_url("put_object", Params=where))
    client.close()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            f"PUT {signed.path}?{signed.query} HTTP/1.1\r\nHost: {signed.netloc}\r\nContent-Length: {8 << 20}\r\n\r\n"
        )
        connection.sendall(head.encode() + b"x" * (5 << 20))
    with FaultProxy(server.port) as proxy:
        proxy.add(WireFault("PUT", "refuse", path="partNumber=2", times=100))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
            through = backend(url)
            with pytest.raises(Unavailable):
                through.put("parts", b"y" * (2 * PART_BYTES + 1))
            through.close()
        assert "PUT" in proxy.methods("partNumber=2")
    assert [*store.list("")] == []
    for key in ("cut", "parts"):
        with pytest.raises(NotFound):
            store.get(key)
    store.close()


def test_a_server_killed_in_the_middle_of_uploads_has_each_object_whole_or_not_at_all(
    outage: servers.Outage, server_url: Callable[[servers.Server], str]
) -> None:
    store = backend(server_url(outage.server))
    answered: list[int] = []
    enough = threading.Event()

    def put(first: int) -> None:
        with contextlib.suppress(DilocoError):
            for number in range(first, 10_000, 3):
                store.put(f"objects/{number:04d}", bytes([number % 251]) * (4 << 20), if_absent=True)
                answered.append(number)
                if len(answered) >= 9:
                    enough.set()

    threads = [threading.Thread(target=put, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    assert enough.wait(WAIT_S)
    outage.begin()
    for thread in threads:
        thread.join()
    outage.end()
    found = {int(info.key.rpartition("/")[2]): info.size for info in store.list("objects/")}
    assert found.keys() >= set(answered)
    for number in found:
        assert store.get(f"objects/{number:04d}")[0] == bytes([number % 251]) * (4 << 20)
    store.close()


def test_a_writer_to_a_folder_killed_in_the_middle_leaves_each_object_whole_or_not_at_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = run / "objects"
    for times in range(3):
        with process(["-c", PUTS, str(run)], tmp_path / "log") as writer:
            # Killed while a temporary file is being filled, after some objects are there.
            wait_for(lambda times=times: len([*folder.glob("[!.]*")]) > times)
            wait_for(lambda: any(0 < _size(path) < 32 << 20 for path in folder.glob(".*")))
            writer.kill()
            writer.wait()
        assert any(folder.glob(".*")), "it was killed in the middle of a put"
        store = backend(str(run))
        listed = [info.key for info in store.list("")]
        assert listed
        for key in listed:
            number = int(key.rpartition("/")[2])
            assert store.get(key)[0] == bytes([number % 251]) * (32 << 20)
        store.close()
        for path in folder.iterdir():
            path.unlink()


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
