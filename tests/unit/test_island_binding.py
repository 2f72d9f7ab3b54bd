"""`Island` around a real torch loop, in a real process where it has to be."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diloco_blob import InvalidSettings, Island, open_store
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import read_run
from diloco_blob.protocol.records import IslandStatus, decode

SCRIPT = """
import sys, time, torch
from diloco_blob import Island
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Island(sys.argv[1], model=model, optimizer=optimizer, name="a") as island:
    print("joined", flush=True)
    while True:
        island.step(tokens=1)
        time.sleep(0.01)
"""


def make(tmp_path: Path) -> Island:
    model = torch.nn.Linear(2, 2)
    return Island(str(tmp_path / "run"), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), name="a")


def status(tmp_path: Path) -> IslandStatus:
    store = open_store(str(tmp_path / "run"))
    return decode(store.get(keys.status("a"))[0], IslandStatus, run=read_run(store).digest)


def test_sigterm_ends_a_plain_loop_as_ctrl_c_does_and_the_island_says_that_it_left(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert status(tmp_path).state == "stopped"
    assert open_store(str(tmp_path / "run")).head(keys.departure("a", 0, 0)).size > 0


def test_a_handler_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with make(tmp_path):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_evaluation_without_bits_is_the_loss_in_bits(tmp_path: Path) -> None:
    with make(tmp_path) as island:
        island.record_eval(loss=1.3862943611198906)  # 2 ln 2
    said = status(tmp_path)
    assert said.last_eval is not None
    assert said.last_eval.bits_per_byte == pytest.approx(2.0)
    assert said.state == "done"


def test_an_island_outside_its_with_block_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="has not joined"):
        make(tmp_path).step(tokens=1)
