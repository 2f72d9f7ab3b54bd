"""Bytes per parameter of each codec: what one payload weighs in the bucket, headers and zstd included.

    python benchmarks/payload_bytes.py

Two sources, both seeded, over the tensors of the small GPT of `workers/`. *Gaussian*: values from N(0, 1). *Trained*:
what an island really sends, the difference of weights between inner steps 20 and 40 of AdamW on Python's own text.
*error* is the relative L2 norm of what one coding loses (error feedback adds that to the next contribution).

With 12-bit positions and 2-bit values, as SparseLoCo packs them (arXiv 2508.15706), 64 of 4096 take 0.0273 bytes.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import zstandard

from diloco_blob.core.settings import Codec
from diloco_blob.wire import FloatArray, codec_for, content_bytes, decode_payload, encode_payload

sys.path.insert(0, str(Path(__file__).parent.parent / "workers"))
from data import load, train_batch
from gpt import GPT, GPTConfig

SEED = 0
MARK, END = 20, 40  # inner steps
CODECS = (
    *(Codec(name=name) for name in ("fp32", "bf16", "int8")),
    *(Codec(name="int4", block=block) for block in (64, 256, 1024)),
    *(Codec(name=name) for name in ("fp4", "int2", "sign")),
    *(Codec(name="topk", value_bits=bits) for bits in (8, 4, 2, 1)),
    Codec(name="topk", keep=128),
    Codec(name="topk", keep=32),
    Codec(name="dct_topk"),
    Codec(name="dct_topk", keep=32),
    Codec(name="dct_topk", keep=4, value_bits=1),
)
BLOCKS = ("int8", "int4", "fp4", "int2", "sign")
SPARSE = ("topk", "dct_topk")


def trained() -> dict[str, FloatArray]:
    """Pseudo-gradient, older minus newer, of an island that sends after END − MARK inner steps."""
    torch.set_num_threads(1)
    text, _ = load([], 1_000_000)
    model = GPT(GPTConfig(), SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.1)
    mark: dict[str, FloatArray] = {}
    for step in range(END):
        if step == MARK:
            mark = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        model.loss(train_batch(text, "payload", step, batch=8, context=128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: mark[name] - p.detach().numpy() for name, p in model.named_parameters()}


def measure(tensors: dict[str, FloatArray], settings: Codec) -> tuple[float, float, float]:
    """Bytes per parameter before zstd and of the payload, and the relative error of what it decodes to."""
    codec = codec_for(settings, 1)
    layout = [(name, array.shape) for name, array in tensors.items()]
    count = sum(array.size for array in tensors.values())
    payload = encode_payload(tensors.items(), layout, codec)
    lost = sum(float(np.sum((tensors[name] - got) ** 2.0)) for name, got in decode_payload([payload], layout, codec))
    whole = sum(float(np.sum(array**2.0)) for array in tensors.values())
    return content_bytes(layout, codec) / count, len(payload) / count, (lost / whole) ** 0.5


def main() -> None:
    """Print one line for each codec."""
    real = trained()
    rng = np.random.default_rng(SEED)
    gaussian = {name: rng.standard_normal(array.shape, np.float32) for name, array in real.items()}
    print(f"{sum(array.size for array in real.values()):,} parameters, seed {SEED}, zstandard {zstandard.__version__}")
    print("codec        block / keep, bits    coded  Gaussian    error  trained    error")
    for settings in CODECS:
        coded, plain, plain_error = measure(gaussian, settings)
        _, sent, error = measure(real, settings)
        what = f"{settings.block}" if settings.name in BLOCKS else ""
        if settings.name in SPARSE:
            what = f"{settings.keep} of {settings.chunk}, {settings.value_bits}"
        print(f"{settings.name:<10}{what:>24}{coded:>9.4f}{plain:>10.4f}{plain_error:>9.1e}{sent:>9.4f}{error:>9.1e}")


if __name__ == "__main__":
    main()
