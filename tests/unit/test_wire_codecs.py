"""Codecs: error bounds, exactness, stability of the bytes, and what they refuse."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import LEVELS, SCALE, VALUES, Blockwise, codec_for
from diloco_blob.wire.reasons import reason_of
from diloco_blob.wire.tensorfile import DTYPES

NAMES = ("fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk")
SPARSE = ("topk", "dct_topk")
LEVEL_MAX = {"int8": 127, "int4": 7}
SHAPES = [(), (0,), (1,), (2,), (7,), (8,), (9,), (255,), (256,), (257,), (3, 5), (4, 0, 2), (33, 31), (1000,)]
FLOAT32_MAX = float(np.finfo(np.float32).max)

finite = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
codecs = st.builds(
    Codec,
    name=st.sampled_from(NAMES),
    block=st.sampled_from([8, 9, 64, 256]),
    chunk=st.sampled_from([16, 64, 4096]),
    keep=st.sampled_from([1, 2, 3, 8]),
    value_bits=st.sampled_from([1, 2, 4, 8]),
)


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def round_trip(setting: Codec, values: np.ndarray) -> np.ndarray:
    codec = codec_for(setting, 1)
    return codec.decode(codec.encode(values), values.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_what_they_were_announced_to_be(name: Any, shape: tuple[int, ...]) -> None:
    codec = codec_for(Codec(name=name, block=16, chunk=16, keep=3), 1)
    parts = codec.encode(normal(shape))
    announced = codec.parts(shape)
    assert {k: (v.dtype, v.shape) for k, v in parts.items()} == {
        k: (DTYPES[dtype], part_shape) for k, (dtype, part_shape) in announced.items()
    }
    assert list(parts) == list(announced)
    decoded = codec.decode(parts, shape)
    assert decoded.shape == shape
    assert decoded.dtype == np.float32


@given(finite)
@settings(deadline=None)
def test_fp32_is_exact_to_the_bit(values: np.ndarray) -> None:
    assert round_trip(Codec(name="fp32"), values).tobytes() == values.tobytes()


@given(finite)
@settings(deadline=None)
def test_bf16_rounds_as_torch_does_except_to_infinity(values: np.ndarray) -> None:
    decoded = round_trip(Codec(name="bf16"), values)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    largest = np.float32(3.3895314e38)
    expected = np.where(np.isinf(expected), np.copysign(largest, values), expected)
    assert decoded.tobytes() == expected.astype(np.float32).tobytes()
    error = np.abs(decoded.astype(np.float64) - values)
    assert (error <= np.maximum(2.0**-8 * np.abs(values.astype(np.float64)), 2.0**-134)).all()


def test_bf16_takes_ties_to_even() -> None:
    # 1 + 2⁻⁸ lies between 1 and 1 + 2⁻⁷; 1 + 3·2⁻⁸ between 1 + 2⁻⁷ and 1 + 2⁻⁶.
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23], np.float32)
    assert round_trip(Codec(name="bf16"), values).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


@given(finite, st.sampled_from(["int8", "int4"]), st.sampled_from([8, 9, 256]))
@settings(deadline=None)
def test_blockwise_error_is_half_a_scale(values: np.ndarray, name: Any, block: int) -> None:
    decoded = round_trip(Codec(name=name, block=block), values).reshape(-1).astype(np.float64)
    flat = values.reshape(-1).astype(np.float64)
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        scale = max(np.abs(part).max() / LEVEL_MAX[name], 2.0**-126)
        assert np.abs(decoded[start : start + block] - part).max() <= scale * (0.5 + 1e-4)


@given(finite, codecs)
@settings(deadline=None)
def test_decoding_is_a_function_of_the_parts(values: np.ndarray, setting: Codec) -> None:
    here, there = codec_for(setting, 1), codec_for(setting, 1)
    parts = here.encode(values)
    again = {suffix: array.copy() for suffix, array in there.encode(values.copy()).items()}
    assert [a.tobytes() for a in parts.values()] == [a.tobytes() for a in again.values()]
    assert here.decode(parts, values.shape).tobytes() == there.decode(again, values.shape).tobytes()


@given(finite, codecs)
@settings(deadline=None)
def test_encoding_leaves_its_argument_alone(values: np.ndarray, setting: Codec) -> None:
    before = values.tobytes()
    round_trip(setting, values)
    assert values.tobytes() == before


def test_int4_by_hand() -> None:
    # Largest 7, so the scale is 1; 3.5 → 4 and 2.5 → 2 (half to even).
    codec = Blockwise(bits=4, block=8)
    values = np.array([7, -7, 3.5, 2.5, 0.4, -0.6, 0, 1, 0.07], np.float32)
    parts = codec.encode(values)
    # levels + 8: 15 1 | 12 10 | 8 7 | 8 9; the ninth value has a block of its own: 15, then zero levels.
    assert parts[LEVELS].tobytes().hex() == "1fac78988f888888"
    assert parts[SCALE].tolist() == [1.0, np.float32(0.07) / np.float32(7)]
    assert codec.decode(parts, (9,)).tolist()[:8] == [7, -7, 4, 2, 0, -1, 0, 1]


def test_int8_by_hand() -> None:
    codec = Blockwise(bits=8, block=8)
    parts = codec.encode(np.array([254, -254, 1, 3, 5, -1, 0, 100], np.float32))
    assert parts[SCALE].tolist() == [2.0]
    assert parts[LEVELS].tolist() == [127, -127, 0, 2, 2, 0, 0, 50]
    assert codec.decode(parts, (8,)).tolist() == [254, -254, 0, 4, 4, 0, 0, 100]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_stay_zeros_and_tiny_blocks_do_no_harm(name: Any) -> None:
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    for magnitude in (0.0, tiny, 2.0**-140, 2.0**-126, 2.0**-120):
        values = np.array([0.0, magnitude, -magnitude, 0.0] * 64, np.float32)
        decoded = round_trip(Codec(name=name), values)
        assert (decoded[values == 0] == 0).all()
        assert np.abs(decoded - values).max() <= 2.0**-127
        # Nothing subnormal comes out: a CPU that flushes to zero decodes the same.
        assert ((decoded == 0) | (np.abs(decoded) >= 2.0**-126)).all()


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "fp4"])
def test_the_largest_values_survive(name: Any) -> None:
    values = np.array([FLOAT32_MAX, -FLOAT32_MAX, 0, 1], np.float32)
    decoded = round_trip(Codec(name=name), values)
    assert np.abs(decoded[:2] / values[:2] - 1).max() <= 2.0**-8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 299])
def test_encoding_refuses_what_is_not_finite(name: Any, bad: float, place: int) -> None:
    values = normal((300,))
    values[place] = bad
    with pytest.raises(Corrupt) as caught:
        codec_for(Codec(name=name), 1).encode(values)
    assert reason_of(caught.value) == "non-finite"


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (np.nan, "non-finite"),
        (np.inf, "non-finite"),
        (FLOAT32_MAX, "non-finite"),
        (-1.0, "format"),
        (0.0, "format"),
        (2.0**-130, "format"),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_refuses_scales_that_no_encoder_writes(bits: int, scale: float, reason: str) -> None:
    codec = Blockwise(bits=bits, block=8)
    parts = codec.encode(normal((20,)))
    parts[SCALE][1] = scale
    with pytest.raises(Corrupt) as caught:
        codec.decode(parts, (20,))
    assert reason_of(caught.value) == reason


@pytest.mark.parametrize(("bits", "byte"), [(8, 0x80), (4, 0x80), (4, 0x08)])
def test_decoding_refuses_levels_that_no_encoder_writes(bits: int, byte: int) -> None:
    codec = Blockwise(bits=bits, block=8)
    parts = codec.encode(normal((20,)))
    parts[LEVELS].view(np.uint8)[3] = 0x0F & byte if bits == 4 and byte == 0x08 else byte
    if bits == 4:
        parts[LEVELS][3] = {0x80: 0x08, 0x08: 0x80}[byte]  # one nibble 0, which would be level −8
    with pytest.raises(Corrupt) as caught:
        codec.decode(parts, (20,))
    assert reason_of(caught.value) == "format"


@pytest.mark.parametrize(("name", "bad"), [("fp32", np.inf), ("fp32", np.nan), ("bf16", 0x7F80), ("bf16", 0xFFC0)])
def test_decoding_refuses_values_that_are_not_finite(name: Any, bad: float) -> None:
    codec = codec_for(Codec(name=name), 1)
    parts = {VALUES: codec.encode(normal((20,)))[VALUES].copy()}
    parts[VALUES][7] = bad
    with pytest.raises(Corrupt) as caught:
        codec.decode(parts, (20,))
    assert reason_of(caught.value) == "non-finite"


def test_non_contiguous_arrays_are_taken_in_row_major_order() -> None:
    values = normal((24, 16)).T
    assert not values.flags.c_contiguous
    name: Any
    for name in NAMES:
        setting = Codec(name=name, block=8)
        assert round_trip(setting, values).tobytes() == round_trip(setting, values.copy(order="C")).tobytes()


# ---- what holds for every codec

DELTA: dict[str, Callable[[int], float]] = {
    "fp32": lambda _: 1.0,
    "bf16": lambda _: 1 - 2.0**-15,
    "int8": lambda width: 1 / (1 + width / 4 / 127**2),
    "int4": lambda width: 1 / (1 + width / 4 / 7**2),
    "int2": lambda width: 0.9 / width,
    "sign": lambda width: 0.99 / width,
    "fp4": lambda width: 0.99 / width,
    "topk": lambda width: 0.97 / width,
    "dct_topk": lambda width: 0.9 / width,
}
"""‖x − C(x)‖² ≤ (1 − δ)·‖x‖² for a block (chunk) of `width` values, as in docs/numerics.md."""


@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 150),
        elements=st.one_of(
            st.just(0.0), st.floats(2.0**-60, 2.0**60, width=32), st.floats(-(2.0**60), -(2.0**-60), width=32)
        ),
    ),
    codecs,
)
@settings(deadline=None, max_examples=200)
def test_every_codec_contracts(values: np.ndarray, setting: Codec) -> None:
    width = setting.block
    if setting.name in SPARSE:
        width = setting.chunk
    delta = DELTA[setting.name](min(width, max(values.size, 1)))
    if setting.name == "dct_topk":  # rows of √chunk
        delta = DELTA[setting.name](setting.chunk)
    before = float((values.astype(np.float64) ** 2).sum())
    after = float(((values - round_trip(setting, values).astype(np.float64)) ** 2).sum())
    assert after <= (1 - delta) * before * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_many_pieces_are_coded_like_few(name: Any) -> None:
    """A tensor of several pieces of work is coded as its blocks (chunks) are by themselves."""
    setting = Codec(name=name, block=250, chunk=1024, keep=9)
    values = normal((3, 70_000))
    if name == "dct_topk":
        values = normal((96, 2080))
        whole = round_trip(setting, values)
        pieces = np.concatenate([round_trip(setting, values[:, at : at + 32]) for at in range(0, 2080, 32)], axis=1)
    else:
        whole = round_trip(setting, values).reshape(-1)
        size = 1024 * 125  # whole blocks of 250 and whole chunks of 1024
        flat = values.reshape(-1)
        pieces = np.concatenate([round_trip(setting, flat[at : at + size]) for at in range(0, flat.size, size)])
    assert whole.tobytes() == pieces.tobytes()


PROGRAM = """
import hashlib, numpy as np
from diloco_blob.core.settings import Codec
from diloco_blob.wire import codec_for
rng = np.random.default_rng(0)
values = (rng.standard_normal((301, 333)) * np.exp(rng.standard_normal((301, 1)))).astype(np.float32)
values[7] = 0.25
values[8] = 0.0
state = hashlib.sha256()
for name in ("fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk"):
    for bits in (1, 2, 4, 8) if "topk" in name else (2,):
        codec = codec_for(Codec(name=name, value_bits=bits), 1)
        parts = codec.encode(values)
        for part in parts.values():
            state.update(part.tobytes())
        state.update(codec.decode(parts, values.shape).tobytes())
print(state.hexdigest())
"""
"""The digest of what every codec encodes and decodes."""

EXPECTED = "8f8f924f55b02c54c35ab99fb70d4c6cdc4acf2d4404d3c1fdc5b56145fb1c78"
"""What the machine gave on which this was written (x86-64, AVX2; numpy 2.4)."""


@pytest.mark.parametrize(("disabled", "kernels"), [("none", "Haswell"), ("half", "Nehalem"), ("all", "Prescott")])
def test_the_same_bytes_whatever_the_cpu_can_do(disabled: str, kernels: str) -> None:
    """Half or none of numpy's SIMD, and BLAS with the kernels of other CPUs: with fused multiply-adds and without."""
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    off = {"none": [], "half": found[len(found) // 2 :], "all": found}[disabled]
    environment = dict(
        os.environ, NPY_DISABLE_CPU_FEATURES=" ".join(off), OPENBLAS_NUM_THREADS="1", OPENBLAS_CORETYPE=kernels
    )
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED


def test_settings_that_make_no_sense_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="at most half of chunk"):
        Codec(name="topk", chunk=64, keep=33)
    with pytest.raises(ValueError, match="must be a square"):
        Codec(name="dct_topk", chunk=2048)
    assert math.isqrt(Codec(name="dct_topk").chunk) == 64


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFFBFFFFF])
def test_a_scale_that_is_any_nan_is_refused_in_silence(bits: int):
    codec = codec_for(Codec(name="int8"), 1)
    parts = {suffix: np.array(part) for suffix, part in codec.encode(np.ones(8, np.float32)).items()}
    parts["#scale"].view(np.uint32)[0] = bits
    with pytest.raises(Corrupt, match="non-finite"):
        codec.decode(parts, (8,))
