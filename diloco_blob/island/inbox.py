"""Following: new versions become arrays that the training thread may take at its next step boundary.

The next commit's name is known, so waiting is one GET that answers 404 until it exists. How the weights of a version
come here is `catchup`'s.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.island.arrays import Arrays
from diloco_blob.island.catchup import advance, newer
from diloco_blob.island.fates import unmerged
from diloco_blob.island.steps import ignore
from diloco_blob.protocol.heads import Head, RunInfo, read_head
from diloco_blob.protocol.records import Commit
from diloco_blob.store.base import ObjectStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A version that is here and checked."""

    fragment: int
    version: int
    weights: Arrays
    """Not to be written to."""
    watermark: int
    """Up to this number the island's contributions are history."""
    staleness: int | None
    """Of the island's newest contribution in this version, if it has one."""
    fastest: float = 0.0
    """Inner steps per second of the fastest island in this version; 0: nobody said."""
    unmerged: tuple[int, ...] = ()
    """Numbers of its contributions that became history since the version taken before, without being merged; known only
    with `sync.owe_unmerged`."""


@dataclass
class _Follower:
    fragment: int
    version: int
    mirror: Arrays
    head: Head | None = None
    """The commit of `version`; read when it is first needed."""
    delay_s: float = 0.0
    next_poll: float = 0.0


def poll_bounds(deadline_s: float) -> tuple[float, float]:
    """Shortest and longest time between two polls of a fragment, in seconds.

    Waiting is a small part of a round whatever its length, and a day of polling stays cheap: once the interval has
    grown to its longest, 50 requests a deadline where that is 25 to 1500 s; 2 a second below, 2 a minute above. Growing
    there after a send takes up to some 20 requests more.
    """
    longest = min(30.0, max(0.5, deadline_s / 50.0))
    return min(0.1, longest), longest


@dataclass
class Inbox:
    """Follows every fragment for one island. `pump` is called by one thread; the rest from any."""

    store: ObjectStore
    run: RunInfo
    island: str
    clock: Clock
    ids: Ids
    at: Callable[[str], None] = ignore
    """Told of each step (`steps.STEPS`)."""
    _followers: dict[int, _Follower] = field(default_factory=dict)
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, fragment: int, version: int, mirror: Arrays) -> None:
        """Follow a fragment from a version whose weights are known."""
        self._followers[fragment] = _Follower(fragment, version, mirror)

    def expect(self, fragment: int) -> None:
        """A contribution was sent: a version may come soon, so poll at short intervals again."""
        follower = self._followers[fragment]
        with self._lock:
            follower.delay_s = 0.0
            follower.next_poll = self.clock.monotonic()

    def arrival(self, fragment: int) -> Arrival | None:
        """The newest version that is here and was not taken yet."""
        with self._lock:
            return self._arrivals.get(fragment)

    def take(self, fragment: int) -> Arrival | None:
        """The same, and it counts as taken."""
        with self._lock:
            return self._arrivals.pop(fragment, None)

    def version(self, fragment: int) -> int:
        """The newest version that is here."""
        return self._followers[fragment].version

    def pump(self) -> float:
        """Poll what is due.

        Returns:
            Seconds until the next poll is due.

        Raises:
            Corrupt: The newest weights in the bucket do not match their digest.
        """
        for follower in self._followers.values():
            with self._lock:
                due = follower.next_poll <= self.clock.monotonic()
            if due:
                self._poll(follower)
        with self._lock:
            soonest = min(follower.next_poll for follower in self._followers.values())
        return max(0.0, soonest - self.clock.monotonic())

    def _poll(self, follower: _Follower) -> None:
        shortest, longest = poll_bounds(self.run.run.settings.policy.deadline_s)
        try:
            found = self._follow(follower)
        except Unavailable as error:
            log.warning("island %s: cannot follow fragment %d: %s", self.island, follower.fragment, error)
            found = False
        with self._lock:
            if found:
                follower.delay_s = 0.0
            else:
                follower.delay_s = min(longest, max(shortest, follower.delay_s * 1.25))
            delay = follower.delay_s * self.ids.uniform(0.8, 1.2)
            follower.next_poll = self.clock.monotonic() + delay

    def _follow(self, follower: _Follower) -> bool:
        """Bring one fragment up to the newest version; whether there was one."""
        heads = newer(self.store, self.run, follower.fragment, follower.version)
        if not heads:
            return False
        heads[-1], mirror = advance(self.store, self.run, self.island, heads, follower.version, follower.mirror)
        newest = heads[-1]
        unmerged = self._unmerged(follower, heads)
        mine = [item for item in newest.commit.merged if item.island == self.island] if newest.commit else []
        tally = newest.tally.get(self.island)
        self.at("version.fetched")
        with self._lock:
            before = self._arrivals.get(follower.fragment)
            self._arrivals[follower.fragment] = Arrival(
                fragment=follower.fragment,
                version=newest.version,
                weights=mirror,
                watermark=tally.consumed if tally else 0,
                staleness=mine[-1].staleness if mine else None,
                fastest=_fastest(newest.commit),
                unmerged=(before.unmerged if before else ()) + unmerged,
            )
            follower.mirror, follower.version, follower.head = mirror, newest.version, newest
        return True

    def _unmerged(self, follower: _Follower, heads: list[Head]) -> tuple[int, ...]:
        if not self.run.run.settings.sync.owe_unmerged:
            return ()
        if follower.head is None:
            follower.head = read_head(self.store, self.run, follower.fragment, follower.version)
        return unmerged(self.store, self.run, self.island, follower.head, heads)


def _fastest(commit: Commit | None) -> float:
    merged = commit.merged if commit else ()
    return max((item.steps / item.train_s for item in merged if item.train_s > 0.0), default=0.0)
