"""Memory of a merge: a few tensors of the largest size, however many islands, contributions and tensors there are."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from diloco_blob.aggregate import ahead
from diloco_blob.aggregate.payloads import Tensors
from diloco_blob.aggregate.step import Share
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Merge, Policy, Settings
from diloco_blob.outer.norms import LANES
from diloco_blob.store.local import LocalStore
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.toy import ToyRun

VALUES = 1 << 18
TENSOR_BYTES = 4 * VALUES
NUM_CPUS = 2
PIECE_BYTES = 128 << 10
"""Of the spool, and of what zstd decodes at a time."""
OBJECTS_BYTES = 16 << 10
"""Of one stream: its generators, the specs of its tensors, its entries in records (5 KiB in Python 3.11)."""
NAME_BYTES = 4 << 10
"""Of one tensor: its name and specs, and its place in headers (1 KiB in Python 3.11)."""


@pytest.fixture(params=[False, True], ids=["alone", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether threads decode ahead. What is otherwise kept in memory while it is small is in files."""
    monkeypatch.setattr(ahead, "num_cpus", lambda: NUM_CPUS if request.param else 1)
    monkeypatch.setattr(ahead, "VALUES_MIN", 0)
    monkeypatch.setattr("diloco_blob.aggregate.payloads.MEMORY_BYTES_MAX", 1 << 16)
    monkeypatch.setattr("diloco_blob.aggregate.files.MEMORY_BYTES_MAX", 1 << 16)
    monkeypatch.setattr("diloco_blob.aggregate.payloads.READ_BYTES", 1 << 16)
    return bool(request.param)


def under_way_bytes(depth: int) -> int:
    """By how much two merges with threads may differ: in one, threads were late at every peak, in the other never.

    At most `depth` tensors are decoded or being decoded, and a thread may not yet have let go of one that was used.
    """
    return (depth + 1) * TENSOR_BYTES


def toy_run(num_tensors: int, codec: Literal["int4", "bf16", "fp32"]) -> ToyRun:
    settings = Settings(
        policy=Policy(islands=1, quorum=1, grace_s=0.0),
        merge=Merge(clip="median"),  # Another pass over the same streams.
        up=Codec(name=codec),
        down=Codec(name="int4"),
    )
    return ToyRun(settings, shapes={f"layer.{number}": (VALUES,) for number in range(num_tensors)})


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that Python and numpy hold of what they allocate meanwhile; what zstd itself does is not seen."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def merge_bytes(toy: ToyRun, folder: Path, num_merged: int) -> int:
    """The peak of a pass over the toy's contributions, from a folder.

    The lower one of two: pathlib interns names, and the table of all interned strings of this process, some MiB,
    is copied when it grows; it does not grow twice in a row.
    """

    def one(copy: Path) -> int:
        local = LocalStore(str(copy), clock=toy.clock, ids=SeededIds(0))
        for info in toy.store.list(""):
            local.put(info.key, toy.store.get(info.key)[0])
        store = RetryingStore(local, toy.clock, SeededIds(0))
        merged: list[int] = []
        peak = peak_bytes(lambda: merged.append(len(toy.aggregate(store=store, drain=True).merged)))
        assert merged == [num_merged]
        return peak

    return min(one(folder / "first"), one(folder / "second"))


@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_memory_of_one_more_island_is_that_of_its_stream(
    codec: Literal["int4", "fp32"], threads: bool, tmp_path: Path
) -> None:
    """Between two tensors a stream holds a piece of the spool and one of what it decoded; a tensor would be 1 MiB.

    (And zstd's decompressor, which is not seen here: some 600 KiB.)
    """
    peaks = {}
    for num_islands in (4, 28):  # More than are decoded ahead.
        toy = toy_run(3, codec)
        for island in range(num_islands):
            toy.send(f"island-{island}", island)
        peaks[num_islands] = merge_bytes(toy, tmp_path / str(num_islands), num_islands)
    streams = 24 * (2 * PIECE_BYTES + OBJECTS_BYTES)
    assert peaks[28] - peaks[4] < streams + (under_way_bytes(NUM_CPUS) if threads else 0)


def test_memory_of_one_more_tensor_is_that_of_its_name(threads: bool, tmp_path: Path) -> None:
    """Files of 40 more would be 40 MiB of weights, as much of momentum, 20 MiB of the payload and 5 of the update."""
    peaks = {}
    for num_tensors in (8, 48):
        toy = toy_run(num_tensors, "bf16")
        toy.send("a", 1)
        peaks[num_tensors] = merge_bytes(toy, tmp_path / str(num_tensors), 1)
    assert peaks[48] - peaks[8] < 40 * NAME_BYTES + (under_way_bytes(1) if threads else 0)


@pytest.mark.parametrize(("num", "clip", "tensors"), [(1, 1.0, 1), (1, 0.5, 1), (2, 1.0, 3), (2, 0.5, 3), (8, 0.5, 3)])
def test_memory_of_an_islands_sum_is_the_sum_and_one_contribution(num: int, clip: float, tensors: int) -> None:
    """The sum is float64, twice a tensor; a single contribution is its own, clipped or not."""

    def stream() -> Tensors:
        yield "w", np.full(VALUES, 0.5, np.float32)

    share = Share(1.0, tuple(stream() for _ in range(num)), clip)
    pieces = 2 * 8 * LANES  # float64, one being freed
    assert peak_bytes(share.next_tensor) < tensors * TENSOR_BYTES + pieces + OBJECTS_BYTES
