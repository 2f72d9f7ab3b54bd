"""What a round costs an island's training thread: the step that sends, and the step that adopts.

A real island core around a torch model, with overlap, so that it waits for nobody; its pumps and the aggregator run
in between, off the clock. CPU time of the calling thread and wall time, the best of a few rounds. torch on one thread.
"""

import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from diloco_blob.aggregate import aggregate
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Outer, Policy, Settings, Sync
from diloco_blob.island.binding import TorchPort
from diloco_blob.island.core import start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.store.memory import MemoryStore, forget
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.fleet import HandDriver
from speed.model import Model

Adopt = Literal["overwrite", "mix", "carry"]
ADOPTS: tuple[Adopt, ...] = ("overwrite", "mix", "carry")


class Lost(NamedTuple):
    """Milliseconds of one round, CPU and wall."""

    adopt: str
    parameters: int
    copy_ms: float
    """Copying as many fp32 values with torch."""
    snapshot_ms: float
    snapshot_wall_ms: float
    adoption_ms: float
    adoption_wall_ms: float


class Timed:
    """Runs a generator of the core to its end, which must not wait, and times it."""

    def __init__(self) -> None:
        self.cpu_ms = self.wall_ms = float("inf")

    def run(self, waiting: Iterator[str]) -> None:
        """Once more; the best counts."""
        wall, cpu = time.monotonic(), time.thread_time()
        assert next(waiting, None) is None
        self.cpu_ms = min(self.cpu_ms, 1e3 * (time.thread_time() - cpu))
        self.wall_ms = min(self.wall_ms, 1e3 * (time.monotonic() - wall))


def lost(model: Model, adopt: Adopt, rounds: int) -> Lost:
    """Measure one way to adopt."""
    torch.set_num_threads(1)
    module = torch.nn.Module()
    for name, shape in model.shapes().items():
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.randn(shape)))
    settings = Settings(
        sync=Sync(sync_every=2, overlap=1, adopt=adopt),
        policy=Policy(islands=1, quorum=1),
        up=Codec(name="int4", error_feedback=True),
        down=Codec(name="int4", error_feedback=True),
        outer=Outer(lr=0.7, momentum=0.0),
    )
    clock, ids, driver, url = VirtualClock(), SeededIds(0), HandDriver(), f"memory://speed-{adopt}"
    store = RetryingStore(MemoryStore(url, clock=clock), clock, ids)
    options = IslandOptions(name="island", settings=settings, islands=1)
    core = start(store, TorchPort(module, []), options, clock=clock, ids=ids, driver=driver)
    for waiting in (core.begin(), core.after_step(1000)):  # With `sync_every = 2` every second step sends.
        assert next(waiting, None) is None
    snapshot, adoption, version = Timed(), Timed(), 0
    parameters = list(module.parameters())
    for _ in range(rounds):
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.999)
        snapshot.run(core.after_step(1000))
        while any(pump() == 0.0 for pump in driver.pumps):
            pass
        aggregate(store, clock=clock, ids=ids)
        clock.sleep(60.0)
        while any(pump() == 0.0 for pump in driver.pumps):
            pass
        adoption.run(core.after_step(1000))
        assert core.version > version, "the round must have been adopted"
        version = core.version
    forget(url)
    values = sum(parameter.numel() for parameter in parameters)
    return Lost(adopt, values, _copy_ms(values), snapshot.cpu_ms, snapshot.wall_ms, adoption.cpu_ms, adoption.wall_ms)


def _copy_ms(values: int) -> float:
    source, target, best = torch.ones(values), torch.ones(values), float("inf")
    for _ in range(5):
        cpu = time.thread_time()
        target.copy_(source)
        best = min(best, 1e3 * (time.thread_time() - cpu))
    return best
