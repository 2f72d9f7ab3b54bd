"""Large objects in parts, side by side: on a long path one connection fills a fraction of the line."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from diloco_blob.core.errors import Unavailable

PART_BYTES = 16 << 20
"""What one request transfers of an object that is larger than this."""

PARALLEL = 8
"""Parts of one store that are under way at once."""


class PartReader:
    """Threads that read parts, started when the first large object is read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Executor | None = None
        self._pid = 0

    def read_rest(self, what: str, first: bytes, size: int, read: Callable[[int, int], bytes]) -> bytes:
        """Complete an object of which the `first` bytes are there.

        Args:
            what: Names the object in errors.
            first: How it begins.
            size: Bytes of the whole.
            read: Given a start and a length, returns those bytes; called from several threads.

        Raises:
            Unavailable: The parts do not add up to `size`; and whatever `read` raises.
        """
        starts = range(len(first), size, PART_BYTES)
        parts = [b""]
        if starts:
            parts = [*self._executor().map(lambda start: read(start, min(PART_BYTES, size - start)), starts)]
        data = b"".join([first, *parts])
        if len(data) != size:
            raise Unavailable(f"only {len(data)} of {size} bytes of {what} arrived")
        return data

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            if self._pool is not None and self._pid == os.getpid():
                self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _executor(self) -> Executor:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():  # threads do not survive a fork
                self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="diloco-parts")
                self._pid = os.getpid()
            return self._pool
