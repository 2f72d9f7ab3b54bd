"""Tensors ↔ bytes: codecs, error feedback, digests, safetensors files, payloads. numpy, no torch."""

from diloco_blob.wire.codecs import Parts, TensorCodec, codec_for, taken
from diloco_blob.wire.digest import RunningDigest, WeightsDigest, digest, verified, weights_digest
from diloco_blob.wire.feedback import Coded, ErrorFeedback, code
from diloco_blob.wire.payload import content_bytes, decode_payload, encode_payload, pack_payload, pack_stream
from diloco_blob.wire.reasons import REASONS, printable, reason_of
from diloco_blob.wire.tensorfile import read_tensor_stream, read_tensors, write_tensor_stream, write_tensors
from diloco_blob.wire.types import FloatArray, Layout, Shape

__all__ = [
    "REASONS",
    "Coded",
    "ErrorFeedback",
    "FloatArray",
    "Layout",
    "Parts",
    "RunningDigest",
    "Shape",
    "TensorCodec",
    "WeightsDigest",
    "code",
    "codec_for",
    "content_bytes",
    "decode_payload",
    "digest",
    "encode_payload",
    "pack_payload",
    "pack_stream",
    "printable",
    "read_tensor_stream",
    "read_tensors",
    "reason_of",
    "taken",
    "verified",
    "weights_digest",
    "write_tensor_stream",
    "write_tensors",
]
