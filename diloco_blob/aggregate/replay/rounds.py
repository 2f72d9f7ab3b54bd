"""A closed round, with its mail read and judged again.

Receipts are written once, and which of them a close disposes of is on record. So what an aggregator saw when it
decided can be read again at any time, and the same functions must come to the same decision.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from diloco_blob.aggregate.closing import ClosedRound, choose, read_before, read_close
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.gather import Mail, read_mail
from diloco_blob.core.errors import Corrupt
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import Ledger
from diloco_blob.protocol.heads import Head, watermark_of
from diloco_blob.protocol.records import Chosen, Skipped

WEIGHT_TOLERANCE = 1e-9
"""How far weights and discount may be from the recomputed ones: `x ** y` may differ in its last bit between C
libraries. Everything that follows from the recorded weights must be equal to the bit."""


@dataclass(frozen=True)
class Round:
    """A round that was closed."""

    closed: ClosedRound
    mails: tuple[Mail, ...]
    """What it disposed of, by island, each receipt judged anew."""


def read_round(ctx: Context, head: Head) -> Round:
    """The round that made the version after `head`.

    Raises:
        Corrupt: A close is damaged or missing.
    """
    closed = read_close(ctx, head)
    if closed is None:
        raise Corrupt(f"{keys.close(head.fragment, head.version + 1)} is missing")
    marks = read_before(ctx, head).watermarks
    counts = Counter(entry.island for entry in closed.close.chosen)
    counts.update(entry.island for entry in closed.close.skipped)
    mails = []
    for island, count in sorted(counts.items()):
        mail = read_mail(ctx, head, island, watermark_of(marks, island))
        mails.append(replace(mail, entries=mail.entries[:count]))  # More may have come since.
    return Round(closed, tuple(mails))


def check_decision(ctx: Context, found: Round, ledger: Ledger) -> None:
    """That the close says what its receipts and the settings give; every deviation is a finding."""
    close = found.closed.close
    key = keys.close(close.fragment, close.version)
    chosen, discount = choose(ctx.run.run.settings, found.mails)
    expected = {(entry.island, entry.seq): entry for entry in chosen}
    to_skip = {
        (entry.island, entry.seq): entry.reason
        for mail in found.mails
        for entry in mail.entries
        if isinstance(entry, Skipped)
    }
    recorded = {(entry.island, entry.seq): entry for entry in close.chosen}
    for island, seq in sorted(recorded.keys() - expected.keys()):
        why = to_skip.get((island, seq), "there is no such receipt to choose")
        ledger.broken("decision", key, f"{island} {seq} is chosen, but it is to be skipped: {why}")
    for skipped in close.skipped:
        one = (skipped.island, skipped.seq)
        if one in expected:
            ledger.broken("decision", key, f"{one[0]} {one[1]} is skipped ({skipped.reason}), but it can be merged")
        elif one not in to_skip:
            ledger.broken("decision", key, f"{one[0]} {one[1]} is skipped, but there is no such receipt")
        elif reason_class(to_skip[one]) != reason_class(skipped.reason):
            ledger.broken(
                "decision", key, f"{one[0]} {one[1]} is skipped as {skipped.reason!r}, but it is {to_skip[one]!r}"
            )
    if recorded.keys() == expected.keys():  # Else all weights are others, for a reason that is told already.
        _check_weights(close.chosen, expected, key, ledger)
        if not math.isclose(close.discount, discount, rel_tol=0.0, abs_tol=WEIGHT_TOLERANCE):
            ledger.broken("decision", key, f"the discount is {close.discount!r}, the settings give {discount!r}")


def reason_class(reason: str) -> str:
    """What kind of reason it is: what follows may hold figures and other people's text."""
    return reason.partition(":")[0]


def _check_weights(
    recorded: tuple[Chosen, ...], expected: dict[tuple[str, int], Chosen], key: str, ledger: Ledger
) -> None:
    for entry in recorded:
        right = expected[entry.island, entry.seq]
        who = f"{entry.island} {entry.seq}"
        if entry.staleness != right.staleness:
            ledger.broken("decision", key, f"{who} has staleness {right.staleness}, the close says {entry.staleness}")
        if not math.isclose(entry.weight, right.weight, rel_tol=0.0, abs_tol=WEIGHT_TOLERANCE):
            ledger.broken("decision", key, f"{who} has weight {entry.weight!r}, the settings give {right.weight!r}")
