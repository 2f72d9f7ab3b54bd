"""Which names there are under `islands/`, remembered so that one LIST serves all fragments.

A remembered list is a hint: it may lack islands that came meanwhile, which does no harm while a round stays open.
A close is decided with a list that was made since its round was looked at, so that a newcomer whose receipt is there
is in it.
"""

import math
from dataclasses import dataclass

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.ids import check_island_name
from diloco_blob.core.limits import ISLANDS_MAX
from diloco_blob.protocol import keys
from diloco_blob.store.base import ObjectStore

STRANGERS_MAX = 2 * ISLANDS_MAX
"""Names under `islands/` that one LIST looks at."""


def watch_age_max_s(deadline_s: float) -> float:
    """How old the list of a loop may get while rounds are open, in seconds: a small part of a round."""
    return max(1.0, min(10.0, deadline_s / 50.0))


@dataclass
class Roster:
    """The names of one run's islands.

    Args:
        age_max_s: How long a list is used, by the machine's clock; without end by default, for a single pass.
    """

    age_max_s: float = math.inf
    fresh: bool = False
    """Whether the list was made since `expire` was last called."""
    seen: bool = False
    """Whether anyone has contributed yet: until then newcomers are all there is to see, and every pass lists."""
    _names: tuple[str, ...] = ()
    _listed_at: float = -math.inf

    def expire(self) -> None:
        """Another round is looked at: what was listed before may be used until it is about to be closed."""
        self.fresh = False

    def begin_pass(self) -> None:
        """Another pass over the fragments begins."""
        if not self.seen:
            self._listed_at = -math.inf

    def names(self, store: ObjectStore, clock: Clock, *, fresh: bool = False) -> tuple[str, ...]:
        """Names that islands may have, in the store's order.

        Args:
            store: Listed, if the last list is too old.
            clock: Tells how old it is.
            fresh: Whether only a list made since `expire` will do.

        Raises:
            Unavailable, Denied: The store did not answer, or refused.
        """
        now = clock.monotonic()
        if (fresh and not self.fresh) or now - self._listed_at >= self.age_max_s:
            self._names = _list(store)
            self._listed_at, self.fresh = now, True
        return self._names


def _list(store: ObjectStore) -> tuple[str, ...]:
    found = []
    for looked_at, name in enumerate(store.list_dirs(keys.ISLANDS)):
        if looked_at >= STRANGERS_MAX:
            break
        try:
            found.append(check_island_name(name))
        except InvalidSettings:
            continue  # Not an island of ours: whatever lies there is none of our business.
    return tuple(found)
