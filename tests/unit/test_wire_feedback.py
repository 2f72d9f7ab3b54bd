"""Error feedback: nothing is lost but what the decay forgets."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import codec_for
from diloco_blob.wire.feedback import ErrorFeedback, code

EXACT = ("fp32", "bf16", "int8", "int4")
ROUNDED = ("int2", "sign", "fp4", "topk", "dct_topk")
LIMIT = 2.0**100

pairs = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=30).flatmap(
    lambda shape: st.tuples(
        *[
            hnp.arrays(np.float32, shape, elements=st.floats(-LIMIT, LIMIT, width=32, allow_subnormal=False))
            for _ in range(2)
        ]
    )
)


def normal(seed: int, shape: tuple[int, ...] = (1000,)) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(pairs, st.sampled_from(EXACT), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(deadline=None)
def test_sent_and_residual_make_exactly_what_was_owed(
    arrays: tuple[np.ndarray, np.ndarray], name: Any, decay: float
) -> None:
    values, residual = arrays
    codec = codec_for(Codec(name=name, block=8), 1)
    coded = code(codec, values, residual, decay)
    owed = np.asarray(values + residual * np.float32(decay), np.float32)
    assert ((coded.sent + coded.residual) == owed).all()
    assert coded.residual.shape == values.shape == coded.sent.shape
    assert coded.residual.dtype == np.float32
    assert codec.decode(coded.parts, values.shape).tobytes() == coded.sent.tobytes()


@given(pairs, st.sampled_from(ROUNDED), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_sent_and_residual_make_what_was_owed_to_one_rounding(
    arrays: tuple[np.ndarray, np.ndarray], name: Any, decay: float, bits: Any
) -> None:
    values, residual = arrays
    codec = codec_for(Codec(name=name, block=8, chunk=16, keep=3, value_bits=bits), 1)
    coded = code(codec, values, residual, decay)
    owed = np.asarray(values + residual * np.float32(decay), np.float32).astype(np.float64)
    sent, rest = coded.sent.astype(np.float64), coded.residual.astype(np.float64)
    # The difference of two fp32 numbers, exact in float64 for these exponents up to 2⁻⁵³, rounded to fp32 once.
    assert (np.abs(sent + rest - owed) <= 2.0**-24 * np.abs(rest) + 2.0**-50 * np.abs(owed)).all()
    assert (coded.residual[coded.sent == 0] == owed[coded.sent == 0]).all()
    assert (np.abs(rest) <= (np.abs(owed) + np.abs(sent)) * (1 + 2.0**-23)).all()
    assert codec.decode(coded.parts, values.shape).tobytes() == coded.sent.tobytes()


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_coding_leaves_its_arguments_alone(name: Any) -> None:
    codec = codec_for(Codec(name=name), 1)
    values, residual = normal(0), normal(1)
    before = values.tobytes(), residual.tobytes()
    coded = code(codec, values, residual)
    assert (values.tobytes(), residual.tobytes()) == before
    again = codec.decode(coded.parts, values.shape)
    assert again.tobytes() == coded.sent.tobytes()
    coded = code(codec, values)
    np.add(coded.residual, 1, out=coded.residual)
    assert values.tobytes() == before[0]


@pytest.mark.parametrize("decay", [0.95, 1.0])
@pytest.mark.parametrize("name", ROUNDED)
def test_coarse_codecs_send_everything_in_the_end(name: Any, decay: float) -> None:
    """The same tensor again and again: the mean of what is sent comes near it, and the residual stays bounded."""
    values = normal(3, (64, 64)) + 1
    setting = Codec(name=name, chunk=1024, keep=64, error_feedback=True, decay=decay)
    feedback, sent, rounds = ErrorFeedback(setting), np.zeros(values.shape), 200
    for _ in range(rounds):
        coded = feedback.code("w", values, 1)
        feedback.keep({"w": coded.residual})
        sent += coded.sent
    residual = float(np.linalg.norm(feedback.export()["w"]))
    assert residual < 16 * np.linalg.norm(values)  # 1/16 is sent each time
    if decay == 1.0:
        np.testing.assert_allclose(sent + feedback.export()["w"], rounds * values.astype(np.float64), atol=1e-2)


def test_by_hand() -> None:
    # int8, largest 127: levels are the rounded values. First 0.4 is owed and 0 sent, then 0.4 + 0.4 is owed and 1 sent.
    settings_ = Codec(name="int8", block=8, error_feedback=True)
    feedback = ErrorFeedback(settings_)
    values = np.array([127.0, 0.4], np.float32)
    first = feedback.code("w", values, 1)
    assert first.sent.tolist() == [127.0, 0.0]
    feedback.keep({"w": first.residual})
    second = feedback.code("w", values, 1)
    assert second.sent.tolist() == [127.0, 1.0]
    assert second.residual[1] == pytest.approx(-0.2, abs=1e-6)


def test_decay_forgets() -> None:
    feedback = ErrorFeedback(Codec(name="int8", error_feedback=True, decay=0.5), {"w": np.array([4.0], np.float32)})
    assert feedback.code("w", np.array([10.0], np.float32), 1).sent.tolist() == [12.0]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_over_many_rounds_only_one_residual_is_missing(name: Any) -> None:
    feedback = ErrorFeedback(Codec(name=name, error_feedback=True))
    total, sent = np.zeros(1000), np.zeros(1000)
    for seed in range(50):
        coded = feedback.code("w", normal(seed), 1)
        feedback.keep({"w": coded.residual})
        total += normal(seed)
        sent += coded.sent
    np.testing.assert_allclose(sent + feedback.export()["w"], total, atol=1e-4)
    assert np.abs(total - sent).max() < 1.0  # without feedback int4 would be off by several


def test_coding_changes_nothing_until_it_is_kept() -> None:
    feedback = ErrorFeedback(Codec(name="int4", error_feedback=True), {"w": normal(1)})
    before = feedback.export()["w"].tobytes()
    first, again = feedback.code("w", normal(2), 1), feedback.code("w", normal(2), 1)
    assert feedback.export()["w"].tobytes() == before
    assert first.sent.tobytes() == again.sent.tobytes()


def test_exported_residuals_continue_where_they_were() -> None:
    setting = Codec(name="int4", error_feedback=True, decay=0.95)
    one = ErrorFeedback(setting)
    one.keep({"w": one.code("w", normal(1), 1).residual})
    other = ErrorFeedback(setting, {name: array.copy() for name, array in one.export().items()})
    assert one.code("w", normal(2), 1).residual.tobytes() == other.code("w", normal(2), 1).residual.tobytes()


def test_without_feedback_nothing_is_kept() -> None:
    feedback = ErrorFeedback(Codec(name="int4"), {"w": normal(1)})
    coded = feedback.code("w", normal(2), 1)
    feedback.keep({"w": coded.residual})
    assert feedback.export() == {}
    assert feedback.code("w", normal(2), 1).sent.tobytes() == coded.sent.tobytes()


def test_a_residual_that_overflows_is_refused() -> None:
    huge = np.array([3e38], np.float32)
    with pytest.raises(Corrupt, match="non-finite"):
        code(codec_for(Codec(name="int8"), 1), huge, huge)
