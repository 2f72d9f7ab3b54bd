"""The same run, with nothing but the URL changed, ends with the same weights: a folder, real S3 and GCS servers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import servers
from commands import ROOT, cli

SETTINGS = """
[sync]
sync_every = 6
[up]
name = "int4"
error_feedback = true
[down]
name = "int8"
error_feedback = true
[outer]
momentum = 0.6
[policy]
quorum = 3        # all three in every round: then nothing depends on time
grace_s = 100.0
deadline_s = 100.0
"""
SMALL = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--batch", "4", "--eval-batches", "2")


def train(url: str, folder: Path) -> tuple[bytes, str]:
    """The demo in small; its exported weights and the line that says how good they are."""
    folder.mkdir()
    (folder / "run.toml").write_text(SETTINGS)
    words = (
        *("launch", "--islands", "3", "--run", url, "--settings", "run.toml", "--export", "model"),
        *(str(ROOT / "workers" / "train.py"), "--steps", "18", *SMALL),
    )
    done = cli(*words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = cli("verify", url, folder=folder)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("held-out bits per byte")]
    return (folder / "model" / "model.safetensors").read_bytes(), line.partition(" (")[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("seaweedfs")
def test_a_folder_s3_and_gcs_end_with_the_same_weights(
    seaweedfs_server: servers.Server,
    fake_gcs_server: servers.Server,
    server_url: Callable[[servers.Server], str],
    tmp_path: Path,
) -> None:
    weights, line = train("run", tmp_path / "folder")
    assert "8.000 at version 0" in line
    assert train(server_url(seaweedfs_server), tmp_path / "s3") == (weights, line)
    assert train(server_url(fake_gcs_server), tmp_path / "gcs") == (weights, line)
