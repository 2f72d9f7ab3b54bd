"""What one seed decides beforehand: the run's settings, who takes part, and how rough the world is."""

from dataclasses import dataclass

from diloco_blob.core.settings import Codec, Collect, Merge, Outer, Policy, Settings, Sync
from diloco_blob.sim.dice import Dice

CHAOS_S = (5.0, 30.0)
"""How long faults and accidents happen, before the calm in which everything must come to an end."""


@dataclass(frozen=True)
class Schedule:
    """A draw."""

    settings: Settings
    num_islands: int
    num_watchers: int
    functions: bool
    """Whether receipts and a timer start aggregators as functions."""
    rounds: int
    step_s: float
    """Of the fastest island's inner step."""
    chaos_s: float
    accident_every_s: float
    """Mean time between two accidents."""
    fault_intensity: float
    skew_s: float
    """By how much machines' clocks are wrong, at most."""
    budget_s: float
    """How long retry layers ride out an outage."""


def draw(dice: Dice) -> Schedule:
    """The schedule of one seed."""
    num_islands = dice.choice((1, 2, 2, 3, 3, 4)) if dice.chance(0.97) else dice.integer(5, 16)
    functions = dice.chance(0.5)
    return Schedule(
        settings=_settings(dice, num_islands),
        num_islands=num_islands,
        num_watchers=dice.choice((0, 1, 1, 2)) if functions else dice.choice((1, 1, 2, 3)),
        functions=functions,
        rounds=dice.choice((2, 2, 3, 4)),
        step_s=dice.choice((0.1, 0.3, 1.0)),
        chaos_s=dice.uniform(*CHAOS_S),
        accident_every_s=dice.choice((2.0, 5.0, 15.0)),
        fault_intensity=dice.choice((0.0, 0.3, 1.0)),
        skew_s=dice.choice((0.0, 60.0, 86_400.0)),
        budget_s=dice.choice((1.0, 10.0)),
    )


def _settings(dice: Dice, num_islands: int) -> Settings:
    sync_every = dice.integer(2, 4)
    overlap = dice.choice((0, 1, sync_every - 1))
    adopt = dice.choice(("overwrite", "carry", "mix")) if overlap else dice.choice(("overwrite", "carry"))
    deadline_s = dice.choice((2.0, 6.0, 15.0))
    up = _codec(dice)
    return Settings(
        sync=Sync(
            sync_every=sync_every,
            num_fragments=dice.choice((1, 1, 1, 1, 2, 3)),
            overlap=overlap,
            adopt=adopt,  # type: ignore[arg-type]
            max_in_flight=dice.integer(1, 3),
            pause_after=dice.choice((1, 3)),
            owe_unmerged=up.error_feedback and dice.chance(0.7),
            match_speed=dice.chance(0.3),
        ),
        up=up,
        down=_codec(dice),
        merge=Merge(
            rule=dice.choice(("mean", "mean", "rda", "trimmed_mean", "sparse_mean")),
            clip=dice.choice(("none", "none", "median")),
            weights=dice.choice(("tokens", "uniform")),
            discount=dice.chance(0.2),
        ),
        outer=Outer(
            optimizer=dice.choice(("nesterov", "nesterov", "delayed_nesterov", "rho_adaptive")),
            momentum=dice.choice((0.0, 0.9)),
            delay=2,
        ),
        policy=Policy(
            islands=num_islands,
            quorum=dice.integer(1, num_islands),
            grace_s=min(deadline_s, dice.choice((0.0, 0.5, 2.0, 15.0))),
            deadline_s=deadline_s,
            takeover_s=dice.choice((0.5, 3.0, 10.0)),
            active_versions=dice.integer(1, 3),
            max_staleness=dice.choice((0, 1, 3, 10)),
        ),
        collect=Collect(keep_versions=dice.choice((0, 1, 1, 2, 4))),
    )


def _codec(dice: Dice) -> Codec:
    feedback = dice.chance(0.5)
    cycle = dice.choice((1, 1, 2, 3)) if feedback else 1
    return Codec(
        name=dice.choice(("fp32", "fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk")),
        block=8,
        chunk=16,
        keep=dice.integer(1, 4),
        value_bits=dice.choice((1, 2, 4, 8)),
        error_feedback=feedback,
        decay=dice.choice((1.0, 0.9)),
        cycle=cycle,
        whole_every=dice.choice((0, 2, 5)) if cycle > 1 else 0,
    )
