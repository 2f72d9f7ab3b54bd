"""The aggregator's half in a clean virtual environment: the base install, no torch, no cloud SDK, no greenlet."""

import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MERGE = """
import importlib.util, pkgutil, sys
import diloco_blob, diloco_blob.aggregate, diloco_blob.cli
from diloco_blob.protocol.audit import audit
from diloco_blob.testing.fleet import Fleet
from diloco_blob.core.settings import Codec, Policy, Settings, Sync

for name in ("torch", "boto3", "google.cloud.storage", "greenlet"):
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    assert found is None, f"{name} is installed: this environment proves nothing"
skipped = {"diloco_blob.island.binding", "diloco_blob.store.s3", "diloco_blob.store.s3_errors", "diloco_blob.store.gcs"}
for module in pkgutil.walk_packages(diloco_blob.__path__, "diloco_blob."):
    if module.name not in skipped and not module.name.startswith("diloco_blob.sim."):
        importlib.import_module(module.name)
fleet = Fleet(Settings(sync=Sync(sync_every=5), up=Codec(name="int4"), policy=Policy(quorum=2)), num_islands=2)
fleet.add_all()
fleet.run(10)
assert [len(report.merged) for report in fleet.reports] == [2, 2]
assert not audit(fleet.bare).findings
try:
    diloco_blob.Island
except diloco_blob.InvalidSettings as error:
    print(error)
"""


@pytest.mark.slow
def test_the_aggregators_half_works_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(ROOT)], check=True, timeout=150)
    done = subprocess.run(
        [python, "-W", "error", "-c", MERGE], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "an island needs torch (pip install torch)\n"
    command = [tmp_path / "venv" / "bin" / "diloco-blob", "status", str(tmp_path / "nothing")]
    status = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert status.returncode == 1
    assert "there is no run" in status.stderr
    command[1:] = ["simulate", "protocol", "--seeds", "1"]
    simulated = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (simulated.returncode, simulated.stdout) == (2, "")
    assert "pip install greenlet" in simulated.stderr
