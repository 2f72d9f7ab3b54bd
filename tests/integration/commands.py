"""What several integration tests type: `diloco-blob` as a process, and a model that trains in seconds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4", "--eval-batches", "1")
"""Words for workers/train.py."""


def cli(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `diloco-blob` in a folder and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "diloco_blob.cli.main", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=170,
    )
