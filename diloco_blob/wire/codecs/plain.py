"""Codecs that code every value by itself: fp32 and bf16."""

import numpy as np

from diloco_blob.wire.codecs.base import VALUES, Parts, PartShapes, Scratch, check_finite, flat_of, spans
from diloco_blob.wire.types import AnyArray, FloatArray, Shape


class Fp32:
    """The values themselves, to the bit."""

    name = "fp32"

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return {VALUES: ("F32", shape)}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`. The array is not copied."""
        return {VALUES: _checked(values)}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:  # noqa: ARG002 - as the protocol has it
        """See `TensorCodec.decode`. The array is not copied."""
        return _checked(parts[VALUES])


class Bf16:
    """The upper half of each fp32, rounded to nearest even: relative error at most 2⁻⁸.

    Below 2⁻¹²⁶, where fp32 and bf16 are subnormal, the error is at most 2⁻¹³⁴, which may be the whole value.

    A finite value that would round to infinity (above 3.3895e38) becomes the largest finite one instead.
    """

    name = "bf16"

    def parts(self, shape: Shape) -> PartShapes:
        """See `TensorCodec.parts`."""
        return {VALUES: ("BF16", shape)}

    def encode(self, values: FloatArray) -> Parts:
        """See `TensorCodec.encode`. The array of a part holds bit patterns, as uint16."""
        flat = flat_of(values)
        upper = np.empty(flat.size, "<u2")
        scratch = Scratch()
        for span in spans(flat.size):
            check_finite(flat[span])
            _round(flat[span], upper[span], scratch)
        return {VALUES: upper.reshape(values.shape)}

    def decode(self, parts: Parts, shape: Shape) -> FloatArray:
        """See `TensorCodec.decode`."""
        upper = parts[VALUES].reshape(-1)
        values = np.empty(upper.size, np.float32)
        bits = values.view(np.uint32)
        for span in spans(upper.size):
            np.left_shift(upper[span], np.uint32(16), out=bits[span], dtype=np.uint32)
            check_finite(values[span])
        return values.reshape(shape)


def to_bf16(values: FloatArray) -> AnyArray:
    """bf16 bit patterns (uint16) of finite fp32 values, rounded to nearest even, never to infinity."""
    upper = np.empty(values.shape, "<u2")
    _round(values, upper, Scratch())
    return upper


def _round(values: FloatArray, upper: AnyArray, scratch: Scratch) -> None:
    bits = values.view(np.uint32)
    rounded = scratch.array("rounded", values.shape, np.uint32)
    np.right_shift(bits, np.uint32(16), out=rounded)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    np.right_shift(rounded, np.uint32(16), out=upper, casting="unsafe")
    infinite = (upper & np.uint16(0x7FFF)) == np.uint16(0x7F80)
    if infinite.any():
        upper[infinite] -= np.uint16(1)


def from_bf16(upper: AnyArray) -> FloatArray:
    """The fp32 values of bf16 bit patterns."""
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _checked(values: FloatArray) -> FloatArray:
    flat = values.reshape(-1)
    for span in spans(flat.size):
        check_finite(flat[span])
    return values
