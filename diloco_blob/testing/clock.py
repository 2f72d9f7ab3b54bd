"""Time that passes only when somebody sleeps."""

import threading


class VirtualClock:
    """A `Clock` for tests and simulation: `sleep` returns at once and moves time on.

    Safe to use from many threads.

    Args:
        start: What `wall` says at first; seconds since the Unix epoch.
    """

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._start = start
        self._elapsed = 0.0

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        with self._lock:
            return self._elapsed

    def wall(self) -> float:
        """See `Clock.wall`."""
        with self._lock:
            return self._start + self._elapsed

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`; negative sleeps are a programmer's error."""
        assert seconds >= 0, seconds  # noqa: S101 - programmer error
        with self._lock:
            self._elapsed += seconds

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass without anybody sleeping."""
        self.sleep(seconds)
