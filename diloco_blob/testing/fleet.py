"""A small world in one thread: islands and an aggregator around one store, on one virtual clock.

The production bookkeeping, unchanged; only the training is a toy and time is free. Every island does an inner step a
tick unless it waits; pumps and aggregator get their turn after that. The same arguments give the same run, to the bit.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco_blob.aggregate import FragmentReport, aggregate
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Settings
from diloco_blob.island.core import IslandCore, start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.island.pumps import Pump
from diloco_blob.protocol.heads import read_run
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.metered import MeteredStore
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.port import ArrayPort

_NUMBERS = itertools.count()
"""Each fleet has a bucket of its own."""

TOKENS = 64
"""Tokens of one inner step of a toy island."""


class HandDriver:
    """A driver whose pumps the fleet turns itself."""

    def __init__(self) -> None:
        self.pumps: Sequence[Pump] = ()

    def start(self, pumps: Sequence[Pump]) -> None:
        """See `Driver.start`."""
        self.pumps = pumps

    def wake(self) -> None:
        """See `Driver.wake`."""

    def wait(self, seconds: float) -> None:
        """The fleet never blocks."""
        raise AssertionError(f"a toy island was made to block for {seconds} s")

    def check(self) -> None:
        """See `Driver.check`."""

    def stop(self) -> None:
        """See `Driver.stop`."""


@dataclass
class ToyIsland:
    """One island of a fleet."""

    name: str
    port: ArrayPort
    core: IslandCore
    driver: HandDriver
    waiting: Iterator[str] | None
    slowness: int = 1
    """Ticks an inner step takes."""
    done: bool = False

    def tick(self, now: int, steps: int) -> None:
        """Go on waiting, do an inner step, or finish after `steps`."""
        if self.waiting is None and not self.done and now % self.slowness == 0:
            if self.core.steps < steps:
                loss = self.port.train()
                self.waiting = self.core.after_step(TOKENS, loss=loss, cursor=str(self.core.steps + 1))
            else:
                self.waiting, self.done = self.core.finish(), True
        if self.waiting is not None and next(self.waiting, None) is None:
            self.waiting = None

    def pump(self) -> None:
        """Let every pump do what it can do now."""
        for pump in self.driver.pumps:
            while pump() == 0.0:
                pass


@dataclass
class Fleet:
    """Islands around one store: see the module's docstring.

    Args:
        settings: Of the run.
        num_islands: How many islands `add_all` adds.
        seed: Of everything.
        checkpoints: Folder for the islands' local checkpoints; none if not given.
        wrap: Put around the bare store, for injecting faults.
    """

    settings: Settings
    num_islands: int = 3
    seed: int = 0
    checkpoints: Path | None = None
    wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store
    tick_s: float = 0.25
    shapes: Mapping[str, tuple[int, ...]] | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    reports: list[FragmentReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bare = MemoryStore(f"memory://fleet-{next(_NUMBERS)}", clock=self.clock)
        self.ids = SeededIds(self.seed)
        self.islands: list[ToyIsland] = []
        self._now = 0

    def store(self) -> RetryingStore:
        """A client of the bucket, with retries and a meter of its own."""
        return RetryingStore(MeteredStore(self.wrap(self.bare)), self.clock, self.ids)

    def add(self, name: str, *, slowness: int = 1, at: Callable[[str], None] | None = None) -> ToyIsland:
        """Start an island, or start it again."""
        number = int(name.rsplit("-", 1)[-1])
        initial = ArrayPort(self.seed, self.shapes).weights
        port = ArrayPort(1000 * (self.seed + 1) + number, self.shapes, initial)
        driver = HandDriver()
        options = IslandOptions(
            name=name,
            settings=self.settings,
            islands=self.num_islands,
            checkpoint_dir=self.checkpoints / name if self.checkpoints else None,
        )
        extra = {"at": at} if at else {}
        core = start(self.store(), port, options, clock=self.clock, ids=self.ids, driver=driver, **extra)
        island = ToyIsland(name, port, core, driver, core.begin(), slowness)
        self.islands = [other for other in self.islands if other.name != name] + [island]
        return island

    def add_all(self) -> list[ToyIsland]:
        """Start `num_islands` islands."""
        return [self.add(f"island-{number}") for number in range(self.num_islands)]

    def aggregate(self, *, drain: bool = False) -> list[FragmentReport]:
        """One pass of an aggregator."""
        store = self.store()
        reports = aggregate(store, run=read_run(store), clock=self.clock, ids=self.ids, drain=drain)
        self.reports += [report for report in reports if report.action == "merged"]
        return reports

    def tick(self, steps: int, *, aggregators: int = 1) -> None:
        """One tick of the world."""
        self._now += 1
        for island in self.islands:
            island.tick(self._now, steps)
            island.pump()
        for _ in range(aggregators):
            self.aggregate()
        self.clock.sleep(self.tick_s)

    def run(self, steps: int, *, aggregators: int = 1, ticks_max: int = 100_000) -> None:
        """Until every island has done `steps` inner steps and finished."""
        for _ in range(ticks_max):
            if all(island.done and island.waiting is None for island in self.islands):
                return
            self.tick(steps, aggregators=aggregators)
        raise AssertionError(f"the fleet is not done after {ticks_max} ticks")
