"""Real islands in lockstep: cores, payloads, receipts and aggregator passes around a bucket in memory.

Every island stands at the same step; a pass of the aggregator follows right after what was sent. So a new version is
there one step boundary after its contributions, and with overlap `sync.overlap` alone decides when it is adopted.
Virtual time moves on by a second a step. The same arguments give the same run, to the bit.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from diloco_blob.aggregate import aggregate
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Settings
from diloco_blob.island.arrays import Arrays
from diloco_blob.island.core import IslandCore, start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import find_head, read_run
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Receipt, decode
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.metered import MeteredStore, Usage
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.fleet import HandDriver
from diloco_blob.wire import read_tensors
from quality.model import Stack

_NUMBERS = itertools.count()
"""Each run has a bucket of its own."""
_TURNS_MAX = 100
"""More than an exchange of all islands needs, `finish` included."""


class Diverged(Exception):  # noqa: N818 - it is a result, not a mistake
    """The aggregator rejected what an island sent: its values are too large."""


class RowPort:
    """One island's model: a row of the stack. See `ModelPort`."""

    def __init__(self, stack: Stack, row: int) -> None:
        self.exact = True
        self._stack, self._row = stack, row

    def tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """See `ModelPort.tensors`."""
        return [(slot.name, slot.shape, "float32") for slot in self._stack.slots]

    def read(self, names: Sequence[str]) -> Arrays:
        """See `ModelPort.read`."""
        arrays = self._stack.read(self._row)
        return {name: arrays[name] for name in names}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `ModelPort.write`."""
        self._stack.write(self._row, arrays)

    def capture(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """See `ModelPort.capture`; nothing here is restarted."""
        return {}, {}

    def restore(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, object]) -> None:
        """See `ModelPort.restore`."""


class Traffic(Struct, frozen=True):
    """What all islands moved from the first step on, in bytes of object bodies."""

    payloads_up: int
    """Contributions, headers and all."""
    payloads_down: int
    """Updates; each island fetches each."""
    records_up: int
    """Receipts and everything else that is not a contribution."""
    records_down: int
    """Commits and everything else that is not an update."""
    versions: int
    """Of all fragments."""


class Islands:
    """The islands of one run.

    Args:
        settings: Of the run.
        stack: The models; a row each.
        seed: Of all ids.
        tokens: Of one inner step of one island.
    """

    def __init__(self, settings: Settings, stack: Stack, seed: int, tokens: int) -> None:
        self._tokens = tokens
        self._clock, self._ids = VirtualClock(), SeededIds(seed)
        self._bucket = MemoryStore(f"memory://quality-{next(_NUMBERS)}", clock=self._clock)
        self._store = RetryingStore(MeteredStore(self._bucket), self._clock, self._ids)
        self._payloads_up = self._payloads_down = 0
        self._hints: dict[int, int] = {}
        self._cores: list[IslandCore] = []
        for row in range(stack.rows):
            options = IslandOptions(name=f"island-{row}", settings=settings, islands=stack.rows)
            store = RetryingStore(MeteredStore(self._bucket), self._clock, self._ids)
            port, driver = RowPort(stack, row), HandDriver()
            self._cores.append(start(store, port, options, clock=self._clock, ids=self._ids, driver=driver))
        self._run = read_run(self._store)
        self._drive([core.begin() for core in self._cores])
        self._before = [core.store.meter.usage() for core in self._cores]

    def after_step(self) -> None:
        """What every island does between two inner steps, and whatever that makes the aggregator do.

        Raises:
            Corrupt: A weight is not finite.
            Diverged: A contribution was rejected.
        """
        self._clock.sleep(1.0)
        self._drive([core.after_step(self._tokens) for core in self._cores])

    def finish(self) -> None:
        """Send and merge what is left; every row then holds the newest version."""
        self._drive([core.finish() for core in self._cores])

    def params(self) -> Arrays:
        """The newest version of every fragment."""
        found: Arrays = {}
        for p in range(len(self._run.run.fragments)):
            head = find_head(self._store, self._run, p, hint=self._hints.get(p, 0))
            found |= read_tensors(
                self._store.get(head.weights.params.key)[0], fragment_layout(self._run.run.tensors, p)
            )
        return found

    def traffic(self) -> Traffic:
        """What was moved so far."""
        used = [core.store.meter.usage().since(before) for core, before in zip(self._cores, self._before, strict=True)]
        total = Usage(bytes_up=sum(one.bytes_up for one in used), bytes_down=sum(one.bytes_down for one in used))
        return Traffic(
            payloads_up=self._payloads_up,
            payloads_down=self._payloads_down,
            records_up=total.bytes_up - self._payloads_up,
            records_down=total.bytes_down - self._payloads_down,
            versions=sum(self._hints.values()),
        )

    def _drive(self, waits: list[Iterator[str]]) -> None:
        """Let islands and aggregator take turns until no island waits and nothing is unsent."""
        for _ in range(_TURNS_MAX):
            waits = [wait for wait in waits if next(wait, None) is not None]
            sent = self._send()
            for p in sorted(sent):
                self._aggregate(p)
            if not (waits or sent):
                return
            self._clock.sleep(1.0)  # so that polls are due
            for core in self._cores:
                _turn(core, 1)
        raise AssertionError("the islands wait for something that does not come")

    def _send(self) -> set[int]:
        """Empty every outbox; the fragments to which something was sent."""
        fragments = range(len(self._run.run.fragments))
        due = {p for core in self._cores for p in fragments if core.outbox.unsent(p)}
        for core in self._cores:
            _turn(core, 0)
        return due

    def _aggregate(self, fragment: int) -> None:
        """A pass, and the bytes of what it merged and made."""
        [report] = aggregate(
            self._store, run=self._run, clock=self._clock, ids=self._ids, fragment=fragment, hints=self._hints
        )
        assert report.action == "merged", report
        if report.rejected:
            raise Diverged(report.rejected[0].reason)
        assert len(report.merged) == len(self._cores), "everybody is in every round"
        for entry in report.merged:
            data, _ = self._store.get(keys.receipt(entry.island, fragment, entry.seq))
            receipt = decode(data, Receipt, run=self._run.digest)
            self._payloads_up += sum(part.size for part in receipt.parts)
        head = find_head(self._store, self._run, fragment, hint=report.version)
        assert head.commit is not None
        self._payloads_down += len(self._cores) * head.commit.update.size


def _turn(core: IslandCore, pump: int) -> None:
    """Let one pump, 0: outbox, 1: inbox, do what it can do now."""
    driver = core.driver
    assert isinstance(driver, HandDriver)
    while driver.pumps[pump]() == 0.0:
        pass
