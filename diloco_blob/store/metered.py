"""Counts what is asked of a store, as a bill would: every attempt, also one that fails.

A listing counts one request for each thousand objects that it began to give. Transfers that a backend splits
into parts count as one.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
from msgspec import Struct

from diloco_blob.core.errors import Denied, Unavailable
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.body import Body, body_size

_PAGE = 1000  # objects that S3 and GCS give at most for one listing request

_Class = Literal["gets", "heads", "puts", "lists", "deletes"]


class Usage(Struct, frozen=True):
    """Requests by class, and bytes of object bodies, since the store was opened."""

    gets: int = 0
    heads: int = 0
    puts: int = 0
    lists: int = 0
    deletes: int = 0
    failed: int = 0
    """Of these, how many were `Unavailable` or `Denied`. A 404 or a lost race is an answer, not a failure."""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def requests(self) -> int:
        """All requests."""
        return self.gets + self.heads + self.puts + self.lists + self.deletes

    def since(self, earlier: "Usage") -> "Usage":
        """What was used between `earlier` and this."""
        names = self.__struct_fields__
        return Usage(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class MeteredStore:
    """Passes everything on to `inner` and counts it. Safe to use from many threads."""

    def __init__(self, inner: ObjectStore) -> None:
        self.url = inner.url
        self._inner = inner
        self._lock = threading.Lock()
        self._usage = Usage()

    def usage(self) -> Usage:
        """What was used so far."""
        with self._lock:
            return self._usage

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        with self._counted("gets"):
            data, info = self._inner.get(key)
        self._add(bytes_down=len(data))
        return data, info

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with self._counted("gets"):
            data = self._inner.get_range(key, start, length)
        self._add(bytes_down=len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self._counted("heads"):
            return self._inner.head(key)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`. The bytes count even if no answer came: they may well have been sent."""
        self._add(bytes_up=body_size(data))
        with self._counted("puts"):
            return self._inner.put(key, data, if_absent=if_absent, metadata=metadata)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        with self._counted("lists"):
            for number, info in enumerate(self._inner.list(prefix, start_after=start_after)):
                if number and number % _PAGE == 0:
                    self._add(lists=1)
                yield info

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        with self._counted("lists"):
            for number, name in enumerate(self._inner.list_dirs(prefix)):
                if number and number % _PAGE == 0:
                    self._add(lists=1)
                yield name

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._counted("deletes"):
            self._inner.delete(key)

    def now(self) -> float:
        """See `ObjectStore.now`; not counted, since it asks the store at most once."""
        return self._inner.now()

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._inner.close()

    @contextmanager
    def _counted(self, kind: _Class) -> Iterator[None]:
        self._add(**{kind: 1})
        try:
            yield
        except (Unavailable, Denied):
            self._add(failed=1)
            raise

    def _add(self, **counts: int) -> None:
        with self._lock:
            added = {name: getattr(self._usage, name) + count for name, count in counts.items()}
            self._usage = msgspec.structs.replace(self._usage, **added)
