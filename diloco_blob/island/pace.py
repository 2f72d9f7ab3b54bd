"""When a fragment is due: every `sync_every` inner steps, or sooner on an island that is slower than others.

With `sync.match_speed` an island makes ⌊v / v_max · sync_every⌋ steps between two contributions to a fragment, v being
its own inner steps per second and v_max those of the fastest island in the version taken last (DyLU, arXiv 2401.09135):
all islands then send at about the same time, and nobody waits for a slow one or merges its work late.
"""

from dataclasses import dataclass, field

from diloco_blob.core.settings import Sync
from diloco_blob.protocol.layout import offsets

RATIO_MAX = 16
"""Nobody makes fewer than `sync_every` / 16 steps, whatever speed another island claims."""


@dataclass
class Pace:
    """The due steps of one island.

    Args:
        sync: `sync_every`, `num_fragments`, `match_speed`.
    """

    sync: Sync
    _due_at: dict[int, int] = field(default_factory=dict)
    """Step at which a fragment is due next, where that is not a matter of counting alone."""
    _intervals: dict[int, int] = field(default_factory=dict)
    _speeds: dict[int, float] = field(default_factory=dict)
    """Own steps per second in the newest contribution, by fragment."""
    _taken_at: dict[int, int] = field(default_factory=dict)
    """Step at which the newest contribution to a fragment was taken; a restart takes what was due without `due`."""

    def __post_init__(self) -> None:
        self._offsets = offsets(self.sync.num_fragments, self.sync.sync_every)

    def interval(self, fragment: int) -> int:
        """Inner steps between two contributions to a fragment, as of now."""
        return self._intervals.get(fragment, self.sync.sync_every)

    def due(self, step: int) -> list[int]:
        """The fragments that are due after inner step number `step`; to be asked once for each step."""
        found = []
        for p, offset in enumerate(self._offsets):
            if step >= self._due_at[p] if p in self._due_at else (step - offset) % self.sync.sync_every == 0:
                found.append(p)
                if self.sync.match_speed:
                    self._due_at[p] = step + self.interval(p)
        return found

    def took(self, fragment: int, step: int, steps: int, seconds: float) -> None:
        """A contribution of so many steps, which took so long to train, was taken after inner step number `step`."""
        self._taken_at[fragment] = step
        if seconds > 0.0:
            self._speeds[fragment] = steps / seconds

    def learned(self, fragment: int, fastest: float) -> None:
        """The fastest island in the version just taken makes so many steps per second; 0: nobody said."""
        own = self._speeds.get(fragment, 0.0)
        if not self.sync.match_speed or own <= 0.0 or fastest <= 0.0:
            return
        ratio = min(1.0, max(own / fastest, 1.0 / RATIO_MAX))
        self._intervals[fragment] = max(1, self.sync.overlap + 1, int(ratio * self.sync.sync_every))
        self._due_at[fragment] = self._taken_at[fragment] + self._intervals[fragment]
