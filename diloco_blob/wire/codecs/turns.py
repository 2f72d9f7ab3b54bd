"""Values take turns: in each version one of every `cycle` neighbours is coded, the same ones for everybody.

What all islands send is the same set of coordinates, and the update holds just these. So there are no positions to
send, a mean is a mean over all islands, and after `cycle` versions every coordinate has been averaged once.
The same part of the model for all, and what waits stays in the islands' own weights (`sync.adopt = "carry"`): that is
the partial synchronization and error reset of CSER (arXiv 2007.13221), which draws blocks at random.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from diloco_blob.wire.codecs.base import (
    SPAN,
    Parts,
    PartShapes,
    TensorCodec,
    check_finite,
    count_of,
    flat_of,
    spans,
)
from diloco_blob.wire.types import AnyArray, FloatArray, Shape

_GOLDEN = np.uint64(0x9E3779B1)
"""2³² over the golden ratio: its multiples mod 2³² spread evenly, whatever the width of a matrix."""


class InTurns:
    """Codes one value of each group of `cycle` consecutive ones, as a tensor of one dimension; all others become 0.

    Of group g, turn t takes the value at place (⌊cycle · (g·0x9E3779B1 mod 2³²) / 2³²⌋ + t) mod `cycle`. In the last,
    shorter group a turn may find no value; then 0 is coded in its place, and nothing comes of it.

    Args:
        codec: For the values taken.
        cycle: Values of a group.
        turn: Which one; any integer.
    """

    def __init__(self, codec: TensorCodec, *, cycle: int, turn: int) -> None:
        self.name = codec.name
        self._codec = codec
        self._cycle, self._turn = cycle, np.uint64(turn % cycle)

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return self._codec.parts((self._groups(count_of(shape)),))

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`. Every value is looked at, also those whose turn it is not."""
        flat = flat_of(values)
        for span in spans(flat.size):
            check_finite(flat[span])
        taken = np.zeros(self._groups(flat.size), np.float32)
        for groups, places in self._places(flat.size):
            np.take(flat, places, out=taken[groups])
        return self._codec.encode(taken)

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        values = np.zeros(count_of(shape), np.float32)
        taken = self._codec.decode(parts, (self._groups(values.size),))
        for groups, places in self._places(values.size):
            values[places] = taken[groups]
        return values.reshape(shape)

    def taken(self, shape: Shape) -> npt.NDArray[np.bool_]:
        """Which values of a tensor of this shape have their turn."""
        taken = np.zeros(count_of(shape), np.bool_)
        for _, places in self._places(taken.size):
            taken[places] = True
        return taken.reshape(shape)

    def _groups(self, count: int) -> int:
        return -(-count // self._cycle)

    def _places(self, count: int) -> Iterator[tuple[slice, AnyArray]]:
        """Groups, piece by piece, and where in `count` values each has its turn's."""
        cycle = np.uint64(self._cycle)
        for span in spans(self._groups(count), SPAN // 4):
            group = np.arange(span.start, span.stop, dtype=np.uint64)
            place = (((group * _GOLDEN & np.uint64(0xFFFFFFFF)) * cycle) >> np.uint64(32)) + self._turn
            place = (place % cycle + group * cycle).astype(np.int64)
            found = place.size - int(place[-1] >= count)  # only the last group can lack it
            yield slice(span.start, span.start + found), place[:found]
