"""The array types that the wire speaks of: what a layout is, and the names that annotations use."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
AnyArray: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Layout: TypeAlias = Sequence[tuple[str, Shape]]
"""Names and shapes of fp32 tensors, in the order in which every file of a fragment holds them."""
