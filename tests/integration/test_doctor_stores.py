"""`doctor` on real servers: credentials of every kind, wrong ones, faults on the wire, and a doctor that is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import servers
from commands import cli
from faultproxy import FaultProxy, WireFault

from diloco_blob.cli import doctor
from diloco_blob.cli.main import main
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol.doctor import Examination, diagnose
from diloco_blob.protocol.doctor.probes import MARK
from diloco_blob.store import open_store

QUICK = ("--racers", "3", "--rounds", "1", "--samples", "4", "--megabytes", "0.5")
S3 = pytest.param("seaweedfs", marks=pytest.mark.xdist_group("seaweedfs"))
GCS = pytest.param("fake_gcs", marks=pytest.mark.xdist_group("fake-gcs"))
TOY = Path(__file__).with_name("toy_worker.py")

Where = Callable[[servers.Server], str]


def names(url: str) -> list[str]:
    with closing(open_store(url)) as store:
        return [info.key for info in store.list("")]


def diagnosed(url: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", url, "--json", *QUICK, *words])
    document = json.loads(capsys.readouterr().out)
    return code, document | {"checks": {check["name"]: check for check in document["checks"]}}


def broken(document: dict[str, Any]) -> list[str]:
    return [name for name, check in document["checks"].items() if check["verdict"] == "broken"]


@pytest.mark.parametrize("name", [S3, GCS])
def test_a_sound_server_is_sound_and_left_empty(name: str, request: pytest.FixtureRequest, server_url: Where) -> None:
    url = server_url(request.getfixturevalue(f"{name}_server"))
    done = cli("doctor", url, *QUICK, folder=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # How fast this machine is, is not for a test to say.
    timed = {"latency", "clock", "upload", "download", "exchange", "reliability"}
    assert {line.split()[0] for line in lines[:-1] if line.split()[1] not in timed} == {"ok"}
    assert not any(line.startswith("broken") for line in lines)
    assert "this credential can be: island, aggregator, creator, collector" in lines[-1]
    assert names(url) == []


@pytest.mark.parametrize("name", [S3, GCS])
def test_a_clock_that_is_an_hour_off_is_measured(name: str, request: pytest.FixtureRequest, server_url: Where) -> None:
    class HourAhead(SystemClock):
        def wall(self) -> float:
            return super().wall() + 3600

    how = Examination(racers=2, rounds=1, samples=3, transfer_bytes=1000)
    with closing(open_store(server_url(request.getfixturevalue(f"{name}_server")))) as store:
        found = {check.name: check for check in diagnose(store, clock=HourAhead(), ids=SystemIds(), how=how)}
    clock = found["clock"]
    assert clock.verdict == "warning"
    assert clock.figures["store_ahead_s"] == pytest.approx(-3600, abs=clock.figures["uncertainty_s"] + 1)


@pytest.mark.parametrize("name", [S3, GCS])
def test_no_such_bucket(
    name: str, request: pytest.FixtureRequest, server_url: Where, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server_url(request.getfixturevalue(f"{name}_server")).replace(servers.BUCKET, "no-such-bucket", 1)
    code, document = diagnosed(url, capsys=capsys)
    assert (code, broken(document)) == (1, ["bucket"])
    assert "create it" in document["checks"]["bucket"]["hint"]


@pytest.mark.xdist_group("seaweedfs")
@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret"}, "the key or its secret is wrong"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "the key or its secret is wrong"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "set AWS_ACCESS_KEY_ID"),
    ],
)
def test_credentials_that_are_wrong_or_missing(
    change: dict[str, str],
    hint: str,
    seaweedfs_server: servers.Server,
    server_url: Where,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = server_url(seaweedfs_server)
    for variable, value in change.items():
        monkeypatch.setenv(variable, value)
    code, document = diagnosed(url, capsys=capsys)
    assert (code, broken(document)) == (1, ["credentials"])
    assert hint in document["checks"]["credentials"]["hint"]


@pytest.fixture(scope="module")
def limited_server() -> Iterator[servers.Server]:
    """SeaweedFS with credentials that may not do everything: `reader`, `island-a`, `aggregator`."""
    everywhere = [f"Read:{servers.BUCKET}", f"List:{servers.BUCKET}"]
    rights = {
        "reader": everywhere,
        "island-a": [*everywhere, f"Write:{servers.BUCKET}/run/islands/a/*"],
        "aggregator": [*everywhere, f"Write:{servers.BUCKET}/run/fragments/*"],
    }
    with servers.mortal_seaweedfs() as outage:
        path = Path(outage.folder, "s3.json")
        config = json.loads(path.read_text())
        for name, actions in rights.items():
            key = {"accessKey": name, "secretKey": f"secret-of-{name}"}
            config["identities"].append({"name": name, "credentials": [key], "actions": actions})
        path.write_text(json.dumps(config))
        outage.begin()
        outage.end()
        yield outage.server


@pytest.mark.xdist_group("seaweedfs")
@pytest.mark.parametrize(
    ("who", "words", "code", "roles"),
    [
        ("reader", (), 1, []),
        ("island-a", (), 1, []),  # Nobody said which island it is.
        ("island-a", ("--island", "a"), 0, ["island"]),
        ("island-a", ("--island", "b"), 1, []),
        ("aggregator", (), 0, ["aggregator"]),
        ("aggregator", ("--island", "a"), 1, ["aggregator"]),
    ],
)
def test_what_a_limited_credential_can_be(
    who: str,
    words: tuple[str, ...],
    code: int,
    roles: list[str],
    limited_server: servers.Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, value in limited_server.env.items():
        monkeypatch.setenv(variable, value)
    url = f"s3://{servers.BUCKET}/run"
    with monkeypatch.context() as limited:
        limited.setenv("AWS_ACCESS_KEY_ID", who)
        limited.setenv("AWS_SECRET_ACCESS_KEY", f"secret-of-{who}")
        found, document = diagnosed(url, *words, capsys=capsys)
    assert (found, document["roles"]) == (code, roles)
    assert ("role island" in broken(document)) is (code == 1)
    if roles:
        assert document["checks"]["race"]["verdict"] == "ok"
        assert document["checks"]["cleanup"]["verdict"] == "ok"
    assert names(url) == []


SKEWED = b"<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message></Error>"


@pytest.mark.xdist_group("seaweedfs")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (WireFault("GET", "status", times=1_000, status=403, body=SKEWED), "finds this machine's clock wrong"),
        (WireFault("GET", "status", times=1_000, status=503), "cannot answer now"),
        (WireFault("GET", "refuse", times=1_000), "did not answer"),
    ],
)
def test_a_store_that_does_not_answer(
    fault: WireFault,
    said: str,
    seaweedfs_server: servers.Server,
    server_url: Where,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "BUDGET_S", 0.0)
    url = server_url(seaweedfs_server)
    with FaultProxy(seaweedfs_server.port) as proxy:
        proxy.add(fault)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        code, document = diagnosed(url, capsys=capsys)
    assert (code, broken(document)) == (4, ["answer"])
    assert said in document["checks"]["answer"]["what"]


@pytest.mark.xdist_group("seaweedfs")
def test_lost_answers_are_ridden_out_and_counted(
    seaweedfs_server: servers.Server,
    server_url: Where,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = server_url(seaweedfs_server)
    with FaultProxy(seaweedfs_server.port) as proxy:
        # The tenth name is that of the race: one racer's answer is lost, and it is still told rightly how it ended.
        proxy.add(WireFault("PUT", "drop_answer", path="/000010"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        code, document = diagnosed(url, capsys=capsys)
        assert names(url) == []
    assert (code, broken(document)) == (0, [])
    assert document["checks"]["race"]["verdict"] == "ok"
    assert document["checks"]["reliability"]["figures"]["repeated"] >= 1


@pytest.mark.xdist_group("seaweedfs")
def test_a_killed_doctor_disturbs_no_run(seaweedfs_server: servers.Server, server_url: Where, tmp_path: Path) -> None:
    url = server_url(seaweedfs_server)
    words = [sys.executable, "-m", "diloco_blob.cli.main", "doctor", url, "--island", "island-0"]
    endless = ("--racers", "2", "--rounds", "1", "--samples", "10000")
    with subprocess.Popen([*words, *endless], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ok       consistency"):  # Now it takes its samples, of which it would write 10,000.
                break
        os.kill(process.pid, signal.SIGKILL)
    left = names(url)
    assert left
    assert all(f"/{MARK}/" in key for key in left)
    settings = "[sync]\nsync_every = 5\n[policy]\ngrace_s = 10.0\ndeadline_s = 60.0\n[collect]\nkeep_versions = 1\n"
    (tmp_path / "run.toml").write_text(settings)
    run = ("--islands", "2", "--run", url, "--settings", "run.toml", TOY, "--steps", "10")
    for launch in (("launch", *run), ("verify", url), ("verify", url, "--replay"), ("gc", url)):
        done = cli(*launch, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads(cli("status", url, "--json", folder=tmp_path).stdout)
    assert [(island["name"], island["state"]) for island in status["islands"]] == [
        ("island-0", "done"),
        ("island-1", "done"),
    ]
    assert [fragment["version"] for fragment in status["fragments"]] == [2]
    before = [key for key in names(url) if MARK not in key]
    again = cli("doctor", url, *QUICK, folder=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [key for key in names(url) if MARK not in key] == before
    assert set(left) <= set(names(url)), "what is younger than a day may be of a doctor that is still at it"
