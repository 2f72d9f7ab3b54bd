"""Merge rules: by hand, exact where exactness is promised, and the same bits on every CPU."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_blob.core.settings import Merge
from diloco_blob.outer.merge import merge_tensor
from diloco_blob.outer.norms import square_sum
from diloco_blob.outer.weights import Work, island_weights

finite = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=50),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def weights_of(merge, items):
    """Of islands with one contribution each."""
    return island_weights(merge, [[Work(*item)] for item in items])


def normal(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def merged(rule: str, arrays: list[list[float]], weights: list[float], **more: bool) -> list[float]:
    return merge_tensor(rule, [np.array(a, np.float32) for a in arrays], weights, **more).tolist()  # type: ignore[arg-type]


def test_mean_by_hand() -> None:
    assert merged("mean", [[1, 2], [3, 6]], [0.25, 0.75]) == [2.5, 5.0]
    assert merged("mean", [[1, 2], [3, 6]], [1, 3]) == [2.5, 5.0]
    assert merged("mean", [[1, 2], [3, 6], [100, 100]], [0.5, 0.5, 0.0]) == [2.0, 4.0]


def test_rda_by_hand() -> None:
    # Norms 3 and 4: radius 3.5. Directions (1, 0) and (0, 1): mean (½, ½), of length 1/√2.
    assert merged("rda", [[3, 0], [0, 4]], [0.5, 0.5]) == pytest.approx([3.5 / math.sqrt(2)] * 2, rel=1e-7)
    # Weights 1 : 3. Radius (3 + 12)/4 = 3.75; direction (1, 3)/√10.
    expected = [3.75 / math.sqrt(10), 3 * 3.75 / math.sqrt(10)]
    assert merged("rda", [[3, 0], [0, 4]], [1, 3]) == pytest.approx(expected, rel=1e-7)
    # φ(0) = 0: a zero contribution shortens the radius and leaves the direction.
    assert merged("rda", [[3, 4], [0, 0]], [0.5, 0.5]) == pytest.approx([1.5, 2.0], rel=1e-7)


def test_rda_averages_embeddings_and_what_cancels() -> None:
    assert merged("rda", [[3, 0], [0, 4]], [0.5, 0.5], embedding=True) == [1.5, 2.0]
    assert merged("rda", [[1, 0], [-3, 0]], [0.5, 0.5]) == [-1.0, 0.0]
    assert merged("rda", [[0, 0], [0, 0]], [0.5, 0.5]) == [0.0, 0.0]


def test_the_norm_of_rda_does_not_shrink_with_the_number_of_islands() -> None:
    for count in (2, 8, 32):
        arrays = [normal(100_000, seed) for seed in range(count)]
        norms = [np.linalg.norm(array.astype(np.float64)) for array in arrays]
        uniform = [1 / count] * count
        assert np.linalg.norm(merge_tensor("rda", arrays, uniform)) == pytest.approx(np.mean(norms), rel=1e-5)
        shrunk = np.mean(norms) / math.sqrt(count)
        assert np.linalg.norm(merge_tensor("mean", arrays, uniform)) == pytest.approx(shrunk, rel=0.05)


@given(
    finite,
    st.sampled_from(["mean", "rda"]),
    st.sampled_from(["tokens", "tokens2_per_step", "uniform"]),
    st.sampled_from(["constant", "polynomial", "hinge"]),
    st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 1000), st.integers(0, 9)), min_size=1, max_size=12),
)
@settings(deadline=None)
def test_identical_contributions_merge_to_that_contribution(
    values: np.ndarray, rule: str, weights: str, staleness: str, items: list[tuple[int, int, int]]
) -> None:
    factors, _ = weights_of(Merge(rule=rule, weights=weights, staleness=staleness), items)
    result = merge_tensor(rule, [values.copy() for _ in items], factors)  # type: ignore[arg-type]
    assert result.shape == values.shape
    assert result.dtype == np.float32
    assert (result == values).all()


@pytest.mark.parametrize("rule", ["mean", "rda"])
def test_identical_large_contributions_too(rule: str) -> None:
    values = normal((300, 1001))
    weights = list(np.random.default_rng(1).random(64))
    assert merge_tensor(rule, [values] * 64, weights).tobytes() == values.tobytes()  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["mean", "rda"])
@pytest.mark.parametrize(
    "weights", [[0.05, 0.1, 0.15, 0.2, 0.25, 0.05, 0.2], [0.0613, 0.1171, 0.1523, 0.1911, 0.2297, 0.0583, 0.1902]]
)
def test_another_order_changes_only_how_a_tie_is_rounded(rule: str, weights: list[float]) -> None:
    arrays = [normal(20_000, seed) for seed in range(7)]
    forward = merge_tensor(rule, arrays, weights)  # type: ignore[arg-type]
    backward = merge_tensor(rule, arrays[::-1], weights[::-1])  # type: ignore[arg-type]
    assert (np.abs(forward - backward) <= np.spacing(np.abs(forward))).all()
    # Twentieths of fp32 values often lie halfway between two of them, where the last bit of the float64 sum decides.
    round_weights = weights[0] == 0.05 and rule == "mean"
    assert np.count_nonzero(forward != backward) <= (400 if round_weights else 0)


def test_a_mean_is_rounded_once() -> None:
    arrays, weights = [normal(1000, seed) for seed in range(5)], [0.1, 0.2, 0.3, 0.25, 0.15]
    exact = [math.fsum(w * float(a[i]) for a, w in zip(arrays, weights, strict=True)) for i in range(1000)]
    expected = np.array(exact) / math.fsum(weights)
    error = np.abs(merge_tensor("mean", arrays, weights) - expected)
    assert (error <= 0.5000001 * np.spacing(np.abs(expected).astype(np.float32))).all()


@pytest.mark.parametrize("size", [0, 1, 2, 8191, 8192, 8193, 40_000])
def test_square_sum_is_defined_by_its_order(size: int) -> None:
    values = normal(size)
    lanes = [0.0] * 8192
    for index, value in enumerate(values.tolist()):
        lanes[index % 8192] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[half + i] for i in range(half)]
    assert square_sum(values) == lanes[0]
    assert lanes[0] == pytest.approx(math.fsum(v * v for v in values.tolist()), rel=1e-13)


def test_arrays_are_taken_one_at_a_time() -> None:
    alive = 0

    def arrays() -> object:
        nonlocal alive
        for seed in range(5):
            alive += 1
            yield normal(10, seed)

    merge_tensor("rda", arrays(), [0.2] * 5)  # type: ignore[arg-type]
    assert alive == 5


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -0.5], [math.nan, 1.0]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        merge_tensor("mean", [normal(3)] * len(weights), weights)


def test_numbers_and_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="zip"):
        merge_tensor("mean", [normal(3)], [0.5, 0.5])
    with pytest.raises(ValueError, match="one shape"):
        merge_tensor("mean", [normal(3), normal(4)], [0.5, 0.5])


PROGRAM = """
import hashlib, numpy as np
from diloco_blob.core.settings import Codec, Outer
from diloco_blob.outer import merge_tensor, outer_step, square_sum
from diloco_blob.wire import codec_for
rng = np.random.default_rng(0)
arrays = [rng.standard_normal((301, 333)).astype(np.float32) for _ in range(3)]
state = hashlib.sha256()
state.update(np.float64(square_sum(arrays[0])).tobytes())
for rule in ("mean", "rda", "trimmed_mean"):
    delta = merge_tensor(rule, arrays, [0.2, 0.3, 0.5], trim=0.125)
    step, kept = outer_step(Outer(), delta, {"momentum": arrays[0]}, 1)
    buf = kept["momentum"]
    state.update(step.tobytes() + buf.tobytes())
    for name in ("bf16", "int8", "int4"):
        codec = codec_for(Codec(name=name), 1)
        state.update(codec.decode(codec.encode(step), step.shape).tobytes())
print(state.hexdigest())
"""
"""A merge, a step and three codecs; the digest of all results."""

EXPECTED = "b852cb3fc6f09bb232443ce3d66c6f18a930957b553e4233190bc00a6ca3a74f"
"""What the machine gave on which this was written (x86-64, AVX-512; numpy 2.4)."""


@pytest.mark.parametrize("disabled", ["none", "half", "all"])
def test_the_same_bits_whatever_the_cpu_can_do(disabled: str) -> None:
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])  # type: ignore[index]
    off = {"none": [], "half": found[len(found) // 2 :], "all": found}[disabled]
    environment = dict(os.environ, NPY_DISABLE_CPU_FEATURES=" ".join(off), OPENBLAS_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == EXPECTED
    assert len(EXPECTED) == len(hashlib.sha256().hexdigest())
