"""Files between the merge and the store: written piece by piece, in memory only while they are small.

A version's files are each as large as the fragment; what a merge may hold is a tensor. So they are written to temporary
files, named by what they hold, and put from there.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from tempfile import SpooledTemporaryFile, gettempdir

from diloco_blob.core.errors import Unavailable
from diloco_blob.store.body import COPY_BYTES, Body
from diloco_blob.wire import FloatArray, Layout, RunningDigest, write_tensor_stream

MEMORY_BYTES_MAX = 64 << 20
"""Of one temporary file that are kept in memory."""


@contextmanager
def temporary_space() -> Iterator[None]:
    """What the system says of a temporary file that cannot be written is no answer of the store, and decides nothing.

    Raises:
        Unavailable: There is no room.
    """
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"the folder for temporary files, {gettempdir()}, takes nothing: {error.strerror or error}",
            "free some space there, or set TMPDIR to a folder with room for the model, several times",
        ) from error


class VersionFile:
    """A file that was not put yet, and its digest and size so far."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES_MAX)  # noqa: SIM115 - closed by close()
        self._digest = RunningDigest()
        self.size = 0
        """Bytes."""

    def write(self, piece: bytes | memoryview) -> None:
        """Append; not after `body` or `chunks`."""
        with temporary_space():
            self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)

    @property
    def digest(self) -> str:
        """Its content name: see `wire.digest`."""
        return self._digest.hexdigest()

    def body(self) -> Body:
        """What the store is given."""
        return self._file

    def chunks(self) -> Iterator[bytes]:
        """All of it, in pieces."""
        self._file.seek(0)
        while chunk := self._file.read(COPY_BYTES):
            yield chunk

    def close(self) -> None:
        """Give the memory or the disk back."""
        self._file.close()


class TensorFile(VersionFile):
    """A safetensors file of fp32 tensors, written as they come."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._queue: deque[tuple[str, FloatArray]] = deque()
        self._pieces = write_tensor_stream(layout, self._queued())
        self.write(next(self._pieces))  # The header.

    def _queued(self) -> Iterator[tuple[str, FloatArray]]:
        while self._queue:
            yield self._queue.popleft()

    def add(self, name: str, values: FloatArray) -> None:
        """Write the next tensor of the layout.

        Raises:
            Corrupt: A value is not finite.
        """
        self._queue.append((name, values))
        self.write(next(self._pieces))

    def check_whole(self) -> None:
        """Every tensor of the layout must have been added."""
        if next(self._pieces, None) is not None:
            raise AssertionError("tensors are missing")


def written(pieces: Iterable[bytes], file: VersionFile) -> VersionFile:
    """The file, with all pieces appended."""
    for piece in pieces:
        file.write(piece)
    return file
