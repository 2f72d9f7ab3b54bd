"""When a round is closed: whatever arrived before a deadline.

Pure functions of what was seen in the store and of the store's clock. Invariants, each with a property test:
more arrivals never make a due round not due; nor does time; and a round with enough contributions is due at
its deadline even if nobody arrives afterwards, because "not due" always says when time alone may change that.
(One exception to the first: a close that would only skip gives way to one that is going to merge something.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diloco_blob.core.settings import Policy
from diloco_blob.protocol.records import Watermark

Reason = Literal["all", "grace", "deadline", "drain", "backlog"]


@dataclass(frozen=True)
class RoundView:
    """What is known about an open round at one moment; all times by the store's clock."""

    now: float
    opened_at: float
    """When the head was committed: the deadline is armed then, not at the first arrival."""
    arrivals: Mapping[str, float]
    """When each contributing island's first mergeable receipt appeared."""
    active: frozenset[str]
    """Islands that are waited for."""
    active_changes_at: float = math.inf
    """When `active` next shrinks by time alone."""
    num_known: int = 0
    """Islands that ever started, and those that are expected."""
    num_left: int = 0
    """Of these, islands that have left."""
    blocked: bool = False
    """Whether some island's unmergeable receipts are as many as a pass reads: what lies behind them can only be reached
    once a close has skipped them."""


@dataclass(frozen=True)
class Decision:
    """Whether to close a round now, or when to look again."""

    reason: Reason | None
    """Why it is due; None if it is not."""
    look_again_s: float | None = None
    """If not due: seconds until time alone may change that; None if only an arrival can."""

    @property
    def due(self) -> bool:
        """Whether the round is to be closed now."""
        return self.reason is not None


@dataclass(frozen=True)
class Active:
    """Islands that are waited for."""

    islands: frozenset[str]
    changes_at: float
    """When the set next shrinks by time alone; infinite if it does not."""


def decide(view: RoundView, policy: Policy, *, drain: bool = False) -> Decision:
    """Whether a round is due.

    It is when every active island and at least a quorum contributed (`all`); when the quorum has been there
    for `grace_s` (`grace`); when `deadline_s` has passed since the round opened and `min_contributions`
    islands have been there for `grace_s` (`deadline`: if nobody could make it in time, the first to arrive does
    not close the round alone); when anything is there and no more will come (`drain`); and where nothing of this
    can come true by time alone, `deadline_s` after it opened, if a backlog blocks it (`backlog`: skips and merges
    nothing).
    Work that arrived before the round opened counts as arriving when it opened. Islands that have left lower
    `quorum` and `min_contributions` to those that remain.

    Args:
        view: The round as seen.
        policy: The run's policy.
        drain: No more contributions will come.
    """
    num_arrived = len(view.arrivals)
    if num_arrived == 0 and not view.blocked:
        return Decision(reason=None)
    quorum = _reachable(view, policy, policy.quorum_or_majority)
    has_quorum = num_arrived >= quorum
    if has_quorum and view.active <= view.arrivals.keys():
        return Decision(reason="all")
    moments: list[float] = []
    if has_quorum:
        quorum_at = _nth_arrival(view, quorum)
        if view.now >= quorum_at + policy.grace_s:
            return Decision(reason="grace")
        moments += [quorum_at + policy.grace_s, view.active_changes_at]
    enough = _reachable(view, policy, policy.min_contributions)
    if num_arrived >= enough:
        due_at = max(view.opened_at + policy.deadline_s, _nth_arrival(view, enough) + policy.grace_s)
        if view.now >= due_at:
            return Decision(reason="deadline")
        moments.append(due_at)
    if drain and num_arrived > 0:
        return Decision(reason="drain")
    if view.blocked and not moments:
        due_at = view.opened_at + policy.deadline_s
        if drain or view.now >= due_at:
            return Decision(reason="backlog")
        moments.append(due_at)
    soonest = min(moments, default=math.inf)
    return Decision(reason=None, look_again_s=None if math.isinf(soonest) else max(0.0, soonest - view.now))


def _reachable(view: RoundView, policy: Policy, wanted: int) -> int:
    """`wanted`, or everybody who has not left if these are fewer: islands that are done cannot contribute."""
    if view.num_left == 0:
        return wanted
    return min(wanted, max(1, max(view.num_known, policy.islands) - view.num_left))


def _nth_arrival(view: RoundView, count: int) -> float:
    """When the round had `count` islands' work; what was there before it opened counts as arriving when it opened."""
    return sorted(max(arrived, view.opened_at) for arrived in view.arrivals.values())[count - 1]


def active_islands(
    *,
    head_version: int,
    watermarks: Mapping[str, Watermark],
    joined_at: Mapping[str, float],
    now: float,
    policy: Policy,
) -> Active:
    """The islands that a round waits for: recent contributors, and newcomers still at their first work.

    Args:
        head_version: The fragment's newest version.
        watermarks: Of every island that ever contributed, as of the head.
        joined_at: When islands that never contributed first started; those unknown are left out.
        now: By the store's clock.
        policy: The run's policy.
    """
    islands = {
        name
        for name, mark in watermarks.items()
        if has_contributed(mark) and mark.version > head_version - policy.active_versions
    }
    changes_at = math.inf
    for name, joined in joined_at.items():
        if has_contributed(watermarks.get(name)) or now >= joined + policy.deadline_s:
            continue
        islands.add(name)
        changes_at = min(changes_at, joined + policy.deadline_s)
    return Active(islands=frozenset(islands), changes_at=changes_at)


def has_contributed(mark: Watermark | None) -> bool:
    """Whether anything of an island was ever chosen: a watermark past skipped receipts only has version 0."""
    return mark is not None and mark.version > 0
