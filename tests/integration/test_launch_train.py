"""`launch` with the reference program: what the README promises, on a model that takes seconds."""

import json
from pathlib import Path

import pytest
from commands import ROOT, TINY, cli

SETTINGS = """
[sync]
sync_every = 4
num_fragments = 2
[up]
name = "int8"
error_feedback = true
[policy]
grace_s = 20.0
deadline_s = 60.0
"""


@pytest.mark.slow
def test_train_py(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "run.toml").write_text(SETTINGS)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    words = (
        *("launch", "--islands", "2", "--run", "run", "--settings", "run.toml", "--export", "model"),
        *(ROOT / "workers" / "train.py", "--data", "text.txt", "--steps", "12", *TINY),
    )
    done = cli(*words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out bits per byte   8.000 at version 0, " in done.stdout
    assert "what the model writes" in done.stdout
    assert cli("verify", "run", folder=tmp_path).returncode == 0
    status = json.loads(cli("status", "run", "--json", folder=tmp_path).stdout)
    assert status["eval"]["bits_per_byte"] < 8.0
    assert status["totals"]["steps"] == 24
    assert [fragment["version"] for fragment in status["fragments"]] == [3, 4] or status["totals"]["rounds"] >= 3.0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["width"] == 32
