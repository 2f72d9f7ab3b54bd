"""Time as an argument.

Library code never reads the machine's clock: it gets a `Clock`. One seed then replays a run in virtual time. Nothing
that decides who is late uses an island's or the aggregator's clock: that is `ObjectStore.now()`.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since the Unix epoch by this machine; for people and logs only."""

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)
