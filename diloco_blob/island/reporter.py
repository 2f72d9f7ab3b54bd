"""What people see of an island: `status.json`, at most once in five seconds. Nobody decides anything from it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Corrupt, NotFound, Unavailable
from diloco_blob.core.limits import RECORD_BYTES_MAX
from diloco_blob.protocol import keys
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import Eval, IslandStatus, decode, encode
from diloco_blob.store.base import ObjectStore

log = logging.getLogger(__name__)

STATUS_EVERY_S = 5.0
"""One object name may be written about once a second on some stores; figures for people need no more than this."""


@dataclass
class Reporter:
    """Writes an island's status when it is due."""

    store: ObjectStore
    clock: Clock
    status: Callable[[], IslandStatus]
    _next: float = 0.0

    def pump(self) -> float:
        """Write the status if five seconds have passed; returns the seconds until the next."""
        wait = self._next - self.clock.monotonic()
        if wait > 0:
            return wait
        self.write()
        return STATUS_EVERY_S

    def write(self) -> None:
        """Write the status now."""
        self._next = self.clock.monotonic() + STATUS_EVERY_S
        try:
            status = self.status()  # it has the store's time in it, for which the store may have to be asked
            self.store.put(keys.status(status.island), encode(status))
        except Unavailable as error:
            log.warning("status not written: %s", error)


def earlier_status(store: ObjectStore, island: str, run: str) -> IslandStatus | None:
    """What an earlier process of this island last said of itself; its figures are added to, not forgotten."""
    try:
        data, _ = read_limited(store, keys.status(island), RECORD_BYTES_MAX)
        return decode(data, IslandStatus, run=run)
    except (NotFound, Corrupt):
        return None


@dataclass
class Evals:
    """The first and the last evaluation that an island reported."""

    first: Eval | None = None
    last: Eval | None = None

    def record(self, evaluation: Eval) -> None:
        """Remember one more."""
        self.first = self.first or evaluation
        self.last = evaluation
