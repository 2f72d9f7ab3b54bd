"""The island's pumps as threads of a simulated process: the same behaviour as `ThreadedDriver`, in virtual time."""

from collections.abc import Callable, Sequence
from functools import partial

from diloco_blob.island.pumps import Pump
from diloco_blob.sim.world import Process

_TICK_S = 1e-6
"""Shortest wait: nobody goes on for ever at one moment."""


class SimulatedDriver:
    """One simulated thread for each pump. See `Driver`.

    Args:
        process: Whose threads they are.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._wakes = 0
        self._running = 0
        self._stopping = False
        self._failure: Exception | None = None
        self._waiting: list[Callable[..., None]] = []

    def start(self, pumps: Sequence[Pump]) -> None:
        """See `Driver.start`."""
        for pump in pumps:
            self._running += 1
            self._process.spawn(partial(self._run, pump))

    def wake(self) -> None:
        """See `Driver.wake`."""
        self._wakes += 1
        self._notify()

    def wait(self, seconds: float) -> None:
        """See `Driver.wait`."""
        self.check()
        self._pause(seconds)
        self.check()

    def check(self) -> None:
        """See `Driver.check`."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """See `Driver.stop`."""
        self._stopping = True
        self._notify()
        while self._running:
            self._pause(None)

    def _run(self, pump: Pump) -> None:
        try:
            while self._goes_on():
                seen = self._wakes
                delay = pump()
                self._notify()
                while self._goes_on() and self._wakes == seen:
                    if delay is None:
                        self._pause(None)
                        continue
                    ends = self._process.monotonic() + delay
                    self._pause(delay)
                    delay = ends - self._process.monotonic()
                    if delay <= 0.0:
                        break
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._failure = error
        finally:
            self._running -= 1
            self._notify()

    def _goes_on(self) -> bool:
        return not self._stopping and self._failure is None

    def _notify(self) -> None:
        """Whoever waits looks again."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            self._process.world.after(0.0, wake)

    def _pause(self, seconds: float | None) -> None:
        """Until a notification, and at most for `seconds`."""
        self._process.check_alive()
        world, task = self._process.world, self._process.world.current
        if task is None:
            raise AssertionError("only a task can wait")
        wake = task.ticket()
        self._waiting.append(wake)
        if seconds is not None:
            world.after(max(_TICK_S, self._process.true_s(seconds)), wake)
        world.suspend()
        self._process.check_alive()
