"""A stream of chunks, read by exact counts.

Readers ask for the number of bytes that the format says comes next, and never get fewer: a file that ends
early is an error at the place where it ends. Memory is one chunk of the caller's plus what was asked for.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.reasons import corrupt


class ByteSource:
    """Bytes in order from an iterable of chunks of any sizes."""

    def __init__(self, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        self._chunks = iter(chunks)
        self._chunk = memoryview(b"")

    def take(self, count: int) -> bytes:
        """The next `count` bytes; the caller has checked that `count` is reasonable.

        Raises:
            Corrupt: `size`: the stream ends before.
        """
        if count <= len(self._chunk):
            taken, self._chunk = self._chunk[:count], self._chunk[count:]
            return bytes(taken)
        taken_bytes = np.empty(count, np.uint8)
        self.fill(taken_bytes)
        return taken_bytes.tobytes()

    def fill(self, target: npt.NDArray[np.uint8]) -> None:
        """Overwrite all of `target` (one dimension, contiguous) with the next bytes.

        Raises:
            Corrupt: `size`: the stream ends before.
        """
        view, done = target.data, 0
        while done < len(target):
            if self.exhausted():
                raise corrupt("size", f"the stream ends {len(target) - done} bytes early")
            part = self._chunk[: len(target) - done]
            view[done : done + len(part)] = part
            self._chunk = self._chunk[len(part) :]
            done += len(part)

    def exhausted(self) -> bool:
        """Whether nothing follows. Asks the iterable for more, so what it checks at its end runs here."""
        while not self._chunk:
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            self._chunk = memoryview(chunk).cast("B")
        return False
