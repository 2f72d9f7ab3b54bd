"""How much each island counts in a round.

    w_m ∝ base_m · factor_m,   Σ w = 1

Contributions are increments of one trajectory, so those of one island are summed before they are weighted: its base
weight comes from its tokens and steps in all, its factor is the mean of its contributions' staleness factors, weighted
by tokens (docs/decisions/0001). `trimmed_mean` uses no weights: its islands all count alike.

These run once, when a round is closed, and their results are written into the close. Whoever merges takes the
recorded numbers. That matters: `x ** y` may differ in its last bit between C libraries, and the merge must
not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_blob.core.settings import Merge


class Work(NamedTuple):
    """What a contribution says about itself."""

    tokens: int
    """Tokens trained on since the contribution before."""
    steps: int
    """Inner steps since then."""
    staleness: int
    """Versions that were committed meanwhile; 0 for fresh work."""


def bounded_work(work: Work, tokens_max: int) -> Work:
    """What a contribution may count for, whatever it claims: at most `tokens_max` tokens, and the steps of these.

    A claim is cut, not refused, since an island that was cut off for long sends several intervals in one
    contribution. Tokens per step stay what they are, up to rounding the steps up, so `tokens2_per_step` is bounded
    too.
    """
    if work.tokens <= tokens_max:
        return work
    return work._replace(tokens=tokens_max, steps=-(-work.steps * tokens_max // work.tokens))


def staleness_factor(merge: Merge, staleness: int) -> float:
    """The factor in [0, 1] for work that started `staleness` versions ago (FedAsync, arXiv 1903.03934).

    constant: 1. polynomial: (1 + s)^−a; a = 1/2 is usual with FedBuff (arXiv 2106.06639). hinge: 1 if s ≤ b,
    else 1 / (a·(s − b) + 1).
    """
    if staleness < 0:
        raise ValueError(f"staleness is a count of versions, got {staleness}")
    if merge.staleness == "constant":
        return 1.0
    if merge.staleness == "polynomial":
        return float((1.0 + staleness) ** -merge.staleness_a)
    if staleness <= merge.staleness_b:
        return 1.0
    return 1.0 / (merge.staleness_a * (staleness - merge.staleness_b) + 1.0)


def island_weights(merge: Merge, islands: Sequence[Sequence[Work]]) -> tuple[list[float], float]:
    """The weights of a round's islands, and the discount of its step.

    Rules: tokens: c. tokens2_per_step: c²/steps, quantity × quality of Decoupled DiLoCo (arXiv 2604.21428,
    §3.2), 0 without steps. uniform, and whatever the rule for `trimmed_mean`: 1.

    Under `trimmed_mean` staleness changes no weight either, only the discount.

    Two degenerate cases have answers rather than a division by zero. No island has any base weight (no
    tokens): all count alike. Every product of weight and factor is zero, as factors can underflow: relative
    weights are the base weights, and the discount, if it is asked for, is zero.

    Args:
        merge: The rules.
        islands: The contributions of each island, at least one.

    Returns:
        Weights, in the order of `islands`, that sum to 1 up to rounding; and Σ(base·factor) / Σ base if
        `merge.discount`, else 1.0: what to multiply the step by.
    """
    if not islands or any(not works or any(min(work) < 0 for work in works) for works in islands):
        raise ValueError(f"weights need at least one contribution and no negative counts, got {islands}")
    base = [_base_weight(merge, works) for works in islands]
    if math.fsum(base) == 0.0:
        base = [1.0] * len(islands)
    total = math.fsum(base)
    base = [weight / total for weight in base]
    scaled = [weight * _mean_factor(merge, works) for weight, works in zip(base, islands, strict=True)]
    kept = math.fsum(scaled)
    discount = min(1.0, kept) if merge.discount else 1.0
    if kept == 0.0 or merge.rule == "trimmed_mean":
        return base, discount
    return [weight / kept for weight in scaled], discount


def _base_weight(merge: Merge, works: Sequence[Work]) -> float:
    tokens, steps = sum(work.tokens for work in works), sum(work.steps for work in works)
    if merge.weights == "uniform" or merge.rule == "trimmed_mean":
        return 1.0
    if merge.weights == "tokens":
        return float(tokens)
    return tokens**2 / steps if steps else 0.0


def _mean_factor(merge: Merge, works: Sequence[Work]) -> float:
    """The staleness factors of one island's contributions, weighted by tokens; alike, if they have none."""
    factors = [staleness_factor(merge, work.staleness) for work in works]
    tokens = sum(work.tokens for work in works)
    if len(factors) == 1 or tokens == 0:
        return math.fsum(factors) / len(factors)
    return math.fsum(factor * (work.tokens / tokens) for factor, work in zip(factors, works, strict=True))
