"""`launch` on real object stores: the toy run of `test_launch`, with nothing but the URL changed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import servers
from commands import cli

WORKER = Path(__file__).with_name("toy_worker.py")
SETTINGS = """
[sync]
sync_every = 5
num_fragments = 2
[policy]
grace_s = 10.0
deadline_s = 60.0
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("seaweedfs", marks=pytest.mark.xdist_group("seaweedfs")),
        pytest.param("fake_gcs", marks=pytest.mark.xdist_group("fake-gcs")),
    ],
)
def test_a_bucket_instead_of_a_folder(
    name: str, request: pytest.FixtureRequest, server_url: Callable[[servers.Server], str], tmp_path: Path
) -> None:
    url = server_url(request.getfixturevalue(f"{name}_server"))
    (tmp_path / "run.toml").write_text(SETTINGS)
    words = ("--islands", "2", "--run", url, "--settings", "run.toml", "--export", "model", WORKER, "--steps", "10")
    done = cli("launch", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out bits per byte   8.000 at version 0, 2.500 at version 2" in done.stdout
    [workdir] = (tmp_path / "diloco-runs").iterdir()
    assert (workdir / "logs" / "island-0.log").exists()
    assert (workdir / "checkpoints" / "island-1").is_dir()
    assert (tmp_path / "model" / "model.safetensors").exists()
    verified = cli("verify", url, folder=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    status = json.loads(cli("status", url, "--json", folder=tmp_path).stdout)
    assert [island["state"] for island in status["islands"]] == ["done", "done"]


@pytest.mark.xdist_group("moto")
def test_no_such_bucket_is_one_line(
    moto_server: servers.Server, server_url: Callable[[servers.Server], str], tmp_path: Path
) -> None:
    server_url(moto_server)
    url = "s3://no-such-bucket/run"
    for words in (("launch", "--islands", "1", "--run", url, WORKER), ("status", url), ("export", url, "model")):
        done = cli(*words, folder=tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("diloco-blob: error: there is no bucket 'no-such-bucket'")
        assert done.stderr.count("\n") == 1
