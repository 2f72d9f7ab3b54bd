"""Which runs a contender gets: as many trials as every other one at one seed, then its best at fresh seeds.

A search is a generator that asks for the next configuration and is told its held-out bits per byte. So it can be
replayed on stored results: what the table shows is what the queue found, and a stopped queue goes on where it was.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from quality.contenders import Contender, Outer
from quality.studies import Study
from quality.training import Config, Result

TUNING_SEED = 0
"""Not among the seeds that are reported."""

Point = tuple[float, Outer | None]
"""Inner learning rate, and outer learning rate and momentum; None: data parallel."""


def search(
    start: Point, outers: Sequence[Outer], trials: int, factors: Sequence[float] = (2.0, 0.5)
) -> Generator[Point, float, Point]:
    """Climb along inner learning rates by these factors, then try the outer settings, then refine the learning rate.

    Args:
        start: Where to begin.
        outers: Other outer settings, tried at the best inner learning rate.
        trials: How many points may be asked for; all are.
        factors: Of the climb, in their order.

    Returns:
        The best point.
    """
    seen: dict[Point, float] = {}

    def visit(point: Point) -> Generator[Point, float, bool]:
        """Whether it is the best so far."""
        if point in seen or len(seen) >= trials:
            return False
        seen[point] = yield point
        return point == min(seen, key=seen.__getitem__)

    best = start
    yield from visit(start)
    for factor in factors:
        while (yield from visit(_scaled(best, factor))):
            best = _scaled(best, factor)
    for outer in outers:
        yield from visit((best[0], outer))
    factor = math.sqrt(2.0)
    while len(seen) < trials:
        best = min(seen, key=seen.__getitem__)
        yield from visit(_scaled(best, factor))
        yield from visit(_scaled(best, 1 / factor))
        factor = math.sqrt(factor)
    return min(seen, key=seen.__getitem__)


def _scaled(point: Point, factor: float) -> Point:
    lr, outer = point
    return float(f"{lr * factor:.4g}"), outer


def config_of(study: Study, contender: Contender, point: Point, seed: int) -> Config:
    """The run of a contender at a point."""
    lr, outer = point
    settings = contender.settings
    if settings is not None and outer is not None:
        settings = settings | {"outer.lr": outer[0], "outer.momentum": outer[1]}
    return Config(
        size=study.size,
        islands=study.islands,
        steps=study.steps,
        settings=settings,
        lr=lr,
        inner=contender.inner,
        batch=study.batch,
        seed=seed,
    )


@dataclass
class Outcome:
    """What is known of a contender in a study."""

    trials: dict[Point, Config] = field(default_factory=dict)
    best: Point | None = None
    """None: its tuning is not finished."""
    runs: list[Config] = field(default_factory=list)
    """The best point at each reported seed, as far as they were asked for."""


def plan(study: Study, contender: Contender, start: Point, outcome: Outcome) -> Generator[Config, Result, None]:
    """Every run of a contender in a study, in order; `outcome` is brought up to date on the way."""
    searching = search(start, _others(contender, start), study.trials, study.factors)
    bits: float | None = None
    while True:
        try:
            point = next(searching) if bits is None else searching.send(bits)
        except StopIteration as stop:
            outcome.best = stop.value
            break
        config = config_of(study, contender, point, TUNING_SEED)
        outcome.trials[point] = config
        result = yield config
        bits = math.inf if result.bits is None else result.bits
    assert outcome.best is not None
    for seed in study.seeds:
        config = config_of(study, contender, outcome.best, seed)
        outcome.runs.append(config)
        yield config


def _others(contender: Contender, start: Point) -> list[Outer]:
    return [outer for outer in contender.outers if outer != start[1]]


def start_of(study: Study, contender: Contender, results: Mapping[str, Result]) -> Point:
    """Where a contender's search begins: at its best in the study that this one follows, or at its own default."""
    if study.follows is not None:
        trials = replay(study.follows, contender, results).trials
        known = {point: results[config.key].bits for point, config in trials.items() if config.key in results}
        good = {point: bits for point, bits in known.items() if bits is not None}
        if good:
            return min(good, key=good.__getitem__)
    return contender.lr, contender.outers[0] if contender.outers else None


def replay(study: Study, contender: Contender, results: Mapping[str, Result]) -> Outcome:
    """What stored results say about a contender; stops at the first run that is missing."""
    outcome = Outcome()
    planned = plan(study, contender, start_of(study, contender, results), outcome)
    config = next(planned, None)
    while config is not None and config.key in results:
        try:
            config = planned.send(results[config.key])
        except StopIteration:
            break
    return outcome
