"""What the islands have to offer to one fragment: their receipts past the watermark, each judged.

Receipts are other people's words: whatever is wrong with one is written into the close as the reason why it was
skipped, the watermark moves past it, and nobody else is affected. Their names are known, so reading them is a HEAD
and a GET for each, and a HEAD for the first that does not exist; a LIST finds islands that are new (`roster.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diloco_blob.aggregate.context import Context
from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.core.limits import (
    CONTRIBUTIONS_PER_ISLAND_MAX,
    ISLANDS_MAX,
    RECORD_BYTES_MAX,
    TOKENS_PER_STEP_MAX,
)
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, watermark_of
from diloco_blob.protocol.records import Receipt, Skipped, Watermark, decode, record_digest
from diloco_blob.store.keys import check_key

RECEIPTS_READ_MAX = 8 * CONTRIBUTIONS_PER_ISLAND_MAX
"""Receipts of one island that a pass reads, those it skips included: bad ones must not hide the good ones behind."""

CONTRIBUTIONS_PER_CLOSE_MAX = 4096
"""Contributions in one close, of all islands, chosen or skipped: keeps the record below `RECORD_BYTES_MAX`."""

REASON_CHARS_MAX = 200
"""Of a reason on record, part of which is other people's text."""


@dataclass(frozen=True)
class Candidate:
    """A receipt that can be merged."""

    receipt: Receipt
    digest: str
    staleness: int
    arrived_at: float

    @property
    def seq(self) -> int:
        """Its number."""
        return self.receipt.seq


@dataclass(frozen=True)
class Mail:
    """An island's receipts past its watermark, in order, without gaps."""

    island: str
    mark: Watermark
    entries: tuple[Candidate | Skipped, ...]
    blocked: bool = False
    """Whether these are as many receipts as a pass reads, and none is mergeable: good ones may lie behind them, and
    only a close that moves the watermark gets there."""

    @property
    def arrived_at(self) -> float | None:
        """When its first mergeable receipt appeared, by the store's clock."""
        return next((entry.arrived_at for entry in self.entries if isinstance(entry, Candidate)), None)


def gather(
    ctx: Context, head: Head, watermarks: Mapping[str, Watermark], *, read: Sequence[Mail] = (), fresh: bool = False
) -> tuple[Mail, ...]:
    """Read what every known or new island has to offer, sorted by name.

    Args:
        ctx: The pass.
        head: The fragment's newest version.
        watermarks: As of the head.
        read: What was read a moment ago: only islands that are not in it are read now.
        fresh: Whether a remembered list of islands will not do.

    Raises:
        Unavailable: The store did not answer; nothing was decided.
    """
    mails = {mail.island: mail for mail in read}
    # Islands do not depend on each other: this loop may become a pool's map.
    for name in _find_islands(ctx, watermarks, fresh=fresh):
        if name not in mails:
            mails[name] = read_mail(ctx, head, name, watermark_of(watermarks, name))
    ctx.roster.seen |= bool(watermarks) or any(mail.entries for mail in mails.values())
    return _limited([mails[name] for name in sorted(mails)])


def _find_islands(ctx: Context, watermarks: Mapping[str, Watermark], *, fresh: bool) -> set[str]:
    """Names of the islands that contributed before, and of newcomers while there is room."""
    found = set(watermarks)
    for name in ctx.roster.names(ctx.store, ctx.clock, fresh=fresh):
        if len(found) >= ISLANDS_MAX:
            break
        found.add(name)
    return found


def read_mail(ctx: Context, head: Head, island: str, mark: Watermark) -> Mail:
    """Read one island's receipts from its watermark on, until the first that does not exist (yet)."""
    entries: list[Candidate | Skipped] = []
    num_candidates = 0
    for seq in range(mark.seq + 1, mark.seq + 1 + RECEIPTS_READ_MAX):
        entry = _read_receipt(ctx, head, island, seq)
        if entry is None:
            break
        entries.append(entry)
        num_candidates += isinstance(entry, Candidate)
        if num_candidates == CONTRIBUTIONS_PER_ISLAND_MAX:
            break
    blocked = len(entries) == RECEIPTS_READ_MAX and num_candidates == 0
    return Mail(island=island, mark=mark, entries=tuple(entries), blocked=blocked)


def _read_receipt(ctx: Context, head: Head, island: str, seq: int) -> Candidate | Skipped | None:
    key = keys.receipt(island, head.fragment, seq)
    try:
        info = ctx.store.head(key)
        if not 0 < info.size <= RECORD_BYTES_MAX:
            return skip(island, seq, f"malformed: receipt of {info.size} bytes")
        data = ctx.store.get_range(key, 0, info.size)
    except NotFound:
        return None
    try:
        receipt = decode(data, Receipt, run=ctx.run.digest)
    except Corrupt as error:
        return skip(island, seq, f"malformed: {error.message}")
    fault = _fault(receipt, head, island, seq)
    if fault:
        return skip(island, seq, fault)
    staleness = head.version - receipt.base_version
    limit = ctx.run.run.settings.policy.max_staleness
    if staleness > limit:
        return skip(island, seq, f"stale: {staleness} > {limit}")
    return Candidate(receipt=receipt, digest=record_digest(data), staleness=staleness, arrived_at=info.last_modified)


def _fault(receipt: Receipt, head: Head, island: str, seq: int) -> str | None:
    """What is wrong with a receipt that can be read, or None."""
    if (receipt.island, receipt.fragment, receipt.seq) != (island, head.fragment, seq):
        return "malformed: the receipt says that it is another one"
    if receipt.base_version > head.version:
        return f"malformed: base version {receipt.base_version} is ahead of the head, {head.version}"
    if receipt.tokens > receipt.steps * TOKENS_PER_STEP_MAX:
        return f"malformed: {receipt.tokens} tokens in {receipt.steps} steps"
    if len(receipt.parts) != 1:
        return f"parts: {len(receipt.parts)} payload objects, this program merges 1"
    prefix = keys.payloads(island, head.fragment)
    for part in receipt.parts:
        try:
            check_key(part.key)
        except Corrupt:
            return "malformed: a payload's name is not allowed"
        if not part.key.startswith(prefix):
            return "malformed: a payload is not the island's own"
    return None


def skip(island: str, seq: int, reason: str) -> Skipped:
    """A contribution that is not merged, as the record says it: the reason is cut to what a record may hold."""
    return Skipped(island=island, seq=seq, reason=reason[:REASON_CHARS_MAX])


def _limited(mails: list[Mail]) -> tuple[Mail, ...]:
    """Cut to what one close may hold: everybody's next contribution first, the longest unserved islands foremost.

    Who is cut does not depend on who arrived when, and nobody starves: whoever was left out goes first next time.
    """
    if sum(len(mail.entries) for mail in mails) <= CONTRIBUTIONS_PER_CLOSE_MAX:
        return tuple(mails)
    turns = sorted((depth, mail.mark.version, mail.island) for mail in mails for depth in range(len(mail.entries)))
    taken: dict[str, int] = {}
    for _, _, island in turns[:CONTRIBUTIONS_PER_CLOSE_MAX]:
        taken[island] = taken.get(island, 0) + 1
    return tuple(replace(mail, entries=mail.entries[: taken.get(mail.island, 0)]) for mail in mails)
