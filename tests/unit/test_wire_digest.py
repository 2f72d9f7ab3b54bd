"""Digests: known values, and everything that must change them."""

import numpy as np
import pytest
import xxhash

from diloco_blob.core.errors import Corrupt
from diloco_blob.wire.digest import WeightsDigest, digest, verified, weights_digest


def test_known_value() -> None:
    # From the reference implementation's sanity vectors: XXH3_128bits of nothing, seed 0.
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


def test_weights_digest_is_of_these_bytes() -> None:
    tensors = {"a.b": np.array([[1.0, -2.0]], np.float32), "s": np.float32(0.5) * np.ones((), np.float32)}
    data = b"3:3:" + b"a.b" + b"1,2" + bytes.fromhex("0000803f000000c0") + b"1:0:" + b"s" + bytes.fromhex("0000003f")
    assert weights_digest(tensors) == xxhash.xxh3_128_hexdigest(data)


def test_weights_digest_sees_names_shapes_order_and_bits() -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones(2, np.float32)
    digests = [
        weights_digest(tensors)
        for tensors in (
            {"a": a, "b": b},
            {"b": b, "a": a},
            {"a": a.reshape(2, 2), "b": b},
            {"ab": a, "b": b},
            {"a": a, "b": -b},
            {"a": -a * 0, "b": b},
            {"a": a * 0, "b": b},
            {"a": a},
            {"a": a[:0], "b": b},
            {},
        )
    ]
    assert len(set(digests)) == len(digests)


def test_streamed_and_strided_give_the_same() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4).T
    state = WeightsDigest()
    state.update("a", a)
    assert state.hexdigest() == weights_digest({"a": a.copy(order="C")})


def test_only_fp32_has_a_weights_digest() -> None:
    with pytest.raises(TypeError, match="float64"):
        weights_digest({"a": np.zeros(3)})


def test_verified_passes_chunks_on_and_refuses_at_the_end() -> None:
    chunks = [b"ab", b"", b"c"]
    assert b"".join(verified(chunks, digest(b"abc"))) == b"abc"
    seen = []
    with pytest.raises(Corrupt, match=r"^digest: "):
        seen.extend(iter(verified(chunks, digest(b"abd"))))
