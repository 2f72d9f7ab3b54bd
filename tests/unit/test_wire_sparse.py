"""topk and what it is made of: positions, selection, kept values. By hand, against brute force, and hostile bytes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt
from diloco_blob.wire.codecs import TopK
from diloco_blob.wire.codecs.base import Scratch
from diloco_blob.wire.codecs.bits import Positions, num_bytes, pack, unpack
from diloco_blob.wire.codecs.kept import KeptValues, _two_means
from diloco_blob.wire.codecs.plain import from_bf16
from diloco_blob.wire.codecs.select import largest
from diloco_blob.wire.codecs.sparse import ChunkBytes
from diloco_blob.wire.reasons import reason_of

PART = "#topk"
few_values = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


def bytes_for(positions: Positions, num: int) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.zeros(num_bytes(num, w), np.uint8) for w in (positions.high_width, positions.low_width))  # type: ignore[return-value]


@given(st.integers(1, 16), st.lists(st.integers(0, 65535), max_size=50))
def test_bits_are_packed_and_unpacked(bits: int, numbers: list[int]) -> None:
    codes = np.array([number % 2**bits for number in numbers], np.uint8 if bits <= 8 else np.uint16)
    packed = np.zeros(num_bytes(codes.size, bits), np.uint8)
    pack(codes, bits, packed)
    assert unpack(packed, bits, codes.size).tolist() == codes.tolist()
    whole = sum(int(code) << (bits * index) for index, code in enumerate(codes))
    assert packed.tobytes() == whole.to_bytes(packed.size, "little")  # the definition, with Python's integers


def test_positions_by_hand() -> None:
    # 3 of 16: l = 2, highs of 1, 6, 13 are 0, 1, 3, so bits 0, 2, 5 of 3 + 3; lows are 1, 2, 1.
    positions = Positions(16, 3)
    assert (positions.high_width, positions.low_width) == (6, 6)
    highs, lows = bytes_for(positions, 1)
    positions.pack(np.array([[1, 6, 13]]), highs, lows)
    assert highs.tolist() == [0b100101]
    assert lows.tolist() == [0b01_10_01]
    assert positions.unpack(highs, lows, 1).tolist() == [[1, 6, 13]]


def test_64_of_4096_take_8_bits_each() -> None:
    positions = Positions(4096, 64)
    assert positions.high_width + positions.low_width == 511
    assert ChunkBytes(1, 4096, 64, 2).num_bytes == 84


@given(st.data())
@settings(deadline=None)
def test_positions_round_trip(draw: st.DataObject) -> None:
    n = draw.draw(st.integers(1, 200))
    k = draw.draw(st.integers(1, n))
    rows = draw.draw(st.lists(st.permutations(range(n)), min_size=1, max_size=4))
    chosen = np.sort(np.array(rows)[:, :k], axis=1)
    positions = Positions(n, k)
    highs, lows = bytes_for(positions, len(rows))
    positions.pack(chosen, highs, lows)
    assert (positions.unpack(highs, lows, len(rows)) == chosen).all()


def test_every_vector_of_bits_is_refused_or_is_the_code_of_what_it_decodes_to() -> None:
    """All 2¹² bytes of 3 of 16: exactly as many are accepted as there are choices."""
    positions, accepted = Positions(16, 3), 0
    for high, low in itertools.product(range(256), range(64)):
        highs, lows = np.array([high], np.uint8), np.array([low], np.uint8)
        try:
            found = positions.unpack(highs, lows, 1)
        except Corrupt:
            continue
        accepted += 1
        again = bytes_for(positions, 1)
        positions.pack(found, *again)
        assert (again[0].tolist(), again[1].tolist()) == ([high], [low])
    assert accepted == math.comb(16, 3)


def test_ones_in_the_wrong_chunk_are_refused() -> None:
    positions = Positions(16, 2)  # 2 + 1 bits of high parts
    assert positions.high_width == 3
    highs, lows = bytes_for(positions, 2)
    positions.pack(np.array([[1, 2], [3, 4]]), highs, lows)
    assert highs.tolist() == [0b011_011]
    with pytest.raises(Corrupt, match="format"):
        positions.unpack(np.array([0b001_111], np.uint8), lows, 2)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=few_values),
    st.integers(1, 70),
)
@settings(deadline=None)
def test_the_largest_are_chosen_and_of_equal_ones_the_first(magnitudes: np.ndarray, k: int) -> None:
    k = min(k, magnitudes.shape[1])
    expected = [sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]) for row in magnitudes.tolist()]
    assert largest(magnitudes, k, Scratch()).tolist() == expected


def test_selection_from_long_rows() -> None:
    rng = np.random.default_rng(0)
    magnitudes = np.abs(rng.standard_normal((8, 4096))).astype(np.float32)
    magnitudes[3] = 0.0
    magnitudes[4, 100:] = 0.5
    expected = np.sort(np.argsort(-magnitudes, axis=1, kind="stable")[:, :64], axis=1)
    assert (largest(magnitudes, 64, Scratch()) == expected).all()


@given(hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(0, 100, width=16)))
@settings(deadline=None)
def test_two_magnitudes_are_the_best_split_there_is(magnitudes: np.ndarray) -> None:
    def lost(groups: list[list[float]]) -> float:
        return sum(float(np.var(group)) * len(group) for group in groups)

    rows = sorted(magnitudes.astype(np.float64).tolist())
    low, high = _two_means(magnitudes[None])[0]
    best = min((lost([rows[:cut], rows[cut:]]) for cut in range(1, len(rows))), default=0.0)
    found = sum(min((value - low) ** 2, (value - high) ** 2) for value in rows)
    assert found <= best + 1e-6 * (1 + sum(value**2 for value in rows))
    assert low <= high


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_off_by_half_a_scale(bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((50, 20)).astype(np.float32)
    kept = KeptValues(20, bits)
    scales, codes = kept.encode(values)
    decoded = kept.decode(scales, codes)
    assert (np.abs(decoded - values) <= from_bf16(scales) * 0.5001).all()


def test_topk_by_hand() -> None:
    # The largest 2 of 16, and of the last 3 values ⌈3·2/16⌉ = 1. One bit: mean magnitudes 3 and 4.
    codec = TopK(chunk=16, keep=2, value_bits=1)
    values = np.zeros(19, np.float32)
    values[[2, 9, 17]] = [-4.0, 2.0, 4.0]
    values[[0, 16]] = [1.0, 0.5]
    part = codec.encode(values)[PART]
    # l = 3: highs of 2 and 9 are 0 and 1: bits 0 and 2; lows 2 and 1; signs 1, 0. Scale 3 is 0x4040 in bf16.
    # Position 1 of 3, l = 1: high 0 is bit 0, low 1; sign 0; 4 is 0x4080.
    assert part.tobytes().hex(" ") == "40 40 05 0a 01 80 40 01 01 00"
    decoded = codec.decode({PART: part}, (19,))
    assert np.flatnonzero(decoded).tolist() == [2, 9, 17]
    assert decoded[[2, 9, 17]].tolist() == [-3.0, 3.0, 4.0]


def test_two_bits_by_hand() -> None:
    codec = TopK(chunk=16, keep=4, value_bits=2)
    values = np.arange(16, dtype=np.float32) / np.float32(16)
    values[[3, 5, 7, 11]] = [8.0, -2.0, 2.0, -6.0]
    decoded = codec.decode(codec.encode(values), (16,))
    assert decoded[[3, 5, 7, 11]].tolist() == [7.0, -2.0, 2.0, -7.0]
    assert np.count_nonzero(decoded) == 4


BAD = [
    (1, 0, 0x80, 0x7F, "non-finite"),  # the scale becomes infinite
    (1, 1, 0xC0, None, "format"),  # or negative
    (1, 1, 0x01, None, "format"),  # or too small
    (1, 2, 0x01, None, "format"),  # one position
    (1, 2, 0x07, None, "format"),  # three
    (1, 2, 0x25, None, "format"),  # padding of the high parts
    (1, 3, 0x4A, None, "format"),  # of the low parts
    (1, 4, 0x05, None, "format"),  # of the signs
]


@pytest.mark.parametrize(("bits", "place", "byte", "after", "reason"), BAD)
def test_bytes_that_no_encoder_writes(bits: int, place: int, byte: int, after: int | None, reason: str) -> None:
    codec = TopK(chunk=16, keep=2, value_bits=bits)
    values = np.zeros(16, np.float32)
    values[[2, 9]] = [-4.0, 2.0]
    part = codec.encode(values)[PART].copy()
    part[place] = byte
    if after is not None:
        part[place + 1] = after
    with pytest.raises(Corrupt) as caught:
        codec.decode({PART: part}, (16,))
    assert reason_of(caught.value) == reason


def test_levels_and_magnitudes_that_no_encoder_writes() -> None:
    kept = KeptValues(4, 2)
    scales, codes = kept.encode(np.array([[1.0, -2.0, 3.0, 4.0]], np.float32))
    with pytest.raises(Corrupt, match="lower magnitude"):
        kept.decode(scales[:, ::-1], codes)
    for bits in (4, 8):
        kept = KeptValues(4, bits)
        scales, codes = kept.encode(np.array([[1.0, -2.0, 3.0, 4.0]], np.float32))
        codes[0][0, 2] = 0  # level −8 or −128
        with pytest.raises(Corrupt, match="level is out of range"):
            kept.decode(scales, codes)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_change_of_a_part_is_refused_or_decodes_to_k_values(draw: st.DataObject) -> None:
    bits = draw.draw(st.sampled_from([1, 2, 4, 8]))
    codec = TopK(chunk=16, keep=3, value_bits=bits)
    values = np.random.default_rng(0).standard_normal(70).astype(np.float32)
    part = codec.encode(values)[PART].copy()
    for _ in range(draw.draw(st.integers(1, 3))):
        part[draw.draw(st.integers(0, part.size - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    try:
        decoded = codec.decode({PART: part}, (70,))
    except Corrupt:
        return
    assert np.isfinite(decoded).all()
    assert np.count_nonzero(decoded) <= 4 * 3 + 2
