"""What one hostile island of eight does to a run, and what clipping and the trimmed mean make of it.

    python benchmarks/hostile_island.py [--seeds 3] [--rounds 10] [--processes 2]

A small byte-level GPT of `workers/` on Python's own text: eight islands, each round 15 inner steps of AdamW on each,
real payloads and receipts in a bucket in memory, and one real pass of the aggregator. In every round one island sends
*garbage* (normal noise of 100 times the norm of its own pseudo-gradient), or *reversed* (its own pseudo-gradient times
−10), or is honest like the others. Printed: held-out bits per byte at the end, median and range over seeds; it starts
at 8.000, and is cut at 20, also where a model that diverged has no finite loss any more. Last column: what a merge
costs, one pass over 4 million parameters from eight honest islands, the fastest of three.
"""

import argparse
import itertools
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch

from diloco_blob.aggregate import aggregate
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Merge, Outer, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.heads import RunInfo, find_head
from diloco_blob.protocol.layout import fragment_layout, make_layout
from diloco_blob.protocol.records import FORMAT, ObjectRef, Receipt, encode
from diloco_blob.store.memory import MemoryStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.wire import FloatArray, codec_for, digest, encode_payload, read_tensors

sys.path.insert(0, str(Path(__file__).parent.parent / "workers"))
from data import held_out_batches, load, train_batch
from gpt import GPT, GPTConfig

NUM_ISLANDS, HOSTILE = 8, 3
STEPS, BATCH = 15, 4
MODEL = GPTConfig(context=64, layers=2, width=64, heads=2)
BITS_MAX = 20.0
ATTACKS = ("none", "garbage", "reversed")
MERGES = {
    "mean": Merge(weights="uniform"),
    "clip": Merge(weights="uniform", clip="median"),
    "trimmed_mean": Merge(rule="trimmed_mean"),
    "clip + trimmed_mean": Merge(rule="trimmed_mean", clip="median"),
}

_NUMBERS = itertools.count()

Arrays = dict[str, FloatArray]


class Case(NamedTuple):
    """One run."""

    attack: str
    merge: str
    seed: int
    rounds: int


class Bucket:
    """A run in memory, to which islands contribute one after the other."""

    def __init__(self, merge: Merge, initial: Arrays, seed: int) -> None:
        settings = Settings(
            sync=Sync(sync_every=STEPS),
            merge=merge,
            outer=Outer(lr=0.7, momentum=0.6),
            policy=Policy(islands=NUM_ISLANDS, quorum=NUM_ISLANDS),
        )
        self.clock, self.ids = VirtualClock(), SeededIds(seed)
        # One bucket for each case, also of one process.
        self.store = MemoryStore(f"memory://hostile-{next(_NUMBERS)}", clock=self.clock)
        tensors = make_layout([(name, array.shape, "float32") for name, array in initial.items()], 1)
        self.run: RunInfo = create_run(self.store, settings, tensors, initial, ids=self.ids, created_by="benchmark")
        self.layout = fragment_layout(tensors, 0)
        self.codec = codec_for(settings.up, 1)
        self.version = 0

    def send(self, island: str, deltas: Arrays) -> None:
        """One contribution, as an island would write it."""
        seq = self.version + 1
        data = encode_payload(((name, deltas[name]) for name, _ in self.layout), self.layout, self.codec)
        part = ObjectRef(key=keys.payload(island, 0, seq, 0, digest(data)), digest=digest(data), size=len(data))
        receipt = Receipt(
            format=FORMAT,
            run=self.run.digest,
            write_id=self.ids.fresh(),
            island=island,
            generation=1,
            fragment=0,
            seq=seq,
            base_version=self.version,
            steps=STEPS,
            tokens=STEPS * BATCH * MODEL.context,
            step_to=STEPS * seq,
            tokens_to=STEPS * BATCH * MODEL.context * seq,
            cursor="",
            parts=(part,),
        )
        self.store.put(part.key, data)
        self.store.put(keys.receipt(island, 0, seq), encode(receipt), if_absent=True)

    def aggregate(self) -> float:
        """One pass; the seconds that it took."""
        started = monotonic()
        [report] = aggregate(self.store, clock=self.clock, ids=self.ids, run=self.run, drain=True)
        seconds = monotonic() - started
        assert report.version == self.version + 1
        assert len(report.merged) == NUM_ISLANDS, "an attack of finite values is merged, not rejected"
        self.version = report.version
        return seconds

    def params(self) -> Arrays:
        """The newest weights."""
        key = find_head(self.store, self.run, 0, hint=self.version).weights.params.key
        return read_tensors(self.store.get(key)[0], self.layout)


def attacked(attack: str, deltas: Arrays, seed: int) -> Arrays:
    """What the hostile island sends instead of its own pseudo-gradient."""
    if attack == "reversed":
        return {name: -10 * delta for name, delta in deltas.items()}
    rng = np.random.default_rng(seed)
    noise = {name: rng.standard_normal(delta.shape, np.float32) for name, delta in deltas.items()}
    scale = np.float32(100 * norm(deltas) / norm(noise))
    return {name: scale * values for name, values in noise.items()}


def norm(arrays: Arrays) -> float:
    """L2 norm over all tensors."""
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays.values())))


def run(case: Case) -> float:
    """Train eight islands for some rounds; held-out bits per byte at the end."""
    torch.set_num_threads(1)
    text, held_out = load([], 4_000_000)
    torch.manual_seed(case.seed)
    model = GPT(MODEL, case.seed)
    named = dict(model.named_parameters())
    bucket = Bucket(MERGES[case.merge], {name: p.detach().numpy().copy() for name, p in named.items()}, case.seed)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1) for _ in range(NUM_ISLANDS)
    ]  # Each keeps its island's moments; the weights are set anew for each island and round.
    for number in range(case.rounds):
        mark = bucket.params()
        for island, optimizer in enumerate(optimizers):
            with torch.no_grad():
                for name, p in named.items():
                    p.copy_(torch.from_numpy(mark[name]))
            for step in range(number * STEPS, (number + 1) * STEPS):
                batch = train_batch(text, f"{case.seed}/{island}", step, batch=BATCH, context=MODEL.context)
                model.loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            deltas = {name: mark[name] - p.detach().numpy() for name, p in named.items()}
            if island == HOSTILE and case.attack != "none":
                deltas = attacked(case.attack, {n: np.nan_to_num(d) for n, d in deltas.items()}, number)
            if not all(np.isfinite(delta).all() for delta in deltas.values()):
                return BITS_MAX  # The model is beyond repair.
            bucket.send(f"island-{island}", deltas)
        bucket.aggregate()
    with torch.no_grad():
        for name, values in bucket.params().items():
            named[name].copy_(torch.from_numpy(values))
        batches = held_out_batches(held_out, 16, batch=16, context=MODEL.context)
        nats = statistics.mean(float(model.loss(batch)) for batch in batches)
    bits = nats / float(np.log(2))
    return min(bits, BITS_MAX) if np.isfinite(bits) else BITS_MAX


def cost(merge: Merge) -> float:
    """Seconds of the fastest of three passes over eight islands' contributions of 4 million parameters."""
    shapes = {f"layer.{number}": (1024, 1024) for number in range(4)}
    rng = np.random.default_rng(0)
    bucket = Bucket(merge, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, 0)
    seconds = []
    for _ in range(3):
        for island in range(NUM_ISLANDS):
            bucket.send(f"island-{island}", {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()})
        seconds.append(bucket.aggregate())
    return min(seconds)


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description="One hostile island of eight.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    started = monotonic()
    cases = [Case(a, m, seed, args.rounds) for seed in range(args.seeds) for a in ATTACKS for m in MERGES]
    with ProcessPoolExecutor(args.processes) as pool:
        outcomes = dict(zip(cases, pool.map(run, cases), strict=True))
    num = sum(p.numel() for p in GPT(MODEL).parameters())
    print(
        f"{num:,} parameters, {NUM_ISLANDS} islands, {args.rounds} rounds of {STEPS} steps of {BATCH} × "
        f"{MODEL.context} bytes, seeds 0 to {args.seeds - 1}; {monotonic() - started:.0f} s"
    )
    print("held-out bits per byte: median (lowest … highest)")
    print(f"{'':<20}" + "".join(f"{attack:>26}" for attack in ATTACKS) + f"{'seconds of a pass':>20}")
    for name, merge in MERGES.items():
        cells = []
        for attack in ATTACKS:
            bits = sorted(outcomes[Case(attack, name, seed, args.rounds)] for seed in range(args.seeds))
            cells.append(f"{statistics.median(bits):.3f} ({bits[0]:.3f} … {bits[-1]:.3f})")
        print(f"{name:<20}" + "".join(f"{cell:>26}" for cell in cells) + f"{cost(merge):>20.2f}")


if __name__ == "__main__":
    main()
