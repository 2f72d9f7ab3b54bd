"""The one retry layer: whole operations, with full jitter, within a budget that rides out a minute's outage.

Backends make one attempt and say honestly how it ended. Nothing below or above this layer tries again, so
that attempts never multiply. Only `Unavailable` is retried; every other error is an answer.

*Lost answers.* A create whose answer was lost is refused, when it is tried again, by its own object. So a
refusal or an ambiguous failure is settled by reading the object back:

- its bytes are the ones that were sent: this create made it, success;
- it has other bytes: another writer was first, `Conflict`;
- it is absent: nothing was written (yet), try again, which is safe because a create never overwrites;
- it cannot be read: the outcome is unknown; try again, and when the budget is spent raise `Unavailable`.
  Never guess.

*Answers that end early.* A connection that breaks in the middle of a body is not always noticed below. What is shorter
than the object is no answer, and is asked for again: no reader has to wonder whether an object or its journey is
damaged.

Equal bytes can only mean "mine" because every record has a fresh write id in its body: two writers never send
the same bytes to one name. (User metadata would not do: some stores drop it.) Unconditional writes are of
objects named by their content, so writing one again changes nothing, and they are simply retried.
"""

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Conflict, DilocoError, NotFound, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.body import Body, body_bytes, body_size
from diloco_blob.store.metered import MeteredStore

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_WAIT_FIRST_S = 0.5
_WAIT_MAX_S = 10.0
_SAY_EVERY_S = 5.0
_LISTED_AT_ONCE = 100_000
_SLOWEST_BYTES_PER_S = 250_000
"""An upload gets as much more budget as it takes at this rate: a large one is not given up after one failure."""


@dataclass(frozen=True)
class Outage:
    """A store that does not answer."""

    since: float
    """Of the first failure, by the clock's `monotonic`."""
    error: Unavailable
    """The newest failure."""


class RetryingStore:
    """Tries operations on `inner` again while it is `Unavailable`, and says so at once, then at most every 5 s.

    Args:
        inner: One attempt at a time. It is metered here, below the retries, so that `usage` counts every
            attempt.
        clock: Waits between attempts and measures the budget.
        ids: Jitter.
        budget_s: How long after its first failure an operation is still tried again.
    """

    def __init__(self, inner: ObjectStore, clock: Clock, ids: Ids, budget_s: float = 90.0) -> None:
        self.url = inner.url
        self.meter = inner if isinstance(inner, MeteredStore) else MeteredStore(inner)
        self._clock = clock
        self._ids = ids
        self._budget_s = budget_s
        self._saying = threading.Lock()
        self._said_at = -math.inf
        self.outage: Outage | None = None
        """Set while attempts fail, by any thread; None as soon as one is answered, be it by a refusal."""

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        return self._retried(f"get {key}", lambda: self._whole(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`. Whoever asks beyond the end pays a HEAD: it may be the answer that ended."""

        def attempt() -> bytes:
            data = self.meter.get_range(key, start, length)
            if len(data) < length:
                self._check_length(key, start + len(data), self.meter.head(key).size)
            return data

        return self._retried(f"get {key}", attempt)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._retried(f"head {key}", lambda: self.meter.head(key))

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`. With `if_absent`, nobody else may write the same `data` to this name."""
        extra_s = body_size(data) / _SLOWEST_BYTES_PER_S
        if not if_absent:
            return self._retried(f"put {key}", lambda: self.meter.put(key, data, metadata=metadata), extra_s)
        mine = body_bytes(data)

        def attempt() -> ObjectInfo:
            try:
                return self.meter.put(key, mine, if_absent=True, metadata=metadata)
            except (Conflict, Unavailable) as error:
                return self._settle(key, mine, error)

        return self._retried(f"put {key}", attempt, extra_s)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. Tried again whole: nothing is yielded before all pages are there, up to a limit."""
        yield from self._listed(prefix, lambda: self.meter.list(prefix, start_after=start_after))

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`. Tried again whole, up to a limit."""
        yield from self._listed(prefix, lambda: self.meter.list_dirs(prefix))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._retried(f"delete {key}", lambda: self.meter.delete(key))

    def now(self) -> float:
        """See `ObjectStore.now`."""
        return self._retried("ask the time", self.meter.now)

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self.meter.close()

    def _listed(self, prefix: str, listing: Callable[[], Iterator[_T]]) -> Iterator[_T]:
        """The first names of a listing at once, with retries; what is beyond them as it comes, without.

        Others may have put any number of names there: who needs only some must not have to hold them all.
        """

        def attempt() -> tuple[list[_T], Iterator[_T]]:
            rest = listing()
            return [*itertools.islice(rest, _LISTED_AT_ONCE)], rest

        first, rest = self._retried(f"list {prefix}", attempt)
        yield from first
        if len(first) == _LISTED_AT_ONCE:
            yield from rest

    def _whole(self, key: str) -> tuple[bytes, ObjectInfo]:
        """An object, all of it: half a record would look like a bad one, and be called so for ever."""
        data, info = self.meter.get(key)
        self._check_length(key, len(data), info.size)
        return data, info

    def _check_length(self, key: str, found: int, size: int) -> None:
        if found < size:
            raise Unavailable(f"the answer for {key} in {self.url} was cut short: {found} of {size} bytes")

    def _settle(self, key: str, data: bytes, error: Conflict | Unavailable) -> ObjectInfo:
        """Decide by reading back how a create ended that was refused or whose outcome is unknown."""
        try:
            stored, info = self._whole(key)
        except NotFound:
            raise Unavailable(f"creating {key} in {self.url} left no object: {error}") from error
        if stored == data:
            return info
        raise Conflict(f"another writer created {key} in {self.url} first") from error

    def _may_say(self) -> bool:
        """Whether it is time for another line: in an outage many threads fail many times, and one line is enough."""
        now = self._clock.monotonic()
        with self._saying:
            if now - self._said_at < _SAY_EVERY_S:
                return False
            self._said_at = now
            return True

    def _noted(self, attempt: Callable[[], _T]) -> _T:
        """One attempt, of which `outage` takes note."""
        try:
            result = attempt()
        except Unavailable as error:
            outage = self.outage
            self.outage = Outage(outage.since if outage else self._clock.monotonic(), error)
            raise
        except DilocoError:
            self.outage = None
            raise
        self.outage = None
        return result

    def _retried(self, what: str, attempt: Callable[[], _T], extra_s: float = 0.0) -> _T:
        """Call `attempt` until it is answered or the budget, counted from its first failure, is spent."""
        try:
            return self._noted(attempt)
        except Unavailable as error:
            failed = [error]
        deadline: float | None = None

        def again() -> _T:
            if failed:
                raise failed.pop()
            return self._noted(attempt)

        def wait(state: tenacity.RetryCallState) -> float:
            highest = min(_WAIT_MAX_S, _WAIT_FIRST_S * 2 ** min(state.attempt_number - 1, 16))
            return self._ids.uniform(0.0, highest)

        def stop(state: tenacity.RetryCallState) -> bool:
            nonlocal deadline
            now = self._clock.monotonic()
            if deadline is None:
                deadline = now + self._budget_s + extra_s
            return now + state.upcoming_sleep > deadline

        def report(state: tenacity.RetryCallState) -> None:
            if self._may_say():
                reason = state.outcome.exception() if state.outcome else None
                _LOG.warning("could not %s, still trying: %s", what, reason, extra={"run": self.url})

        return tenacity.Retrying(
            sleep=self._clock.sleep,
            wait=wait,
            stop=stop,
            retry=tenacity.retry_if_exception_type(Unavailable),
            before_sleep=report,
            reraise=True,
        )(again)
