"""The simulation itself: thousands of histories without a broken promise, and each of them the same for ever."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from diloco_blob.core.errors import DilocoError, InvalidSettings, NotFound
from diloco_blob.core.ids import SeededIds
from diloco_blob.sim import campaign, faults
from diloco_blob.sim.protocol import Outcome, simulate
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.memory import MemoryStore, forget
from diloco_blob.store.probe import probe

BLOCK, BLOCKS = 50, 60


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_promise_holds(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        outcome = simulate(seed)
        assert outcome.ok, f"seed {seed}: {outcome.promise}: {outcome.what}"


def test_seeds_meet_every_fault_and_every_accident() -> None:
    wanted = {"kill", "stall", "zombie", "outage", "collector", "island ended: fenced"}
    wanted |= set(faults.ANY + faults.FOR_PUTS + faults.FOR_CREATES + faults.FOR_BODIES)
    for seed in range(10_000, 10_400):
        wanted -= {name.partition(",")[0] for name in simulate(seed).counts}
        if not wanted:
            return
    pytest.fail(f"never met: {sorted(wanted)}")


def trace_elsewhere(seed: int, hash_seed: str) -> bytes:
    words = [sys.executable, "-m", "diloco_blob.cli.main", "simulate", "protocol", "--seeds", "1", "--trace", "--json"]
    done = subprocess.run(
        [*words, "--from", str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("seed", [3, 7, 21, 42])
def test_the_same_seed_gives_the_same_events_in_any_process(seed: int) -> None:
    first = trace_elsewhere(seed, "1")
    assert first == trace_elsewhere(seed, "2")
    assert first.startswith("\n".join(campaign.trace(seed)).encode())


def test_seeds_come_in_order_from_any_number_of_processes() -> None:
    alone: list[Outcome] = list(campaign.outcomes(5, 20))
    assert [outcome.seed for outcome in alone] == list(range(5, 25))
    assert list(campaign.outcomes(5, 20, jobs=2)) == alone


# ---- stores that are outside the contract


class StaleStore(MemoryStore):
    """A double: its readers see the bucket as it was some operations ago, as caches in front of gateways have it."""

    def __init__(self, url: str, stale: str) -> None:
        super().__init__(url)
        self._stale = stale
        self._hidden: dict[str, int] = {}

    def put(self, key: str, data: bytes, **words: object) -> ObjectInfo:
        info = super().put(key, data, **words)  # type: ignore[arg-type]
        self._hidden.setdefault(key, 1)
        return info

    def _is_hidden(self, operation: str, key: str) -> bool:
        left = self._hidden.get(key, 0)
        if operation != self._stale or left == 0:
            return False
        self._hidden[key] = left - 1
        return True

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        if self._is_hidden("get", key):
            raise NotFound(f"no object {key}")
        return super().get(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, start_after=start_after):
            if not self._is_hidden("list", info.key):
                yield info


@pytest.mark.parametrize("stale", ["get", "list"])
def test_a_store_with_stale_reads_is_refused(stale: str) -> None:
    store = StaleStore("memory://stale", stale)
    with pytest.raises(InvalidSettings, match="cannot carry a run"):
        probe(store, SeededIds(1))
    forget("memory://stale")


def test_the_simulated_store_keeps_the_contract() -> None:
    """Else the findings would be about the simulation."""
    try:
        assert probe(MemoryStore("memory://sound"), SeededIds(1))
    except DilocoError as error:
        pytest.fail(str(error))
    finally:
        forget("memory://sound")
