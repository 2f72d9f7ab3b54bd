"""Who takes part: islands, aggregators as loops and as functions, and a collector. Each runs the production code."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco_blob.aggregate import aggregate, watch
from diloco_blob.aggregate.collect import sweep
from diloco_blob.aggregate.context import Context
from diloco_blob.core.errors import Fenced, NotFound, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Settings
from diloco_blob.island.core import IslandCore, start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.protocol.heads import read_run
from diloco_blob.sim.auditor import Auditor
from diloco_blob.sim.dice import Dice
from diloco_blob.sim.faults import FaultPlan
from diloco_blob.sim.network import Connection
from diloco_blob.sim.threads import SimulatedDriver
from diloco_blob.sim.world import Process, World
from diloco_blob.store import RetryingStore
from diloco_blob.testing.port import ArrayPort

SHAPES: dict[str, tuple[int, ...]] = {"embed": (4,), "layer": (3, 2), "scale": ()}
"""A model that costs nothing to train."""

TOKENS = 8
"""Of an inner step."""


@dataclass(frozen=True)
class Stage:
    """What all actors share."""

    world: World
    auditor: Auditor
    plan: FaultPlan
    settings: Settings
    num_islands: int
    budget_s: float
    seed: int

    def store(self, process: Process, ids: SeededIds) -> RetryingStore:
        """A process's client of the bucket, with retries."""
        return RetryingStore(Connection(process, self.auditor.view(process), self.plan), process, ids, self.budget_s)


@dataclass
class IslandPlan:
    """One island over all its processes."""

    name: str
    number: int
    step_s: float
    steps: int
    """It finishes after so many."""
    disk: Path | None
    """Where its local checkpoint lies; None: it has none."""
    starts: int = 0
    done: bool = False


def run_island(
    stage: Stage, process: Process, plan: IslandPlan, dice: Dice, at: Callable[[str], None]
) -> Callable[[], None]:
    """The training program of one island, as `process`."""
    ids = SeededIds(dice.integer(0, 1 << 40))

    def checked(core: IslandCore, port: ArrayPort, seen: dict[int, int]) -> None:
        """What it holds after each step is what the bucket says."""
        for trajectory in core.trajectories:
            if seen.get(trajectory.fragment) != trajectory.version:
                known = trajectory.fragment in seen
                seen[trajectory.fragment] = trajectory.version
                if known and stage.settings.sync.adopt == "overwrite":
                    model = port.read(list(trajectory.mirror))
                    stage.auditor.wrote_model(plan.name, trajectory.fragment, trajectory.mirror, model)
                stage.auditor.adopted(plan.name, trajectory.fragment, trajectory.version, trajectory.mirror)
                if stage.world.traced:
                    stage.world.trace(
                        process.name, f"holds version {trajectory.version} of fragment {trajectory.fragment}"
                    )

    def body() -> None:
        initial = ArrayPort(stage.seed, SHAPES).weights
        port = ArrayPort(1000 * plan.number + plan.starts, SHAPES, initial)
        options = IslandOptions(
            name=plan.name, settings=stage.settings, islands=stage.num_islands, checkpoint_dir=plan.disk
        )
        store, driver = stage.store(process, ids), SimulatedDriver(process)
        core = start(store, port, options, clock=process, ids=ids, driver=driver, at=at)
        stage.world.trace(process.name, f"is start {core.membership.generation} of {plan.name}, at step {core.steps}")
        seen: dict[int, int] = {}
        checked(core, port, seen)
        try:
            core.block(core.begin())
            checked(core, port, seen)
            while core.steps < plan.steps:
                process.sleep(plan.step_s * dice.uniform(0.8, 1.2))
                loss = port.train()
                core.block(core.after_step(TOKENS, loss=loss, cursor=str(core.steps + 1)))
                checked(core, port, seen)
            core.block(core.finish())
            checked(core, port, seen)
        except Fenced:
            stage.auditor.fenced(plan.name, core.membership.generation)
            core.end("fenced")
            raise
        core.end("done")
        plan.done = True

    return body


def run_watch(stage: Stage, process: Process, dice: Dice, at: Callable[[str], None]) -> Callable[[], None]:
    """`diloco-blob aggregate --watch`."""
    ids, poll_s = SeededIds(dice.integer(0, 1 << 40)), dice.choice((1.0, 2.0, 4.0))

    def body() -> None:
        watch(
            stage.store(process, ids),
            clock=process,
            ids=ids,
            stop=lambda: False,
            on_report=lambda _: None,
            poll_s=poll_s,
            wait_for_run=True,
            at=at,
        )

    return body


def run_function(
    stage: Stage, process: Process, dice: Dice, at: Callable[[str], None], *, fragment: int | None, drain: bool = False
) -> Callable[[], None]:
    """One invocation of the aggregator as a function."""
    ids = SeededIds(dice.integer(0, 1 << 40))

    def body() -> None:
        try:
            aggregate(stage.store(process, ids), clock=process, ids=ids, fragment=fragment, drain=drain, at=at)
        except (NotFound, Unavailable) as error:
            stage.world.trace(process.name, f"gives up: {error.kind}")

    return body


def run_collector(stage: Stage, process: Process, dice: Dice, at: Callable[[str], None]) -> Callable[[], None]:
    """`diloco-blob gc`."""
    ids = SeededIds(dice.integer(0, 1 << 40))

    def body() -> None:
        store = stage.store(process, ids)
        try:
            run = read_run(store)
            ctx = Context(store=store, run=run, clock=process, ids=ids, at=at)
            for _ in sweep(ctx):
                pass
        except (NotFound, Unavailable) as error:
            stage.world.trace(process.name, f"gives up: {error.kind}")

    return body
