"""Tensor files, zstd frames, payloads: `Corrupt` with a reason of the closed list, or exactly what the bytes hold.

Frames are checked against zstandard itself. Payloads are fuzzed inside their frame, whose checksum a fuzzer would not
get past; the first byte of an input chooses the codec and how the bytes are cut into chunks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import zstandard

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire import codec_for, decode_payload, encode_payload, read_tensors, write_tensors
from diloco_blob.wire.frame import compress, open_frame
from diloco_blob.wire.reasons import REASONS
from diloco_blob.wire.tensorfile import read_tensor_stream

LAYOUT = (("w", (3, 5)), ("scalar", ()), ("w#scale", (2,)), ("empty", (0, 3)), ("é", (33,)))
CODECS = (
    Codec(), Codec(name="bf16"), Codec(name="int8", block=8), Codec(name="int4", block=16),
    Codec(name="int2", block=8), Codec(name="sign", block=16), Codec(name="fp4", block=8),
    *(Codec(name="topk", chunk=16, keep=3, value_bits=bits) for bits in (1, 2, 4, 8)),
    *(Codec(name="dct_topk", chunk=16, keep=3, value_bits=bits) for bits in (1, 2, 4, 8)),
    Codec(name="int2", block=8, error_feedback=True, cycle=3),
)  # fmt: skip
FRAME_BYTES_MAX = 1 << 16

Result = TypeVar("Result")


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Values for `LAYOUT`."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in LAYOUT}


def refused_or(read: Callable[[], Result]) -> tuple[Result | None, str]:
    """What is read, or None and the reason."""
    try:
        return read(), ""
    except Corrupt as error:
        return None, _reason(error)


def _reason(error: Corrupt) -> str:
    """Which reason a refusal names; it must fit into a record and a line of a log, since that is where it goes."""
    error.message.encode()
    assert error.message.isprintable()
    assert len(error.message) < 500
    reason = error.message.partition(":")[0]
    assert reason in REASONS, error.message
    return reason


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    """The bytes in chunks."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def same(left: Iterable[tuple[str, np.ndarray]], right: Iterable[tuple[str, np.ndarray]]) -> None:
    """Names and bits are equal."""
    for (name, values), (other, others) in zip(left, right, strict=True):
        assert (name, values.shape, values.tobytes()) == (other, others.shape, others.tobytes())


def tensorfile(data: bytes) -> None:
    """The target of plain safetensors files."""
    found, reason = refused_or(lambda: read_tensors(data, LAYOUT))
    streamed, _ = refused_or(lambda: list(read_tensor_stream(pieces(data, 7), LAYOUT)))
    assert (streamed is None) == (found is None)
    if found is None:
        return
    assert not reason
    assert list(found) == [name for name, _ in LAYOUT]
    held = b"".join(values.tobytes() for values in found.values())
    assert data.endswith(held), "what is read is not what the file holds"
    same(found.items(), streamed or [])
    same(read_tensors(write_tensors(found), LAYOUT).items(), found.items())


def frame(data: bytes) -> None:
    """The target of zstd frames: what is accepted is what zstandard makes of it."""
    found, _ = refused_or(lambda: b"".join(open_frame([data], FRAME_BYTES_MAX)[1]))
    streamed, _ = refused_or(lambda: b"".join(open_frame(pieces(data, 3), FRAME_BYTES_MAX)[1]))
    assert streamed == found
    if found is not None:
        assert len(found) <= FRAME_BYTES_MAX
        assert zstandard.ZstdDecompressor().decompress(data, max_output_size=FRAME_BYTES_MAX) == found


def payload(data: bytes) -> None:
    """The target of payloads: first byte, then the content of the frame."""
    if not data:
        return
    codec = codec_for(CODECS[data[0] % len(CODECS)], 1)
    framed = compress([data[1:]], len(data) - 1)
    found, _ = refused_or(lambda: list(decode_payload([framed], LAYOUT, codec)))
    size = 1 + data[0] // len(CODECS)
    streamed, _ = refused_or(lambda: list(decode_payload(pieces(framed, size), LAYOUT, codec)))
    assert (streamed is None) == (found is None)
    if found is None or streamed is None:
        return
    same(found, streamed)
    for (name, values), (expected, shape) in zip(found, LAYOUT, strict=True):
        assert (name, values.shape, values.dtype) == (expected, shape, np.float32)
        assert np.isfinite(values).all()
    if codec.name in {"fp32", "bf16"}:  # Coding is exact for what it decoded to.
        again = encode_payload(found, LAYOUT, codec)
        same(found, decode_payload([again], LAYOUT, codec))


def tensorfile_seeds() -> Iterator[bytes]:
    """A valid file, with and without metadata."""
    yield write_tensors(tensors())
    yield write_tensors(tensors(), {"format": "pt"})


def frame_seeds() -> Iterator[bytes]:
    """Raw, repeated and compressed blocks; nothing at all."""
    for content in (b"", b"a", bytes(1000), bytes(range(256)) * 3, np.random.default_rng(0).bytes(500)):
        yield compress([content], len(content))


def payload_seeds() -> Iterator[bytes]:
    """The content of a valid payload of each codec."""
    for number, codec in enumerate(CODECS):
        coded = encode_payload(tensors().items(), LAYOUT, codec_for(codec, 1))
        yield bytes([number]) + zstandard.decompress(coded)
