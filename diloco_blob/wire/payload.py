"""Payloads of contributions and updates: one zstd frame around one safetensors file of coded tensors.

A payload is read as a stream. Memory holds the header, the parts of one tensor and that tensor decoded,
whatever the size of the payload; so an aggregator can walk the payloads of many islands in step, tensor by
tensor.

A payload comes from outside and may be anything. What it must hold follows from the layout and the codec,
both of which `run.json` fixes, so every check has an exact right answer, and comes before the memory that it
guards: declared size, then header, then tensors. Every fault raises `Corrupt`, whose message begins with one
of `reasons.REASONS`.
"""

from collections.abc import Iterable, Iterator

from diloco_blob.core.errors import Corrupt
from diloco_blob.wire.codecs import Parts, TensorCodec
from diloco_blob.wire.frame import compress_stream, open_frame
from diloco_blob.wire.reasons import in_tensor
from diloco_blob.wire.tensorfile import (
    TensorSpec,
    checked,
    data_bytes,
    file_bytes_max,
    header_bytes,
    read_stream,
    write_stream,
)
from diloco_blob.wire.types import AnyArray, FloatArray, Layout, Shape


def payload_specs(layout: Layout, codec: TensorCodec) -> list[TensorSpec]:
    """What the safetensors file inside a payload holds, in order: each tensor's parts, side by side."""
    return checked(
        [
            TensorSpec(f"{name}{suffix}", dtype, part_shape)
            for name, shape in layout
            for suffix, (dtype, part_shape) in codec.parts(tuple(shape)).items()
        ]
    )


def content_bytes(layout: Layout, codec: TensorCodec) -> int:
    """Bytes of a payload before compression, exactly."""
    specs = payload_specs(layout, codec)
    return len(header_bytes(specs)) + data_bytes(specs)


def encode_payload(tensors: Iterable[tuple[str, FloatArray]], layout: Layout, codec: TensorCodec) -> bytes:
    """Encode tensors, taken one at a time, which must come as `layout` says (else ValueError).

    Raises:
        Corrupt: `non-finite`, naming the tensor.
    """
    return pack_payload(_encoded(tensors, codec), layout, codec)


def pack_payload(coded: Iterable[tuple[str, Parts]], layout: Layout, codec: TensorCodec) -> bytes:
    """`encode_payload` for tensors that are coded already (error feedback has to know what was sent)."""
    return b"".join(pack_stream(coded, layout, codec))


def pack_stream(coded: Iterable[tuple[str, Parts]], layout: Layout, codec: TensorCodec) -> Iterator[bytes]:
    """`pack_payload` in pieces, none larger than a coded tensor (or what zstd held back)."""
    specs = payload_specs(layout, codec)
    arrays = ((f"{name}{suffix}", array) for name, parts in coded for suffix, array in parts.items())
    return compress_stream(write_stream(specs, arrays), content_bytes(layout, codec))


def _encoded(tensors: Iterable[tuple[str, FloatArray]], codec: TensorCodec) -> Iterator[tuple[str, Parts]]:
    for name, values in tensors:
        try:
            yield name, codec.encode(values)
        except Corrupt as error:
            raise in_tensor(name, error) from error


def decode_payload(chunks: Iterable[bytes], layout: Layout, codec: TensorCodec) -> Iterator[tuple[str, FloatArray]]:
    """Yield the tensors of a payload in layout order, decoded, one at a time.

    Nothing is read before the first is asked for. The last is yielded only after the checksum, the end of the
    frame and the end of `chunks` have been checked: wrap these in `digest.verified` to have the digest
    checked there too.

    Args:
        chunks: The payload in pieces of any size.
        layout: Exactly the tensors that it must hold.
        codec: How they must be coded.

    Raises:
        Corrupt: It holds anything else. Tensors that were yielded before must then be thrown away.
    """
    specs = payload_specs(layout, codec)
    size, content = open_frame(chunks, size_max=file_bytes_max(specs))
    stream = read_stream(content, specs, size)
    for name, shape in layout:
        yield name, _decoded(stream, name, tuple(shape), codec)
    for _ in stream:  # an empty layout: let the stream check its end
        raise AssertionError("more tensors than specs")


def _decoded(stream: Iterator[tuple[str, AnyArray]], name: str, shape: Shape, codec: TensorCodec) -> FloatArray:
    parts = {suffix: next(stream)[1] for suffix in codec.parts(shape)}
    try:
        return codec.decode(parts, shape)
    except Corrupt as error:
        raise in_tensor(name, error) from error
