"""Error feedback: what coding loses this time is added to the next tensor.

    owed = x + β·residual;  sent = decode(encode(owed));  residual' = owed − sent

With fp32, bf16, int8 and int4 the subtraction is exact in fp32 (`sent` is zero, or within a factor of two of `owed`:
Sterbenz), so `sent + residual'` gives back `owed` to the bit. With int2, sign, fp4, topk and dct_topk it is exact
for values that are not sent (`sent` is zero) and rounds once for the others: `sent + residual'`, exactly added, is off
by at most 2⁻²⁴ of the residual, itself at most |owed| + |sent|. So nothing is lost but what β forgets, and that last
bit. Over many rounds with β = 1 the sum of what was sent differs from the sum of what was owed by one residual,
however coarse the codec (1-bit SGD; EF-SGD, arXiv 1901.09847); SparseLoCo (arXiv 2508.15706) uses β = 0.95.

The residual stays bounded because every codec contracts: ‖x − C(x)‖² ≤ (1 − δ)·‖x‖² with a δ above 0 (docs/numerics.md
has them). dct_topk chooses among coefficients, but what is owed is kept as weights: DeMo's m ← m − IDCT(q).

Coding and keeping are two steps. A residual may only advance once its contribution exists for good: a process
that codes, fails to upload and codes again must start from the same residual.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs import Parts, TensorCodec, codec_for
from diloco_blob.wire.types import FloatArray


class Coded(NamedTuple):
    """One tensor, coded."""

    parts: Parts
    """For `payload.pack_payload`."""
    sent: FloatArray
    """What every reader will decode from them."""
    residual: FloatArray
    """owed − sent."""


def code(codec: TensorCodec, values: FloatArray, residual: FloatArray | None = None, decay: float = 1.0) -> Coded:
    """Code `values` plus what is owed from before. A pure function.

    Args:
        codec: How.
        values: fp32, any shape.
        residual: From the coding before, same shape; None: nothing is owed.
        decay: β in [0, 1].

    Raises:
        Corrupt: `non-finite`: `values` is, or what is owed has grown beyond fp32.
    """
    owed = values
    if residual is not None and decay > 0.0:
        owed = np.empty_like(values)
        with np.errstate(over="ignore"):  # the codec refuses infinities
            np.multiply(residual, np.float32(decay), out=owed)
            np.add(owed, values, out=owed)
    parts = codec.encode(owed)
    sent = codec.decode(parts, owed.shape)
    if sent is owed:  # fp32: parts and what they decode to are the array itself
        return Coded(parts, sent, np.zeros_like(owed))
    return Coded(parts, sent, np.subtract(owed, sent, out=np.empty_like(owed) if owed is values else owed))


class ErrorFeedback:
    """The residuals of one sender, by tensor name. Without `error_feedback` in the settings, it keeps none.

    Args:
        settings: Codec and β.
        residuals: As `export` gave them; none at the start.
    """

    def __init__(self, settings: Codec, residuals: Mapping[str, FloatArray] | None = None) -> None:
        self._settings = settings
        self._enabled = settings.error_feedback
        self._decay = settings.decay
        self._residuals: dict[str, FloatArray] = dict(residuals or {}) if self._enabled else {}

    def code(self, name: str, values: FloatArray, version: int) -> Coded:
        """Code a tensor with its residual, for a version; changes nothing here. See `code` and `codec_for`."""
        return code(codec_for(self._settings, version), values, self._residuals.get(name), self._decay)

    def keep(self, residuals: Mapping[str, FloatArray]) -> None:
        """Remember the residuals of tensors whose coding has been sent for good."""
        if self._enabled:
            self._residuals.update(residuals)

    def still_owed(self, residuals: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
        """What the next coding will add for these residuals: β times each, or nothing without error feedback."""
        if not self._enabled or self._decay == 1.0:
            return dict(residuals) if self._enabled else {}
        return {name: np.asarray(array * np.float32(self._decay)) for name, array in residuals.items()}

    def owe(self, sent: Mapping[str, FloatArray]) -> None:
        """Add what was sent in vain to what is owed.

        Args:
            sent: What every reader would have decoded, by tensor name; not written to.
        """
        if self._enabled:
            for name, values in sent.items():
                residual = self._residuals.get(name)
                self._residuals[name] = values.copy() if residual is None else np.asarray(residual + values)

    def export(self) -> dict[str, FloatArray]:
        """All residuals, for a checkpoint or the outer state. The arrays are never changed in place."""
        return dict(self._residuals)
