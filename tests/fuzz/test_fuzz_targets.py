"""What was ever found stays fixed, and a fixed number of coverage-guided inputs for each reader finds nothing new."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from targets import TARGETS

HERE = Path(__file__).parent
FOUND = sorted(path for path in (HERE / "corpus").rglob("*") if path.is_file())
RUNS = {"record": 20_000, "tensorfile": 10_000, "frame": 10_000, "payload": 2_000, "name": 20_000, "round": 200}


@pytest.mark.parametrize("path", FOUND, ids=[f"{path.parent.name}-{path.name}" for path in FOUND])
def test_what_was_found_stays_fixed(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_valid_bytes_pass(target: str) -> None:
    for seed in TARGETS[target].seeds():
        TARGETS[target].run(seed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="atheris comes for Linux only")
@pytest.mark.parametrize("target", TARGETS)
def test_a_fixed_number_of_inputs_finds_nothing(target: str, tmp_path: Path) -> None:
    words = [sys.executable, str(HERE / "fuzz.py"), target, "--runs", str(RUNS[target]), "--seed", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DONE" in done.stderr
    assert list(tmp_path.iterdir()) == [], "a crash was kept"
