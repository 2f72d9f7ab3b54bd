"""What the protocol asks of an object store, and nothing more.

The only conditional operation is *create if absent*. No compare-and-swap, no locks, no rename. Keys are
relative to the run's URL. A backend makes one attempt and says honestly how it ended; `RetryingStore` is the
only place that tries again.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from msgspec import Struct

from diloco_blob.store.body import Body


class ObjectInfo(Struct, frozen=True):
    """What a store says about an object, without its bytes."""

    key: str
    size: int
    etag: str
    last_modified: float
    """Seconds since the Unix epoch, by the store's clock."""
    metadata: Mapping[str, str] = {}
    """User metadata. Some stores drop it: nothing may depend on it."""


class ObjectStore(Protocol):
    """A bucket and a prefix in it.

    Every method may raise `Unavailable` (no honest answer; the outcome of a write is then unknown) and
    `Denied`.
    """

    url: str
    """Where this is, as the user wrote it."""

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """All bytes of an object. Raises NotFound."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of an object, fewer only at its end. Raises NotFound."""

    def head(self, key: str) -> ObjectInfo:
        """What is known about an object. Raises NotFound."""

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """Write an object whole: readers see all or nothing. Raises Conflict if `if_absent` and it exists.

        `data` may be a file, of which only pieces are then in memory; all of it where `if_absent` is asked for.
        """

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix` and sorts after `start_after`, of all pages.

        The order is the store's own: it is not that of the keys everywhere.
        """

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """The names that follow `prefix` (which ends in `/`) up to the next `/`: one level of a directory.

        Some stores go on naming, for a while, a directory whose objects were all deleted.
        """

    def delete(self, key: str) -> None:
        """Remove an object; no error if it does not exist."""

    def now(self) -> float:
        """Seconds since the Unix epoch by the store's clock: its last answer's plus the time since then."""

    def close(self) -> None:
        """Give back connections. The store cannot be used afterwards."""
