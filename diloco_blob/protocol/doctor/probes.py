"""The objects that an examination writes: where they lie, and how they go again.

Every name has a segment `_doctor`, which no object of a run has and nobody looks into: an island's name does not begin
with `_`, a fragment's is a number, and what lies under `islands/NAME/payloads/` is listed by fragment. So what a killed
examination leaves disturbs nobody; `verify` notes that it has no place there, and the next examination deletes what is
older than a day.
"""

import logging
import threading
from collections.abc import Iterable
from typing import Literal, TypeAlias

from diloco_blob.core.errors import Denied, DilocoError, InvalidSettings, Unavailable
from diloco_blob.core.ids import Ids, check_island_name
from diloco_blob.protocol import keys
from diloco_blob.protocol.doctor.report import Check
from diloco_blob.store import ObjectInfo, RetryingStore
from diloco_blob.store.body import Body

_LOG = logging.getLogger(__name__)

MARK = "_doctor"
"""The segment that is in every name that an examination writes, and in none of a run's."""

LEFT_AGE_MIN_S = 86_400.0
"""What is younger may be of an examination that goes on elsewhere."""

LEFT_MAX = 1_000
"""Objects of earlier examinations that one deletes at most."""

Area: TypeAlias = Literal["islands", "fragments", "probes"]

AREAS: tuple[Area, ...] = ("islands", "fragments", "probes")
"""The prefixes of the layout, by who writes there: islands, aggregators, whoever tests the store."""


class Probes:
    """Writes under names of its own, and remembers all of them.

    Args:
        store: The store that is examined.
        ids: Makes the folder's name, which is never used again.
        island: Under whose prefix to write; None writes where no island is.

    Raises:
        InvalidSettings: No island may have this name.
    """

    def __init__(self, store: RetryingStore, ids: Ids, island: str | None = None) -> None:
        self.store = store
        self.ids = ids
        self._id = ids.fresh()
        owner = keys.island(check_island_name(island)) if island else f"{keys.ISLANDS}{MARK}/"
        self.homes: dict[Area, str] = {
            # Below payloads/, so that the right to delete there and nowhere else is seen.
            "islands": f"{owner}payloads/{MARK}/",
            "fragments": f"{keys.FRAGMENTS}{MARK}/",
            "probes": f"{keys.PROBES}{MARK}/",
        }
        self._lock = threading.Lock()
        self._written: dict[str, None] = {}
        self._number = 0
        self.num_written = 0
        self.num_left_before = 0
        self.left: list[str] = []
        """Names that could not be deleted, once `clear` was called."""

    def folder(self, area: Area) -> str:
        """Where this examination writes in an area; ends in a slash."""
        return f"{self.homes[area]}{self._id}/"

    def key(self, area: Area) -> str:
        """A name that was not used before."""
        with self._lock:
            self._number += 1
            return f"{self.folder(area)}{self._number:06d}"

    def body(self) -> bytes:
        """A small body that nobody else writes."""
        return f'{{"write_id":"{self.ids.fresh()}"}}'.encode()

    def put(self, key: str, data: Body, *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`. The name is remembered first: if there is no answer, the object may be there."""
        assert f"/{MARK}/" in key, key  # noqa: S101 - programmer error: it would be a run's own object
        with self._lock:
            is_new = key not in self._written
            self._written[key] = None
        try:
            info = self.store.put(key, data, if_absent=if_absent)
        except (Denied, InvalidSettings):
            if is_new:
                with self._lock:
                    self._written.pop(key, None)
            raise
        with self._lock:
            self.num_written += 1
        return info

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        assert f"/{MARK}/" in key, key  # noqa: S101 - programmer error
        self.store.delete(key)
        with self._lock:
            self._written.pop(key, None)

    def clear(self) -> None:
        """Delete everything that was written and is not deleted yet. Never raises what a store does."""
        away = False
        self.left = []
        for key in [*self._written]:
            try:
                if not away:
                    self.delete(key)
                    continue
            except Unavailable:
                away = True  # What is left harms nobody; to wait for each of them would take hours.
            except DilocoError:
                pass
            self.left.append(key)
        if self.left:
            _LOG.warning(
                *("%d objects of this test of the store could not be deleted, the first is %s", len(self.left)),
                self.left[0],
                extra={"run": self.store.url},
            )

    def sweep(self, areas: Iterable[Area] = AREAS) -> None:
        """Delete what earlier examinations left, where that is allowed."""
        for area in areas:
            try:
                now = self.store.now()
                for looked_at, info in enumerate(self.store.list(self.homes[area])):
                    if looked_at >= LEFT_MAX:
                        break
                    if now - info.last_modified >= LEFT_AGE_MIN_S:
                        self.store.delete(info.key)
                        self.num_left_before += 1
            except DilocoError:
                continue  # Whether these rights are there is told elsewhere.

    def cleanup(self) -> Check:
        """What became of everything that was written; after `clear`."""
        earlier = f", and {self.num_left_before} that earlier ones had left" if self.num_left_before else ""
        if self.left:
            return Check(
                "cleanup",
                "warning",
                f"{len(self.left)} objects of this test could not be deleted, the first is {self.left[0]}",
                f"they disturb no run; delete every object with /{MARK}/ in its name when you may",
                {"left_objects": float(len(self.left))},
            )
        return Check("cleanup", "ok", f"every object that this test wrote is deleted again{earlier}")
