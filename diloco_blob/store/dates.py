"""The store's clock, learnt from the dates in its answers.

A `Date` header names a whole second, and many answers name the same one: taking each as exact would make the
store's now jump back and forth by a second. So an answer only bounds the estimate, and the estimate moves
only if it is out of bounds.
"""

import threading
from email.utils import parsedate_to_datetime

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Denied, NotFound, Unavailable
from diloco_blob.store.base import ObjectStore


class StoreDate:
    """An estimate of the store's now. Safe to use from many threads.

    Args:
        clock: Measures the time since an answer.
        resolution_s: How much later than its date an answer may have been given.
    """

    def __init__(self, clock: Clock, resolution_s: float = 1.0) -> None:
        self._clock = clock
        self._resolution_s = resolution_s
        self._lock = threading.Lock()
        self._offset: float | None = None  # store's now − our monotonic clock

    @property
    def known(self) -> bool:
        """Whether any answer has been seen."""
        return self._offset is not None

    def observe(self, date: float) -> None:
        """Take note that the store, just now, said that it is `date`."""
        with self._lock:
            lowest = date - self._clock.monotonic()
            if self._offset is None:
                self._offset = lowest
            self._offset = min(max(self._offset, lowest), lowest + self._resolution_s)

    def observe_header(self, header: str | None) -> None:
        """Take note of an HTTP `Date` header; anything that is not a date is passed over."""
        if not header:
            return
        try:
            date = parsedate_to_datetime(header).timestamp()
        except ValueError:
            return
        self.observe(date)

    def now(self) -> float:
        """Seconds since the Unix epoch by the store's clock. Something must have been observed."""
        with self._lock:
            assert self._offset is not None, "observe an answer first"  # noqa: S101 - programmer error
            return self._clock.monotonic() + self._offset

    def now_of(self, store: ObjectStore) -> float:
        """The same; where nothing has been observed yet, the store is asked for something small first.

        Raises:
            Unavailable, Denied: It did not answer, or not with a date.
        """
        if not self.known:
            try:
                store.head("run.json")
            except (NotFound, Denied):
                if not self.known:
                    raise
        if not self.known:
            raise Unavailable(f"{store.url} answers without a date")
        return self.now()
