"""The island's local checkpoint: what the bucket does not hold.

Taken at a step at which contributions are due, before the marks move. A process started again from it does the
very same exchange next: sends what was not receipted, recognises what was, and goes on as if nothing had
happened. One safetensors file, replaced whole; its JSON metadata holds the counters. The bucket alone is
enough to go on without it: then inner optimizer, residual and the progress since the last receipt start
afresh.
"""

import contextlib
import os
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from diloco_blob.core.errors import Denied
from diloco_blob.island.arrays import Arrays

_FILE = "island.safetensors"


class FragmentState(Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of one fragment."""

    version: int
    next_seq: int
    sent_at: int
    """The island's step at which it was last sent."""
    steps: int
    tokens: int
    train_s: float
    in_flight: tuple[int, ...]
    """Numbers of the contributions that are sent and not known to be history."""


class CheckpointState(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of a checkpoint but its arrays."""

    run: str
    island: str
    steps: int
    tokens: int
    cursor: str
    due: tuple[int, ...]
    """Fragments to which contributions are due at this very step."""
    fragments: tuple[FragmentState, ...]
    port: dict[str, object]
    """What the model's side wants to find again, next to its arrays."""


class Checkpoint(Struct, frozen=True):
    """A checkpoint as read or to be written.

    Array names: `local/T`, `mark/T`, `mirror/T`, `residual/T` for tensor T, `end/P/SEQ/T` for contribution SEQ
    to fragment P; `port/…` is the model's side.
    """

    state: CheckpointState
    arrays: dict[str, np.ndarray]

    def group(self, prefix: str) -> Arrays:
        """The arrays whose name starts with `prefix/`, without it."""
        start = len(prefix) + 1
        return {name[start:]: array for name, array in self.arrays.items() if name.startswith(f"{prefix}/")}


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint in `directory`; a crash leaves the old one or the new one.

    Raises:
        Denied: The folder cannot be written to.
    """
    state = msgspec.json.encode(checkpoint.state).decode()
    arrays = {name: np.asarray(array, order="C") for name, array in checkpoint.arrays.items()}
    data = save(arrays, metadata={"state": state})
    temporary = directory / f".{_FILE}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / _FILE)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise Denied(
            f"cannot write the local checkpoint in {directory}: {error.strerror or error}",
            "free some space, or give another checkpoint folder",
        ) from error


def load_checkpoint(directory: Path, *, run: str, island: str) -> Checkpoint | None:
    """The checkpoint in `directory`; None if there is none that belongs to this island of this run and can be read."""
    path = directory / _FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            state = msgspec.json.decode(file.metadata()["state"], type=CheckpointState)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, KeyError, TypeError, msgspec.DecodeError):
        return None
    if (state.run, state.island) != (run, island):
        return None
    return Checkpoint(state=state, arrays=arrays)
