"""Safetensors files: ours are read by the library, and what is read is checked to the byte."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import codec_for
from diloco_blob.wire.payload import payload_specs
from diloco_blob.wire.reasons import REASONS, reason_of
from diloco_blob.wire.tensorfile import (
    read_tensor_stream,
    read_tensors,
    write_stream,
    write_tensor_stream,
    write_tensors,
)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (7, 3), "h.0.ln.bias": (5,), "scalar": (), "empty": (0, 4), "a": (1,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def layout_of(arrays: dict[str, np.ndarray]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, array.shape) for name, array in arrays.items()]


def craft(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        one[k].shape == other[k].shape and one[k].tobytes() == other[k].tobytes() for k in one
    )


def test_round_trip_in_order_with_writable_arrays() -> None:
    written = write_tensors(tensors())
    read = read_tensors(written, layout_of(tensors()))
    assert same(read, tensors())
    assert all(array.flags.writeable and array.flags.aligned for array in read.values())
    assert written == write_tensors(tensors())


def test_the_library_reads_ours(tmp_path: Path) -> None:
    data = write_tensors(tensors(), {"format": "pt"})
    assert all(array.tobytes() == tensors()[name].tobytes() for name, array in safetensors.numpy.load(data).items())
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()} == {  # noqa: SIM118
            name: array.tobytes() for name, array in tensors().items()
        }


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk"])
def test_the_library_maps_the_coded_parts(name: Any, tmp_path: Path) -> None:
    # Odd sizes everywhere: a part that is not aligned cannot be mapped.
    arrays = {f"t{size}": np.full(size, 2.0, np.float32) for size in (1, 2, 3, 5, 7, 257, 1023)}
    codec = codec_for(Codec(name=name, block=9), 1)
    parts = [(f"{n}{s}", part) for n, a in arrays.items() for s, part in codec.encode(a).items()]
    path = tmp_path / "parts.safetensors"
    path.write_bytes(b"".join(write_stream(payload_specs(layout_of(arrays), codec), parts)))
    with safetensors.safe_open(path, framework="pt") as file:
        for part_name, part in parts:
            tensor = file.get_tensor(part_name)
            assert tuple(tensor.shape) == part.shape
            if tensor.dtype == torch.bfloat16:  # which numpy does not have: the bits, then
                assert (tensor.view(torch.int16).numpy() == part.view(np.int16)).all()
            else:
                assert (tensor.numpy() == part).all()


def test_what_the_library_writes_is_read_if_the_order_is_the_layouts() -> None:
    arrays = {name: tensors()[name] for name in sorted(tensors())}
    assert same(read_tensors(safetensors.numpy.save(arrays), layout_of(arrays)), arrays)
    with pytest.raises(Corrupt, match=r"^format: tensor 'wte.weight'"):
        read_tensors(safetensors.numpy.save(tensors()), layout_of(tensors()))


@pytest.mark.parametrize("size", [1, 3, 8, 64, 10_000])
def test_streams_in_pieces_of_any_size(size: int) -> None:
    data = b"".join(write_tensor_stream(layout_of(tensors()), iter(tensors().items())))
    assert data == write_tensors(tensors())
    chunks = (data[start : start + size] for start in range(0, len(data), size))
    assert same(dict(read_tensor_stream(chunks, layout_of(tensors()))), tensors())


def test_nothing_at_all_is_a_file_too() -> None:
    assert read_tensors(write_tensors({}), []) == {}
    with pytest.raises(Corrupt, match=r"^size: "):
        read_tensors(write_tensors({}) + b"x", [])


def test_non_finite_values_are_neither_written_nor_read() -> None:
    bad = {"w": np.array([1, np.nan], np.float32)}
    with pytest.raises(Corrupt, match=r"^non-finite: tensor 'w'"):
        write_tensors(bad)
    with pytest.raises(Corrupt, match=r"^non-finite: tensor 'w'"):
        read_tensors(safetensors.numpy.save(bad), layout_of(bad))


def test_every_truncation_and_every_addition_is_refused() -> None:
    data = write_tensors(tensors())
    for end in range(len(data)):
        with pytest.raises(Corrupt) as caught:
            read_tensors(data[:end], layout_of(tensors()))
        assert reason_of(caught.value) == "size"
        with pytest.raises(Corrupt):
            list(read_tensor_stream([data[:end]], layout_of(tensors())))
    with pytest.raises(Corrupt):
        read_tensors(data + b"\0", layout_of(tensors()))


def test_the_last_tensor_waits_for_the_end_of_the_source() -> None:
    data = write_tensors(tensors()) + b"surplus"
    stream = read_tensor_stream([data], layout_of(tensors()))
    for _ in range(len(tensors()) - 1):
        next(stream)
    with pytest.raises(Corrupt, match=r"^size: bytes follow"):
        next(stream)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": A}, "names"),
        ({"a": A, "b": B, "c": {"dtype": "F32", "shape": [0], "data_offsets": [12, 12]}}, "names"),
        ({"a": A, "x" * 3000: B}, "names"),
        ({"a": A | {"dtype": "F64"}, "b": B}, "dtype"),
        ({"a": A | {"dtype": "I8", "shape": [8]}, "b": B}, "dtype"),
        ({"a": A | {"shape": [1, 2]}, "b": B}, "shape"),
        ({"a": A | {"shape": [2**62, 2**62]}, "b": B}, "shape"),
        ({"a": A | {"shape": [-2]}, "b": B}, "shape"),
        ({"a": A, "b": B | {"shape": []}}, "shape"),
        ({"a": A, "b": B | {"shape": [True]}}, "format"),
        ({"a": A, "b": B | {"shape": [1.0]}}, "format"),
        ({"a": A, "b": B | {"data_offsets": [4, 8]}}, "format"),
        ({"a": A, "b": B | {"data_offsets": [0, 4]}}, "format"),
        ({"a": A, "b": B | {"data_offsets": [12, 16]}}, "format"),
        ({"a": A, "b": B | {"data_offsets": [8, 2**70]}}, "format"),
        ({"a": A, "b": B | {"data_offsets": [8, 12, 16]}}, "format"),
        ({"a": A, "b": B | {"more": 1}}, "format"),
        ({"a": A, "b": 7}, "format"),
        ({"__metadata__": {"a": 1}, "a": A, "b": B}, "format"),
        ({"__metadata__": 7, "a": A, "b": B}, "format"),
        ([A, B], "format"),
        (b"", "format"),
        (b"{", "format"),
        (b"null", "format"),
        (b"\xff\xfe{}", "format"),
        (b"[" * 4000, "format"),
        (b'{"a":' * 800, "format"),
        (b"9" * 4200, "format"),
        (json.dumps({"a": A, "b": B})[:-1].encode() + b',"a":' + json.dumps(A).encode() + b"}", "format"),
        (b" " + json.dumps({"a": A, "b": B}).encode(), "format"),
        (json.dumps({"a": A, "b": B}).encode() + b" " * 5000, "size"),
    ],
)
def test_wrong_headers(header: object, reason: str) -> None:
    with pytest.raises(Corrupt) as caught:
        read_tensors(craft(header, bytes(12)), [("a", (2,)), ("b", (1,))])
    assert reason_of(caught.value) == reason
    assert len(caught.value.message) < 300


def test_a_right_header_written_otherwise_is_read() -> None:
    header = {"__metadata__": {"by": "hand"}, "b": B, "a": A}
    read = read_tensors(craft(header, np.arange(3, dtype="<f4").tobytes()), [("a", (2,)), ("b", (1,))])
    assert read["a"].tolist() == [0, 1]
    assert read["b"].tolist() == [2]


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 17 << 20, 5000])
def test_a_huge_header_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(Corrupt, match=r"^size: safetensors header"):
        read_tensors(length.to_bytes(8, "little") + b"{}", [("a", (2,))])


@pytest.mark.parametrize("layout", [[("a", (1,)), ("a", (1,))], [("__metadata__", (1,))]])
def test_names_that_a_file_cannot_hold(layout: list[tuple[str, tuple[int, ...]]]) -> None:
    with pytest.raises(Corrupt, match=r"^names: "):
        list(write_tensor_stream(layout, []))


def test_tensors_that_are_not_what_was_announced_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="expected"):
        list(write_tensor_stream([("a", (2,))], [("b", np.zeros(2, np.float32))]))
    with pytest.raises(ValueError, match="expected"):
        list(write_tensor_stream([("a", (2,))], [("a", np.zeros(3, np.float32))]))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_refused_with_a_reason(data: bytes) -> None:
    for candidate in (data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(Corrupt) as caught:
            read_tensors(candidate, [("a", (2,)), ("b", (1,))])
        assert caught.value.message.split(":")[0] in REASONS
