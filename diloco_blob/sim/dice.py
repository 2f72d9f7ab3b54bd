"""Everything that a simulation draws by lot, from one seed."""

import math
from collections.abc import Sequence
from typing import TypeVar

from diloco_blob.core.ids import SeededIds

_T = TypeVar("_T")


class Dice:
    """Draws from one seed: the same calls give the same draws.

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int) -> None:
        self._source = SeededIds(seed)

    def uniform(self, low: float, high: float) -> float:
        """Evenly from [low, high]."""
        return self._source.uniform(low, high)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return probability > 0.0 and self._source.uniform(0.0, 1.0) < probability

    def integer(self, low: int, high: int) -> int:
        """Evenly from low to high, both included."""
        return min(high, low + int(self._source.uniform(0.0, 1.0) * (high - low + 1)))

    def choice(self, options: Sequence[_T]) -> _T:
        """One of them."""
        return options[self.integer(0, len(options) - 1)]

    def exponential(self, mean: float) -> float:
        """Time until something that happens at random every `mean`."""
        return -mean * math.log(max(1e-12, self._source.uniform(0.0, 1.0)))

    def skewed(self, typical: float) -> float:
        """Around `typical`, and now and then ten times as much: 1 draw in 360 is above that."""
        return typical * (0.5 + 0.5 / math.sqrt(1.0 - self._source.uniform(0.0, 0.9999)))

    def fork(self) -> "Dice":
        """A source of its own, which later draws from this one do not disturb."""
        return Dice(self.integer(0, (1 << 48) - 1))
