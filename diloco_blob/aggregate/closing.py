"""Closing a round: the decision which contributions make the next version, made once and for all.

The record is created only if it is absent, so of any number of aggregators exactly one decides, and whoever comes
later reads what was decided. It lists contributions by island and number, never by arrival: the same mail gives the
same close, whoever reads it and in whatever order it came.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.gather import Candidate, Mail, gather
from diloco_blob.core.errors import Conflict, Corrupt, NotFound
from diloco_blob.core.limits import ISLANDS_MAX
from diloco_blob.core.settings import Settings
from diloco_blob.outer import Work, bounded_work, island_weights
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, exists
from diloco_blob.protocol.policy import RoundView, active_islands, decide, has_contributed
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import (
    FORMAT,
    Chosen,
    Close,
    Departure,
    Skipped,
    Watermark,
    decode,
    encode,
    record_digest,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClosedRound:
    """A close as it stands in the store."""

    close: Close
    digest: str
    closed_at: float
    """When the record appeared, by the store's clock."""
    ours: bool
    """Whether it was created with this context, whose business it then is to merge it."""


@dataclass(frozen=True)
class Before:
    """What the version before says of the islands."""

    watermarks: Mapping[str, Watermark]
    left: tuple[str, ...]
    """Who had said after its last contribution that it leaves."""


@dataclass(frozen=True)
class OpenRound:
    """A round that is not due yet."""

    arrived: tuple[str, ...]
    waiting_for: tuple[str, ...]
    look_again_s: float | None


def close_round(ctx: Context, head: Head, *, drain: bool = False) -> ClosedRound | OpenRound:
    """Find the close of the version after `head`, or make it if the round is due.

    Args:
        ctx: The pass.
        head: The fragment's newest version.
        drain: No more contributions will come.

    Raises:
        Corrupt: A close record is damaged or missing; nothing can go on from there.
    """
    found = read_close(ctx, head)
    if found is not None:
        return found
    policy = ctx.run.run.settings.policy
    before = read_before(ctx, head)
    ctx.roster.expire()
    mails = gather(ctx, head, before.watermarks)
    view, left = _view(ctx, head, before, mails)
    decision = decide(view, policy, drain=drain)
    if decision.due and not ctx.roster.fresh:
        num_read = len(mails)
        mails = gather(ctx, head, before.watermarks, read=mails, fresh=True)
        if len(mails) > num_read:  # Newcomers: they may be in this version, or be waited for.
            view, left = _view(ctx, head, before, mails)
            decision = decide(view, policy, drain=drain)
    ctx.at("close.gathered")
    arrived, waiting_for = tuple(view.arrivals), tuple(sorted(view.active - view.arrivals.keys()))
    if decision.reason is None:
        return OpenRound(arrived=arrived, waiting_for=waiting_for, look_again_s=decision.look_again_s)
    if len(mails) >= ISLANDS_MAX:
        _LOG.warning(
            "fragment %d version %d: %d islands are tracked, no more are admitted: remove names under islands/",
            *(head.fragment, head.version + 1, len(mails)),
            extra={"run": ctx.store.url, "fragment": head.fragment, "version": head.version + 1},
        )
    if decision.reason == "backlog":
        # Work that can be merged stays for a version that merges something.
        mails = tuple(mail for mail in mails if mail.arrived_at is None)
    elif len(arrived) == 1 and waiting_for:
        _LOG.warning(
            "fragment %d version %d: %s is merged alone (%s), without %s",
            *(head.fragment, head.version + 1, arrived[0], decision.reason, ", ".join(waiting_for)),
            extra={"run": ctx.store.url, "fragment": head.fragment, "version": head.version + 1},
        )
    return _put_close(ctx, head, make_close(ctx, head, Before(before.watermarks, left), mails, decision.reason))


def read_close(ctx: Context, head: Head) -> ClosedRound | None:
    """The close of the version after `head`, if somebody made it.

    Raises:
        Corrupt: It is not readable, or not the one that its name says.
    """
    version = head.version + 1
    try:
        data, info = ctx.store.get(keys.close(head.fragment, version))
    except NotFound:
        return None
    close = decode(data, Close, run=ctx.run.digest)
    if (close.fragment, close.version, close.parent) != (head.fragment, version, head.digest):
        raise Corrupt(f"{info.key} does not describe what follows version {head.version} of this fragment")
    ours = ctx.own_closes.get(head.fragment) == close.write_id
    return ClosedRound(close=close, digest=record_digest(data), closed_at=info.last_modified, ours=ours)


def read_before(ctx: Context, head: Head) -> Before:
    """Up to where everybody's contributions are history, and who has left, as of the head."""
    if head.commit is None:
        return Before({}, ())
    key = keys.close(head.fragment, head.version)
    try:
        data, _ = ctx.store.get(key)
    except NotFound as error:
        raise Corrupt(f"{key} is missing, although that version exists: the run was damaged") from error
    if record_digest(data) != head.commit.close:
        raise Corrupt(f"{key} is not the record that the commit names")
    close = decode(data, Close, run=ctx.run.digest)
    return Before(close.watermarks, close.left)


def _view(ctx: Context, head: Head, before: Before, mails: tuple[Mail, ...]) -> tuple[RoundView, tuple[str, ...]]:
    """The open round as the policy sees it, and the islands whose departure the close is to note."""
    policy = ctx.run.run.settings.policy
    arrivals = {mail.island: mail.arrived_at for mail in mails if mail.arrived_at is not None}
    blocked = any(mail.blocked for mail in mails)
    now = ctx.store.now()
    if not arrivals and not blocked:  # Nothing to close, whoever might be waited for.
        return RoundView(now=now, opened_at=head.created_at, arrivals={}, active=frozenset()), before.left
    joined = {
        mail.island: at
        for mail in mails
        if not has_contributed(mail.mark) and (at := _joined_at(ctx, mail.island)) is not None
    }
    active = active_islands(
        head_version=head.version, watermarks=before.watermarks, joined_at=joined, now=now, policy=policy
    )
    left, noted = _left(ctx, head, before, mails, active.islands)
    view = RoundView(
        now=now,
        opened_at=head.created_at,
        arrivals=arrivals,
        active=active.islands - left,
        active_changes_at=active.changes_at,
        num_known=len(before.watermarks.keys() | joined.keys()),
        num_left=len(left),
        blocked=blocked,
    )
    return view, tuple(sorted(noted))


def _left(
    ctx: Context, head: Head, before: Before, mails: tuple[Mail, ...], active: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Islands that left after their last contribution, and those that said so, be they back or not.

    Whoever may be waited for is asked each time, as it may have been started again. Of the others, what was noted holds
    until they contribute: an island that came back and is not heard of for so long might as well have stayed away.
    """
    silent = {mail.island: mail.mark.seq for mail in mails if not mail.entries}
    noted = {name for name in before.left if name in silent and name not in active}
    left = set(noted)
    for name in sorted(active & silent.keys()):
        departure = _departure(ctx, head, name, silent[name])
        if departure is None:
            continue
        noted.add(name)
        if not exists(ctx.store, keys.generation(name, departure.generation + 1)):
            left.add(name)
    return frozenset(left), frozenset(noted)


def _departure(ctx: Context, head: Head, island: str, seq: int) -> Departure | None:
    """What an island said when it left after contribution `seq`; nothing that cannot be read counts."""
    try:
        key = keys.departure(island, head.fragment, seq)
        data, _ = read_limited(ctx.store, key)
        found = decode(data, Departure, run=ctx.run.digest)
    except (NotFound, Corrupt):
        return None
    return found if (found.island, found.fragment, found.seq) == (island, head.fragment, seq) else None


def _joined_at(ctx: Context, island: str) -> float | None:
    try:
        return ctx.store.head(keys.generation(island, 1)).last_modified
    except NotFound:
        return None


def make_close(ctx: Context, head: Head, before: Before, mails: tuple[Mail, ...], reason: str) -> Close:
    """The record: pure, but for its write id and the time.

    Args:
        ctx: The pass.
        head: What it follows.
        before: As of the head, and who has left since.
        mails: What the islands have, by name; at least one of them something to merge or to skip.
        reason: Why the round is due.
    """
    version = head.version + 1
    chosen, discount = choose(ctx.run.run.settings, mails)
    skipped = [entry for mail in mails for entry in mail.entries if isinstance(entry, Skipped)]
    return Close(
        format=FORMAT,
        run=ctx.run.digest,
        write_id=ctx.ids.fresh(),
        fragment=head.fragment,
        version=version,
        parent=head.digest,
        reason=reason,
        chosen=chosen,
        skipped=tuple(skipped),
        watermarks={**before.watermarks, **{mail.island: _moved(mail, version) for mail in mails if mail.entries}},
        left=before.left,
        discount=discount,
        opened_at=head.created_at,
        closed_at=ctx.store.now(),
    )


def choose(settings: Settings, mails: Sequence[Mail]) -> tuple[tuple[Chosen, ...], float]:
    """What of the mail is mergeable, with the weight of its island, and the discount of the step."""
    candidates = [
        found for mail in mails if (found := [entry for entry in mail.entries if isinstance(entry, Candidate)])
    ]
    weights, discount = _weights(settings, candidates)
    chosen = [_chosen(entry, weight) for found, weight in zip(candidates, weights, strict=True) for entry in found]
    return tuple(chosen), discount


def _weights(settings: Settings, islands: Sequence[Sequence[Candidate]]) -> tuple[list[float], float]:
    """Of the islands, and the discount of the step. Claims are bounded here, where they have a say.

    The close, the commit and the tallies keep the claimed figures: these are the receipt's, by which the audit
    compares them, and for people.
    """
    if not islands:
        return [], 1.0
    tokens_max = settings.sync.sync_every * settings.policy.tokens_per_step_max
    works = [
        _bounded([Work(e.receipt.tokens, e.receipt.steps, e.staleness) for e in found], tokens_max) for found in islands
    ]
    return island_weights(settings.merge, works)


def _bounded(works: Sequence[Work], tokens_max: int) -> list[Work]:
    """An island's contributions, cut to so many tokens in all: eight small claims are no better than a large one."""
    total = sum(work.tokens for work in works)
    if total <= tokens_max:
        return list(works)
    return [bounded_work(work, max(1, work.tokens * tokens_max // total)) for work in works]


def _chosen(entry: Candidate, weight: float) -> Chosen:
    receipt = entry.receipt
    return Chosen(
        island=receipt.island,
        seq=receipt.seq,
        generation=receipt.generation,
        base_version=receipt.base_version,
        staleness=entry.staleness,
        weight=weight,
        steps=receipt.steps,
        tokens=receipt.tokens,
        receipt=entry.digest,
        parts=receipt.parts,
        train_s=receipt.train_s,
    )


def _moved(mail: Mail, version: int) -> Watermark:
    """Past everything that was read; the version moves only if something of it was chosen."""
    chosen = any(isinstance(entry, Candidate) for entry in mail.entries)
    return Watermark(seq=mail.entries[-1].seq, version=version if chosen else mail.mark.version)


def _put_close(ctx: Context, head: Head, close: Close) -> ClosedRound:
    data = encode(close)
    ctx.own_closes[close.fragment] = close.write_id
    ctx.at("close.before_put")
    try:
        info = ctx.store.put(keys.close(close.fragment, close.version), data, if_absent=True)
    except Conflict:
        winner = read_close(ctx, head)
        if winner is None:
            raise Corrupt(
                f"the store refused {keys.close(close.fragment, close.version)}, and does not have it"
            ) from None
        return winner
    ctx.at("close.after_put")
    return ClosedRound(close=close, digest=record_digest(data), closed_at=info.last_modified, ours=True)
