"""Time of each codec on one thread, as a ratio to copying the same fp32 values in memory.

    OMP_NUM_THREADS=1 python benchmarks/codec_speed.py [--values 16777216]

Values are Gaussian with a scale that varies from row to row, seeded; each figure is the best of several runs in
CPU time, so that other programs count little. *feedback* is `feedback.code` with a residual: add, encode, decode,
subtract.
"""

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np

from diloco_blob.core.settings import Codec
from diloco_blob.wire import code, codec_for

SEED = 0
WIDTH = 4096
REPEATS = 7
CODECS = (
    *(Codec(name=name) for name in ("fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk")),
    *(Codec(name="topk", value_bits=bits) for bits in (1, 4, 8)),
    Codec(name="dct_topk", keep=32),
)


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of `REPEATS` runs."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Print one line for each codec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--values", type=int, default=1 << 24)
    rows = -(-parser.parse_args().values // WIDTH)
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((rows, WIDTH), np.float32) * np.exp(rng.standard_normal((rows, 1), np.float32))
    residual = rng.standard_normal((rows, WIDTH), np.float32)
    target = np.empty_like(values)
    copy_s = best_s(lambda: np.copyto(target, values))
    print(
        f"{values.size:,} values, seed {SEED}, {platform.machine()}, numpy {np.__version__}; copy {copy_s * 1e3:.1f} ms"
    )
    print("codec     bits   encode   decode  feedback   (times the copy)")
    for settings in CODECS:
        codec = codec_for(settings, 1)
        parts = codec.encode(values)
        works = (
            lambda codec=codec: codec.encode(values),
            lambda codec=codec, parts=parts: codec.decode(parts, values.shape),
            lambda codec=codec: code(codec, values, residual),
        )
        bits = settings.value_bits if "topk" in settings.name else ""
        ratios = [best_s(work) / copy_s for work in works]
        print(f"{settings.name:<10}{bits:>4}" + "".join(f"{ratio:>9.1f}" for ratio in ratios))


if __name__ == "__main__":
    main()
