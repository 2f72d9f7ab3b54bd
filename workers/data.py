"""Text as bytes: what the islands learn from, what is held out, and which batch is the next.

By default the text is this Python's own documentation and standard library, so that nothing is downloaded.
To see how much there is:

    python workers/data.py [FILE OR FOLDER]...
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.05
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_TABLES = {"encodings", "pydoc_data"}  # tables that resemble each other; the topics, which are read as text below


def load(paths: list[str], bytes_max: int) -> tuple[Tensor, Tensor]:
    """Read all text and split it, by file, into training text and held-out text.

    A file's side depends on its name alone, so that islands with slightly different files still agree on what
    is held out. Where that leaves too little or too much (few files), the last 5 % of the text is held out.

    Args:
        paths: Files and folders of text; none means the default text.
        bytes_max: Files after this many bytes are left out.

    Returns:
        Training and held-out text, each a vector of uint8.

    Raises:
        OSError: A path does not exist or cannot be read.
        ValueError: There is no text in them.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    num_bytes = 0
    for name, text in _files(paths) if paths else _python():
        if num_bytes >= bytes_max:
            break
        if text in seen:  # a copy could end up on the other side
            continue
        seen.add(text)
        sides[_fraction(name) < HELD_OUT].append(text[: bytes_max - num_bytes])
        num_bytes += len(text)
    train, held_out = (bytearray(b"\n".join(side)) for side in sides)
    if not HELD_OUT / 4 < len(held_out) / max(1, len(train) + len(held_out)) < HELD_OUT * 4:
        both = bytearray(b"\n".join((*sides[0], *sides[1])))
        cut = int(len(both) * (1 - HELD_OUT))
        train, held_out = both[:cut], both[cut:]
    if not held_out:
        raise ValueError(f"no text in {', '.join(paths) or 'this Python installation'}")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def train_batch(text: Tensor, stream: str, k: int, *, batch: int, context: int) -> Tensor:
    """Batch k of a stream, (batch, context + 1) bytes: a pure function, so k is all there is to remember."""
    generator = torch.Generator().manual_seed(int(_fraction(f"{stream}/{k}") * 2**48))
    return _windows(text, torch.randint(len(text) - context, (batch,), generator=generator), context)


def held_out_batches(text: Tensor, num_batches: int, *, batch: int, context: int) -> Iterator[Tensor]:
    """The same windows every time, evenly spread over the held-out text."""
    starts = torch.linspace(0, len(text) - context - 1, num_batches * batch, dtype=torch.float64).long()
    for first in range(0, num_batches * batch, batch):
        yield _windows(text, starts[first : first + batch], context)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()


def _fraction(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _python() -> Iterator[tuple[str, bytes]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name].encode()
    yield from _walk(Path(sysconfig.get_path("stdlib")), skipped=_SKIPPED | _TABLES, suffix=".py")


def _files(paths: list[str]) -> Iterator[tuple[str, bytes]]:
    for path in map(Path, paths):
        if path.is_dir():
            yield from _walk(path, skipped=set(), suffix="")
        else:
            yield path.name, path.read_bytes()


def _walk(root: Path, *, skipped: set[str], suffix: str) -> Iterator[tuple[str, bytes]]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for file in sorted(name for name in files if not name.startswith(".") and name.endswith(suffix)):
            path = Path(folder, file)
            text = path.read_bytes()
            if b"\0" not in text[:8192]:  # else it is no text
                yield path.relative_to(root).as_posix(), text


if __name__ == "__main__":
    for side, found in zip(("training", "held-out"), load(sys.argv[1:], 1 << 40), strict=True):
        print(f"{side:8}  {len(found):12,} bytes")
