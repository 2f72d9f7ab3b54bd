"""A bucket in this process's memory: the public fake for tests and simulation.

Stores that name the same URL share their objects, as two clients of one bucket do. Every operation is atomic.
"""

import hashlib
import threading
from collections.abc import Iterator, Mapping

from msgspec import Struct

from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import Conflict, InvalidSettings, NotFound
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.body import Body, body_bytes
from diloco_blob.store.keys import check_key, check_list_prefix

_SCHEME = "memory://"


class _Bucket:
    """The objects behind one URL, and the lock that makes each operation atomic."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}


class _Object(Struct, frozen=True):
    data: bytes
    info: ObjectInfo


_BUCKETS: dict[str, _Bucket] = {}
_BUCKETS_LOCK = threading.Lock()


class MemoryStore:
    """Objects in memory, shared by all stores of this process with the same URL.

    Args:
        url: `memory://` and a name.
        clock: The store's clock.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        name = url.removeprefix(_SCHEME).strip("/")
        if not url.startswith(_SCHEME) or not name:
            raise InvalidSettings(f"{url!r} does not name a store in memory", "write it as memory://name")
        self.url = url
        self._clock = clock or SystemClock()
        with _BUCKETS_LOCK:
            self._bucket = _BUCKETS.setdefault(name, _Bucket())

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        found = self._find(key)
        return found.data, found.info

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._find(key).data[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._find(key).info

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`."""
        check_key(key)
        data = body_bytes(data)
        with self._bucket.lock:
            if if_absent and key in self._bucket.objects:
                raise Conflict(f"{key} exists already in {self.url}")
            info = ObjectInfo(
                key=key,
                size=len(data),
                etag=hashlib.blake2b(data, digest_size=16).hexdigest(),
                last_modified=self._clock.wall(),
                metadata=dict(metadata or {}),
            )
            self._bucket.objects[key] = _Object(data, info)
            return info

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        check_list_prefix(prefix)
        with self._bucket.lock:
            keys = sorted(key for key in self._bucket.objects if key.startswith(prefix) and key > start_after)
            infos = [self._bucket.objects[key].info for key in keys]
        yield from infos

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        check_list_prefix(prefix)
        with self._bucket.lock:
            rests = [key[len(prefix) :] for key in self._bucket.objects if key.startswith(prefix)]
        yield from sorted({rest.split("/", 1)[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        check_key(key)
        with self._bucket.lock:
            self._bucket.objects.pop(key, None)

    def now(self) -> float:
        """See `ObjectStore.now`."""
        return self._clock.wall()

    def close(self) -> None:
        """See `ObjectStore.close`; the objects stay until the process ends."""

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self._bucket.lock:
            found = self._bucket.objects.get(key)
        if found is None:
            raise NotFound(f"no object {key} in {self.url}")
        return found


def forget(url: str) -> None:
    """Drop a bucket's objects: whoever makes thousands of them in one process gives the memory back."""
    with _BUCKETS_LOCK:
        _BUCKETS.pop(url.removeprefix(_SCHEME).strip("/"), None)
