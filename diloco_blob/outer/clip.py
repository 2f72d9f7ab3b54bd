"""Clipping: no island's pseudo-gradient is longer than the median of its round.

A mean has no defence: one island that sends 1,000 times what the others send decides the version. Bounded by the
median norm, it moves the version no further than an honest island could. Its direction stays its own; what that
leaves is for `trimmed_mean`.
"""

from collections.abc import Sequence


def clip_factors(norms: Sequence[float]) -> list[float]:
    """What each island's pseudo-gradient is to be multiplied by: median/norm where the norm is larger, else 1.

    The median is that of the norms that are not zero: an island that made no progress says nothing about how much
    is usual. Of two middle ones it is the lower, so that of two islands the larger is clipped. As long as fewer than
    half of them are hostile, it lies between honest norms, or below.

    Args:
        norms: L2 norms, finite, not negative, one per island.

    Returns:
        Factors in (0, 1], in the order of `norms`.
    """
    positive = sorted(norm for norm in norms if norm > 0.0)
    if not positive:
        return [1.0] * len(norms)
    median = positive[(len(positive) - 1) // 2]
    return [median / norm if norm > median else 1.0 for norm in norms]
