"""What it costs when contributions are never merged, and what owing them again is worth.

    PYTHONPATH=benchmarks python benchmarks/lost_contributions.py [--steps 600] [--seeds 2]

The setting of `benchmarks/quality` (0.1 M parameters, 4 islands, `sync_every` 25, AdamW, averaging, int4 up with error
feedback): real islands and real passes of the aggregator in lockstep. About 30 % of all contributions, drawn by seed
from three of the islands, reach the aggregator a round late where `policy.max_staleness` is 0, so each is skipped, on
record, as stale. Printed: held-out bits per byte at the end without loss, with, and with `sync.owe_unmerged`; median
over seeds.
"""

import argparse
import hashlib
import statistics
import sys
from pathlib import Path

import torch

from diloco_blob.aggregate import aggregate
from diloco_blob.core.errors import NotFound
from diloco_blob.store.base import ObjectInfo, ObjectStore

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "workers"))
from quality import training
from quality.lockstep import Islands

SHARE = 0.3
BASE: training.Flat = {
    "merge.weights": "uniform",
    "outer.optimizer": "sgd",
    "outer.lr": 1.0,
    "outer.momentum": 0.0,
    "sync.sync_every": 25,
    "up.name": "int4",
    "up.error_feedback": True,
    "policy.max_staleness": 0,
    "policy.quorum": 1,
    "policy.grace_s": 0.0,
    "policy.active_versions": 1,
}
CASES: dict[str, tuple[float, training.Flat]] = {
    "nothing lost": (0.0, {}),
    "30 % lost": (SHARE, {}),
    "30 % lost, owed again": (SHARE, {"sync.owe_unmerged": True}),
    "30 % lost, carry": (SHARE, {"sync.adopt": "carry"}),
    "30 % lost, carry, owed again": (SHARE, {"sync.adopt": "carry", "sync.owe_unmerged": True}),
}


class _Hiding:
    """A store in which some receipts are not there yet."""

    def __init__(self, store: ObjectStore, share: float, seed: int, version: int) -> None:
        self._store, self._share, self._seed, self._version = store, share, seed, version

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        self._look(key)
        return self._store.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        self._look(key)
        return self._store.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        self._look(key)
        return self._store.head(key)

    def _look(self, key: str) -> None:
        """Contribution number v is an island's for version v; the pass after that finds it."""
        island, _, number = key.partition("/receipts/")
        if number and not island.endswith("island-0"):
            draw = int.from_bytes(hashlib.sha256(f"{self._seed}/{key}".encode()).digest()[:4])
            due = int(number.rpartition("/")[2].removesuffix(".json"))
            if draw < self._share * 4 / 3 * 2**32 and due == self._version:
                raise NotFound(f"{key} is late")

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


class LossyIslands(Islands):
    """Islands whose aggregator does not see some of what was sent in time; island-0's always arrives."""

    share, seed = 0.0, 0
    skipped = sent = 0

    def _aggregate(self, fragment: int) -> None:
        version = self._hints.get(fragment, 0) + 1
        store = _Hiding(self._store, self.share, self.seed, version)
        [report] = aggregate(
            store,  # type: ignore[arg-type]
            run=self._run,
            clock=self._clock,
            ids=self._ids,
            fragment=fragment,
            hints=self._hints,
        )
        assert report.action == "merged", report
        LossyIslands.sent += len(self._cores)
        LossyIslands.skipped += len(report.skipped)


def bits(case: str, seed: int, steps: int, lr: float) -> float:
    """Held-out bits per byte of one run."""
    LossyIslands.share, LossyIslands.seed = CASES[case][0], seed
    LossyIslands.sent = LossyIslands.skipped = 0
    training.Islands = LossyIslands  # type: ignore[misc]
    config = training.Config(size="0.1M", islands=4, steps=steps, settings=BASE | CASES[case][1], lr=lr, seed=seed)
    found = training.run(config).bits
    print(f"  {case}, seed {seed}: {found:.3f}, {LossyIslands.skipped} of {LossyIslands.sent} skipped", flush=True)
    assert found is not None
    return found


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.012)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        found = [bits(case, seed, args.steps, args.lr) for seed in range(args.seeds)]
        print(f"{case:30} {statistics.median(found):.3f}", flush=True)


if __name__ == "__main__":
    main()
