"""The mean over those that sent a coordinate."""

import numpy as np
import pytest

from diloco_blob.outer import merge_tensor
from diloco_blob.outer.sparse_mean import sparse_mean


def fp32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_by_hand() -> None:
    found = sparse_mean([fp32(1, 2, 0, 0), fp32(0, 4, 3, 0)], [0.25, 0.75])
    # 1 alone; (¼·2 + ¾·4); 3 alone; nobody
    assert found.tolist() == [1.0, 3.5, 3.0, 0.0]
    assert found.dtype == np.float32


def test_where_everybody_sends_everything_it_is_the_mean() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((40, 300)).astype(np.float32) for _ in range(5)]
    weights = [0.1, 0.2, 0.2, 0.2, 0.3]
    mean = merge_tensor("mean", arrays, weights)
    np.testing.assert_allclose(merge_tensor("sparse_mean", arrays, weights), mean, rtol=1e-6, atol=1e-9)


def test_against_a_masked_mean_of_numpy() -> None:
    rng = np.random.default_rng(1)
    arrays = [(rng.standard_normal(20_000) * (rng.random(20_000) < 0.1)).astype(np.float32) for _ in range(4)]
    masked = np.ma.masked_equal(np.stack(arrays).astype(np.float64), 0.0)
    right = np.ma.filled(np.ma.average(masked, axis=0, weights=[0.4, 0.3, 0.2, 0.1]), 0.0)
    np.testing.assert_allclose(sparse_mean(arrays, [0.4, 0.3, 0.2, 0.1]), right, rtol=1e-6)


def test_a_weight_of_zero_sends_nothing() -> None:
    assert sparse_mean([fp32(1, 5), fp32(0, 7)], [0.0, 1.0]).tolist() == [0.0, 7.0]


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_shapes_are_kept_and_arguments_left_alone(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 2.0, np.float32)
    before = array.tobytes()
    found = sparse_mean([array, array], [0.5, 0.5])
    assert (found.shape, array.tobytes()) == (shape, before)
    assert found.tobytes() == before


def test_arrays_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        sparse_mean([fp32(1, 2), fp32(1)], [0.5, 0.5])
