"""A model without torch: a few arrays and a noisy quadratic loss, enough to train and to check every number."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from diloco_blob.island.arrays import Arrays, copied

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (8, 4),
    "layer.weight": (4, 4),
    "layer.bias": (4,),
    "head": (4, 8),
    "scale": (),
}
"""A small model's tensors; 85 parameters, one of them without dimensions."""


class ArrayPort:
    """A model of named arrays that descends towards a goal of its own with seeded noise: see `ModelPort`.

    Args:
        seed: Of initial weights and noise; islands with different seeds see different data.
        shapes: Its tensors.
        initial: Initial weights; drawn from `seed` if not given.
    """

    def __init__(
        self,
        seed: int,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        initial: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.exact = True
        self._shapes = dict(shapes or SHAPES)
        self._rng = np.random.default_rng(seed)
        goal = np.random.default_rng(12345)
        self._goal = {
            name: np.asarray(goal.standard_normal(shape), dtype=np.float32) for name, shape in self._shapes.items()
        }
        start = initial or {name: self._draw(shape) for name, shape in self._shapes.items()}
        self.weights: Arrays = copied(start)

    def train(self, lr: float = 0.1, noise: float = 0.3) -> float:
        """One inner step of gradient descent; returns the loss before it."""
        loss = 0.0
        for name, array in self.weights.items():
            error = array - self._goal[name]
            loss += float(np.square(error, dtype=np.float64).sum()) / 2
            gradient = error + np.float32(noise) * self._draw(array.shape)
            self.weights[name] = np.asarray(array - np.float32(lr) * gradient)
        return loss

    def tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """See `ModelPort.tensors`."""
        return [(name, shape, "float32") for name, shape in self._shapes.items()]

    def read(self, names: Sequence[str]) -> Arrays:
        """See `ModelPort.read`."""
        return {name: np.array(self.weights[name]) for name in names}

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `ModelPort.write`."""
        for name, array in arrays.items():
            if type(array) is not np.ndarray or array.dtype != np.float32 or array.shape != self._shapes[name]:
                raise TypeError(f"{name}: fp32 of shape {self._shapes[name]} is wanted, got {array!r}")
            self.weights[name] = array.copy()

    def capture(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """See `ModelPort.capture`: the state of the noise."""
        return {}, {"rng": _plain(self._rng.bit_generator.state)}

    def restore(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, object]) -> None:
        """See `ModelPort.restore`."""
        del arrays
        self._rng.bit_generator.state = cast(dict[str, Any], _numbers(state["rng"]))

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(self._rng.standard_normal(shape), dtype=np.float32)


def _plain(value: object) -> object:
    """128-bit integers do not fit into JSON numbers everywhere: as text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return f"int:{value}" if isinstance(value, int) else value


def _numbers(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return int(value[4:]) if isinstance(value, str) and value.startswith("int:") else value
