"""When a local checkpoint is made, and of what: the link between an island's moving parts and `checkpoint`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diloco_blob.core.clock import Clock
from diloco_blob.island.arrays import Arrays
from diloco_blob.island.checkpoint import Checkpoint, CheckpointState, FragmentState, save_checkpoint
from diloco_blob.island.outbox import Outbox
from diloco_blob.island.port import ModelPort
from diloco_blob.island.trajectory import Contribution, Trajectory

CHECKPOINT_EVERY_S = 30.0
"""Shortest time between two local checkpoints of an island that does not wait for its exchanges."""


@dataclass(frozen=True)
class Moment:
    """An island's counters at a step at which contributions are due."""

    run: str
    island: str
    steps: int
    tokens: int
    cursor: str
    due: Sequence[int]
    sent_at: Sequence[int]
    """Step at which each fragment was last sent."""


@dataclass
class Saver:
    """Makes the local checkpoints of one island.

    Args:
        directory: Where; None: none are made.
        clock: For their distance.
        waits: Whether the island waits for each exchange: then every exchange has its checkpoint, so that a restart
            repeats it exactly.
        at: Told before one is written, and after.
    """

    directory: Path | None
    clock: Clock
    waits: bool
    at: Callable[[str], None]
    _last: float | None = None

    def due(self) -> bool:
        """Whether to make one now."""
        if self.directory is None:
            return False
        now = self.clock.monotonic()
        if not self.waits and self._last is not None and now - self._last < CHECKPOINT_EVERY_S:
            return False
        self._last = now
        return True

    def capture(
        self, moment: Moment, port: ModelPort, trajectories: Sequence[Trajectory], local: Mapping[int, Arrays]
    ) -> Callable[[Outbox], None]:
        """Capture everything now.

        Args:
            moment: The counters.
            port: Model and inner optimizer.
            trajectories: Of all fragments.
            local: The model's weights now, by fragment; kept, so nobody may write to them.

        Returns:
            What writes it, to be called once all contributions that were taken earlier are sent.
        """
        if self.directory is None:
            raise AssertionError("there is no folder for checkpoints")
        directory = self.directory
        port_arrays, port_state = port.capture()
        arrays = {f"port/{name}": array for name, array in port_arrays.items()}
        for p, trajectory in enumerate(trajectories):
            arrays |= _named("local", local[p]) | _named("mark", trajectory.mark) | _named("mirror", trajectory.mirror)
            arrays |= _named("reference", trajectory.reference or {})
        flights = [_Flight(t, [(item, item.end) for item in t.in_flight]) for t in trajectories]

        def write(outbox: Outbox) -> None:
            for p, flight in enumerate(flights):
                for item, end in flight.items:
                    arrays.update(_named(f"end/{p}/{item.seq}", item.sent_to(end) or {}))
            for owed in outbox.residuals().values():
                arrays.update(_named("residual", owed))
            state = CheckpointState(
                run=moment.run,
                island=moment.island,
                steps=moment.steps,
                tokens=moment.tokens,
                cursor=moment.cursor,
                due=tuple(moment.due),
                fragments=tuple(
                    flight.state(outbox.next_seq[p], moment.sent_at[p]) for p, flight in enumerate(flights)
                ),
                port=port_state,
            )
            self.at("checkpoint.before_write")
            save_checkpoint(directory, Checkpoint(state=state, arrays=arrays))
            self.at("checkpoint.after_write")

        return write


class _Flight:
    """A fragment's counters as they were, and the contributions on their way, which get their numbers later."""

    def __init__(self, trajectory: Trajectory, items: list[tuple[Contribution, Arrays | None]]) -> None:
        self.items = items
        self._counters = (trajectory.version, trajectory.steps, trajectory.tokens, trajectory.train_s)

    def state(self, next_seq: int, sent_at: int) -> FragmentState:
        """Once all of them are sent."""
        numbers = [item.seq for item, _ in self.items if item.seq is not None]
        if len(numbers) < len(self.items):
            raise AssertionError("a checkpoint is written after all earlier contributions are sent")
        version, steps, tokens, train_s = self._counters
        return FragmentState(
            version=version,
            next_seq=next_seq,
            sent_at=sent_at,
            steps=steps,
            tokens=tokens,
            train_s=train_s,
            in_flight=tuple(numbers),
        )


def _named(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}
