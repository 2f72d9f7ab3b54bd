"""The arithmetic of a merge, one tensor at a time: contributions in, new weights, outer state and update out.

For each tensor, in layout order: Δ is merged from one tensor of each island, after clipping; the outer optimizer makes
a step of it, times the discount of the close; the downlink codes that step and what it still owes; what islands will
decode is what is subtracted here, so that they and we agree to the bit:

    params_new = params − decoded
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from diloco_blob.aggregate.ahead import Ahead
from diloco_blob.aggregate.files import TensorFile, VersionFile, written
from diloco_blob.aggregate.payloads import Tensors, read_chunks
from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Settings
from diloco_blob.outer import Stepped, in_turn, merge_tensor, outer_step, square_sum, state_kinds
from diloco_blob.outer.norms import spans
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
    pack_stream,
    read_tensor_stream,
    taken,
)


class Share(NamedTuple):
    """An island's part in a merge: increments of one trajectory, which are summed before they are weighted."""

    weight: float
    increments: tuple[Tensors, ...]
    """The pseudo-gradients of each of its contributions, in layout order."""
    clip: float = 1.0
    """Factor on their sum."""

    def next_tensor(self) -> FloatArray:
        """Its progress on the next tensor: summed and clipped in float64, rounded once.

        Beside the result there is a float64 sum if there are several increments, else nothing as large as the tensor:
        each increment goes before the next one is decoded, and the last one's memory takes the result.
        """
        *earlier, last = self.increments
        total: npt.NDArray[np.float64] | None = None
        for tensors in earlier:
            values = next(tensors)[1].reshape(-1)
            total = values.astype(np.float64) if total is None else np.add(total, values, out=total)
            del values
        values = next(last)[1]
        if total is None and self.clip == 1.0:
            return values
        flat = np.ascontiguousarray(values).reshape(-1)
        for part in spans(flat.size):
            wide = flat[part].astype(np.float64)
            if total is not None:
                np.add(total[part], wide, out=wide)
            if self.clip != 1.0:
                np.multiply(wide, self.clip, out=wide)
            flat[part] = wide
        return flat.reshape(values.shape)

    def norm(self, num_tensors: int) -> float:
        """L2 norm of its progress on the whole fragment, to the same bits on every machine; uses the share up."""
        return math.sqrt(math.fsum(square_sum(self.next_tensor()) for _ in range(num_tensors)))


@dataclass
class NewVersion:
    """The files of a version, not yet written to the store."""

    params: VersionFile
    outer: VersionFile
    update: VersionFile
    weights_digest: str
    step_norm: float
    """L2 norm of what is subtracted."""


OuterState: TypeAlias = Mapping[str, FloatArray]
"""What the outer optimizer and the downlink remember of one tensor: kind → array; empty at version 0."""

RESIDUAL = "residual"
"""What the downlink's coding still owes; the other kinds are the optimizer's (`outer.state_kinds`)."""


def kept_kinds(settings: Settings) -> tuple[str, ...]:
    """What is remembered of each tensor, in the order in which the outer state file holds it."""
    return (*state_kinds(settings.outer), *((RESIDUAL,) if settings.down.error_feedback else ()))


def outer_layout(specs: Sequence[TensorSpec], settings: Settings) -> Layout:
    """What the outer state file of a fragment holds, in order; nothing if nothing is remembered."""
    return [(f"{kind}.{spec.name}", spec.shape) for spec in specs for kind in kept_kinds(settings)]


class Stepper:
    """Computes one version of a fragment.

    Args:
        store: Where the head's weights and outer state are read, in pieces.
        run: `run.json`.
        head: The version that is advanced.
        ahead: Decodes contributions.
    """

    def __init__(self, store: ObjectStore, run: Run, head: Head, ahead: Ahead) -> None:
        self._store = store
        self._settings = run.settings
        self._head = head
        self._ahead = ahead
        self._specs = fragment_tensors(run.tensors, head.fragment)
        self._layout = fragment_layout(run.tensors, head.fragment)
        self._kinds = kept_kinds(run.settings)
        self._outer_layout = outer_layout(self._specs, run.settings)
        self._down = codec_for(run.settings.down, head.version + 1)

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
        params, outer, update = TensorFile(self._layout), TensorFile(self._outer_layout), VersionFile()
        for file in (params, outer, update):
            files.callback(file.close)
        weights, squares = WeightsDigest(), [0.0]

        def coded() -> Iterator[tuple[str, Parts]]:
            old_params = self._read_params()
            old_outer = self._read_outer()
            tasks = (share.next_tensor for _ in self._specs for share in shares)
            progress = self._ahead.results(tasks, depth=len(shares))  # one at a time of each share
            for spec in self._specs:
                _, values = next(old_params)
                parts, sent, state = self._step(spec, shares, progress, discount, next(old_outer))
                squares[0] += square_sum(sent)
                with np.errstate(over="ignore"):  # An infinity is refused by the file.
                    values = np.subtract(values, sent, out=values)
                weights.update(spec.name, values)
                params.add(spec.name, values)
                for kind in self._kinds:
                    outer.add(f"{kind}.{spec.name}", state[kind])
                yield spec.name, parts

        try:
            written(pack_stream(coded(), self._layout, self._down), update)
        except Corrupt as error:
            where = f"version {self._head.version + 1} of fragment {self._head.fragment}"
            raise Corrupt(f"{where} cannot be made: {error.message}", error.hint) from error
        params.check_whole()
        outer.check_whole()
        return NewVersion(
            params=params,
            outer=outer,
            update=update,
            weights_digest=weights.hexdigest(),
            step_norm=float(np.sqrt(squares[0])),
        )

    def _step(
        self,
        spec: TensorSpec,
        shares: Sequence[Share],
        progress: Iterator[FloatArray],
        discount: float,
        old: OuterState,
    ) -> tuple[Parts, FloatArray, OuterState]:
        """One tensor: what is sent, what that decodes to, and what is remembered."""
        if not shares:
            zeros = np.zeros(spec.shape, np.float32)
            parts, sent, _ = code(self._down, zeros)
            return parts, sent, {kind: old.get(kind, zeros) for kind in self._kinds}
        delta = merge_tensor(
            self._settings.merge.rule,
            itertools.islice(progress, len(shares)),
            [share.weight for share in shares],
            embedding=spec.embedding,
            trim=self._settings.merge.trim,
        )
        version, outer = self._head.version + 1, self._settings.outer
        step, state = outer_step(outer, delta, old, version)
        its_turn = taken(self._settings.down, version, spec.shape)
        if its_turn is not None:
            step, state = in_turn(its_turn, outer.lr, delta, old, Stepped(step, state))
        if discount != 1.0:
            np.multiply(step, np.float32(discount), out=step)
        parts, sent, residual = code(self._down, step, old.get(RESIDUAL), self._settings.down.decay)
        return parts, sent, {**state, RESIDUAL: np.asarray(residual)}

    def _read_params(self) -> Tensors:
        return self._read(self._head.weights.params, self._layout, "weights")

    def _read_outer(self) -> Iterator[OuterState]:
        """The outer state of each tensor, in layout order; nothing is remembered at version 0."""
        commit = self._head.commit
        if commit is None or not self._kinds:
            for _ in self._specs:
                yield {}
            return
        stream = self._read(commit.outer, self._outer_layout, "outer state")
        for _ in self._specs:
            yield {kind: next(stream)[1] for kind in self._kinds}

    def _read(self, ref: ObjectRef, layout: Layout, what: str) -> Tensors:
        try:
            yield from read_tensor_stream(read_chunks(self._store, ref), layout, size=ref.size)
        except Corrupt as error:
            raise Corrupt(
                f"the {what} of version {self._head.version} in the bucket are damaged: {error.message}",
                f"restore {ref.key}, which nothing that works correctly overwrites",
            ) from error
