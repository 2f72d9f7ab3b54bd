"""A run made by hand: version 0 of a tiny model, and islands' contributions as exactly the bytes that a test wants.

For tests of whatever reads receipts and payloads; nothing trains here (`fleet.Fleet` does that).
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diloco_blob.aggregate import FragmentReport, aggregate
from diloco_blob.aggregate.context import pass_on
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.collecting import horizon
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.heads import Head, RunInfo, find_head
from diloco_blob.protocol.layout import fragment_layout, make_layout
from diloco_blob.protocol.records import (
    FORMAT,
    Close,
    Commit,
    Generation,
    ObjectRef,
    Receipt,
    Watermark,
    decode,
    encode,
)
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.memory import MemoryStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.wire import FloatArray, Layout, codec_for, digest, encode_payload, read_tensors

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (8, 4),
    "layer.weight": (4, 4),
    "layer.bias": (4,),
    "scale": (),
}
"""Tensors of the toy model, among them one without dimensions."""

_NUMBERS = itertools.count()


def random_tensors(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, FloatArray]:
    """Normally distributed tensors of the given shapes."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


@dataclass
class ToyRun:
    """A run in memory.

    Args:
        settings: Of the run; taken as they are.
        shapes: The model's tensors.
        seed: Of the initial weights and of all ids.
    """

    settings: Settings = field(default_factory=Settings)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    seed: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        # Not id(self), which a later object may have again while the bucket is still there.
        self.store: ObjectStore = MemoryStore(f"memory://toy-{next(_NUMBERS)}", clock=self.clock)
        self.ids = SeededIds(self.seed)
        self.initial = random_tensors(self.seed, self.shapes)
        tensors = make_layout(
            [(name, shape, "float32") for name, shape in self.shapes.items()], self.settings.sync.num_fragments
        )
        self.run: RunInfo = create_run(self.store, self.settings, tensors, self.initial, ids=self.ids, created_by="toy")
        self._sent: dict[tuple[str, int], int] = {}

    def layout(self, fragment: int = 0) -> Layout:
        """Names and shapes of a fragment's tensors, in order."""
        return fragment_layout(self.run.run.tensors, fragment)

    def join(self, island: str) -> None:
        """Start an island: its first generation."""
        record = Generation(
            format=FORMAT,
            run=self.run.digest,
            write_id=self.ids.fresh(),
            island=island,
            generation=1,
            host="toy",
            pid=1,
        )
        self.store.put(keys.generation(island, 1), encode(record), if_absent=True)

    def payload(self, deltas: Mapping[str, FloatArray], fragment: int = 0, base_version: int = 0) -> bytes:
        """Pseudo-gradients as the run's uplink codec sends them."""
        layout = self.layout(fragment)
        codec = codec_for(self.settings.up, base_version + 1)
        return encode_payload(((name, deltas[name]) for name, _ in layout), layout, codec)

    def send(
        self,
        island: str,
        deltas: Mapping[str, FloatArray] | bytes | int,
        *,
        fragment: int = 0,
        base_version: int = 0,
        upload: bool = True,
        **changes: Any,
    ) -> Receipt:
        """Contribute: upload a payload and create the receipt with the island's next number.

        Args:
            island: Who.
            deltas: Pseudo-gradients by tensor; or a seed for random ones; or the payload's bytes themselves.
            fragment: To which fragment.
            base_version: From which version.
            upload: Whether the payload is really there.
            changes: Fields of the receipt that are to be different.
        """
        if isinstance(deltas, int):
            deltas = random_tensors(deltas, self.shapes)
        data = deltas if isinstance(deltas, bytes) else self.payload(deltas, fragment, base_version)
        seq = self.next_seq(island, fragment)
        name = digest(data)
        ref = ObjectRef(key=keys.payload(island, fragment, seq, 0, name), digest=name, size=len(data))
        if upload:
            self.store.put(ref.key, data)
        fields: dict[str, Any] = {
            "format": FORMAT,
            "run": self.run.digest,
            "write_id": self.ids.fresh(),
            "island": island,
            "generation": 1,
            "fragment": fragment,
            "seq": seq,
            "base_version": base_version,
            "steps": 10,
            "tokens": 640,
            "step_to": 10 * seq,
            "tokens_to": 640 * seq,
            "cursor": "",
            "parts": (ref,),
        }
        receipt = Receipt(**{**fields, **changes})
        self.store.put(keys.receipt(island, fragment, seq), encode(receipt), if_absent=True)
        return receipt

    def send_raw(self, island: str, receipt: bytes, fragment: int = 0) -> None:
        """Put any bytes where the island's next receipt belongs."""
        self.store.put(keys.receipt(island, fragment, self.next_seq(island, fragment)), receipt, if_absent=True)

    def next_seq(self, island: str, fragment: int = 0) -> int:
        """Take the island's next number."""
        self._sent[island, fragment] = self._sent.get((island, fragment), 0) + 1
        return self._sent[island, fragment]

    def aggregate(
        self, *, at: Callable[[str], None] = pass_on, store: ObjectStore | None = None, **options: Any
    ) -> FragmentReport:
        """One pass over fragment 0, or another one."""
        options.setdefault("fragment", 0)
        ids = SeededIds(1_000_000 + next(_NUMBERS))  # Another aggregator every time: other write ids.
        [report] = aggregate(store or self.store, clock=self.clock, ids=ids, run=self.run, at=at, **options)
        return report

    def head(self, fragment: int = 0) -> Head:
        """The newest version."""
        return find_head(self.store, self.run, fragment)

    def close(self, version: int, fragment: int = 0) -> Close:
        """The close of a version."""
        return decode(self.store.get(keys.close(fragment, version))[0], Close, run=self.run.digest)

    def commit(self, version: int, fragment: int = 0) -> Commit:
        """The commit of a version."""
        return decode(self.store.get(keys.commit(fragment, version))[0], Commit, run=self.run.digest)

    def params(self, version: int | None = None, fragment: int = 0) -> dict[str, FloatArray]:
        """The weights at a version; the newest by default."""
        if version is None:
            weights = self.head(fragment).weights
        else:
            weights = self.commit(version, fragment).weights if version else self.run.run.fragments[fragment]
        return read_tensors(self.store.get(weights.params.key)[0], self.layout(fragment))

    def audit(self, fragment: int = 0) -> dict[tuple[str, int], str]:
        """Walk the whole chain of a fragment and check every promise that can be checked from the bucket.

        Returns:
            What became of each contribution: merged, skipped or rejected, by island and number.
        """
        fate: dict[tuple[str, int], str] = {}
        parent = self.run.digest
        head = self.head(fragment)
        oldest = horizon(head.version, self.settings.collect.keep_versions)
        marks: dict[str, Watermark] = {}
        for version in range(1, head.version + 1):
            close_bytes, _ = self.store.get(keys.close(fragment, version))
            commit_bytes, _ = self.store.get(keys.commit(fragment, version))
            close, commit = self.close(version, fragment), self.commit(version, fragment)
            _check(close.parent == commit.parent == parent, "the chain is broken")
            _check(commit.close == digest(close_bytes), "the commit follows another close")
            for ref in (commit.weights.params, commit.outer, commit.update) if version >= oldest else ():
                data, info = self.store.get(ref.key)
                _check((digest(data), info.size) == (ref.digest, ref.size), f"{ref.key} is not what it should be")
            merged = [(entry.island, entry.seq) for entry in commit.merged]
            rejected = [(entry.island, entry.seq) for entry in commit.rejected]
            skipped = [(entry.island, entry.seq) for entry in close.skipped]
            chosen = [(entry.island, entry.seq) for entry in close.chosen]
            _check(sorted(merged + rejected) == sorted(chosen) == chosen, "a chosen contribution has no fate")
            for what, which in (("merged", merged), ("rejected", rejected), ("skipped", skipped)):
                for one in which:
                    _check(one not in fate, f"{one} was used twice")
                    fate[one] = what
            for island, mark in close.watermarks.items():
                before = marks.get(island, Watermark(seq=0, version=0)).seq
                news = {seq for name, seq in (*chosen, *skipped) if name == island}
                _check(news == set(range(before + 1, mark.seq + 1)), f"the watermark of {island} jumped")
            marks = close.watermarks
            parent = digest(commit_bytes)
        return fate


def _check(holds: bool, promise: str) -> None:  # noqa: FBT001 - like an assert, which -O would take away
    if not holds:
        raise AssertionError(promise)
