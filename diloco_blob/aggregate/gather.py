"""What the islands have to offer to one fragment: their receipts past the watermark, each judged.

Receipts are other people's words: whatever is wrong with one is written into the close as the reason why it was
skipped, the watermark moves past it, and nobody else is affected. Their names are known, so reading them is a HEAD
and a GET for each, and a HEAD for the first that does not exist; a LIST finds islands that are new (`roster.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from diloco_blob.aggregate.context import Context
from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.core.limits import CONTRIBUTIONS_PER_ISLAND_MAX, ISLAND_RECORD_BYTES_MAX, ISLANDS_MAX
from diloco_blob.core.settings import Policy
from diloco_blob.protocol import keys
from diloco_blob.protocol.collecting import payload_file
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


def _find_islands(ctx: Context, watermarks: Mapping[str, Watermark], *, fresh: bool) -> list[str]:
    """Names of the islands that contributed before, and of newcomers while there is room; in one order everywhere."""
    found = set(watermarks)
    for name in ctx.roster.names(ctx.store, ctx.clock, fresh=fresh):
        if len(found) >= ISLANDS_MAX:
            break
        found.add(name)
    return sorted(found)


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
        if not 0 < info.size <= ISLAND_RECORD_BYTES_MAX:
            return skip(island, seq, f"malformed: receipt of {info.size} bytes")
        data = ctx.store.get_range(key, 0, info.size)
    except NotFound:
        return None
    try:
        receipt = decode(data, Receipt, run=ctx.run.digest)
    except Corrupt as error:
        return skip(island, seq, f"malformed: {error.message}")
    policy = ctx.run.run.settings.policy
    fault = _fault(receipt, head, policy, island, seq)
    if fault:
        return skip(island, seq, fault)
    staleness = head.version - receipt.base_version
    if staleness > policy.max_staleness:
        return skip(island, seq, f"stale: {staleness} > {policy.max_staleness}")
    return Candidate(receipt=receipt, digest=record_digest(data), staleness=staleness, arrived_at=info.last_modified)


def _fault(receipt: Receipt, head: Head, policy: Policy, island: str, seq: int) -> str | None:
    """What is wrong with a receipt that can be read, or None."""
    if (receipt.island, receipt.fragment, receipt.seq) != (island, head.fragment, seq):
        return "malformed: the receipt says that it is another one"
    if receipt.base_version > head.version:
        return f"malformed: base version {receipt.base_version} is ahead of the head, {head.version}"
    if receipt.tokens > receipt.steps * policy.tokens_per_step_max:
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
        file = payload_file(part.key)
        if file is None or file.seq != seq:  # It would be collected with other contributions than its own.
            return "malformed: a payload has another number than its receipt"
    return None


def skip(island: str, seq: int, reason: str) -> Skipped:
    """A contribution that is not merged, as the record says it: the reason is cut to what a record may hold."""
    return Skipped(island=island, seq=seq, reason=reason[:REASON_CHARS_MAX])


def _limited(mails: list[Mail]) -> tuple[Mail, ...]:
    """Cut to what one close may hold: what can be merged before what is only to be skipped.

    Else whoever may write names could stop a run with as many bad receipts as a close holds. Everybody's next mergeable
    contribution comes first, those with the fewest bad ones before them foremost, and of these the longest unserved. So
    who is cut does not depend on who arrived when, and of islands that send nothing bad none starves: whoever was left
    out goes first next time.
    """
    if sum(len(mail.entries) for mail in mails) <= CONTRIBUTIONS_PER_CLOSE_MAX:
        return tuple(mails)
    taken, room = dict.fromkeys((mail.island for mail in mails), 0), CONTRIBUTIONS_PER_CLOSE_MAX
    full: set[str] = set()
    # An entry is taken together with all before it: numbers have no gaps.
    for *_, island, end in sorted(turn for mail in mails for turn in _turns(mail)):
        cost = end - taken[island]
        if cost <= room and island not in full:
            taken[island], room = end, room - cost
        else:
            full.add(island)  # What comes after what was left out is left out too.
    return tuple(_cut(mail, taken[mail.island]) for mail in mails)


def _turns(mail: Mail) -> Iterator[tuple[bool, int, int, int, str, int]]:
    """In which order to take an island's entries (see `_limited`): sort key, then the island and how many by then."""
    start = turn = 0
    for end, entry in enumerate(mail.entries, start=1):
        if isinstance(entry, Candidate):
            yield False, turn, end - start, mail.mark.version, mail.island, end
            start, turn = end, turn + 1
    for end in range(start + 1, len(mail.entries) + 1):
        yield True, end - start, 1, mail.mark.version, mail.island, end


def _cut(mail: Mail, num: int) -> Mail:
    return replace(mail, entries=mail.entries[:num], blocked=mail.blocked and num > 0)
