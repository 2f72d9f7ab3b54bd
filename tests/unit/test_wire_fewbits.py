"""sign, int2 and fp4: by hand, error bounds, and what they refuse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import SCALE, Fp4, Int2, Sign, codec_for
from diloco_blob.wire.codecs.base import Scratch
from diloco_blob.wire.codecs.plain import from_bf16
from diloco_blob.wire.codecs.sums import row_sums
from diloco_blob.wire.reasons import reason_of

NAMES = ("sign", "int2", "fp4")
CODES = {"sign": "#sign", "int2": "#q2", "fp4": "#e3m0"}
BF16_MAX = 3.3895314e38


def round_trip(name: Any, values: np.ndarray, block: int = 8) -> np.ndarray:
    codec = codec_for(Codec(name=name, block=block), 1)
    return codec.decode(codec.encode(values), values.shape)


def test_sign_by_hand() -> None:
    values = np.array([1, -2, 3, -4, 0, 6, -7, 9, -5], np.float32)  # mean magnitudes 32/8 and 5
    parts = Sign(block=8).encode(values)
    assert from_bf16(parts[SCALE]).tolist() == [4.0, 5.0]
    assert parts["#sign"].tobytes().hex() == "4a010000"  # bits 1, 3, 6; and bit 8
    assert Sign(block=8).decode(parts, (9,)).tolist() == [4, -4, 4, -4, 4, 4, -4, 4, -5]


def test_int2_by_hand() -> None:
    # Mean magnitude 20/7 of 7 values and a zero: 2.5, times 0.7 is 1.75. Above 3.5: three times that.
    values = np.array([1, -2, 3, -4, 0, 6, -1, 3], np.float32)
    parts = Int2(block=8).encode(values)
    assert from_bf16(parts[SCALE]).tolist() == [1.75]
    assert parts["#q2"].tobytes().hex() == "4a280000"  # signs at 1, 3, 6; large at 3 and 5
    assert Int2(block=8).decode(parts, (8,)).tolist() == [1.75, -1.75, 1.75, -5.25, 1.75, 5.25, -1.75, 1.75]


def test_fp4_by_hand() -> None:
    # Scale 64: levels 64, 32, 16, 8, 4, 2, 1, 0. 47 is nearer to 32, 48 goes up; 0.75 is the smallest that is not 0.
    values = np.array([64, -32, 47, 48, 1, -0.75, 0.74, -0.1, -3], np.float32)
    parts = Fp4(block=16).encode(values)
    assert from_bf16(parts[SCALE]).tolist() == [64.0]
    # Codes 7, 14 | 6, 7 | 1, 9 | 0, 0 | 11: the low nibble first.
    assert parts["#e3m0"].tobytes().hex() == "e77691000b000000"
    assert Fp4(block=16).decode(parts, (9,)).tolist() == [64, -32, 32, 64, 1, -1, 0, 0, -4]


@given(
    hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
    st.sampled_from([8, 9, 16]),
)
@settings(deadline=None)
def test_fp4_is_off_by_a_third_of_the_value_or_it_is_zero(values: np.ndarray, block: int) -> None:
    decoded = round_trip("fp4", values, block).astype(np.float64)
    for start in range(0, values.size, block):
        one, other = values[start : start + block].astype(np.float64), decoded[start : start + block]
        scale = np.abs(one).max()
        error = np.abs(one - other)
        small = np.abs(one) < 0.75 * 2**-6 * scale * (1 + 2**-8) + 2.0**-119
        assert (error[small] <= np.abs(one[small]) * (1 + 2**-7)).all()
        assert (error[~small] <= np.abs(one[~small]) * (1 / 3 + 2**-7)).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_tiny_blocks_decode_to_zeros(name: Any) -> None:
    for magnitude in (0.0, 2.0**-149, 2.0**-140, 2.0**-127):
        values = np.array([0.0, magnitude, -magnitude, 0.0] * 64, np.float32)
        assert not round_trip(name, values, 256).any()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_is_never_subnormal_nor_infinite(name: Any) -> None:
    for exponent in range(-149, 128):
        values = (np.linspace(-1.99, 1.99, 64) * 2.0**exponent).astype(np.float32)
        decoded = round_trip(name, values, 64)
        assert np.isfinite(decoded).all()
        assert ((decoded == 0) | (np.abs(decoded) >= 2.0**-126)).all()


@pytest.mark.parametrize(
    ("name", "scale", "reason"),
    [
        (name, scale, reason)
        for name in NAMES
        for scale, reason in [(0x7F80, "non-finite"), (0x7FC0, "non-finite"), (0xBF80, "format"), (0x8000, "format")]
    ]
    + [("int2", 0x7F7F, "format"), ("fp4", 0x0100, "format"), ("sign", 0x0001, "format")],
)
def test_decoding_refuses_scales_that_no_encoder_writes(name: Any, scale: int, reason: str) -> None:
    codec = codec_for(Codec(name=name, block=8), 1)
    parts = codec.encode(np.arange(20, dtype=np.float32))
    parts[SCALE][1] = scale
    with pytest.raises(Corrupt) as caught:
        codec.decode(parts, (20,))
    assert reason_of(caught.value) == reason


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_of_padding_is_checked(name: Any) -> None:
    codec = codec_for(Codec(name=name, block=8), 1)
    values = np.arange(1, 12, dtype=np.float32)
    parts = {suffix: part.copy() for suffix, part in codec.encode(values).items()}
    codes, flipped, refused = parts[CODES[name]], 0, 0
    for place in range(codes.size):
        for bit in range(8):
            codes[place] ^= 1 << bit
            try:
                changed = codec.decode(parts, values.shape)
                assert changed.tobytes() != codec.decode(codec.encode(values), values.shape).tobytes()
            except Corrupt as error:
                refused += reason_of(error) == "format"
            flipped += 1
            codes[place] ^= 1 << bit
    bits = {"sign": 1, "int2": 2, "fp4": 4}[name] * values.size
    assert refused == flipped - bits


def test_minus_zero_is_no_code() -> None:
    codec = Fp4(block=8)
    parts = codec.encode(np.ones(8, np.float32))
    for byte in (0x87, 0x78):
        parts["#e3m0"][1] = byte
        with pytest.raises(Corrupt, match="minus zero"):
            codec.decode(parts, (8,))


def error_energy(factor: float, values: np.ndarray) -> float:
    """Of four levels ±s, ±3s with s = factor · mean magnitude, as a share of the energy of `values`."""
    scale = factor * np.abs(values).mean()
    levels = np.where(np.abs(values) > 2 * scale, 3, 1) * scale
    return float(((np.abs(values) - levels) ** 2).sum() / (values**2).sum())


@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_the_factor_of_int2_is_near_the_best_and_better_than_three_levels(kind: str) -> None:
    values = getattr(np.random.default_rng(0), kind)(size=200_000)
    found = error_energy(Int2.factor, values)
    assert found <= 1.06 * min(error_energy(factor, values) for factor in np.arange(0.4, 1.2, 0.01))
    magnitudes = np.sort(np.abs(values))[::-1]
    kept = np.arange(1, magnitudes.size + 1)
    three = 1 - (np.cumsum(magnitudes) ** 2 / kept).max() / (values**2).sum()  # −s, 0, s with the best s and threshold
    assert found < 0.8 * three
    as_coded = round_trip("int2", values.astype(np.float32), 256)
    assert ((as_coded - values) ** 2).sum() / (values**2).sum() == pytest.approx(found, rel=0.05)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 70)), elements=st.floats(0, 2.0**127, width=32))
)
@settings(deadline=None)
def test_sums_are_those_of_the_halving_that_is_documented(rows: np.ndarray) -> None:
    expected = []
    for row in rows.tolist():
        while len(row) > 1:
            half = -(-len(row) // 2)
            row = [row[i] + row[i + half] if i + half < len(row) else row[i] for i in range(half)]  # noqa: PLW2901
        expected.append(row[0])
    assert row_sums(rows, Scratch()).tolist() == expected


def test_the_largest_values_do_not_become_infinite() -> None:
    values = np.full(16, np.finfo(np.float32).max, np.float32)
    assert round_trip("sign", values).tolist() == pytest.approx([BF16_MAX] * 16)
    assert round_trip("fp4", values).tolist() == pytest.approx([BF16_MAX] * 16)
    assert np.abs(round_trip("int2", values) / values - 1).max() < 0.35
