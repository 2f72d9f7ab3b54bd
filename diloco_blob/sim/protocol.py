"""The protocol under fire: one seed, one history.

First chaos: faults of network and store, islands and aggregators that crash, stall and come back as zombies beside
their replacement, clocks that are wrong, collectors. Then calm: no more faults, somebody to aggregate, and every island
must come to its end in time. Then the zombies that slept all the while wake. At last all that is left is merged and
collected, the bucket is audited from end to end, and every version that is kept is computed again.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from diloco_blob.aggregate import STEPS as AGGREGATE_STEPS
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.replay import replay
from diloco_blob.core.errors import DilocoError
from diloco_blob.core.ids import SeededIds
from diloco_blob.island.steps import STEPS as ISLAND_STEPS
from diloco_blob.protocol.audit import Finding, audit
from diloco_blob.protocol.heads import read_run
from diloco_blob.sim import actors
from diloco_blob.sim.actors import IslandPlan, Stage
from diloco_blob.sim.auditor import Auditor, Sent
from diloco_blob.sim.dice import Dice
from diloco_blob.sim.faults import FaultPlan
from diloco_blob.sim.schedule import Schedule, draw
from diloco_blob.sim.world import Process, Violation, World
from diloco_blob.store.memory import MemoryStore, forget

INFINITY = float("inf")

CALM_CHECK_S = 2.0
"""How often the calm is looked at for contributions that wait too long."""

FUNCTIONS_MAX = 4
"""Invocations at one time."""

DRAINS_MAX = 50
"""Passes at the end, each of which merges what is left."""


@dataclass
class Outcome:
    """What became of one seed."""

    seed: int
    promise: str
    """What does not hold, by a short stable name; empty if everything does."""
    what: str
    """How, in one line."""
    seconds: float
    """Of virtual time."""
    num_events: int
    num_effects: int
    """Writes and deletions that took place."""
    versions: int
    merged: int
    """Contributions."""
    counts: Counter[str] = field(default_factory=Counter)
    """Faults and accidents."""

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.promise


def simulate(seed: int, tell: Callable[[float, str, str], None] | None = None) -> Outcome:
    """Play one seed to its end.

    Args:
        seed: Decides everything.
        tell: Given each line of the trace: virtual seconds, who, what.

    Returns:
        What happened.
    """
    with TemporaryDirectory(prefix="diloco-sim-", dir=_memory_folder()) as folder, _quiet():
        history = _History(seed, Path(folder), tell)
        try:
            violation = history.play()
        finally:
            history.close()
        return history.outcome(violation)


class _History:
    """The director: decides by lot what happens to whom, and when all is over."""

    def __init__(self, seed: int, folder: Path, tell: Callable[[float, str, str], None] | None) -> None:
        self.seed = seed
        self.dice = Dice(seed)
        self.schedule: Schedule = draw(self.dice)
        self.world = World(tell=tell)
        self.url = f"memory://simulation-{seed}"
        self.auditor = Auditor(self.world, MemoryStore(self.url, clock=self.world))
        self.plan = FaultPlan(self.dice.fork(), self.schedule.fault_intensity)
        self.counts: Counter[str] = Counter()
        self.stage = Stage(
            self.world,
            self.auditor,
            self.plan,
            self.schedule.settings,
            self.schedule.num_islands,
            self.schedule.budget_s,
            seed,
        )
        self.islands = [self._island_plan(number, folder) for number in range(self.schedule.num_islands)]
        self.processes: list[Process] = []
        self.current: dict[str, Process] = {}
        """The newest process of each island, and each watcher."""
        self.traps: dict[str, str] = {}
        """Steps at which the next process to come by is killed or stalled."""
        self.chaos = True
        self.num_started = 0
        self.auditor.on_receipt = self._receipt

    def _island_plan(self, number: int, folder: Path) -> IslandPlan:
        step_s = self.schedule.step_s * self.dice.choice((1.0, 1.0, 1.5, 4.0))
        return IslandPlan(
            name=f"island-{number}",
            number=number,
            step_s=step_s,
            steps=self.schedule.rounds * self.schedule.settings.sync.sync_every + self.dice.integer(0, 1),
            disk=folder / f"island-{number}" if self.dice.chance(0.7) else None,
        )

    def play(self) -> Violation | None:
        """The whole history; the first violation ends it."""
        world, schedule = self.world, self.schedule
        self._trace_schedule()
        for plan in self.islands:
            late = self.dice.uniform(0.0, schedule.chaos_s) if self.dice.chance(0.3) else self.dice.uniform(0.0, 3.0)
            world.after(late, partial(self._start_island, plan))
        for number in range(schedule.num_watchers):
            self._start_watcher(f"watcher-{number}")
        if schedule.functions:
            world.after(schedule.settings.policy.deadline_s / 2, self._timer)
        world.after(self.dice.exponential(schedule.accident_every_s), self._accident)
        try:
            self._run_chaos()
            self._run_calm()
            self._wake_the_dead()
            self._finish()
        except Violation as violation:
            world.trace("auditor", f"VIOLATION {violation}")
            return violation
        return None

    def close(self) -> None:
        """End what still lives, and forget the bucket."""
        for process in self.processes:
            process.discard()
        forget(self.url)

    def outcome(self, violation: Violation | None) -> Outcome:
        """What became of it."""
        return Outcome(
            seed=self.seed,
            promise=violation.promise if violation else "",
            what=violation.what if violation else "",
            seconds=self.world.now,
            num_events=self.world.num_events,
            num_effects=self.auditor.num_effects,
            versions=sum(state.version for state in self.auditor.fragments),
            merged=self.auditor.merged,
            counts=self.counts + self.plan.counts,
        )

    # ---- the acts -------------------------------------------------------------------------------------------------

    def _run_chaos(self) -> None:
        self.world.run(lambda: False, self.schedule.chaos_s)

    def _run_calm(self) -> None:
        """No more faults: every island comes to its end, and no contribution waits too long."""
        world = self.world
        world.now = max(world.now, self.schedule.chaos_s)
        world.trace("world", "calm begins")
        self.chaos = False
        self.plan.calm()
        self.traps.clear()
        self._start_watcher("watcher-calm")
        for plan in self.islands:
            process = self.current.get(plan.name)
            if not plan.done and (process is None or not process.alive or process.stalled_until == INFINITY):
                self._start_island(plan)
        calm_since = world.now

        def look() -> None:
            self._check_waiting(calm_since)
            world.after(CALM_CHECK_S, look)

        look()
        if not world.run(lambda: all(plan.done for plan in self.islands), calm_since + self._calm_max_s()):
            unfinished = [plan.name for plan in self.islands if not plan.done]
            raise Violation("liveness", f"{', '.join(unfinished)} did not finish within {self._calm_max_s():.0f} s")

    def _wake_the_dead(self) -> None:
        """Whoever slept all the while goes on as if nothing had happened."""
        sleepers = [process for process in self.processes if process.alive and process.stalled_until > 0.0]
        for process in sleepers:
            process.wake()
        active = [process for process in sleepers if process.name.split("#")[0] not in self.current_watchers]
        if not self.world.run(lambda: not any(p.alive for p in active), self.world.now + self._calm_max_s()):
            names = [process.name for process in active if process.alive]
            raise Violation("liveness", f"{', '.join(names)} woke, and did not come to an end")

    def _finish(self) -> None:
        """Merge what is left, collect, and look at everything."""
        for process in self.processes:
            process.kill()
        for _ in range(DRAINS_MAX):
            if not any(self._mergeable()):
                break
            self._whole(
                "drain",
                "aggregator",
                lambda p: actors.run_function(self.stage, p, self.dice, _nothing, fragment=None, drain=True),
            )
            self.world.run(lambda: False, self.world.now + self.schedule.settings.policy.takeover_s)
        else:
            raise Violation("liveness", "the aggregator does not merge what is left")
        self._whole("sweeper", "collector", lambda p: actors.run_collector(self.stage, p, self.dice, _nothing))
        self._judge("audit", audit(self.auditor.bucket).findings)
        run = read_run(self.auditor.bucket)
        ctx = Context(store=self.auditor.bucket, run=run, clock=self.world, ids=SeededIds(self.seed))
        self._judge("replay", replay(ctx).findings)

    def _judge(self, by: str, findings: Sequence[Finding]) -> None:
        for finding in findings:
            # Notes of these are what an island got wrong under its own name: here all islands are ours.
            if finding.level == "broken" or finding.promise in {"chain", "numbering"}:
                raise Violation(by, f"{finding.promise}: {finding.where}: {finding.what}")

    def _whole(self, name: str, kind: str, body: Callable[[Process], Callable[[], None]]) -> None:
        """One process from its start to its end."""
        process = self._process(name, kind)
        process.main(body(process))
        if not self.world.run(lambda: not process.alive, self.world.now + 3600.0):
            raise Violation("liveness", f"{name} does not end")

    # ---- liveness -------------------------------------------------------------------------------------------------

    def _calm_max_s(self) -> float:
        policy = self.schedule.settings.policy
        training_s = max(plan.steps * plan.step_s for plan in self.islands)
        round_s = policy.deadline_s + policy.grace_s + 2 * policy.takeover_s + self._slack_s()
        return 300.0 + 3.0 * (training_s + (self.schedule.rounds + 4) * round_s)

    def _slack_s(self) -> float:
        """Of one round: polls, and all the requests of a pass, one after the other, over this network."""
        num_fragments = self.schedule.settings.sync.num_fragments
        num_requests = num_fragments * (20 + 12 * self.schedule.num_islands)
        return 30.0 + num_requests * (4 * self.plan.latency_s + 600 / self.plan.bytes_per_s)

    def _check_waiting(self, calm_since: float) -> None:
        policy = self.schedule.settings.policy
        bound_s = 2 * (policy.deadline_s + policy.grace_s + policy.takeover_s + self._slack_s())
        for island, fragment, sent in self._mergeable():
            waited_s = self.world.now - max(sent.at, calm_since)
            queue = 1 + sum(1 for name, p, _ in self._mergeable() if (name, p) == (island, fragment)) // 8
            if waited_s > bound_s * queue:
                raise Violation(
                    "liveness", f"receipt {sent.receipt.seq} of {island} to {fragment} waits for {waited_s:.0f} s"
                )

    def _mergeable(self) -> Iterator[tuple[str, int, Sent]]:
        """Contributions that wait, and are not too stale ever to be merged."""
        limit = self.schedule.settings.policy.max_staleness
        for island, fragment, sent in self.auditor.pending():
            if self.auditor.fragments[fragment].version - sent.receipt.base_version <= limit:
                yield island, fragment, sent

    # ---- who takes part -------------------------------------------------------------------------------------------

    def _process(self, name: str, kind: str, ended: Callable[[DilocoError | None], None] = lambda _: None) -> Process:
        self.num_started += 1
        skew_s = self.dice.uniform(-self.schedule.skew_s, self.schedule.skew_s)
        rate = self.dice.uniform(0.99, 1.01)
        process = Process(self.world, f"{name}#{self.num_started}", kind, skew_s=skew_s, rate=rate, ended=ended)
        self.processes = [other for other in self.processes if other.alive] + [process]
        return process

    def _start_island(self, plan: IslandPlan) -> None:
        """Start it, or start it again, also beside a process that sleeps."""
        if plan.done:
            return
        plan.starts += 1

        def ended(error: DilocoError | None) -> None:
            if error is not None and self.current.get(plan.name) is process:
                self.counts[f"island ended: {error.kind}"] += 1
                self.world.after(self.dice.uniform(0.5, 5.0), lambda: self._restart(plan, process))

        process = self._process(plan.name, "island", ended)
        self.current[plan.name] = process
        process.main(actors.run_island(self.stage, process, plan, self.dice.fork(), self._trap(process)))

    def _restart(self, plan: IslandPlan, old: Process) -> None:
        if self.current.get(plan.name) is old:
            self._start_island(plan)

    def _start_watcher(self, name: str) -> None:
        def ended(error: DilocoError | None) -> None:
            if error is not None:
                raise Violation("aggregator", f"{name} ended with {error.kind}: {error}")

        process = self._process(name, "aggregator", ended)
        self.current[name] = process
        process.main(actors.run_watch(self.stage, process, self.dice.fork(), self._trap(process)))

    @property
    def current_watchers(self) -> set[str]:
        """Names of the aggregators that never end."""
        return {name for name in self.current if name.startswith("watcher")}

    def _receipt(self, fragment: int) -> None:
        """An event: delivered at once, late, twice or never."""
        if not self.schedule.functions:
            return
        for _ in range(self.dice.choice((0, 1, 1, 1, 2))):
            self.world.after(self.dice.exponential(1.0), lambda: self._invoke(fragment))

    def _timer(self) -> None:
        if self.chaos:
            self._invoke(None)
            self.world.after(self.schedule.settings.policy.deadline_s / 2, self._timer)

    def _invoke(self, fragment: int | None) -> None:
        running = sum(p.alive and p.name.startswith("function") for p in self.processes)
        if not self.chaos or running >= FUNCTIONS_MAX:
            return

        def ended(error: DilocoError | None) -> None:
            if error is not None:
                raise Violation("aggregator", f"a function ended with {error.kind}: {error}")

        process = self._process("function", "aggregator", ended)
        process.main(actors.run_function(self.stage, process, self.dice.fork(), self._trap(process), fragment=fragment))

    # ---- accidents ------------------------------------------------------------------------------------------------

    def _trap(self, process: Process) -> Callable[[str], None]:
        def at(step: str) -> None:
            fate = self.traps.pop(step, None)
            if fate is None or not process.alive:
                return
            self.counts[f"{fate} at {step}"] += 1
            self.world.trace(process.name, f"at {step}:")
            if fate == "killed":
                self._killed(process)
                process.kill_here()
            else:
                process.stall(self._stall_s())
                self._replace(process)
                self.world.sleep(0.0)
                process.check_alive()

        return at

    def _stall_s(self) -> float:
        return INFINITY if self.dice.chance(0.3) else self.dice.exponential(10.0)

    def _accident(self) -> None:
        if not self.chaos:
            return
        self.world.after(self.dice.exponential(self.schedule.accident_every_s), self._accident)
        kind = self.dice.choice(("kill", "stall", "zombie", "trap", "trap", "trap", "collect", "outage"))
        alive = [p for p in self.processes if p.alive and p.kind != "collector" and p.stalled_until == 0.0]
        if kind == "trap":
            step = self.dice.choice(AGGREGATE_STEPS + ISLAND_STEPS)
            self.traps[step] = self.dice.choice(("killed", "stalled"))
        elif kind == "collect":
            self.counts["collector"] += 1
            process = self._process("gc", "collector")
            process.main(actors.run_collector(self.stage, process, self.dice.fork(), self._trap(process)))
        elif kind == "outage":
            self.counts["outage"] += 1
            seconds = self.dice.exponential(8.0)
            self.world.trace("world", f"OUTAGE for {seconds:.0f} s")
            self.plan.begin_outage(self.world.now + seconds)
        elif alive:
            process = self.dice.choice(alive)
            self.counts[kind] += 1
            if kind == "kill":
                process.kill()
                self._killed(process)
            else:
                process.stall(self._stall_s())
                if kind == "zombie":
                    self._replace(process)

    def _killed(self, process: Process) -> None:
        """Somebody starts it again, sooner or later."""
        self.world.after(self.dice.exponential(3.0), lambda: self._replace(process))

    def _replace(self, process: Process) -> None:
        name = process.name.split("#")[0]
        if self.current.get(name) is not process:
            return
        for plan in self.islands:
            if plan.name == name:
                self._start_island(plan)
                return
        if name.startswith("watcher"):
            self._start_watcher(name)

    def _trace_schedule(self) -> None:
        if not self.world.traced:
            return
        schedule, settings = self.schedule, self.schedule.settings
        self.world.trace(
            "world",
            f"{schedule.num_islands} islands, {schedule.num_watchers} watchers, functions: "
            f"{schedule.functions}, {schedule.rounds} rounds",
        )
        for group in ("sync", "up", "down", "merge", "outer", "policy", "collect"):
            self.world.trace("world", f"{getattr(settings, group)}")
        for rule in self.plan.rules:
            self.world.trace("world", f"{rule}")


def _nothing(_: str) -> None:
    """Nobody waits at this step."""


def _memory_folder() -> str | None:
    """Local disks of islands are kept in memory where there is such a folder: nothing here needs to last."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a fresh folder of our own is made in it


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the production code logs of so many faults is nobody's news."""
    logger = logging.getLogger("diloco_blob")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
