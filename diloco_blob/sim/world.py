"""A world of processes on one virtual clock, in one thread: every order of events comes from the caller's seed.

Production code that blocks runs here unchanged. Each thread of a simulated process is a greenlet; where it would wait
for the store, for another thread or for time to pass, it gives control back to the world, which goes on with whatever
happens next. So processes interleave at every request and every sleep, and the same decisions give the same history.

A killed process is never resumed: whatever it had sent is still on its way, and everything that it kept is gone. A
stalled one is resumed later, and knows nothing of it.
"""

import heapq
import itertools
from collections.abc import Callable

from greenlet import getcurrent, greenlet

from diloco_blob.core.errors import DilocoError


class Killed(BaseException):
    """What SIGKILL is to a process: nobody catches it."""


class Violation(Exception):  # noqa: N818 - named for what it is
    """A promise of the protocol does not hold.

    Args:
        promise: Which, by a short stable name.
        what: How, in one line.
    """

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise
        self.what = what


class World:
    """Virtual time, and what happens next.

    Args:
        start: The time at the beginning; seconds since the Unix epoch. It is the store's clock.
        tell: Given each line of the trace, without the time; None: nobody listens.
    """

    def __init__(self, start: float = 1_700_000_000.0, tell: Callable[[float, str, str], None] | None = None) -> None:
        self.now = 0.0
        """Seconds since the beginning: small numbers, so that small differences are not rounded away."""
        self._start = start
        self.hub = getcurrent()
        self.current: Task | None = None
        self.num_events = 0
        self._tell = tell
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def traced(self) -> bool:
        """Whether anybody listens to the trace."""
        return self._tell is not None

    def trace(self, who: str, what: str) -> None:
        """One line of the trace."""
        if self._tell is not None:
            self._tell(self.now, who, what)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let `action` happen `delay_s` from now; what is due at one moment happens in the order of these calls."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Let things happen until `done`; False if nothing is left to happen, or the clock passes `until`.

        Raises:
            Violation: Whoever watches has found one.
        """
        while not done():
            if not self._events or self._events[0][0] > until:
                return False
            self.now, _, action = heapq.heappop(self._events)
            self.num_events += 1
            action()
        return True

    def suspend(self) -> object:
        """Give control back until the current task is resumed; what it is resumed with. Only within a task."""
        return self.hub.switch()

    def wall(self) -> float:
        """The true time: as a `Clock`, the world is that of the store."""
        return self._start + self.now

    def monotonic(self) -> float:
        """See `wall`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Suspend the current task for `seconds` of true time."""
        task = self.current
        if task is None:
            raise AssertionError("only a task can sleep")
        self.after(seconds, task.ticket())
        self.suspend()


class Task:
    """One thread of a process: a greenlet.

    Args:
        process: Whose.
        body: What it does.
    """

    def __init__(self, process: "Process", body: Callable[[], None]) -> None:
        self.process = process
        self.done = False
        self._body = body
        self._turn = 0
        self._greenlet = greenlet(self._run, parent=process.world.hub)

    def ticket(self) -> Callable[..., None]:
        """What ends the task's next wait, with the value that it is given; without effect once the task has gone on."""
        turn = self._turn
        return lambda value=None: self._resume(turn, value)

    def _resume(self, turn: int, value: object) -> None:
        process, world = self.process, self.process.world
        if turn != self._turn or self.done or not process.alive:
            return
        if process.stalled_until > world.now:
            process.asleep.append(lambda: self._resume(turn, value))
            return
        self._turn += 1
        before, world.current = world.current, self
        try:
            self._greenlet.switch(value)
        finally:
            world.current = before

    def _run(self, _: object = None) -> None:
        try:
            self._body()
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001 - handed to whoever started the process
            self.process.fail(error)
        finally:
            self.done = True

    def unwind(self) -> None:
        """End the greenlet of a killed process: its open files are closed, its requests go nowhere any more."""
        if self._greenlet and self._greenlet is not getcurrent():  # Started, and not yet ended.
            self._greenlet.throw(Killed)
        self.done = True


class Process:
    """A process on some machine: it lives, may stall, and ends by itself or is killed.

    Args:
        world: Where.
        name: For the trace.
        kind: What it may do: `island`, `aggregator` or `collector`.
        skew_s: How far its clock is off.
        rate: How fast its clock goes.
        ended: Called once when it has ended by itself, with the error that ended it or None.
    """

    def __init__(
        self,
        world: World,
        name: str,
        kind: str,
        *,
        skew_s: float = 0.0,
        rate: float = 1.0,
        ended: Callable[[DilocoError | None], None] = lambda _: None,
    ) -> None:
        self.world = world
        self.name = name
        self.kind = kind
        self.alive = True
        self.stalled_until = 0.0
        self.asleep: list[Callable[[], None]] = []
        """What waits for the end of a stall."""
        self._skew_s = skew_s
        self._rate = rate
        self._tasks: list[Task] = []
        self._ended = ended

    def spawn(self, body: Callable[[], None]) -> Task:
        """Start a thread."""
        task = Task(self, body)
        self._tasks.append(task)
        self.world.after(0.0, task.ticket())
        return task

    def main(self, body: Callable[[], None]) -> None:
        """Start the process; it ends with `body`."""

        def whole() -> None:
            body()
            self._end(None)

        self.spawn(whole)

    def kill(self) -> None:
        """SIGKILL. Called by the world, never by a task."""
        if not self.alive:
            return
        self.alive = False
        self.world.trace(self.name, "KILLED")
        for task in self._tasks:
            task.unwind()

    def discard(self) -> None:
        """Give back what its tasks hold: the world has come to an end."""
        self.alive = False
        for task in self._tasks:
            task.unwind()

    def kill_here(self) -> None:
        """SIGKILL at this very point of the current task."""
        self.world.after(0.0, self.kill)
        self.world.suspend()

    def stall(self, seconds: float) -> None:
        """Stop the whole process for so long, as SIGSTOP or a sleeping laptop does. `wake` ends it earlier."""
        self.stalled_until = self.world.now + seconds
        self.world.trace(self.name, f"STALLS for {seconds:.0f} s")
        if seconds != float("inf"):
            self.world.after(seconds, self.wake)

    def wake(self) -> None:
        """End a stall: everything that waited for it happens now."""
        if not self.alive or self.stalled_until == 0.0:
            return
        self.world.trace(self.name, "WAKES")
        self.stalled_until = 0.0
        asleep, self.asleep = self.asleep, []
        for action in asleep:
            self.world.after(0.0, action)

    def fail(self, error: Exception) -> None:
        """One of its tasks ended with an error: so does the process."""
        if not self.alive:
            return
        if not isinstance(error, DilocoError):
            # A bug, of the simulated code or of the simulation: the world must not go on as if nothing had happened.
            self.world.after(0.0, lambda: _raise(error))
            return
        self._end(error)

    def monotonic(self) -> float:
        """See `Clock.monotonic`: as this machine's clock has it."""
        return self.world.now * self._rate

    def wall(self) -> float:
        """See `Clock.wall`: wrong by the skew."""
        return self.world.wall() + self._skew_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        self.check_alive()
        self.world.sleep(self.true_s(seconds))
        self.check_alive()

    def true_s(self, seconds: float) -> float:
        """How long `seconds` of its clock really are."""
        return seconds / self._rate

    def check_alive(self) -> None:
        """Nothing that a dead process still unwinds may have an effect."""
        if not self.alive:
            raise Killed

    def _end(self, error: DilocoError | None) -> None:
        self.alive = False
        for task in self._tasks:
            if task is not self.world.current:
                self.world.after(0.0, task.unwind)
        self.world.trace(self.name, "ends" if error is None else f"ends with {error.kind}: {error}")
        self._ended(error)


def _raise(error: Exception) -> None:
    raise error
