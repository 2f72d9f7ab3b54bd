"""Payloads and tensor files from hostile hands: only `Corrupt`, with a reason of the list, in bounded memory."""

import json
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import almost, damaged
from targets import tensors

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire import codec_for, content_bytes, decode_payload, encode_payload, read_tensors, write_tensors
from diloco_blob.wire.frame import compress

MIB = 1 << 20
PAYLOADS = list(tensors.payload_seeds())


def split(file: bytes) -> tuple[dict[str, object], bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(file[:8], "little")
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def seeds_of(source: Callable[[], object]) -> st.SearchStrategy[bytes]:
    return st.sampled_from(list(source())).flatmap(damaged)  # type: ignore[call-overload]


@given(seeds_of(tensors.tensorfile_seeds))
@settings(max_examples=500)
def test_damaged_tensor_files(data: bytes) -> None:
    tensors.tensorfile(data)


@given(almost(split(next(tensors.tensorfile_seeds()))[0]), st.sampled_from([None, 0, 1, 2**32, 2**63, 2**64 - 1]))
@settings(max_examples=1000)
def test_tensor_files_whose_header_is_almost_right(header: bytes, length: int | None) -> None:
    tensors.tensorfile(joined(header, split(next(tensors.tensorfile_seeds()))[1], length))


@given(st.data())
@settings(max_examples=500)
def test_payloads_whose_content_is_almost_right(draw: st.DataObject) -> None:
    seed = draw.draw(st.sampled_from(PAYLOADS))
    header, data = split(seed[1:])
    if draw.draw(st.booleans()):
        tensors.payload(seed[:1] + joined(draw.draw(almost(header)), data))
    else:
        tensors.payload(seed[:1] + draw.draw(damaged(seed[1:])))


@given(seeds_of(tensors.frame_seeds))
@settings(max_examples=500)
def test_damaged_frames(data: bytes) -> None:
    tensors.frame(data)


@given(st.binary(max_size=300), st.binary(max_size=300))
@settings(max_examples=200)
def test_several_frames_and_what_follows_them(first: bytes, second: bytes) -> None:
    """A decompressor may go on with the next frame; we must not."""
    frames = [compress([content], len(content)) for content in (first, second)]
    skippable = b"\x50\x2a\x4d\x18" + len(second).to_bytes(4, "little") + second
    tensors.frame(frames[0])
    for surplus in (frames[1], skippable, second or b"\0"):
        found, reason = tensors.refused_or(
            lambda surplus=surplus: list(decode_payload([frames[0] + surplus], (), codec_for(Codec(), 1)))  # type: ignore[misc]
        )
        assert found is None
        assert reason in {"format", "size"}


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("second", [0, 5])
def test_overlapping_and_reordered_tensors_are_refused(first: int, second: int) -> None:
    """Two tensors of one shape: only each in its own place is right."""
    layout = [("a", (5,)), ("b", (5,))]
    file = write_tensors({name: np.arange(5, dtype=np.float32) for name, _ in layout})
    header, data = split(file)
    for name, start in (("a", first), ("b", second)):
        header[name] = {"dtype": "F32", "shape": [5], "data_offsets": [4 * start, 4 * start + 20]}
    changed = joined(json.dumps(header).encode(), data)
    if (first, second) == (0, 5):
        assert list(read_tensors(changed, layout)) == ["a", "b"]
        return
    with pytest.raises(Corrupt, match="format: tensor"):
        read_tensors(changed, layout)


# ---- memory

SHAPE = (1 << 18,)
BIG = (("w", SHAPE), ("v", SHAPE))


def bound(codec: Codec) -> int:
    """What reading a payload for `BIG` may hold, in traced memory.

    The parts of one tensor and what they decode to, with one temporary of each size (int4 unpacks levels to a byte
    each; bf16 widens twice; `isfinite` makes a byte a value); the header as bytes, text and JSON (40 bytes a byte, see
    `test_fuzz_records.py`); two blocks of 128 KiB, joined.
    """
    num = SHAPE[0]
    parts = sum(
        int(np.prod(shape)) * {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}[dtype]
        for dtype, shape in codec_for(codec, 1).parts(SHAPE).values()
    )
    header = 5000
    return parts + 4 * num + 2 * 4 * num + num + 42 * header + 4 * (128 << 10)


def bomb(size: int, **options: bool) -> bytes:
    settings_ = {"write_checksum": True, "write_content_size": True, **options}
    return zstandard.ZstdCompressor(**settings_).compress(bytes(size))  # type: ignore[arg-type]


def lying_bomb(declared: int, size: int) -> bytes:
    """A frame that holds more than its header says: the size field of an honest one, changed."""
    data = bytearray(bomb(size))
    parameters = zstandard.get_frame_parameters(bytes(data))
    assert parameters.content_size == size
    end = zstandard.frame_header_size(bytes(data))
    data[end - 4 : end] = declared.to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(data)).content_size == declared
    return bytes(data)


def nested_header(codec: Codec) -> bytes:
    content = b"[" * 4000
    return compress([joined(content, b"")], len(content) + 8)


ATTACKS: dict[str, Callable[[Codec], bytes]] = {
    "bomb": lambda _: bomb(512 * MIB),
    "bomb without size": lambda _: bomb(64 * MIB, write_content_size=False),
    "bomb of the right size": lambda codec: bomb(content_bytes(BIG, codec_for(codec, 1))),
    "lying bomb": lambda codec: lying_bomb(content_bytes(BIG, codec_for(codec, 1)), 64 * MIB),
    "huge header": lambda _: compress([(1 << 62).to_bytes(8, "little"), bytes(1000)], 1008),
    "deep header": nested_header,
    "empty lists": lambda _: compress([joined(b"[" + b"[]," * 1300 + b"0]", b"")], 8 + 3 * 1300 + 3),
    "honest": lambda codec: encode_payload(((n, np.ones(s, np.float32)) for n, s in BIG), BIG, codec_for(codec, 1)),
}


@pytest.mark.parametrize("codec", tensors.CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("attack", ATTACKS)
def test_memory_is_bounded_by_the_layout(attack: str, codec: Codec) -> None:
    data = ATTACKS[attack](codec)
    # The store's reads are ranged: chunks are not in our memory twice.
    chunks = [data[start : start + 65536] for start in range(0, len(data), 65536)]
    tracemalloc.start()
    found = 0
    try:
        for _, values in decode_payload(iter(chunks), BIG, codec_for(codec, 1)):
            found += values.size
            del values
    except Corrupt:
        found = -1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found == 2 * SHAPE[0]) == (attack == "honest")
    assert peak < bound(codec)
