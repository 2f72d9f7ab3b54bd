"""Who turns the handles: one thread for each in a real island, or the caller itself in a test or simulation.

The bookkeeping does one small piece of work whenever it is pumped and says when it wants to be pumped again.
Sending has a thread of its own, so that a slow upload never delays a download or the small objects that others
wait for.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from diloco_blob.core.clock import Clock

Pump = Callable[[], float | None]
"""Does one piece of work; returns the seconds until the next, or None if only a wake-up can bring any."""


class Driver(Protocol):
    """Runs pumps beside the training thread."""

    def start(self, pumps: Sequence[Pump]) -> None:
        """Begin."""

    def wake(self) -> None:
        """There may be work now."""

    def wait(self, seconds: float) -> None:
        """Return when something happened, and at the latest after `seconds`. Raises what a pump raised."""

    def check(self) -> None:
        """Raise what a pump raised, if one did."""

    def stop(self) -> None:
        """End; what is being sent right now is finished first."""


class InlineDriver:
    """Pumps only while the training thread waits: deterministic, one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pumps: Sequence[Pump] = ()

    def start(self, pumps: Sequence[Pump]) -> None:
        """See `Driver.start`."""
        self._pumps = pumps

    def wake(self) -> None:
        """See `Driver.wake`."""

    def wait(self, seconds: float) -> None:
        """See `Driver.wait`."""
        delays = [pump() for pump in self._pumps]
        soonest = min([seconds, *(delay for delay in delays if delay is not None)])
        if soonest > 0:
            self._clock.sleep(soonest)

    def check(self) -> None:
        """See `Driver.check`."""

    def stop(self) -> None:
        """See `Driver.stop`."""


class ThreadedDriver:
    """One thread for each pump."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wakes = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, pumps: Sequence[Pump]) -> None:
        """See `Driver.start`."""
        for number, pump in enumerate(pumps):
            thread = threading.Thread(target=self._run, args=(pump,), name=f"island-pump-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wake(self) -> None:
        """See `Driver.wake`."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """See `Driver.wait`."""
        with self._changed:
            if self._failure is None:
                self._changed.wait(seconds)
            if self._failure is not None:
                raise self._failure

    def check(self) -> None:
        """See `Driver.check`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def stop(self) -> None:
        """See `Driver.stop`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _called(self, seen: int) -> bool:
        return self._stopping or self._failure is not None or self._wakes != seen

    def _run(self, pump: Pump) -> None:
        try:
            while True:
                with self._changed:
                    if self._stopping or self._failure is not None:
                        return
                    seen = self._wakes
                delay = pump()
                with self._changed:
                    self._changed.notify_all()
                    if self._stopping:
                        return
                    if delay is None or delay > 0:
                        # Only a wake-up ends this early: other pumps notify too, and must not keep each other busy.
                        self._changed.wait_for(partial(self._called, seen), delay)
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
