"""Watches every effect on the bucket, and stops the world at the first that breaks a promise.

It keeps a model of its own of what the bucket must look like (heads, watermarks, receipts, what must not be deleted)
and asks no production code what is right: only the words (`protocol.records`, digests) are shared. What can only be
seen when all is over is looked at by `protocol.audit` afterwards.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from diloco_blob.core.errors import Conflict, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Close, Commit, Generation, ObjectRef, Receipt, Run, decode, record_digest
from diloco_blob.sim.arithmetic import Reference, differs
from diloco_blob.sim.world import Process, Violation, World
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.body import Body, body_bytes
from diloco_blob.store.memory import MemoryStore
from diloco_blob.wire import codec_for, decode_payload, digest, read_tensors, weights_digest
from diloco_blob.wire.types import AnyArray

_FRAGMENT = re.compile(r"fragments/(\d{4})/([a-z]+)/(\d{10})(?:-([0-9a-f]{32}))?\.")
_ISLAND = re.compile(r"islands/([^/]+)/([a-z]+)/(?:(\d{4})/)?(\d{6,10})(?:-\d+-([0-9a-f]{32}))?\.")
_COLLECTABLE = {"params", "outer", "updates", "payloads"}


@dataclass
class _Fragment:
    """What is known of one fragment."""

    digest: str
    """Of the head's commit."""
    opened_at: float
    version: int = 0
    weights: dict[int, str] = field(default_factory=dict)
    """Digest of each version's weights."""
    named: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Objects that each version names."""
    watermarks: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    """After each version."""
    close: Close | None = None
    """Of the version after the head."""
    reference: Reference | None = None
    """What its versions must be, where that can be told."""
    close_digest: str = ""


@dataclass
class Sent:
    """A receipt that exists."""

    digest: str
    receipt: Receipt
    at: float


class Auditor:
    """See the module's docstring.

    Args:
        world: Whose time it is.
        bucket: The bare bucket.
    """

    def __init__(self, world: World, bucket: MemoryStore) -> None:
        self.world = world
        self.bucket = bucket
        self.run: Run | None = None
        self.run_digest = ""
        self.num_effects = 0
        self.merged = 0
        self.on_receipt: Callable[[int], None] = lambda _: None
        """Told the fragment of each receipt as it appears."""
        self.fragments: list[_Fragment] = []
        self.sent: dict[tuple[str, int], list[Sent]] = {}
        """Receipts by island and fragment, in order."""
        self._generations: dict[str, int] = {}
        self._deleted: set[str] = set()

    def view(self, process: Process) -> "AuditedBucket":
        """The bucket, as this process's requests reach it."""
        return AuditedBucket(self, process)

    def pending(self) -> Iterator[tuple[str, int, Sent]]:
        """Receipts that no commit has disposed of: island, fragment, receipt."""
        for (island, fragment), receipts in self.sent.items():
            mark = self.fragments[fragment].watermarks[self.fragments[fragment].version].get(island, 0)
            for sent in receipts[mark:]:
                yield island, fragment, sent

    # ---- what islands say -----------------------------------------------------------------------------------------

    def adopted(self, island: str, fragment: int, version: int, weights: Mapping[str, AnyArray]) -> None:
        """An island holds these weights as those of a version."""
        state = self.fragments[fragment]
        found = weights_digest(weights)
        if version > state.version or found != state.weights[version]:
            raise Violation("weights", f"{island} holds other weights than those of version {version}")

    def wrote_model(
        self, island: str, fragment: int, mirror: Mapping[str, AnyArray], model: Mapping[str, AnyArray]
    ) -> None:
        """An island's model holds these weights right after it took a version whole."""
        if weights_digest(mirror) != weights_digest(model):
            raise Violation("weights", f"the model of {island} is not the version of fragment {fragment} that it took")

    def fenced(self, island: str, generation: int) -> None:
        """A process says that a newer start of its island exists."""
        if self._generations.get(island, 0) <= generation:
            raise Violation("fence", f"start {generation} of {island} gave up, but it is the newest")

    # ---- what happens to the bucket -------------------------------------------------------------------------------

    def wrote(self, process: Process, key: str, data: bytes, old: bytes | None) -> None:
        """An object was written."""
        self.num_effects += 1
        self._check_right(process, key)
        if old is not None and old != data and not key.endswith("/status.json"):
            raise Violation("write-once", f"{process.name} wrote {key} over other bytes")
        if key == keys.RUN:
            self._run_created(data)
        elif match := _FRAGMENT.match(key):
            fragment, kind, version, name = int(match[1]), match[2], int(match[3]), match[4]
            self._check_name(key, data, name)
            if kind == "closes":
                self._closed(key, data, fragment, version)
            elif kind == "commits":
                self._committed(key, data, fragment, version)
        elif match := _ISLAND.match(key):
            self._check_name(key, data, match[5])
            if match[2] == "receipts":
                self._received(key, data, match[1], int(match[3]), int(match[4]))
            elif match[2] == "generations":
                self._started(key, data, match[1], int(match[4]))
        if key in self._deleted and key.endswith(".json") and not key.startswith("probes/"):
            raise Violation("names", f"{key} was deleted, and exists again")

    def deleted(self, process: Process, key: str) -> None:
        """An object was deleted."""
        self.num_effects += 1
        self._deleted.add(key)
        if key.startswith("probes/"):
            return
        fragment_match, island_match = _FRAGMENT.match(key), _ISLAND.match(key)
        kind = (fragment_match or island_match or [""] * 3)[2]
        if kind not in _COLLECTABLE or self.run is None:
            raise Violation("records", f"{process.name} deleted {key}")
        if fragment_match:
            self._check_file(key, int(fragment_match[1]), int(fragment_match[3]))
        elif island_match:
            state = self.fragments[int(island_match[3])]
            mark = state.watermarks[self._horizon(state)].get(island_match[1], 0)
            if int(island_match[4]) > mark:
                raise Violation("collected", f"{process.name} deleted {key}, needed by what comes after {mark}")

    def _horizon(self, state: _Fragment) -> int:
        """The oldest version whose objects must be there."""
        keep = self.run.settings.collect.keep_versions if self.run else 0
        return max(0, state.version - keep + 1) if keep else 0

    def _check_file(self, key: str, fragment: int, version: int) -> None:
        state = self.fragments[fragment]
        if version > state.version:
            raise Violation("collected", f"{key} was deleted while its version is being made")
        for kept in range(self._horizon(state), state.version + 1):
            if key in state.named[kept]:
                raise Violation("collected", f"{key} was deleted, but version {kept} is to be kept")

    def _check_right(self, process: Process, key: str) -> None:
        if process.kind == "island":
            name = process.name.split("#")[0]
            creates = key == keys.RUN or key.startswith("probes/") or "/params/0000000000-" in key
            allowed = creates or key.startswith(keys.island(name))
        else:
            allowed = process.kind == "aggregator" and key.startswith(keys.FRAGMENTS)
        if not allowed:
            raise Violation("rights", f"{process.name}, {process.kind}, wrote {key}")

    def _check_name(self, key: str, data: bytes, name: str | None) -> None:
        if name is not None and digest(data) != name:
            raise Violation("names", f"{key} has bytes of digest {digest(data)}")

    def _check_ref(self, ref: ObjectRef, by: str) -> bytes:
        try:
            data, _ = self.bucket.get(ref.key)
        except NotFound:
            raise Violation("dangling", f"{by} names {ref.key}, which does not exist") from None
        if (digest(data), len(data)) != (ref.digest, ref.size):
            raise Violation("dangling", f"{by} names {ref.key} with other bytes than it has")
        return data

    def _run_created(self, data: bytes) -> None:
        self.run, self.run_digest = decode(data, Run), record_digest(data)
        for weights in self.run.fragments:
            self._check_ref(weights.params, keys.RUN)
            state = _Fragment(digest=self.run_digest, opened_at=self.world.now)
            state.weights[0], state.named[0] = weights.digest, (weights.params.key,)
            if Reference.applies(self.run.settings):
                state.reference = Reference(self.run, len(self.fragments))
            self.fragments.append(state)

    def _started(self, key: str, data: bytes, island: str, number: int) -> None:
        record = decode(data, Generation, run=self.run_digest)
        if (record.island, record.generation) != (island, number) or number != self._generations.get(island, 0) + 1:
            raise Violation("numbering", f"{key} follows start {self._generations.get(island, 0)}")
        self._generations[island] = number

    def _received(self, key: str, data: bytes, island: str, fragment: int, seq: int) -> None:
        receipt, state = decode(data, Receipt, run=self.run_digest), self.fragments[fragment]
        before = self.sent.setdefault((island, fragment), [])
        if (receipt.island, receipt.fragment, receipt.seq) != (island, fragment, seq) or seq != len(before) + 1:
            raise Violation("numbering", f"{key} follows receipt {len(before)}")
        if seq <= state.watermarks[state.version].get(island, 0):
            raise Violation("numbering", f"{key} is history before it exists")
        if before and receipt.generation < before[-1].receipt.generation:
            raise Violation("fence", f"{key} is of start {receipt.generation}, after one of a newer start")
        if receipt.base_version > state.version:
            raise Violation("numbering", f"{key} started from version {receipt.base_version}, which is not there")
        for part in receipt.parts:
            self._check_ref(part, key)
        begin = receipt.step_to - receipt.steps
        self._check_gap(key, receipt, before)
        for old in before:
            earlier = old.receipt
            if begin < earlier.step_to and earlier.step_to - earlier.steps < receipt.step_to:
                same_bytes = earlier.parts[0].digest == receipt.parts[0].digest
                if same_bytes or earlier.generation == receipt.generation:
                    raise Violation("steps", f"{key} has steps that receipt {earlier.seq} has already")
        before.append(Sent(record_digest(data), receipt, self.world.now))
        self.on_receipt(fragment)

    def _check_gap(self, key: str, receipt: Receipt, before: list[Sent]) -> None:
        """One start of an island sends every step, unless it gives steps up when it adopts."""
        sync = self.run.settings.sync if self.run else None
        if sync is None or not before or (sync.overlap > 0 and sync.adopt != "carry"):
            return
        last = before[-1].receipt
        if last.generation == receipt.generation and receipt.step_to - receipt.steps != last.step_to:
            raise Violation("steps", f"{key} goes on from step {receipt.step_to - receipt.steps}, not {last.step_to}")

    def _closed(self, key: str, data: bytes, fragment: int, version: int) -> None:
        close, state = decode(data, Close, run=self.run_digest), self.fragments[fragment]
        if (close.version, version, close.parent) != (state.version + 1, state.version + 1, state.digest):
            raise Violation("chain", f"{key} does not follow version {state.version}")
        if state.close is not None:
            raise Violation("write-once", f"{key} is the second close of its version")
        marks = dict(state.watermarks[state.version])
        disposed = sorted([(c.island, c.seq) for c in close.chosen] + [(s.island, s.seq) for s in close.skipped])
        for island, seq in disposed:
            if seq != marks.get(island, 0) + 1:
                raise Violation("once", f"{key} takes {island} {seq}, its watermark is {marks.get(island, 0)}")
            marks[island] = seq
        if {name: mark.seq for name, mark in close.watermarks.items()} != marks:
            raise Violation("watermarks", f"{key} has other watermarks than what it disposes of")
        for item in close.chosen:
            sent = self.sent[item.island, fragment][item.seq - 1]
            if sent.digest != item.receipt or item.staleness != state.version - sent.receipt.base_version:
                raise Violation("receipts", f"{key} takes {item.island} {item.seq} for another")
        for lost in close.skipped:
            self._check_skipped(key, state, fragment, lost.island, lost.seq)
        total = math.fsum({item.island: item.weight for item in close.chosen}.values())
        if close.chosen and abs(total - 1.0) > 1e-9:
            raise Violation("weights", f"the weights in {key} sum to {total}")
        self._check_time(key, close, state)
        if self.world.traced:
            takes = ", ".join(f"{item.island} {item.seq}" for item in close.chosen) or "nothing"
            skips = "".join(f"; skips {lost.island} {lost.seq} ({lost.reason})" for lost in close.skipped)
            self.world.trace("", f"  by {close.reason}: takes {takes}{skips}")
        state.close, state.close_digest = close, record_digest(data)

    def _check_skipped(self, key: str, state: _Fragment, fragment: int, island: str, seq: int) -> None:
        """Everything that islands send here is sound: only staleness is a reason."""
        limit = self.run.settings.policy.max_staleness if self.run else 0
        if state.version - self.sent[island, fragment][seq - 1].receipt.base_version <= limit:
            raise Violation("skipped", f"{key} skips {island} {seq}, which is sound")

    def _check_time(self, key: str, close: Close, state: _Fragment) -> None:
        """Times are the store's: no round ends before its time, whatever the aggregator's clock says."""
        policy = self.run.settings.policy if self.run else None
        wait_s = {"deadline": policy.deadline_s, "grace": policy.grace_s}.get(close.reason, 0.0) if policy else 0.0
        if self.world.now < state.opened_at + wait_s - 1e-6:
            raise Violation(
                "clock", f"{key} is closed by {close.reason} after {self.world.now - state.opened_at:.1f} s"
            )

    def _committed(self, key: str, data: bytes, fragment: int, version: int) -> None:
        commit, state = decode(data, Commit, run=self.run_digest), self.fragments[fragment]
        if (commit.version, version, commit.parent) != (state.version + 1, state.version + 1, state.digest):
            raise Violation("chain", f"{key} does not follow version {state.version}")
        close = state.close
        if close is None or commit.close != state.close_digest:
            raise Violation("chain", f"{key} is not of the close of its version")
        if commit.rejected:
            raise Violation("rejected", f"{key} rejects {commit.rejected[0]}, which is sound")
        if {(m.island, m.seq) for m in commit.merged} != {(c.island, c.seq) for c in close.chosen}:
            raise Violation("once", f"{key} does not merge what its close chose")
        self._check_weights(key, commit, state)
        marks = {name: mark.seq for name, mark in close.watermarks.items()}
        if {name: tally.consumed for name, tally in commit.tally.items()} != marks:
            raise Violation("tallies", f"{key} has tallies that are not the watermarks")
        self.merged += len(commit.merged)
        state.version, state.digest, state.opened_at = version, record_digest(data), self.world.now
        state.weights[version] = commit.weights.digest
        state.named[version] = (commit.weights.params.key, commit.outer.key, commit.update.key)
        state.watermarks[version] = marks
        state.close = None

    def _check_weights(self, key: str, commit: Commit, state: _Fragment) -> None:
        """The version is the one before minus its update, to the bit."""
        if self.run is None:
            raise AssertionError("a commit before its run")
        layout = fragment_layout(self.run.tensors, commit.fragment)
        self._check_ref(commit.outer, key)
        update = self._check_ref(commit.update, key)
        new = dict(read_tensors(self._check_ref(commit.weights.params, key), layout))
        old_data, _ = self.bucket.get(state.named[state.version][0])
        old = dict(read_tensors(old_data, layout))
        changes = dict(decode_payload([update], layout, codec_for(self.run.settings.down, commit.version)))
        if state.reference is not None and state.close is not None:
            expected = state.reference.step(state.close, commit, lambda ref: self._check_ref(ref, key))
            wrong = differs(changes, expected)
            if wrong is not None:
                raise Violation("arithmetic", f"the step of {wrong} in {key} is not what its contributions make")
        for name, change in changes.items():
            if (old[name] - change).tobytes() != new[name].tobytes():
                raise Violation("weights", f"{name} in {key} is not the one before minus the update")
        if weights_digest(new) != commit.weights.digest:
            raise Violation("weights", f"{key} has another digest than its weights")


class AuditedBucket:
    """The bucket for one process: effects are shown to the auditor. See `ObjectStore`."""

    def __init__(self, auditor: Auditor, process: Process) -> None:
        self.url = auditor.bucket.url
        self._auditor = auditor
        self._bucket = auditor.bucket
        self._process = process

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        return self._bucket.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._bucket.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._bucket.head(key)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`."""
        data = body_bytes(data)
        try:
            old: bytes | None = self._bucket.get(key)[0]
        except NotFound:
            old = None
        world = self._auditor.world
        try:
            info = self._bucket.put(key, data, if_absent=if_absent, metadata=metadata)
        except Conflict:
            if world.traced:
                world.trace(self._process.name, f"{'has made' if old == data else 'is too late for'} {key}")
            raise
        if world.traced and not key.endswith("/status.json"):
            world.trace(self._process.name, f"{'creates' if if_absent else 'writes'} {key}")
        self._auditor.wrote(self._process, key, data, old)
        return info

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return self._bucket.list(prefix, start_after=start_after)

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        return self._bucket.list_dirs(prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        try:
            self._bucket.head(key)
        except NotFound:
            return
        self._bucket.delete(key)
        self._auditor.world.trace(self._process.name, f"deletes {key}")
        self._auditor.deleted(self._process, key)

    def now(self) -> float:
        """See `ObjectStore.now`."""
        return self._bucket.now()

    def close(self) -> None:
        """See `ObjectStore.close`."""
