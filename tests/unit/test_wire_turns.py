"""Values that take turns: which ones, that all get one, what a payload then costs, and what whole runs make of it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.errors import Corrupt, InvalidSettings
from diloco_blob.core.settings import Codec, Merge, Outer, Policy, Settings, parse_settings
from diloco_blob.protocol.audit import audit
from diloco_blob.testing.toy import ToyRun, random_tensors
from diloco_blob.wire import codec_for, content_bytes, decode_payload, encode_payload
from diloco_blob.wire.feedback import ErrorFeedback, code
from diloco_blob.wire.reasons import reason_of

values_of_any_shape = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=30),
    elements=st.floats(-4, 4, width=32),
)


def turns(name: Any = "fp32", *, cycle: int, whole_every: int = 0) -> Codec:
    return Codec(name=name, block=8, error_feedback=True, cycle=cycle, whole_every=whole_every)


def round_trip(setting: Codec, version: int, values: np.ndarray) -> np.ndarray:
    codec = codec_for(setting, version)
    return codec.decode(codec.encode(values), values.shape)


def place(group: int, cycle: int, version: int) -> int:
    """docs/format.md, in Python's integers."""
    return group * cycle + (cycle * (group * 0x9E3779B1 % 2**32) // 2**32 + version) % cycle


@given(values_of_any_shape, st.integers(2, 40), st.integers(0, 2**40))
@settings(deadline=None)
def test_after_a_cycle_every_value_was_sent_once(values: np.ndarray, cycle: int, first: int) -> None:
    total = np.zeros(values.shape, np.float32)
    for version in range(first, first + cycle):
        sent = round_trip(turns(cycle=cycle), version, values)
        assert not (total[sent != 0]).any(), "sent twice"
        total += sent
    assert total.tobytes() == (values + np.float32(0)).tobytes()  # -0 is sent as -0, and 0 + -0 is 0


@pytest.mark.parametrize(("count", "cycle"), [(1, 2), (7, 3), (1000, 4), (3 << 16, 5), (200_001, 2)])
def test_the_places_are_those_of_the_format(count: int, cycle: int) -> None:
    values = np.ones(count, np.float32)
    for version in (1, 2, cycle, 10**6 + 1):
        found = np.flatnonzero(round_trip(turns(cycle=cycle), version, values)).tolist()
        expected = [place(group, cycle, version) for group in range(-(-count // cycle))]
        assert found == [index for index in expected if index < count]


def test_the_places_of_a_turn_are_spread_over_rows_and_columns() -> None:
    """Not whole columns of a matrix whose width is a power of two."""
    sent = round_trip(turns(cycle=4), 3, np.ones((256, 64), np.float32))
    assert sent.sum() == 256 * 64 / 4
    assert set(sent.sum(axis=1)) == {16.0}
    assert sent.sum(axis=0).min() >= 48
    assert sent.sum(axis=0).max() <= 80


@given(values_of_any_shape, st.sampled_from(["int4", "int2", "sign", "topk", "dct_topk"]), st.integers(2, 9))
@settings(deadline=None)
def test_what_waits_is_what_was_not_sent(values: np.ndarray, name: Any, cycle: int) -> None:
    setting = Codec(name=name, block=8, chunk=16, keep=3, error_feedback=True, cycle=cycle)
    coded = code(codec_for(setting, 7), values)
    waits = coded.sent == 0
    assert (coded.residual[waits] == values[waits]).all()
    assert np.linalg.norm(coded.residual) <= np.linalg.norm(values) * (1 + 1e-6)
    assert np.count_nonzero(coded.sent) <= -(-values.size // cycle)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_also_where_it_is_not_its_turn(bad: float) -> None:
    for index in range(8):
        values = np.ones(8, np.float32)
        values[index] = bad
        with pytest.raises(Corrupt) as refused:
            codec_for(turns("int2", cycle=4), 1).encode(values)
        assert reason_of(refused.value) == "non-finite"


def test_a_quarter_of_the_values_is_about_a_quarter_of_the_bytes() -> None:
    layout = [("a", (1024, 256)), ("b", (333,))]
    whole, quarter = (codec_for(turns("int2", cycle=4, whole_every=2), version) for version in (2, 3))
    assert content_bytes(layout, quarter) < 0.26 * content_bytes(layout, whole)
    tensors = random_tensors(0, dict(layout))
    for codec in (whole, quarter):
        data = encode_payload(tensors.items(), layout, codec)
        for name, values in decode_payload([data], layout, codec):
            assert values.tobytes() == codec.decode(codec.encode(tensors[name]), values.shape).tobytes()


def test_a_payload_of_another_kind_of_version_is_refused() -> None:
    layout = [("a", (64, 8))]
    whole, part = (codec_for(turns("int2", cycle=4, whole_every=2), version) for version in (2, 3))
    data = encode_payload(random_tensors(0, dict(layout)).items(), layout, part)
    with pytest.raises(Corrupt, match="shape"):
        list(decode_payload([data], layout, whole))


def test_in_a_whole_version_nothing_waits() -> None:
    feedback, values = ErrorFeedback(turns(cycle=4, whole_every=5)), np.arange(1, 41, dtype=np.float32)
    total = np.zeros(40)
    for version in range(1, 6):
        coded = feedback.code("w", values, version)
        feedback.keep({"w": coded.residual})
        total += coded.sent
    assert total.tolist() == (5 * values).tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cycle = 2", "cycle (2) needs error_feedback = true: what waits for its turn has to be kept"),
        ("whole_every = 2", "whole_every (2) needs cycle above 1: all values are coded anyway"),
        ("cycle = 0", "Expected `int` >= 1"),
    ],
)
def test_settings_that_would_lose_something_are_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        parse_settings(f"[up]\n{text}", source="run.toml")
    assert said in refused.value.message


def test_a_run_moves_just_the_values_whose_turn_it_is_by_the_mean() -> None:
    """Three islands, one of them late: what it sends is of the turn of its base, and is not lost."""
    both = turns(cycle=2, whole_every=4)
    toy = ToyRun(
        Settings(
            up=both,
            down=both,
            outer=Outer(optimizer="sgd", lr=1.0, momentum=0.0),
            merge=Merge(weights="uniform", staleness="constant"),
            policy=Policy(islands=3, quorum=1, grace_s=0.0),
        )
    )
    expected = {name: values.astype(np.float64) for name, values in toy.initial.items()}
    owed = {name: np.zeros(values.shape) for name, values in expected.items()}
    for version in range(1, 6):
        bases = {"a": version - 1, "b": version - 1, "late": max(0, version - 2)}
        for number, (island, base) in enumerate(bases.items()):
            deltas = random_tensors(10 * version + number, toy.shapes)
            toy.send(island, deltas, base_version=base)
            for name, values in deltas.items():
                owed[name] += round_trip(both, base + 1, values) / 3
        toy.aggregate()
        for name, values in toy.params().items():
            step = round_trip(both, version, owed[name].astype(np.float32)).astype(np.float64)
            owed[name] -= step
            expected[name] -= step
            np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-5)
    assert audit(toy.store).ok


def test_momentum_moves_on_only_in_a_values_turn() -> None:
    """Each value is torch's Nesterov over its own turns: after `cycle` versions as after one without turns."""
    outer = Outer(optimizer="nesterov", lr=0.7, momentum=0.6)
    policy = Policy(islands=1, quorum=1, grace_s=0.0)
    toy = ToyRun(Settings(up=turns(cycle=3), down=turns(cycle=3), outer=outer, policy=policy))
    weights = {name: torch.nn.Parameter(torch.tensor(values)) for name, values in toy.initial.items()}
    reference = torch.optim.SGD(weights.values(), lr=0.7, momentum=0.6, nesterov=True)
    for cycle in range(4):
        deltas = random_tensors(cycle, toy.shapes)
        for version in range(3 * cycle, 3 * cycle + 3):
            toy.send("a", deltas, base_version=version)
            toy.aggregate()
        for name, parameter in weights.items():
            parameter.grad = torch.tensor(deltas[name])
        reference.step()
        for name, values in toy.params().items():
            np.testing.assert_allclose(values, weights[name].detach().numpy(), rtol=0, atol=1e-5)
    assert audit(toy.store).ok
