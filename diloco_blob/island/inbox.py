"""Following: new versions become arrays that the training thread may take at its next step boundary.

The next commit's name is known, so waiting is one GET that answers 404 until it exists. The mirror is advanced
by the coded update and checked against the digest in the commit: bit-exact, or the params are fetched instead.
Someone who is behind by several versions fetches whatever is fewer bytes.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Corrupt, NotFound, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.island.arrays import Arrays, difference
from diloco_blob.island.steps import ignore
from diloco_blob.protocol.heads import Head, RunInfo, find_head, read_head
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import ObjectRef
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import codec_for, decode_payload, digest, read_tensors, weights_digest

log = logging.getLogger(__name__)

_WALK_MAX = 4
"""Versions that are followed one by one; from further behind the head is searched for."""


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


@dataclass
class _Follower:
    fragment: int
    version: int
    mirror: Arrays
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
        heads: list[Head] = []
        while len(heads) < _WALK_MAX:
            try:
                heads.append(read_head(self.store, self.run, follower.fragment, follower.version + len(heads) + 1))
            except NotFound:
                break
        else:
            newest = find_head(self.store, self.run, follower.fragment, hint=heads[-1].version)
            if newest.version > heads[-1].version:
                heads.append(newest)
        if not heads:
            return False
        mirror = self._by_updates(follower, heads)
        if mirror is None:
            heads[-1], mirror = fetch_params(self.store, self.run, heads[-1])
        newest = heads[-1]
        mine = [item for item in newest.commit.merged if item.island == self.island] if newest.commit else []
        tally = newest.tally.get(self.island)
        self.at("version.fetched")
        with self._lock:
            self._arrivals[follower.fragment] = Arrival(
                fragment=follower.fragment,
                version=newest.version,
                weights=mirror,
                watermark=tally.consumed if tally else 0,
                staleness=mine[-1].staleness if mine else None,
            )
            follower.mirror, follower.version = mirror, newest.version
        return True

    def _by_updates(self, follower: _Follower, heads: list[Head]) -> Arrays | None:
        """Apply the updates one after another; None if the params are cheaper, or an update is gone or damaged."""
        commits = [head.commit for head in heads if head.commit]
        walked = [commit.version for commit in commits] == list(
            range(follower.version + 1, follower.version + 1 + len(commits))
        )
        if not walked or sum(commit.update.size for commit in commits) > heads[-1].weights.params.size:
            return None
        settings = self.run.run.settings.down
        layout = fragment_layout(self.run.run.tensors, follower.fragment)
        mirror = follower.mirror
        try:
            for commit in commits:
                data = fetch(self.store, commit.update)
                mirror = difference(mirror, dict(decode_payload([data], layout, codec_for(settings))))
            if weights_digest(mirror) != heads[-1].weights.digest:
                raise Corrupt(
                    f"fragment {follower.fragment} version {heads[-1].version}: weights differ from the commit's"
                )
        except NotFound:
            return None
        except Corrupt as error:
            log.warning("island %s: fetching the params instead: %s", self.island, error)
            return None
        return mirror


def fetch(store: ObjectStore, ref: ObjectRef) -> bytes:
    """The bytes of an object, checked.

    Raises:
        NotFound: It does not exist (any more).
        Corrupt: Its bytes are not what the reference says.
    """
    data, _ = store.get(ref.key)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise Corrupt(f"{ref.key} does not match its digest")
    return data


def fetch_params(store: ObjectStore, run: RunInfo, head: Head) -> tuple[Head, Arrays]:
    """The weights of a version or, where they were collected meanwhile, of the newest one.

    Raises:
        Corrupt: The newest weights do not match their digest.
    """
    while True:
        try:
            data = fetch(store, head.weights.params)
        except NotFound:
            newer = find_head(store, run, head.fragment, hint=head.version)
            if newer.version == head.version:
                raise
            head = newer
            continue
        layout = fragment_layout(run.run.tensors, head.fragment)
        arrays = dict(read_tensors(data, layout))
        if weights_digest(arrays) != head.weights.digest:
            raise Corrupt(f"{head.weights.params.key}: weights differ from the commit's")
        return head, arrays
