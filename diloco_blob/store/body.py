"""What is put: bytes, or a file, so that an object may be larger than what one wants in memory.

A file is read from its start to its end, as often as its put is tried, and is left open. It must stay as it is until
then. Whoever needs all of it at once (a create, which is read back; a store in memory) asks for `body_bytes`.
"""

import io
import os
from typing import IO, TypeAlias

Body: TypeAlias = bytes | IO[bytes]
"""Bytes, or a file that can be read and sought, used by nobody else meanwhile."""

COPY_BYTES = 1 << 20
"""Of a file that is copied, at a time."""


def body_size(body: Body) -> int:
    """Bytes of the whole; a file is then at its start."""
    if isinstance(body, bytes):
        return len(body)
    size = body.seek(0, os.SEEK_END)
    body.seek(0)
    return size


def body_bytes(body: Body) -> bytes:
    """All of it, in memory."""
    return body if isinstance(body, bytes) else body_file(body).read()


def body_file(body: Body) -> IO[bytes]:
    """All of it as a file, at its start."""
    if isinstance(body, bytes):
        return io.BytesIO(body)
    body.seek(0)
    return body
