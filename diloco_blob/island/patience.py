"""How long an island goes on without an answer: when it pauses, what it says then, and what ends the pause.

Counted from the first contribution that was taken and is not history, whether or not it could be sent: so silence of
the store and silence of all aggregators pause an island alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

from diloco_blob.core.clock import Clock
from diloco_blob.core.settings import Policy, Sync
from diloco_blob.island.inbox import poll_bounds
from diloco_blob.island.outbox import Outbox
from diloco_blob.store import RetryingStore

FINISH_S_MIN = 600.0
"""Work that is done is waited for at least as long as this before it is given up."""


@dataclass(frozen=True)
class Cause:
    """Why an island pauses."""

    text: str
    gone: Callable[[], bool]
    """Whether it is over, other than by a new version."""


@dataclass
class Patience:
    """Of one island, by this machine's clock in seconds. Used by the training thread alone."""

    store: RetryingStore
    outbox: Outbox
    clock: Clock
    sync: Sync
    policy: Policy
    _since: float | None = None
    """When the waiting began; None: nothing waits to be merged."""
    _news_at: float = 0.0

    @property
    def round_s(self) -> float:
        """How long sending and a version can take if an aggregator lives: deadline, take-over, a few polls."""
        _, longest = poll_bounds(self.policy.deadline_s)
        return self.policy.deadline_s + self.policy.takeover_s + 4 * longest

    @property
    def finish_s(self) -> float:
        """How long `finish` waits for a store that takes nothing."""
        return max(FINISH_S_MIN, self.sync.pause_after * self.policy.deadline_s + self.round_s)

    def taken(self) -> None:
        """A contribution was taken."""
        if self._since is None:
            self._since = self.clock.monotonic()

    def adopted(self, *, waits: bool) -> None:
        """A version was adopted; `waits`: something taken is still to be merged."""
        self._news_at = self.clock.monotonic()
        if not waits:
            self._since = None

    def renew(self) -> None:
        """What was missing is back: count anew."""
        if self._since is not None:
            self._since = self.clock.monotonic()

    def over(self) -> bool:
        """Whether contributions have waited for `pause_after` deadlines without a new version."""
        if self._since is None:
            return False
        waited_s = self.clock.monotonic() - max(self._since, self._news_at)
        return waited_s > self.sync.pause_after * self.policy.deadline_s

    def cause(self) -> Cause:
        """What is missing, as far as it can be known here."""
        sent, outage, failure = self.outbox.num_sent, self.store.outage, self.outbox.failure
        if outage is None and failure is None:
            return Cause(
                f"no version for {self.sync.pause_after} deadlines. Is an aggregator running, and do enough islands "
                f"contribute (policy.min_contributions = {self.policy.min_contributions})?",
                lambda: False,
            )
        if outage is not None:
            silent_s = self.clock.monotonic() - outage.since
            text = f"{self.store.url} has not answered for {silent_s:.0f} s; last error: {outage.error.message}"
        else:
            text = f"{self.store.url} answers, but nothing can be sent: {failure}"

        def gone() -> bool:
            return self.outbox.num_sent > sent or (self.outbox.empty() and self.store.outage is None)

        return Cause(text, gone)
