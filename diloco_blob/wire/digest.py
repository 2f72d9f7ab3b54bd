"""Digests: content names of objects, and the identity of a version's weights.

xxh3-128 finds accidents, not adversaries: whoever can write to the bucket can also write a matching digest.
It runs at memory speed, which matters because every island checks every version that it adopts.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import xxhash

from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.types import AnyArray


def digest(data: bytes | bytearray | memoryview) -> str:
    """The xxh3-128 of `data` as 32 lower-case hexadecimal characters."""
    return xxhash.xxh3_128_hexdigest(data)


class RunningDigest:
    """The `digest` of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._state.update(piece)

    def hexdigest(self) -> str:
        """`digest` of everything added so far."""
        return self._state.hexdigest()


def verified(chunks: Iterable[bytes], expected: str) -> Iterator[bytes]:
    """Pass `chunks` on, and refuse to end if together they are not what `expected` names.

    A streaming reader cannot know before the last byte; the readers of this package hold their last tensor
    back until their source has ended, so that nobody can mistake a damaged file for a whole one.

    Raises:
        Corrupt: `digest`, after the last chunk.
    """
    state = xxhash.xxh3_128()
    for chunk in chunks:
        state.update(chunk)
        yield chunk
    if state.hexdigest() != expected:
        raise corrupt("digest", f"bytes have digest {state.hexdigest()}, the record says {expected}")


class WeightsDigest:
    """The identity of a set of fp32 tensors, fed one tensor at a time, in layout order.

    It covers names, shapes, order and the raw little-endian values (so −0.0 is not 0.0), and no file format:
    an island compares the mirror in its memory with a commit without serialising anything.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, name: str, values: AnyArray) -> None:
        """Add the next tensor. A `values` that is not fp32 is a programming error."""
        if values.dtype != np.float32:
            raise TypeError(f"weights are float32, tensor {name!r} is {values.dtype}")
        text = name.encode()
        shape = ",".join(str(size) for size in values.shape)
        # Lengths go first: no two sets of tensors feed the same bytes.
        self._state.update(f"{len(text)}:{len(shape)}:".encode() + text + shape.encode())
        self._state.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8).data)

    def hexdigest(self) -> str:
        """32 lower-case hexadecimal characters for everything added so far."""
        return self._state.hexdigest()


def weights_digest(tensors: Mapping[str, AnyArray]) -> str:
    """The digest of fp32 tensors in the mapping's order, names and shapes included. See `WeightsDigest`."""
    state = WeightsDigest()
    for name, values in tensors.items():
        state.update(name, values)
    return state.hexdigest()
