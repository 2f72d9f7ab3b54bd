"""Payloads: round trips, and every sort of damage. Whatever comes, it is `Corrupt` with a reason, in bounded memory."""

import base64
import contextlib
import hashlib
import json
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import codec_for
from diloco_blob.wire.digest import digest, verified
from diloco_blob.wire.feedback import ErrorFeedback
from diloco_blob.wire.frame import compress, open_frame
from diloco_blob.wire.payload import content_bytes, decode_payload, encode_payload, pack_payload, payload_specs
from diloco_blob.wire.reasons import REASONS, reason_of
from diloco_blob.wire.tensorfile import write_stream

NAMES = ("fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk")
LAYOUT = [("h.0.w", (5, 7)), ("scalar", ()), ("h.0.w#scale", (3,)), ("empty", (0,)), ("b", (300,))]
INT4 = Codec(name="int4", block=16)


def normal(layout: Iterable[tuple[str, tuple[int, ...]]] = LAYOUT, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for name, shape in layout:
        yield name, np.asarray(rng.standard_normal(shape), np.float32)


def payload(setting: Codec = INT4) -> bytes:
    return encode_payload(normal(), LAYOUT, codec_for(setting, 1))


def inner(setting: Codec = INT4) -> bytes:
    """The safetensors file inside `payload(setting)`."""
    return zstandard.decompress(payload(setting))


def framed(data: bytes) -> bytes:
    return compress([data], len(data))


def decode(data: bytes, setting: Codec = INT4, layout: object = LAYOUT) -> dict[str, np.ndarray]:
    return dict(decode_payload([data], layout, codec_for(setting, 1)))


def refused(data: bytes, setting: Codec = INT4) -> str:
    """The reason for which these bytes are refused; no other exception may come."""
    with pytest.raises(Corrupt) as caught:
        decode(data, setting)
    assert caught.value.message.split(":")[0] in REASONS
    return reason_of(caught.value)


def decode_unless_refused(data: bytes) -> dict[str, np.ndarray] | None:
    """What is read, or None if it is refused; no other exception may come."""
    with contextlib.suppress(Corrupt):
        return decode(data)
    return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_what_is_read_is_what_the_codec_decodes(name: Any, size: int) -> None:
    codec = codec_for(Codec(name=name, block=16), 1)
    data = encode_payload(normal(), LAYOUT, codec)
    chunks = (data[start : start + size] for start in range(0, len(data), size))
    read = dict(decode_payload(chunks, LAYOUT, codec))
    assert list(read) == [layout_name for layout_name, _ in LAYOUT]
    for tensor_name, values in normal():
        assert read[tensor_name].shape == values.shape
        assert read[tensor_name].tobytes() == codec.decode(codec.encode(values), values.shape).tobytes()
        if name == "fp32":
            assert read[tensor_name].tobytes() == values.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tensors_give_the_same_bytes_of_the_announced_size(name: Any) -> None:
    setting = Codec(name=name)
    assert payload(setting) == payload(setting)
    assert len(inner(setting)) == content_bytes(LAYOUT, codec_for(setting, 1))


def test_several_blocks_and_an_empty_layout() -> None:
    layout = [("large", (700_001,)), ("zeros", (300_000,))]
    arrays = {"large": dict(normal(layout))["large"], "zeros": np.zeros(300_000, np.float32)}
    codec = codec_for(Codec(), 1)
    read = dict(decode_payload([encode_payload(arrays.items(), layout, codec)], layout, codec))
    assert all(read[name].tobytes() == arrays[name].tobytes() for name in arrays)
    assert list(decode_payload([encode_payload([], [], codec)], [], codec)) == []
    with pytest.raises(Corrupt, match=r"^format: bytes follow"):
        list(decode_payload([encode_payload([], [], codec) + b"x"], [], codec))


def test_coded_tensors_are_packed_without_coding_them_again() -> None:
    setting = Codec(name="int4", block=16, error_feedback=True)
    feedback = ErrorFeedback(setting, {"b": np.full(300, 0.1, np.float32)})
    coded = {name: feedback.code(name, values, 1) for name, values in normal()}
    read = decode(pack_payload(((n, c.parts) for n, c in coded.items()), LAYOUT, codec_for(setting, 1)), setting)
    assert all(read[name].tobytes() == coded[name].sent.tobytes() for name in coded)


def test_bytes_of_the_first_format_are_still_read() -> None:
    # Written by version 0.1 with zstd 1.5.7: int4, block 8, tensor a = [7, -7, 3.5, 2.5, 0.4, -0.6, 0, 1, 14].
    old = base64.b64decode(GOLDEN)
    read = decode(old, Codec(name="int4", block=8), [("a", (9,))])
    assert read["a"].tolist() == [7, -7, 4, 2, 0, -1, 0, 1, 14]


GOLDEN = """
KLUv/SSQfQMAFAZ4AHsiYSNzY2FsZSI6eyJkdHlwZSI6IkYzMiIsInNoYXBlIjpbMl0sImRhdGFfb2Zmc2V0cyI6WzAsOF19LCJh
I3FVODg4LDE2XX19ICAgICAAAIA/AAAAQB+seJiPiIiIBADAi6wMBLTiZwBtS2xdZA=="""


GOLDENS: dict[str, tuple[str, str]] = {
    "int8": (
        """
KLUv/WRoAE0HAOQM8AB7ImEjc2NhbGUiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzNdLCJkYXRhX29mZnNldHMiOlswLDEyXX0s
ImEjcUk4NDAxMiw1YjUyLDY0ODY0LDExMl19fSAgICaTST0mk0k9tVotPYHfPZr4VrQScM0riedFogBeuxl31TOQ7kyqCGbDIX/c
RIf0YaQSf8IUCgU9BAIBPejz+TyN/GzlVc4+tyagD3/4aOFRyDyxJJkMf/Rn3E/EOK0glQh/8GbXTr41ph2NBHsAAAAJAOBJHgEA
gSnwcBhXQt7KY60MDLbiZwBtWQ6Oow==""",
        "5ae7f1e422be44a3",
    ),
    "int4": (
        """
KLUv/WQ8ANUFAMQJ8AB7ImEjc2NhbGUiOnsiZHR5cGUiOiJGMzIiLCJzaGFwZSI6WzNdLCJkYXRhX29mZnNldHMiOlswLDEyXX0s
ImEjcVU4MjAxMiwzYjMyLDQ0NDQ0LDY4XX19ICAgIEmSZD9EP2Er2JReGseDTfm2cjzopW8c15NfbtsWPyVJEj/btg0/gn5dSzr5
6Ma1pJJ/blw7KvjnxrSjgo+ICgB2w4J3eYQABKbAw2FcCXkrj7UyMNiKnwG0AZuxfEY=""",
        "8c6b023fe4f0a3da",
    ),
    "int2": (
        """
KLUv/WQcAN0EAEQI8AB7ImEjc2NhbGUiOnsiZHR5cGUiOiJCRjE2Iiwic2hhcGUiOlszXSwiZGF0YV9vZmZzZXRzIjpbMCw2XX0s
ImEjcTJVODEyNiwxOF19LCJiMTgsMjQyNCwzNl19fSAgDUASQA1AW1rSkpYJSUlIQgAAuj+3P7M/q1KVqlQFBSpQgQoUBwDoEUEQ
gw4ezrOVx1oZKHDFzwDaPFWnSQ==""",
        "008a38d564c28b6e",
    ),
    "sign": (
        """
KLUv/WQUAJUEALQH8AB7ImEjc2NhbGUiOnsiZHR5cGUiOiJCRjE2Iiwic2hhcGUiOlszXSwiZGF0YV9vZmZzZXRzIjpbMCw2XX0s
ImEjc2lnblU4ODYsMTRdfSwiYjE0LDIwMjAsMjhdfX1KQFBASkBbWtKSlgAAAAVAA0AAQKtSlapUBQAABwDsEUEQmU4ezgP+cmUg
4RU/A2gDiX0Mdw==""",
        "50ed382fcb2cc615",
    ),
    "fp4": (
        """
KLUv/WQ4AJ0FAFQJ+AB7ImEjc2NhbGUiOnsiZHR5cGUiOiJCRjE2Iiwic2hhcGUiOlszXSwiZGF0YV9vZmZzZXRzIjpbMCw2XX0s
ImEjZTNtMFU4MjA2LDJiMjYsMzI0MzIsNTZdfX0gyEDIQKxA3/ZrTuf1bQ7mdW3P5nNe1/Z7TueEQIBAeECv1+bm9XR7bW5eT8fX
5ub1c3xtbl4vBwAKADjhwDs+RAgC0+jhMK8E15VvXBmN8IrHAWABYaB4uQ==""",
        "a0628204b92cd576",
    ),
    "topk": (
        """
KLUv/SSs9QMARAd4AHsiYSN0b3BrIjp7ImR0eXBlIjoiVTgiLCJzaGFwZSI6WzIyXSwiZGF0YV9vZmZzZXRzIjpbMCwyMl19LCJi
MjIsNDRdfX2wQMJAsEDCQFkJ8AoVLaRArEAFCQECaECEQFRAgECTCTgOKRRgQHRAKQkCBQIAvlcRDgALdL3zcQ==""",
        "b2dab78eb32244a1",
    ),
    "dct_topk": (
        """
KLUv/SS4ZQQA5Ad4AHsiYSNkY3QiOnsiZHR5cGUiOiJVOCIsInNoYXBlIjpbMjJdLCJkYXRhX29mZnNldHMiOlswLDIyXX0sImIz
NDIyLDU2XX19ICCEQB5BrEDhQCxAwkCqnAK2vgIDAJwBgEC0QAhAtUAwQLVAFEBxKkCNQDVTVYFo1ssEaQkEAN8JBXitu7obA21x
g4H3""",
        "c28a80458f3ce56c",
    ),
}
"""Codec → a payload of `golden_tensors`, as its first program wrote it, and the digest of what it decodes to."""


def golden_tensors() -> Iterator[tuple[str, np.ndarray]]:
    """Values that every machine writes alike: 40 and 5 × 9 multiples of 1/8, tied and negative ones among them."""
    yield "a", (((np.arange(40) * 37) % 101 - 50) / 8).astype(np.float32)
    yield "b", (((np.arange(45) * 29) % 64 - 30) / 8).astype(np.float32).reshape(5, 9)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_bytes_of_every_codec_stay(name: Any) -> None:
    """What is written stays the same bytes before zstd, and what was written stays readable and means the same."""
    setting = Codec(name=name, block=16, chunk=16, keep=3)
    codec, layout = codec_for(setting, 1), [("a", (40,)), ("b", (5, 9))]
    old, decoded = GOLDENS[name]
    assert zstandard.decompress(encode_payload(golden_tensors(), layout, codec)) == zstandard.decompress(
        base64.b64decode(old)
    )
    state = hashlib.sha256()
    for _, values in decode_payload([base64.b64decode(old)], layout, codec):
        state.update(values.tobytes())
    assert state.hexdigest()[:16] == decoded


def test_encoding_refuses_what_is_not_finite_and_names_it() -> None:
    name: Any
    for name in NAMES:
        arrays = dict(normal())
        arrays["b"][17] = np.inf
        with pytest.raises(Corrupt, match=r"^non-finite: tensor 'b'"):
            encode_payload(arrays.items(), LAYOUT, codec_for(Codec(name=name), 1))


def test_tensors_out_of_order_are_a_programming_error() -> None:
    with pytest.raises(ValueError, match="expected"):
        encode_payload(reversed(list(normal())), LAYOUT, codec_for(Codec(), 1))


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_every_truncation_is_refused(name: Any) -> None:
    setting = Codec(name=name, block=16)
    data = payload(setting)
    for end in range(len(data)):
        assert refused(data[:end], setting) in {"size", "format"}


@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_a_flipped_byte_is_refused_or_harmless(flip: int) -> None:
    right, expected = payload(), decode(payload())
    for place in range(len(right)):
        wrong = bytearray(right)
        wrong[place] ^= flip
        read = decode_unless_refused(bytes(wrong))
        if read is not None:  # zstd ignores a bit of its header: what is read then is still right, and the digest tells
            assert all(read[name].tobytes() == expected[name].tobytes() for name in expected)
        chunks = verified([bytes(wrong)], digest(right))
        with pytest.raises(Corrupt):
            list(decode_payload(chunks, LAYOUT, codec_for(INT4, 1)))


@pytest.mark.parametrize(
    "surplus",
    [b"\0", b"garbage", payload(), framed(b""), b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"],
    ids=["zero", "garbage", "same frame", "empty frame", "skippable frame"],
)
def test_nothing_may_follow_or_precede(surplus: bytes) -> None:
    assert refused(payload() + surplus) == "format"
    assert refused(surplus + payload()) in {"format", "size"}


def test_the_last_tensor_waits_for_every_check() -> None:
    data = payload()
    stream = decode_payload(verified([data], "0" * 32), LAYOUT, codec_for(INT4, 1))
    assert [next(stream)[0] for _ in LAYOUT[:-1]] == [name for name, _ in LAYOUT[:-1]]
    with pytest.raises(Corrupt, match=r"^digest: "):
        next(stream)


def test_frames_that_do_not_declare_what_we_need() -> None:
    data = inner()
    assert refused(zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(data)) == "format"
    assert refused(zstandard.ZstdCompressor(write_checksum=False).compress(data)) == "format"
    window_128_mib = zstandard.FRAME_HEADER + bytes([0x84, 17 << 3]) + len(data).to_bytes(4, "little")
    assert refused(window_128_mib + payload()[8:]) == "format"
    assert refused(b"") == "size"
    assert refused(data) == "format"


@contextlib.contextmanager
def memory_at_most(num_bytes: int) -> Iterator[None]:
    """Check what Python and numpy allocate inside; zstd's own buffers are bounded by the window."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_a_declared_bomb_is_refused_before_it_is_opened() -> None:
    bomb = compress((bytes(1 << 20) for _ in range(64)), 64 << 20)
    assert len(bomb) < 20_000
    with memory_at_most(1 << 20):
        assert refused(bomb) == "size"


@pytest.mark.parametrize("declared", [len(inner()), 200_000])
def test_a_lying_bomb_is_stopped_at_the_first_block_too_many(declared: int) -> None:
    frame = compress((bytes(1 << 20) for _ in range(256)), 256 << 20)
    blocks = frame[zstandard.frame_header_size(frame) :]
    # The same blocks behind a header with a checksum, a window of 512 KiB and a size (of 4 bytes) that is acceptable.
    lying = zstandard.FRAME_HEADER + bytes([0x84, 9 << 3]) + declared.to_bytes(4, "little") + blocks
    with memory_at_most(1 << 20):
        assert refused(lying) in {"size", "format"}
        _, content = open_frame([lying], size_max=declared)
        with pytest.raises(Corrupt):
            list(content)


def test_memory_is_bounded_by_tensors_not_by_the_payload() -> None:
    layout = [(f"t{index:02d}", (1 << 16,)) for index in range(48)]
    codec = codec_for(Codec(), 1)
    data = encode_payload(normal(layout), layout, codec)
    assert len(data) > 10 << 20
    with memory_at_most(2 << 20):  # a tensor is 256 KiB
        for _ in decode_payload((data[at : at + 65536] for at in range(0, len(data), 65536)), layout, codec):
            pass


def rewritten(setting: Codec, **changes: object) -> bytes:
    """A payload whose inner header has these entries (None: removed), around the same data."""
    data = inner(setting)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, change in changes.items():
        if change is None:
            del header[name]
        else:
            header[name] = header.get(name, {}) | change  # type: ignore[operator]
    text = json.dumps(header, separators=(",", ":")).encode()
    return framed(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"b": {"shape": [100, 3]}}, "shape"),
        ({"b": {"shape": [1 << 60]}}, "shape"),
        ({"b": {"dtype": "BF16"}}, "dtype"),
        ({"b": {"data_offsets": [0, 1200]}}, "format"),
        ({"b": None}, "names"),
        ({"extra": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, "names"),
        ({"empty": None, "full": {"dtype": "F32", "shape": [0], "data_offsets": [156, 156]}}, "names"),
        ({}, "ok"),
    ],
)
def test_headers_that_are_not_the_layouts(changes: dict[str, object], reason: str) -> None:
    setting = Codec()
    data = rewritten(setting, **changes)
    if reason == "ok":
        assert decode(data, setting)["b"].tobytes() == dict(normal())["b"].tobytes()
    else:
        assert refused(data, setting) == reason


def test_another_layout_or_codec_is_refused() -> None:
    name: Any
    for name in NAMES:
        other: Any
        for other in set(NAMES) - {name}:
            assert refused(payload(Codec(name=name)), Codec(name=other)) in {"names", "dtype", "shape", "size"}
    assert refused(payload(Codec(name="int4", block=16)), Codec(name="int4", block=32)) in {"shape", "size"}
    for layout in (LAYOUT[:-1], [*LAYOUT, ("more", (1,))], LAYOUT[::-1], [("x", s) for _, s in LAYOUT[:1]]):
        with pytest.raises(Corrupt):
            decode(payload(), INT4, layout)


def test_more_or_less_data_than_the_header_says() -> None:
    assert refused(framed(inner()[:-1])) == "size"
    assert refused(framed(inner() + b"\0")) == "size"
    assert refused(framed(b"")) == "size"
    assert refused(framed((1 << 63).to_bytes(8, "little") + inner()[8:])) == "size"


@pytest.mark.parametrize(
    ("name", "suffix", "bad", "reason"),
    [
        ("fp32", "", np.nan, "non-finite"),
        ("fp32", "", np.inf, "non-finite"),
        ("bf16", "", 0x7F80, "non-finite"),
        ("int8", "#scale", np.nan, "non-finite"),
        ("int4", "#scale", np.inf, "non-finite"),
        ("int8", "#scale", -1.0, "format"),
        ("int8", "#q", -128, "format"),
        ("int4", "#q", 0, "format"),
    ],
)
def test_bad_values_are_refused_and_named(name: Any, suffix: str, bad: float, reason: str) -> None:
    codec = codec_for(Codec(name=name, block=16), 1)
    arrays = [(f"{n}{s}", part.copy()) for n, v in normal() for s, part in codec.encode(v).items()]
    dict(arrays)[f"b{suffix}"][3] = bad
    data = framed(b"".join(write_stream(payload_specs(LAYOUT, codec), arrays)))
    with pytest.raises(Corrupt, match=f"^{reason}: tensor 'b': "):
        decode(data, Codec(name=name, block=16))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(zstandard.FRAME_HEADER + data)
    refused(framed(data))


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_damage_to_the_content_is_refused_or_read_as_finite_values(draw: st.DataObject) -> None:
    content = bytearray(inner())
    for _ in range(draw.draw(st.integers(1, 4))):
        content[draw.draw(st.integers(0, len(content) - 1))] = draw.draw(st.integers(0, 255))
    read = decode_unless_refused(framed(bytes(content)))
    if read is not None:  # only values have changed, to other ones that an encoder could have written
        assert [(name, array.shape) for name, array in read.items()] == LAYOUT
        assert all(np.isfinite(array).all() for array in read.values())
