"""Plain safetensors files, tensors in layout order, written and read one tensor at a time.

The format is the library's (https://github.com/huggingface/safetensors): eight bytes of length, a JSON
header, the data. The header is ours to write because the library sorts tensors by the size of their type and
then by name. We need the layout's order, with the parts of a tensor side by side: then the merge can walk
many files in step and hold one tensor of each. The reader is ours because it reads a stream, and because it
has an exact expectation: which tensors, of which type and shape, at which offsets, are all known from the
layout before the first byte arrives. Anything else is refused before memory is spent on it. What we write,
the library reads; a test holds us to that.

The last tensor is handed out only once the source has ended as it should, so that a reader that takes as many
tensors as the layout has cannot miss a check (checksum, digest, trailing bytes) that comes at the end.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from diloco_blob.core.limits import SAFETENSORS_HEADER_BYTES_MAX
from diloco_blob.wire.reasons import corrupt, in_tensor, quoted
from diloco_blob.wire.source import ByteSource
from diloco_blob.wire.types import AnyArray, FloatArray, Layout, Shape

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
"""The types that we exchange, by their safetensors names, and how numpy (without bfloat16) holds them."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_HEADER_SLACK_BYTES = 4096
"""What another writer's header may have beyond ours: white space and metadata."""
_METADATA = "__metadata__"
_Table: TypeAlias = dict[str, Any]


class TensorSpec(Struct, frozen=True):
    """One tensor of a file, as its header must describe it."""

    name: str
    dtype: str
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Bytes of its data; exact, whatever the shape claims."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def f32_specs(layout: Layout) -> list[TensorSpec]:
    """The contents of a file that holds the layout's tensors as they are."""
    return checked([TensorSpec(name, "F32", tuple(shape)) for name, shape in layout])


def checked(specs: list[TensorSpec]) -> list[TensorSpec]:
    """`specs`, whose names a safetensors file can hold.

    Raises:
        Corrupt: `names`: a name is used twice, or is the one that the format keeps for metadata.
    """
    names = {spec.name for spec in specs}
    if len(names) != len(specs) or _METADATA in names:
        raise corrupt("names", "the layout uses a tensor name twice, or the reserved name __metadata__")
    return specs


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file up to its data: length and header, padded so that the data begins at a multiple of 8."""
    table: _Table = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for spec in specs:
        end = position + spec.num_bytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > SAFETENSORS_HEADER_BYTES_MAX:
        raise corrupt("size", f"a header of {len(text)} bytes; the limit is {SAFETENSORS_HEADER_BYTES_MAX}")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def data_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of all tensors."""
    return sum(spec.num_bytes for spec in specs)


def file_bytes_max(specs: Sequence[TensorSpec]) -> int:
    """The size that a valid file with these tensors cannot exceed."""
    return len(header_bytes(specs)) + _HEADER_SLACK_BYTES + data_bytes(specs)


def write_stream(
    specs: Sequence[TensorSpec],
    arrays: Iterable[tuple[str, AnyArray]],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, a piece per tensor. Arrays that differ from `specs` are a programming error."""
    yield header_bytes(specs, metadata)
    for spec, (name, array) in zip(specs, arrays, strict=True):
        if name != spec.name or array.shape != spec.shape or array.dtype != DTYPES[spec.dtype]:
            raise ValueError(f"expected {spec}, got {name!r} {array.dtype} {array.shape}")
        yield np.ascontiguousarray(array, dtype=DTYPES[spec.dtype]).reshape(-1).view(np.uint8).data


def read_stream(
    chunks: Iterable[bytes | bytearray | memoryview], specs: Sequence[TensorSpec], size: int | None = None
) -> Iterator[tuple[str, AnyArray]]:
    """Yield the tensors of a file in the order of `specs`, each in fresh memory.

    Args:
        chunks: The file, in pieces of any size.
        specs: Exactly what it must hold.
        size: Its size in bytes, if that is already known: compared before memory is spent.

    Raises:
        Corrupt: It holds anything else. The header is checked before the first tensor is read, the end of the
            source before the last one is yielded.
    """
    source = ByteSource(chunks)
    length = int.from_bytes(source.take(_LENGTH_BYTES), "little")
    length_max = len(header_bytes(specs)) - _LENGTH_BYTES + _HEADER_SLACK_BYTES
    if length > min(length_max, SAFETENSORS_HEADER_BYTES_MAX):
        raise corrupt("size", f"safetensors header of {length} bytes, at most {length_max} are expected")
    check_header(source.take(length), specs)
    needed = _LENGTH_BYTES + length + data_bytes(specs)
    if size is not None and size != needed:
        raise corrupt("size", f"{size} bytes, but the tensors need {needed}")
    for index, spec in enumerate(specs, start=1):
        # Not bound to a name: a suspended stream must not hold the tensor that it gave away.
        yield spec.name, _read_tensor(source, spec, last=index == len(specs))
    if not specs:
        _check_end(source)


def _read_tensor(source: ByteSource, spec: TensorSpec, *, last: bool) -> AnyArray:
    flat = np.empty(spec.num_bytes // DTYPES[spec.dtype].itemsize, DTYPES[spec.dtype])
    source.fill(flat.view(np.uint8))
    if last:
        _check_end(source)
    return flat.reshape(spec.shape)


def _check_end(source: ByteSource) -> None:
    if not source.exhausted():
        raise corrupt("size", "bytes follow the last tensor")


def check_header(header: bytes, specs: Sequence[TensorSpec]) -> None:
    """Check that a header describes exactly `specs`, their data adjoining and in their order.

    Raises:
        Corrupt: `format` (not such JSON), `names`, `dtype`, `shape`, naming the tensor.
    """
    try:
        table = json.loads(header.decode(), object_pairs_hook=_without_duplicates)
        if not isinstance(table, dict) or not header.startswith(b"{"):
            raise ValueError("not an object")
        msgspec.convert(table.pop(_METADATA, {}), dict[str, str])
    except (ValueError, RecursionError) as error:
        raise corrupt("format", f"safetensors header: {error}") from error
    if len(table) > len(specs):
        known = {spec.name for spec in specs}
        surplus = next(name for name in table if name not in known)
        raise corrupt("names", f"tensor {quoted(surplus)} is not expected")
    position = 0
    for spec in specs:
        _check_entry(table, spec, position)
        position += spec.num_bytes


def _check_entry(table: _Table, spec: TensorSpec, position: int) -> None:
    where = f"tensor {quoted(spec.name)}"
    if spec.name not in table:
        raise corrupt("names", f"{where} is missing")
    try:
        entry = msgspec.convert(table[spec.name], _Entry)
    except ValueError as error:  # A ValidationError, or a name with half a surrogate pair, which JSON can spell.
        raise corrupt("format", f"{where}: {error}") from error
    if entry.dtype != spec.dtype:
        raise corrupt("dtype", f"{where} is {quoted(entry.dtype)}, expected {spec.dtype}")
    if entry.shape != spec.shape:
        raise corrupt("shape", f"{where} is {list(entry.shape)}, expected {list(spec.shape)}")
    if entry.data_offsets != (position, position + spec.num_bytes):
        raise corrupt("format", f"{where} lies at {list(entry.data_offsets)}, expected from {position}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> _Table:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


def write_tensors(tensors: Mapping[str, FloatArray], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of fp32 tensors in the mapping's order; the same bytes for the same tensors.

    Args:
        tensors: fp32 arrays of any shape.
        metadata: Strings for the header; `{"format": "pt"}` is what Hugging Face's loaders want.

    Raises:
        Corrupt: `non-finite`: a value is NaN or infinite, and would spread to every island.
    """
    layout = [(name, values.shape) for name, values in tensors.items()]
    return b"".join(write_tensor_stream(layout, tensors.items(), metadata))


def write_tensor_stream(
    layout: Layout, tensors: Iterable[tuple[str, FloatArray]], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """`write_tensors` for tensors that are not all in memory: the layout says beforehand what will come."""
    return write_stream(f32_specs(layout), _finite(tensors), metadata)


def read_tensors(data: bytes | bytearray | memoryview, layout: Layout) -> dict[str, FloatArray]:
    """The tensors of a file that must hold exactly `layout`, in its order; fresh, writable arrays.

    Raises:
        Corrupt: It holds anything else, or a value that is not finite.
    """
    return dict(read_tensor_stream([data], layout, size=len(data)))


def read_tensor_stream(
    chunks: Iterable[bytes | bytearray | memoryview], layout: Layout, size: int | None = None
) -> Iterator[tuple[str, FloatArray]]:
    """`read_tensors` for a file that arrives in pieces: one tensor in memory at a time. See `read_stream`."""
    return _finite(read_stream(chunks, f32_specs(layout), size))


def _finite(tensors: Iterable[tuple[str, FloatArray]]) -> Iterator[tuple[str, FloatArray]]:
    for name, values in tensors:
        if not np.isfinite(values).all():
            raise in_tensor(name, corrupt("non-finite", "a value is NaN or infinite"))
        yield name, values
