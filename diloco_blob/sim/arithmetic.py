"""What a version must be, computed a second time in another way: plain float64, all at once, for the plain settings.

Only where the result can be told to rounding: the mean without clipping, and updates in fp32. Momentum is kept here
from commit to commit, so that state which is lost or read back wrongly shows.
"""

from collections.abc import Callable, Mapping

import numpy as np

from diloco_blob.core.settings import Settings
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Close, Commit, ObjectRef, Run
from diloco_blob.wire import FloatArray, codec_for, decode_payload

TOLERANCE = 1e-4
"""Of a step, relative to its largest value."""


class Reference:
    """The outer optimizer of one fragment, written out.

    Args:
        run: The run.
        fragment: Which fragment.
    """

    def __init__(self, run: Run, fragment: int) -> None:
        self._settings = run.settings
        self._layout = fragment_layout(run.tensors, fragment)
        self._momentum = {name: np.zeros(shape) for name, shape in self._layout}

    @staticmethod
    def applies(settings: Settings) -> bool:
        """Whether the settings are plain enough."""
        return settings.merge.rule == "mean" and settings.merge.clip == "none" and settings.down.name == "fp32"

    def step(self, close: Close, commit: Commit, read: Callable[[ObjectRef], bytes]) -> dict[str, FloatArray] | None:
        """What must be subtracted; None where nothing may be.

        Args:
            close: Of the version: weights of islands.
            commit: Of the version: what was merged.
            read: Gives the bytes of a payload.
        """
        if not commit.merged:
            return None
        outer, codec = self._settings.outer, codec_for(self._settings.up)
        delta = {name: np.zeros(shape) for name, shape in self._layout}
        for item in close.chosen:
            for name, values in decode_payload([read(item.parts[0])], self._layout, codec):
                delta[name] += item.weight * values.astype(np.float64)
        step = {}
        for name, mean in delta.items():
            self._momentum[name] = outer.momentum * self._momentum[name] + mean
            buffer = self._momentum[name]
            move = mean + outer.momentum * buffer if outer.optimizer == "nesterov" else buffer
            step[name] = np.asarray(outer.lr * close.discount * move, np.float32)
        return step


def differs(found: Mapping[str, FloatArray], expected: Mapping[str, FloatArray] | None) -> str | None:
    """The first tensor that is not what it must be, to rounding; None if all are."""
    for name, values in found.items():
        right = np.zeros_like(values) if expected is None else expected[name]
        scale = max(1e-6, float(np.max(np.abs(right), initial=0.0)))
        if float(np.max(np.abs(values - right), initial=0.0)) > TOLERANCE * scale:
            return name
    return None
