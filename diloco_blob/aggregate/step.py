"""The arithmetic of a merge, one tensor at a time: contributions in, new weights, outer state and update out.

For each tensor, in layout order: Δ is merged from one tensor of each island, after clipping; the outer optimizer makes
a step of it, times the discount of the close; the downlink codes that step and what it still owes; what islands will
decode is what is subtracted here, so that they and we agree to the bit:

    params_new = params − decoded
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import NamedTuple

import numpy as np

from diloco_blob.aggregate.payloads import MEMORY_BYTES_MAX, read_chunks
from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Settings
from diloco_blob.outer import merge_tensor, outer_step, square_sum
from diloco_blob.protocol.heads import Head
from diloco_blob.protocol.layout import fragment_layout, fragment_tensors
from diloco_blob.protocol.records import ObjectRef, Run, TensorSpec
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import (
    FloatArray,
    Layout,
    Parts,
    WeightsDigest,
    code,
    codec_for,
    pack_payload,
    read_tensor_stream,
    write_tensor_stream,
)


class Share(NamedTuple):
    """An island's part in a merge: increments of one trajectory, which are summed before they are weighted."""

    weight: float
    increments: tuple[Iterator[tuple[str, FloatArray]], ...]
    """The pseudo-gradients of each of its contributions, in layout order."""
    clip: float = 1.0
    """Factor on their sum."""

    def next_tensor(self) -> FloatArray:
        """Its progress on the next tensor: summed and clipped in float64, rounded once."""
        first, *rest = (next(tensors)[1] for tensors in self.increments)
        if not rest and self.clip == 1.0:
            return first
        total = first.astype(np.float64)
        for values in rest:
            np.add(total, values, out=total)
        if self.clip != 1.0:
            np.multiply(total, self.clip, out=total)
        return total.astype(np.float32)

    def norm(self, num_tensors: int) -> float:
        """L2 norm of its progress on the whole fragment, to the same bits on every machine; uses the share up."""
        return math.sqrt(math.fsum(square_sum(self.next_tensor()) for _ in range(num_tensors)))


@dataclass
class NewVersion:
    """The files of a version, not yet written to the store."""

    params: "TensorFile"
    outer: "TensorFile"
    update: bytes
    weights_digest: str
    step_norm: float
    """L2 norm of what is subtracted."""


class OuterState(NamedTuple):
    """What the outer optimizer and the downlink remember of one tensor; None: nothing."""

    momentum: FloatArray | None
    residual: FloatArray | None


def outer_layout(specs: Sequence[TensorSpec], settings: Settings) -> Layout:
    """What the outer state file of a fragment holds, in order; nothing if neither momentum nor residual is kept."""
    kinds = [
        *(["momentum"] if settings.outer.momentum > 0.0 else []),
        *(["residual"] if settings.down.error_feedback else []),
    ]
    return [(f"{kind}.{spec.name}", spec.shape) for spec in specs for kind in kinds]


class TensorFile:
    """A safetensors file of fp32 tensors, written as they come, that lies in memory only while it is small."""

    def __init__(self, layout: Layout) -> None:
        self._queue: deque[tuple[str, FloatArray]] = deque()
        self._pieces = write_tensor_stream(layout, self._queued())
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES_MAX)  # noqa: SIM115 - closed by close()
        self._file.write(next(self._pieces))  # The header.

    def _queued(self) -> Iterator[tuple[str, FloatArray]]:
        while self._queue:
            yield self._queue.popleft()

    def add(self, name: str, values: FloatArray) -> None:
        """Write the next tensor of the layout.

        Raises:
            Corrupt: A value is not finite.
        """
        self._queue.append((name, values))
        self._file.write(next(self._pieces))

    def contents(self) -> bytes:
        """The whole file; every tensor of the layout must have been added."""
        if next(self._pieces, None) is not None:
            raise AssertionError("tensors are missing")
        self._file.seek(0)
        return self._file.read()

    def close(self) -> None:
        """Give the memory or the disk back."""
        self._file.close()


class Stepper:
    """Computes one version of a fragment.

    Args:
        store: Where the head's weights and outer state are read, in pieces.
        run: `run.json`.
        head: The version that is advanced.
    """

    def __init__(self, store: ObjectStore, run: Run, head: Head) -> None:
        self._store = store
        self._settings = run.settings
        self._head = head
        self._specs = fragment_tensors(run.tensors, head.fragment)
        self._layout = fragment_layout(run.tensors, head.fragment)
        self._outer_layout = outer_layout(self._specs, run.settings)
        self._down = codec_for(run.settings.down)

    def compute(self, shares: Sequence[Share], discount: float, files: ExitStack) -> NewVersion:
        """Merge and step. Without shares the weights and the outer state stay as they are.

        Args:
            shares: The islands, in the order of the close; weights sum to 1.
            discount: Factor on the whole step.
            files: Closes the temporary files.

        Raises:
            NotFound: The head's weights or outer state are gone.
            Corrupt: They are damaged, or the result is not finite.
        """
        params, outer = TensorFile(self._layout), TensorFile(self._outer_layout)
        files.callback(params.close)
        files.callback(outer.close)
        weights, squares = WeightsDigest(), [0.0]

        def coded() -> Iterator[tuple[str, Parts]]:
            old_params = self._read_params()
            old_outer = self._read_outer()
            for spec in self._specs:
                _, values = next(old_params)
                parts, sent, state = self._step(spec, shares, discount, next(old_outer))
                squares[0] += square_sum(sent)
                with np.errstate(over="ignore"):  # An infinity is refused by the file.
                    values = np.subtract(values, sent, out=values)
                weights.update(spec.name, values)
                params.add(spec.name, values)
                for kind, kept in zip(OuterState._fields, state, strict=True):
                    if kept is not None:
                        outer.add(f"{kind}.{spec.name}", kept)
                yield spec.name, parts

        try:
            update = pack_payload(coded(), self._layout, self._down)
        except Corrupt as error:
            where = f"version {self._head.version + 1} of fragment {self._head.fragment}"
            raise Corrupt(f"{where} cannot be made: {error.message}", error.hint) from error
        return NewVersion(
            params=params,
            outer=outer,
            update=update,
            weights_digest=weights.hexdigest(),
            step_norm=float(np.sqrt(squares[0])),
        )

    def _step(
        self, spec: TensorSpec, shares: Sequence[Share], discount: float, old: OuterState
    ) -> tuple[Parts, FloatArray, OuterState]:
        """One tensor: what is sent, what that decodes to, and what is remembered."""
        if not shares:
            parts, sent, _ = code(self._down, np.zeros(spec.shape, np.float32))
            return parts, sent, self._started(spec, old)
        delta = merge_tensor(
            self._settings.merge.rule,
            (share.next_tensor() for share in shares),
            [share.weight for share in shares],
            embedding=spec.embedding,
            trim=self._settings.merge.trim,
        )
        step, momentum = outer_step(self._settings.outer, delta, old.momentum)
        if discount != 1.0:
            np.multiply(step, np.float32(discount), out=step)
        parts, sent, residual = code(self._down, step, old.residual, self._settings.down.decay)
        kept = np.asarray(residual) if self._settings.down.error_feedback else None
        return parts, sent, OuterState(momentum, kept)

    def _started(self, spec: TensorSpec, old: OuterState) -> OuterState:
        """The old state, zeros where there should be some and was none."""
        zeros = np.zeros(spec.shape, np.float32)
        keeps_momentum, keeps_residual = (
            self._settings.outer.momentum > 0.0,
            self._settings.down.error_feedback,
        )
        return OuterState(
            momentum=(zeros if old.momentum is None else old.momentum) if keeps_momentum else None,
            residual=(zeros if old.residual is None else old.residual) if keeps_residual else None,
        )

    def _read_params(self) -> Iterator[tuple[str, FloatArray]]:
        return self._read(self._head.weights.params, self._layout, "weights")

    def _read_outer(self) -> Iterator[OuterState]:
        """The outer state of each tensor, in layout order; nothing is remembered at version 0."""
        commit = self._head.commit
        if commit is None or not self._outer_layout:
            for _ in self._specs:
                yield OuterState(None, None)
            return
        stream = self._read(commit.outer, self._outer_layout, "outer state")
        keeps_momentum = self._settings.outer.momentum > 0.0
        keeps_residual = self._settings.down.error_feedback
        for _ in self._specs:
            momentum = next(stream)[1] if keeps_momentum else None
            residual = next(stream)[1] if keeps_residual else None
            yield OuterState(momentum, residual)

    def _read(self, ref: ObjectRef, layout: Layout, what: str) -> Iterator[tuple[str, FloatArray]]:
        try:
            yield from read_tensor_stream(read_chunks(self._store, ref), layout, size=ref.size)
        except Corrupt as error:
            raise Corrupt(
                f"the {what} of version {self._head.version} in the bucket are damaged: {error.message}",
                f"restore {ref.key}, which nothing that works correctly overwrites",
            ) from error
