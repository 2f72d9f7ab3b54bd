"""The reference program, killed with SIGKILL at chosen steps: the run ends with the weights of an undisturbed one."""

from pathlib import Path

import pytest
from commands import ROOT, TINY, cli

SETTINGS = """
[sync]
sync_every = 6
[up]
name = "int4"
error_feedback = true
[down]
name = "int8"
error_feedback = true
[policy]
quorum = 2
grace_s = 100.0
deadline_s = 100.0
"""
WRAPPER = """
import os, pathlib, signal, sys
sys.path.insert(0, {workers!r})
import train
from diloco_blob import Island

kill_at, marker, real = set({kill_at!r}), pathlib.Path({marker!r}), Island.step

def step(self, **words):
    real(self, **words)
    seen = marker.read_text().split() if marker.exists() else []
    if self.name == "island-1" and self.steps in kill_at and str(self.steps) not in seen:
        marker.write_text(" ".join([*seen, str(self.steps)]))
        os.kill(os.getpid(), signal.SIGKILL)

Island.step = step
sys.exit(train.main())
"""


def run(folder: Path, kill_at: tuple[int, ...]) -> tuple[bytes, str]:
    folder.mkdir()
    (folder / "run.toml").write_text(SETTINGS)
    script = folder / "script.py"
    workers, marker = str(ROOT / "workers"), str(folder / "killed")
    script.write_text(WRAPPER.format(workers=workers, kill_at=kill_at, marker=marker))
    words = ("--islands", "2", "--run", "run", "--settings", "run.toml", "--export", "model", str(script))
    done = cli("launch", *words, "--steps", "18", *TINY, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    verified = cli("verify", "run", folder=folder)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert (folder / "killed").exists() == bool(kill_at)
    return (folder / "model" / "model.safetensors").read_bytes(), verified.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sigkill_changes_nothing(tmp_path: Path) -> None:
    """Before the first exchange, right after one, in the middle of an interval, several times."""
    undisturbed, report = run(tmp_path / "undisturbed", ())
    assert "6 contributions merged, 0 skipped, 0 rejected, 0 pending" in report
    for kill_at in ((3,), (6, 8), (11, 12, 17)):
        killed, same_report = run(tmp_path / f"killed-{kill_at[0]}", kill_at)
        assert "6 contributions merged, 0 skipped, 0 rejected, 0 pending" in same_report
        assert killed == undisturbed, f"killed after steps {kill_at}"
