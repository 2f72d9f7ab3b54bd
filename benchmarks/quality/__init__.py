"""What islands cost in quality: held-out bits per byte of every method at equal tokens, against bytes exchanged.

    make bench-quality          or          PYTHONPATH=benchmarks .venv/bin/python -m quality --help

The library is the real one: cores of islands, payloads, receipts and aggregator passes around a bucket in memory, in
lockstep on a virtual clock. Only the training is special: all islands' models are one batched computation (`model`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workers"))
