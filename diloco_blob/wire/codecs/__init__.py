"""Codecs: an fp32 tensor as fewer bytes, and back. One implementation for both ends.

What a codec decodes *is* what was sent: the sender subtracts it from its residual, the aggregator merges it,
and on the downlink it is the new version, encoded by whichever aggregator comes first. So encoding and decoding
give the same bits on every machine: elementwise IEEE operations, maxima, sums in an order of our own or of integers
that are exact in any order; never what depends on how a CPU's sort breaks ties. What is multiplied keeps out of
the subnormal range, where CPUs that flush to zero would differ.

Every codec contracts: ‖x − decode(encode(x))‖ ≤ ‖x‖, which error feedback needs (arXiv 1901.09847).
Encoding refuses what is not finite: one NaN would reach every island.
"""

import numpy as np
import numpy.typing as npt

from diloco_blob.core.settings import Codec
from diloco_blob.wire.codecs.base import LEVELS, SCALE, VALUES, Parts, PartShapes, TensorCodec
from diloco_blob.wire.codecs.blockwise import Blockwise
from diloco_blob.wire.codecs.dct import DctTopK
from diloco_blob.wire.codecs.fewbits import Fp4, Int2, Sign
from diloco_blob.wire.codecs.plain import Bf16, Fp32
from diloco_blob.wire.codecs.sparse import TopK
from diloco_blob.wire.codecs.turns import InTurns
from diloco_blob.wire.types import Shape

__all__ = [
    "LEVELS",
    "SCALE",
    "VALUES",
    "Bf16",
    "Blockwise",
    "DctTopK",
    "Fp4",
    "Fp32",
    "InTurns",
    "Int2",
    "PartShapes",
    "Parts",
    "Sign",
    "TensorCodec",
    "TopK",
    "codec_for",
    "taken",
]


def codec_for(settings: Codec, version: int) -> TensorCodec:
    """The codec that `settings` asks for.

    Args:
        settings: Of one direction.
        version: Of a contribution the one that it is meant for, its base version + 1; of an update the one that it
            makes. With `cycle` above 1 it says which values have their turn.
    """
    codec = _whole(settings)
    if settings.cycle == 1 or (settings.whole_every and version % settings.whole_every == 0):
        return codec
    return InTurns(codec, cycle=settings.cycle, turn=version)


def taken(settings: Codec, version: int, shape: Shape) -> npt.NDArray[np.bool_] | None:
    """Which values of a tensor `codec_for(settings, version)` codes; None: all."""
    codec = codec_for(settings, version)
    return codec.taken(shape) if isinstance(codec, InTurns) else None


def _whole(settings: Codec) -> TensorCodec:
    match settings.name:
        case "fp32":
            return Fp32()
        case "bf16":
            return Bf16()
        case "int8":
            return Blockwise(bits=8, block=settings.block)
        case "int4":
            return Blockwise(bits=4, block=settings.block)
        case "int2":
            return Int2(block=settings.block)
        case "sign":
            return Sign(block=settings.block)
        case "fp4":
            return Fp4(block=settings.block)
        case "topk":
            return TopK(chunk=settings.chunk, keep=settings.keep, value_bits=settings.value_bits)
        case "dct_topk":
            return DctTopK(chunk=settings.chunk, keep=settings.keep, value_bits=settings.value_bits)
