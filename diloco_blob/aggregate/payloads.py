"""The bytes of a close's contributions: fetched, checked, and kept aside for the merge.

A contribution whose bytes are not what its receipt promised, or not what the layout asks for, is rejected on record
and the others are merged without it. That must be a property of the bytes, so that every aggregator rejects the
same: a store that does not answer rejects nobody, it fails the pass.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.files import MEMORY_BYTES_MAX, temporary_space
from diloco_blob.aggregate.gather import skip
from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.core.limits import PSEUDO_GRADIENT_ABS_MAX
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Chosen, ObjectRef, Skipped
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import FloatArray, Layout, TensorCodec, codec_for, content_bytes, decode_payload, verified

READ_BYTES = 16 << 20
"""Of one ranged read."""

Tensors: TypeAlias = Iterator[tuple[str, FloatArray]]
"""A file's tensors by name, in layout order, one at a time."""

_CHUNK_BYTES = 128 << 10  # Of the spool: each contribution's stream holds one.
_HEADER_SLACK_BYTES = 4096


def read_chunks(store: ObjectStore, ref: ObjectRef) -> Iterator[bytes]:
    """An object in ranged reads, checked against its digest at the end; memory holds one read.

    Raises:
        Corrupt: It is not what `ref` says.
        NotFound: It does not exist.
    """
    return verified(_ranges(store, ref), ref.digest)


def _ranges(store: ObjectStore, ref: ObjectRef) -> Iterator[bytes]:
    for start in range(0, ref.size, READ_BYTES):
        yield store.get_range(ref.key, start, min(READ_BYTES, ref.size - start))


@dataclass(frozen=True)
class Fetched:
    """A contribution whose payload has been checked and lies in the spool."""

    chosen: Chosen
    start: int
    size: int


class Spool:
    """The payloads of one merge, compressed as they came, in one temporary file; memory is bounded by a constant."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES_MAX)  # noqa: SIM115 - closed by __exit__
        self._end = 0
        self._lock = threading.Lock()
        """Around a position and what is read or written there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def keep(self, chunks: Iterator[bytes]) -> tuple[int, int]:
        """Append; give where it starts and how long it is. What an exception cuts short is overwritten."""
        start = end = self._end
        for chunk in chunks:
            with self._lock, temporary_space():
                self._file.seek(end)
                self._file.write(chunk)
            end += len(chunk)
        self._end = end
        return start, end - start

    def read(self, start: int, size: int) -> Iterator[bytes]:
        """What was kept, in pieces; several threads may read at once, and one may write."""
        position, end = start, start + size
        while position < end:
            with self._lock:
                self._file.seek(position)
                piece = self._file.read(min(_CHUNK_BYTES, end - position))
            if not piece:
                return  # The decoder says what is missing.
            position += len(piece)
            yield piece


class Payloads:
    """Fetches and decodes the contributions of one fragment.

    Args:
        ctx: The pass.
        fragment: Which fragment; says what a payload must hold.
        spool: Where they are kept.
    """

    def __init__(self, ctx: Context, fragment: int, spool: Spool) -> None:
        self._store = ctx.store
        self._spool = spool
        self._layout = fragment_layout(ctx.run.run.tensors, fragment)
        self._settings = ctx.run.run.settings.up

    def fetch(self, chosen: Chosen) -> Fetched | Skipped:
        """Fetch one contribution, or say why it is rejected; `check` must follow.

        Raises:
            Unavailable, Denied: The store did not answer; that is no fault of the contribution.
        """
        try:
            return self._kept(chosen)
        except NotFound:
            return skip(chosen.island, chosen.seq, "payload missing")
        except Corrupt as error:
            return skip(chosen.island, chosen.seq, error.message)

    def check(self, found: Fetched | Skipped) -> Fetched | Skipped:
        """Look at every value of what was fetched, or say why it is rejected. May run in any thread."""
        if isinstance(found, Skipped):
            return found
        try:
            for tensor in self.decode(found):
                _check_magnitude(*tensor)
                del tensor  # else it would lie beside the next one
        except Corrupt as error:
            return skip(found.chosen.island, found.chosen.seq, error.message)
        return found

    def _kept(self, chosen: Chosen) -> Fetched:
        try:
            start, size = self._spool.keep(self._checked(chosen))
        except Corrupt:
            # Damaged here, or on its way to us? A rejection is for ever: look once more.
            start, size = self._spool.keep(self._checked(chosen))
        return Fetched(chosen=chosen, start=start, size=size)

    def _checked(self, chosen: Chosen) -> Iterator[bytes]:
        if len(chosen.parts) != 1:
            raise Corrupt(f"parts: {len(chosen.parts)} payload objects, this program merges 1")
        part = chosen.parts[0]
        bytes_max = payload_bytes_max(self._layout, self._codec(chosen))
        if part.size > bytes_max:
            raise Corrupt(f"size: a payload of {part.size} bytes, at most {bytes_max} are expected")
        found = self._store.head(part.key).size
        if found != part.size:
            raise Corrupt(f"size: the payload has {found} bytes, the receipt says {part.size}")
        return read_chunks(self._store, part)

    def decode(self, fetched: Fetched) -> Tensors:
        """Its tensors, in layout order, one at a time."""
        return decode_payload(self._spool.read(fetched.start, fetched.size), self._layout, self._codec(fetched.chosen))

    def _codec(self, chosen: Chosen) -> TensorCodec:
        return codec_for(self._settings, chosen.base_version + 1)


def payload_bytes_max(layout: Layout, codec: TensorCodec) -> int:
    """The most bytes that a payload for this layout can have: zstd's own bound on what does not compress."""
    content = content_bytes(layout, codec) + _HEADER_SLACK_BYTES
    return content + (content >> 8) + 1024


def _check_magnitude(name: str, values: FloatArray) -> None:
    largest = max(float(np.max(values, initial=0.0)), -float(np.min(values, initial=0.0)))
    if largest > PSEUDO_GRADIENT_ABS_MAX:
        raise Corrupt(f"huge: tensor {name[:80]!r} has a value of {largest:.3g}")
