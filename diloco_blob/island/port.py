"""What the bookkeeping asks of a model: to be read, written, and to say what a checkpoint must hold."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from diloco_blob.island.arrays import Arrays


class ModelPort(Protocol):
    """A model and its inner optimizer, as arrays."""

    exact: bool
    """Whether it holds fp32 values as they are; False where it rounds them."""

    def tensors(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each trainable tensor, in the model's order."""

    def read(self, names: Sequence[str]) -> Arrays:
        """Copies of these tensors, fp32."""

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set these tensors; the arrays stay the caller's."""

    def capture(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """Inner optimizer and random state: arrays, and what fits into JSON."""

    def restore(self, arrays: Mapping[str, np.ndarray], state: Mapping[str, object]) -> None:
        """Take back what `capture` gave. Raises Corrupt if it does not fit this model."""
