"""What a contender came to in a study: the figures that table and pictures show, from stored results alone."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quality.contenders import Contender
from quality.studies import Study
from quality.training import Result, settings_of
from quality.tuning import Point, replay

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Summary:
    """One row of a table."""

    contender: Contender
    point: Point
    """Inner and outer learning rates of the runs below."""
    bits: tuple[float, ...]
    """Held-out bits per byte of each, sorted."""
    tuned: bool
    """Whether these are the reported seeds of the best point; else the best trial so far, at the tuning seed."""
    trials: int
    """Trials made."""
    up: float
    """Payload bytes that an island sends in `sync_every` steps, per parameter."""
    down: float
    """The same for what it fetches."""
    moved: float
    """Both, over the whole run."""
    records: float
    """Bytes of records that an island sends and fetches over the whole run, in all."""
    cpu_seconds: float
    """Of a run."""

    @property
    def median(self) -> float:
        """Of the seeds."""
        return statistics.median(self.bits)


def summary(study: Study, contender: Contender, results: Mapping[str, Result]) -> Summary | None:
    """What is known of a contender; None if no run of it has ended well."""
    outcome = replay(study, contender, results)
    runs = [results[config.key] for config in outcome.runs if config.key in results]
    tuned = len(runs) == len(study.seeds)
    trials = [results[config.key] for config in outcome.trials.values() if config.key in results]
    if not tuned:
        good = [result for result in trials if result.bits is not None]
        runs = [min(good, key=lambda result: result.bits or 0.0)] if good else []
    bits = sorted(result.bits for result in runs if result.bits is not None)
    if not bits:
        return None
    one = runs[0]
    up, down, moved, records = _traffic(one)
    return Summary(
        contender=contender,
        point=_point(one),
        bits=tuple(bits),
        tuned=tuned and len(bits) == len(runs),
        trials=len(trials),
        up=up,
        down=down,
        moved=moved,
        records=records,
        cpu_seconds=statistics.median(result.cpu_seconds for result in runs),
    )


def _point(result: Result) -> Point:
    config = result.config
    if config.settings is None:
        return config.lr, None
    outer = settings_of(config.settings).outer
    return config.lr, (outer.lr, outer.momentum)


def _traffic(result: Result) -> tuple[float, float, float, float]:
    """Up and down per parameter and round, both over the run, and records, all of one island.

    Data parallel moves nothing in this bench. What it would have to move is a ring all-reduce of fp32 gradients in each
    step: 2 (M − 1) / M values of each parameter, sent and received.
    """
    config, traffic = result.config, result.traffic
    if config.settings is None or traffic is None:
        step = FLOAT * 2 * (config.islands - 1) / config.islands
        return step, step, 2 * step * config.steps, 0.0
    values = config.islands * result.parameters
    rounds = config.steps / settings_of(config.settings).sync.sync_every
    up, down = traffic.payloads_up / values, traffic.payloads_down / values
    return up / rounds, down / rounds, up + down, (traffic.records_up + traffic.records_down) / config.islands


def summaries(study: Study, results: Mapping[str, Result]) -> list[Summary]:
    """Of all contenders of which something is known, the best first."""
    found: Sequence[Summary | None] = [summary(study, contender, results) for contender in study.contenders]
    return sorted((one for one in found if one), key=lambda one: one.median)


def data_parallel(study: Study, results: Mapping[str, Result]) -> float | None:
    """Held-out bits per byte of data parallel at a study's size and length, wherever it was measured."""
    for contender in study.contenders:
        if contender.name == "dp":
            found = summary(study, contender, results)
            return found.median if found else None
    return None
