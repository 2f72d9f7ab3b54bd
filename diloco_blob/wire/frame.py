"""One zstd frame (RFC 8878), written with its size and checksum, read without trusting either.

A few bytes of zstd can stand for gigabytes, and a decompressor given a chunk returns whatever comes out. So
the reader walks the frame's blocks itself (a block header is three bytes) and decompresses one block, at most
128 KiB of output, at a time; it knows where the frame ends, so that nothing can follow unnoticed. What a
payload must hold is known from the layout: a frame that declares more is refused before anything is
decompressed, one that delivers more, at the first block beyond.

Writing is deterministic for one version of the zstd library; another version may compress the same content to
other bytes. Content is what weights depend on, never the compressed form.
"""

from collections.abc import Iterable, Iterator

import zstandard

from diloco_blob.wire.reasons import corrupt
from diloco_blob.wire.source import ByteSource

LEVEL = 1
"""Quantised noise has no repetitions to look for, only uneven symbols: level 3 takes 1.3 to 1.8 times the time of
level 1 for about 1% of the bytes at best (int4 82.3% → 82.2% of the input, bf16 80.6% → 79.4%, int8 93.2% → 93.3%;
8 million Gaussian values of varying scale)."""

WINDOW_BYTES_MAX = 8 << 20
"""What a decoder must be ready to hold (RFC 8878, 3.1.1.1.2); our own frames use 512 KiB."""

_BLOCK_BYTES_MAX = 128 << 10
_PREFIX_BYTES = 5
_RLE, _RESERVED = 1, 3


def compress(chunks: Iterable[bytes | memoryview], size: int) -> bytes:
    """One frame with content size and checksum, holding `chunks`, which together have `size` bytes."""
    return b"".join(compress_stream(chunks, size))


def compress_stream(chunks: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """`compress` in pieces, one a chunk and one at the end."""
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    frame = compressor.compressobj(size=size)
    for chunk in chunks:
        yield frame.compress(chunk)
    yield frame.flush()


def open_frame(chunks: Iterable[bytes], size_max: int) -> tuple[int, Iterator[bytes]]:
    """Read a frame's header; give its declared content size, and the content in pieces of at most 128 KiB.

    Args:
        chunks: The compressed bytes, in pieces of any size.
        size_max: The most content that the caller will accept.

    Raises:
        Corrupt: `size` or `format`: no frame, no declared size, more than `size_max`, no checksum, a
        dictionary, a window
            over `WINDOW_BYTES_MAX`. The iterator raises it for damaged or surplus content, a wrong checksum,
            an early end, and anything that follows the frame.
    """
    source = ByteSource(chunks)
    header = source.take(_PREFIX_BYTES)
    if not header.startswith(zstandard.FRAME_HEADER):
        raise corrupt("format", "not a zstd frame")
    try:
        header += source.take(zstandard.frame_header_size(header) - _PREFIX_BYTES)
        parameters = zstandard.get_frame_parameters(header)
    except zstandard.ZstdError as error:
        raise corrupt("format", f"zstd header: {error}") from error
    if parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise corrupt("format", "zstd frame without a content size")
    if parameters.content_size > size_max:
        raise corrupt("size", f"zstd frame declares {parameters.content_size} bytes, {size_max} at most are expected")
    if not parameters.has_checksum or parameters.dict_id:
        raise corrupt("format", "zstd frame without a checksum, or with a dictionary")
    if parameters.window_size > WINDOW_BYTES_MAX:
        raise corrupt("format", f"zstd window of {parameters.window_size} bytes")
    return parameters.content_size, _content(source, header, parameters.content_size)


def _content(source: ByteSource, header: bytes, size: int) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    frame = decompressor.decompressobj(read_across_frames=False)
    produced, last = 0, False
    try:
        frame.decompress(header)
        while not last:
            block_header = source.take(3)
            word = int.from_bytes(block_header, "little")
            last, kind, length = bool(word & 1), (word >> 1) & 3, word >> 3
            if kind == _RESERVED or length > _BLOCK_BYTES_MAX:
                raise corrupt("format", "zstd block of an unknown kind or too large")
            piece = frame.decompress(block_header) + frame.decompress(source.take(1 if kind == _RLE else length))
            produced += len(piece)
            if produced > size:
                raise corrupt("size", f"zstd frame holds more than the {size} bytes that it declares")
            yield piece
        frame.decompress(source.take(4))
    except zstandard.ZstdError as error:
        raise corrupt("format", f"zstd: {error}") from error
    if produced != size or not frame.eof:
        raise corrupt("size", f"zstd frame holds {produced} bytes, not the {size} that it declares")
    if not source.exhausted():
        raise corrupt("format", "bytes follow the zstd frame")
