"""What a pass did to a fragment: for logs, progress, and whoever decides when to call again."""

from typing import Literal

from msgspec import Struct

from diloco_blob.protocol.records import Merged, Skipped

Action = Literal["waiting", "elsewhere", "merged", "lost"]
"""waiting: the round is open. elsewhere: another aggregator closed it and is merging. merged: this pass made a version.
lost: this pass merged, but another one's commit was first; nothing was lost but its work."""


class FragmentReport(Struct, frozen=True):
    """What one pass did to one fragment."""

    fragment: int
    version: int
    """The newest version, after the pass."""
    action: Action
    look_again_s: float | None
    """When another pass may find something to do by time alone; None if only an arrival can change anything."""
    reason: str = ""
    """Why the round was closed: all | grace | deadline | drain | backlog."""
    arrived: tuple[str, ...] = ()
    """Islands with something to merge, of an open round."""
    waiting_for: tuple[str, ...] = ()
    """Active islands that an open round still waits for."""
    merged: tuple[Merged, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    rejected: tuple[Skipped, ...] = ()
    tokens: int = 0
    """Merged into this fragment from version 1 on."""
    step_norm: float = 0.0
    merge_s: float = 0.0
    takeover: bool = False
    """Whether another aggregator had closed the round and left it."""
