"""One fragment's bookkeeping: which progress is new, which is sent, and how a new version is taken.

Three points of an island's trajectory matter. `mark`: up to here progress has been sent. `mirror`: the global
version last adopted. `end` of each contribution that is sent but not yet history. Contributions are
increments between marks: consecutive ones cover disjoint intervals, however late anything arrives. So with
`carry`, and without overlap, every step is in exactly one of them. With overlap `mix` and `overwrite` put the mark
at the new version: the share of `local` that `mix` keeps is in the next contribution again, what was sent of it
included; and the steps that `overwrite` discards between a send and the adoption are in none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from diloco_blob.core.settings import Sync
from diloco_blob.island.arrays import Arrays, Difference, mix, total, translated


@dataclass
class Contribution:
    """Progress on one fragment between two marks, on its way to the bucket."""

    fragment: int
    base_version: int
    """The version this progress started from."""
    delta: Mapping[str, np.ndarray]
    """Pseudo-gradient `mark − local`, older minus newer: computed when it is encoded, not by the training thread."""
    steps: int
    tokens: int
    step_to: int
    tokens_to: int
    cursor: str
    train_s: float
    end: Arrays | None = None
    """Where the trajectory was when this was taken, moved along with later translations; only kept for `carry`."""
    owed: Arrays | None = None
    """What error feedback still owed after this was coded: progress up to its end that nothing sent holds, known once
    it is coded. Not to be written to."""
    seq: int | None = None
    """Its number; known once its receipt exists."""

    def sent_to(self, end: Arrays | None) -> Arrays | None:
        """The point of the trajectory to which all leads that was sent up to here, given its end."""
        return end if end is None or not self.owed else total(end, self.owed)


@dataclass
class Trajectory:
    """The points of one fragment. All arrays are owned: nobody else writes to them."""

    fragment: int
    version: int
    mirror: Arrays
    mark: Arrays
    steps: int = 0
    tokens: int = 0
    train_s: float = 0.0
    """Inner steps, tokens and seconds since the mark."""
    in_flight: list[Contribution] = field(default_factory=list)
    """Taken, and not known to be history; oldest first."""
    reference: Arrays | None = None
    """Where the mirror lies on the model's own trajectory; None where that is the mirror itself (see `rounded`)."""

    def count(self, tokens: int, seconds: float) -> None:
        """Count one inner step."""
        self.steps += 1
        self.tokens += tokens
        self.train_s += seconds

    def take(self, local: Arrays, *, step_to: int, tokens_to: int, cursor: str, keep_end: bool) -> Contribution:
        """Snapshot the progress since the mark and move the mark to `local`.

        Args:
            local: The island's weights now; kept, so the caller must not write to them.
            step_to: The island's inner step count.
            tokens_to: The island's token count.
            cursor: Where its data stream is.
            keep_end: Remember where this contribution ended (`carry` needs it).
        """
        contribution = Contribution(
            fragment=self.fragment,
            base_version=self.version,
            delta=Difference(self.mark, local),
            steps=self.steps,
            tokens=self.tokens,
            step_to=step_to,
            tokens_to=tokens_to,
            cursor=cursor,
            train_s=self.train_s,
            end=local if keep_end else None,
        )
        self.mark = local
        self._restart()
        self.in_flight.append(contribution)
        return contribution

    def adopt(self, local: Arrays, new: Arrays, version: int, watermark: int, sync: Sync) -> Arrays:
        """Take a new version.

        Args:
            local: The island's weights now; written to. `overwrite` does not need them.
            new: The global weights at `version`; kept, so nobody may write to them.
            version: Their version.
            watermark: The number up to which the island's contributions are history at `version`.
            sync: How to adopt.

        Returns:
            What the island's weights become; not to be written to.
        """
        if sync.adopt == "carry":
            return self._carry(local, new, version, watermark)
        self._settle(watermark)
        self.mirror, self.version, self.reference = new, version, None
        self.mark = new
        self._restart()
        return new if sync.adopt == "overwrite" else mix(local, new, sync.mix_alpha)

    def rounded(self, intended: Arrays, actual: Arrays) -> None:
        """Account for a model that could not hold what it was given, such as one in bfloat16.

        All points move by the rounding, so that it is in no contribution: the global weights keep the bits that the
        model has no room for. The next adoption takes it back.

        Args:
            intended: What was written into the model.
            actual: What the model then held.
        """
        points = [self.mark, self.reference or self.mirror, *self._ends()]
        self.mark, self.reference, *ends = translated(points, actual, intended)
        self._set_ends(ends)

    def unmerged(self, watermark: int, max_staleness: int) -> int:
        """Contributions taken that are not history at `watermark` and may still be merged.

        One that is too stale for the version after this one will only be skipped, whenever that may be: nobody need
        wait for it.
        """
        oldest = self.version - max_staleness
        return sum(
            1 for item in self.in_flight if (item.seq is None or item.seq > watermark) and item.base_version >= oldest
        )

    def _carry(self, local: Arrays, new: Arrays, version: int, watermark: int) -> Arrays:
        """Translate the trajectory so that its merged part becomes `new` and all later progress stays.

        The reference is the point up to which progress is merged: the end of the newest contribution that is
        history, without what coding still owes of it; or, where none became history since the last adoption, the
        mirror, to which that point was translated then. So an island goes on from the new version and its own residual:
        it does not train a second time what will be sent later.
        """
        merged = self._settle(watermark)
        since, owed = (merged.end, merged.owed) if merged else (None, None)
        if since is None:
            since, owed = self.reference or self.mirror, None
        # With nothing unsent, mark and local are one point: equal to the bit, and so they stay. Of the others the old
        # memory is still read by whoever sends.
        moved, self.mark, *ends = translated([local, self.mark, *self._ends()], new, since, owed, into=[local])
        self._set_ends(ends)
        self.mirror, self.version, self.reference = new, version, None
        return moved

    def _ends(self) -> list[Arrays]:
        return [item.end for item in self.in_flight if item.end is not None]

    def _set_ends(self, ends: list[Arrays]) -> None:
        for item, end in zip((item for item in self.in_flight if item.end is not None), ends, strict=True):
            item.end = end

    def _settle(self, watermark: int) -> Contribution | None:
        """Forget the contributions that are history; return the newest of them."""
        newest = None
        waiting = []
        for item in self.in_flight:
            if item.seq is not None and item.seq <= watermark:
                newest = item
            else:
                waiting.append(item)
        self.in_flight = waiting
        return newest

    def _restart(self) -> None:
        self.steps, self.tokens, self.train_s = 0, 0, 0.0
