"""What a pass of the aggregator works with: its injected edges, and the run."""

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_blob.aggregate.roster import Roster
from diloco_blob.core.clock import Clock
from diloco_blob.core.ids import Ids
from diloco_blob.protocol.heads import RunInfo
from diloco_blob.store.base import ObjectStore

STEPS = (
    "head.found",
    "close.gathered",
    "close.before_put",
    "close.after_put",
    "merge.begin",
    "merge.fetched",
    "merge.computed",
    "params.after_put",
    "outer.after_put",
    "update.after_put",
    "commit.before_put",
    "commit.after_put",
    "collect.begin",
    "collect.deleted",
    "collect.end",
)
"""The moments of a pass at which it may be killed, or another aggregator may overtake it: each is announced. Those from
`collect.begin` on only if the version makes something collectable, `collect.deleted` after each object."""


def pass_on(step: str) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Context:
    """One pass over one run; or, in `watch`, one process's passes, which know of each other what is remembered here.

    Args:
        store: The run's store.
        run: Its `run.json`.
        clock: Measures how long a merge takes; decides nothing.
        ids: Source of write ids.
        at: Called with the name of each step of `STEPS` as it is reached: where tests kill or interleave passes.
        roster: The islands' names as last listed: saves requests.
        own_closes: Write ids of the newest closes that were made with this context, by fragment: saves waiting for
            oneself. Written down before the record is put, since the answer may be lost.
    """

    store: ObjectStore
    run: RunInfo
    clock: Clock
    ids: Ids
    at: Callable[[str], None] = pass_on
    roster: Roster = field(default_factory=Roster)
    own_closes: dict[int, str] = field(default_factory=dict)
