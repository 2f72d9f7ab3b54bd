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
        self._gathered = {name: np.zeros(shape) for name, shape in self._layout}
        self._before = {name: np.zeros(shape) for name, shape in self._layout}

    @staticmethod
    def applies(settings: Settings) -> bool:
        """Whether the settings are plain enough."""
        return (
            settings.merge.rule == "mean"
            and settings.merge.clip == "none"
            and settings.down.name == "fp32"
            and settings.down.cycle == 1
        )

    def step(self, close: Close, commit: Commit, read: Callable[[ObjectRef], bytes]) -> dict[str, FloatArray] | None:
        """What must be subtracted; None where nothing may be.

        Args:
            close: Of the version: weights of islands.
            commit: Of the version: what was merged.
            read: Gives the bytes of a payload.
        """
        if not commit.merged:
            return None
        outer = self._settings.outer
        delta = {name: np.zeros(shape) for name, shape in self._layout}
        for item in close.chosen:
            codec = codec_for(self._settings.up, item.base_version + 1)
            for name, values in decode_payload([read(item.parts[0])], self._layout, codec):
                delta[name] += item.weight * values.astype(np.float64)
        return {
            name: np.asarray(outer.lr * close.discount * self._direction(name, mean, commit.version), np.float32)
            for name, mean in delta.items()
        }

    def _direction(self, name: str, mean: np.ndarray, version: int) -> np.ndarray:
        outer, buffer = self._settings.outer, self._momentum[name]
        if outer.optimizer == "rho_adaptive":
            before, self._before[name] = self._before[name], mean
            norms = float(np.linalg.norm(mean) * np.linalg.norm(before))
            rho = float(np.vdot(mean, before)) / norms if norms else 0.0
            return np.asarray(mean / (1 - min(2 * (1 - rho), outer.momentum) * rho))
        if outer.optimizer == "delayed_nesterov":
            self._gathered[name] = self._gathered[name] + mean
            if version % outer.delay:
                return mean
            buffer = self._momentum[name] = outer.momentum * buffer + self._gathered[name]
            self._gathered[name] = np.zeros_like(mean)
            return np.asarray(mean + outer.momentum * buffer)
        buffer = self._momentum[name] = outer.momentum * buffer + mean
        return np.asarray(mean + outer.momentum * buffer) if outer.optimizer == "nesterov" else buffer


def differs(found: Mapping[str, FloatArray], expected: Mapping[str, FloatArray] | None) -> str | None:
    """The first tensor that is not what it must be, to rounding; None if all are."""
    for name, values in found.items():
        right = np.zeros_like(values) if expected is None else expected[name]
        scale = max(1e-6, float(np.max(np.abs(right), initial=0.0)))
        if float(np.max(np.abs(values - right), initial=0.0)) > TOLERANCE * scale:
            return name
    return None
