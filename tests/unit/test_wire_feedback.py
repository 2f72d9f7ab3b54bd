"""Error feedback: nothing is lost but what the decay forgets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import codec_for
from diloco_blob.wire.feedback import ErrorFeedback, code

NAMES = ("fp32", "bf16", "int8", "int4")
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


@given(pairs, st.sampled_from(NAMES), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(deadline=None)
def test_sent_and_residual_make_exactly_what_was_owed(
    arrays: tuple[np.ndarray, np.ndarray], name: str, decay: float
) -> None:
    values, residual = arrays
    codec = codec_for(Codec(name=name, block=8))
    coded = code(codec, values, residual, decay)
    owed = np.asarray(values + residual * np.float32(decay), np.float32)
    assert ((coded.sent + coded.residual) == owed).all()
    assert coded.residual.shape == values.shape == coded.sent.shape
    assert coded.residual.dtype == np.float32
    assert codec.decode(coded.parts, values.shape).tobytes() == coded.sent.tobytes()


def test_by_hand() -> None:
    # int8, largest 127: levels are the rounded values. First 0.4 is owed and 0 sent, then 0.4 + 0.4 is owed and 1 sent.
    settings_ = Codec(name="int8", block=8, error_feedback=True)
    feedback = ErrorFeedback(settings_)
    values = np.array([127.0, 0.4], np.float32)
    first = feedback.code("w", values)
    assert first.sent.tolist() == [127.0, 0.0]
    feedback.keep({"w": first.residual})
    second = feedback.code("w", values)
    assert second.sent.tolist() == [127.0, 1.0]
    assert second.residual[1] == pytest.approx(-0.2, abs=1e-6)


def test_decay_forgets() -> None:
    feedback = ErrorFeedback(Codec(name="int8", error_feedback=True, decay=0.5), {"w": np.array([4.0], np.float32)})
    assert feedback.code("w", np.array([10.0], np.float32)).sent.tolist() == [12.0]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_over_many_rounds_only_one_residual_is_missing(name: str) -> None:
    feedback = ErrorFeedback(Codec(name=name, error_feedback=True))
    total, sent = np.zeros(1000), np.zeros(1000)
    for seed in range(50):
        coded = feedback.code("w", normal(seed))
        feedback.keep({"w": coded.residual})
        total += normal(seed)
        sent += coded.sent
    np.testing.assert_allclose(sent + feedback.export()["w"], total, atol=1e-4)
    assert np.abs(total - sent).max() < 1.0  # without feedback int4 would be off by several


def test_coding_changes_nothing_until_it_is_kept() -> None:
    feedback = ErrorFeedback(Codec(name="int4", error_feedback=True), {"w": normal(1)})
    before = feedback.export()["w"].tobytes()
    first, again = feedback.code("w", normal(2)), feedback.code("w", normal(2))
    assert feedback.export()["w"].tobytes() == before
    assert first.sent.tobytes() == again.sent.tobytes()


def test_exported_residuals_continue_where_they_were() -> None:
    setting = Codec(name="int4", error_feedback=True, decay=0.95)
    one = ErrorFeedback(setting)
    one.keep({"w": one.code("w", normal(1)).residual})
    other = ErrorFeedback(setting, {name: array.copy() for name, array in one.export().items()})
    assert one.code("w", normal(2)).residual.tobytes() == other.code("w", normal(2)).residual.tobytes()


def test_without_feedback_nothing_is_kept() -> None:
    feedback = ErrorFeedback(Codec(name="int4"), {"w": normal(1)})
    coded = feedback.code("w", normal(2))
    feedback.keep({"w": coded.residual})
    assert feedback.export() == {}
    assert feedback.code("w", normal(2)).sent.tobytes() == coded.sent.tobytes()


def test_a_residual_that_overflows_is_refused() -> None:
    huge = np.array([3e38], np.float32)
    with pytest.raises(Corrupt, match="non-finite"):
        code(codec_for(Codec(name="int8")), huge, huge)
