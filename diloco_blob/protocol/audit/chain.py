"""Auditing the records of a fragment: one history, in which every contribution is disposed of exactly once.

The walk goes from version 1 to the head. What it knows of the past is the previous version's commit and watermarks, the
newest generation seen of each island, and the steps that its last contributions cover; that is enough, since watermarks
only rise.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit.intervals import Intervals
from diloco_blob.protocol.audit.kept import Collected, Kept
from diloco_blob.protocol.audit.listing import Listing, audit_receipt_numbers
from diloco_blob.protocol.audit.objects import audit_initial, audit_object, audit_objects
from diloco_blob.protocol.audit.report import Ledger
from diloco_blob.protocol.heads import RunInfo, exists, watermark_of
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import (
    COUNT_MAX,
    Chosen,
    Close,
    Commit,
    Merged,
    Receipt,
    Record,
    Tally,
    Watermark,
    Weights,
    decode,
    record_digest,
)
from diloco_blob.store.base import ObjectStore

PENDING_READ_MAX = 64
"""Pending receipts of one island and fragment that are looked into."""

WEIGHT_TOLERANCE = 1e-9
"""How far from 1 the weights of a version may sum: they are rounded once each."""


@dataclass
class _Walk:
    """Where the walk along one fragment stands: everything it knows of the versions before."""

    store: ObjectStore
    run: RunInfo
    fragment: int
    listing: Listing
    kept: Kept
    ledger: Ledger
    version: int
    """The next one to look at."""
    parent: str
    """Digest of the commit before it."""
    weights: Weights | None
    """Of the version before; None if they are collected or broken."""
    watermarks: dict[str, Watermark] | None = field(default_factory=dict)
    """After the version before; None if its close could not be read."""
    tally: Mapping[str, Tally] = field(default_factory=dict)
    tokens: int = 0
    generations: dict[str, int] = field(default_factory=dict)
    receipts: dict[tuple[str, int], Receipt] = field(default_factory=dict)
    """That the close at hand chose and that can be read, by island and number."""

    def __post_init__(self) -> None:
        self.intervals = Intervals(self.fragment, self.ledger)

    @property
    def place(self) -> str:
        """Where we are, for findings that are not about one object."""
        return f"fragment {self.fragment} version {self.version}"

    @property
    def clips(self) -> bool:
        """Whether the run clips pseudo-gradients."""
        return self.run.run.settings.merge.clip != "none"


def audit_fragment(
    store: ObjectStore, run: RunInfo, fragment: int, listing: Listing, kept: Kept, ledger: Ledger
) -> int:
    """Walk along a fragment's history; every finding goes to `ledger`. Returns the newest version."""
    initial_sound = audit_initial(store, run, fragment, kept, ledger)
    walk = _Walk(
        store=store,
        run=run,
        fragment=fragment,
        listing=listing,
        kept=kept,
        ledger=ledger,
        version=1,
        parent=run.digest,
        weights=run.run.fragments[fragment] if initial_sound else None,
    )
    while _step(walk):
        walk.version += 1
    _check_end(walk)
    ledger.count(collected=min(walk.version, kept.horizon))
    return walk.version - 1


def _step(walk: _Walk) -> bool:
    """Audit one version; False if there is none."""
    commit_key = keys.commit(walk.fragment, walk.version)
    try:
        data, commit = _read(walk, commit_key, Commit)
    except NotFound:
        return False
    if commit is None:
        walk.ledger.note("chain", commit_key, "what follows it could not be checked")
        walk.watermarks = None
        return False
    walk.ledger.count(commits=1, merged=len(commit.merged), rejected=len(commit.rejected))
    if (commit.fragment, commit.version) != (walk.fragment, walk.version):
        walk.ledger.broken(
            "records", commit_key, f"says that it is fragment {commit.fragment} version {commit.version}"
        )
    if commit.parent != walk.parent:
        walk.ledger.broken("chain", commit_key, f"its parent is {commit.parent}, the version before is {walk.parent}")
    close = _audit_close(walk, commit)
    if commit.merged:
        _check_weights(walk, commit_key, commit.merged)
    if close is not None:
        _audit_disposal(walk, close, commit)
        _audit_tally(walk, close, commit)
    sound = audit_objects(walk.store, walk.run, commit, walk.weights, walk.kept, walk.ledger)
    walk.parent = record_digest(data)
    walk.weights = commit.weights if sound else None
    walk.watermarks = close.watermarks if close is not None else None
    walk.tally, walk.tokens = commit.tally, commit.tokens
    return True


def _check_end(walk: _Walk) -> None:
    """Beyond the head there is at most one close; what is above the watermarks is still to come."""
    head, listed = walk.version - 1, walk.listing.fragments[walk.fragment]
    if listed.commits.highest > head:
        missing = keys.commit(walk.fragment, walk.version)
        if not exists(walk.store, missing):
            walk.ledger.broken("chain", missing, f"is missing, but version {listed.commits.highest} exists")
    elif listed.closes.highest > head + 1:
        walk.ledger.broken(
            "head", keys.close(walk.fragment, listed.closes.highest), f"lies beyond the head, version {head}"
        )
    elif listed.closes.highest == head + 1:
        walk.ledger.count(pending_closes=1)
        _audit_close(walk, None)
    if walk.watermarks is None:
        return
    audit_receipt_numbers(walk.store, walk.listing, walk.fragment, walk.watermarks, walk.ledger)
    for name, island in sorted(walk.listing.islands.items()):
        history = watermark_of(walk.watermarks, name).seq
        pending = max(0, island.num_receipts(walk.fragment) - history)
        walk.ledger.count(pending=pending)
        for seq in range(history + 1, history + 1 + min(pending, PENDING_READ_MAX)):
            _audit_pending(walk, keys.receipt(name, walk.fragment, seq), head)
    for name, mark in walk.watermarks.items():
        listed_island = walk.listing.islands.get(name)
        if mark.seq > (listed_island.num_receipts(walk.fragment) if listed_island else 0):
            _audit_last_receipt(walk, name, mark.seq)


def _audit_pending(walk: _Walk, key: str, head: int) -> None:
    """A contribution to come may be anything. What it says that its island saw should be there, if it is honest."""
    try:
        data, _ = read_limited(walk.store, key)
        base_version = decode(data, Receipt, run=walk.run.digest).base_version
    except (NotFound, Corrupt):
        return  # The aggregator will skip it, or the numbers have a gap, which was found before.
    if base_version > head:
        walk.ledger.note("chain", key, f"says that it started from version {base_version}, but the head is {head}")


def _audit_last_receipt(walk: _Walk, island: str, seq: int) -> None:
    """The receipt at a watermark, which the list did not show: of a skipped contribution that is its only trace."""
    key = keys.receipt(island, walk.fragment, seq)
    try:
        missing = not exists(walk.store, key)
    except Corrupt:
        return  # No island's name; that was found before.
    if missing:
        walk.ledger.broken("receipts", key, "is missing, but the watermark says that it is history")


def _audit_close(walk: _Walk, commit: Commit | None) -> Close | None:
    """The close of the version at hand, whose commit may be still to come; None if it cannot be read."""
    key, ledger = keys.close(walk.fragment, walk.version), walk.ledger
    try:
        data, close = _read(walk, key, Close)
    except NotFound:
        ledger.broken("closes", key, "is missing, but the version exists")
        return None
    if commit is not None and record_digest(data) != commit.close:
        ledger.broken("closes", key, f"has digest {record_digest(data)}, the commit says {commit.close}")
    if close is None:
        return None
    if (close.fragment, close.version) != (walk.fragment, walk.version):
        ledger.broken("records", key, f"says that it is fragment {close.fragment} version {close.version}")
    if close.parent != walk.parent:
        ledger.broken("closes", key, f"its parent is {close.parent}, the version before is {walk.parent}")
    if commit is not None:
        ledger.count(skipped=len(close.skipped))
    if close.chosen:
        _check_weights(walk, key, close.chosen)
    _audit_watermarks(walk, close, key)
    walk.receipts = {}
    for item in close.chosen:
        _audit_staleness(walk, item, key)
        receipt = _audit_receipt(walk, item)
        if receipt is not None:
            walk.receipts[item.island, item.seq] = receipt
    return close


def _audit_watermarks(walk: _Walk, close: Close, key: str) -> None:
    old_marks = walk.watermarks
    if old_marks is None:
        return
    disposed: dict[str, list[int]] = {}
    for name, seq in [(c.island, c.seq) for c in close.chosen] + [(s.island, s.seq) for s in close.skipped]:
        disposed.setdefault(name, []).append(seq)
    chosen_islands = {item.island for item in close.chosen}
    for name in sorted(close.watermarks.keys() | old_marks.keys() | disposed.keys()):
        old = watermark_of(old_marks, name)
        new = close.watermarks.get(name)
        if new is None:
            walk.ledger.broken("watermarks", key, f"{name} has no watermark any more")
            continue
        if new.seq < old.seq:
            walk.ledger.broken("watermarks", key, f"that of {name} falls from {old.seq} to {new.seq}")
            continue
        numbers = sorted(disposed.get(name, []))
        # Lengths first: a watermark that somebody made up may be any number.
        if len(numbers) != new.seq - old.seq or numbers != list(range(old.seq + 1, new.seq + 1)):
            walk.ledger.broken(
                "watermarks",
                key,
                f"that of {name} goes from {old.seq} to {new.seq}, but the close disposes of {_shown(numbers)}",
            )
        expected = close.version if name in chosen_islands else old.version
        if new.version != expected:
            walk.ledger.broken(
                "watermarks", key, f"{name} last contributed to version {expected}, it says {new.version}"
            )


def _audit_staleness(walk: _Walk, item: Chosen, key: str) -> None:
    staleness = walk.version - 1 - item.base_version
    if item.staleness != staleness:
        walk.ledger.broken(
            "staleness", key, f"{item.island} {item.seq} has staleness {staleness}, the close says {item.staleness}"
        )
    elif staleness > walk.run.run.settings.policy.max_staleness:
        walk.ledger.broken("staleness", key, f"{item.island} {item.seq} is staler than max_staleness: {staleness}")


def _audit_receipt(walk: _Walk, item: Chosen) -> Receipt | None:
    """The receipt of a chosen contribution; None if it cannot be read."""
    key, ledger = keys.receipt(item.island, walk.fragment, item.seq), walk.ledger
    try:
        data, receipt = _read(walk, key, Receipt)
    except NotFound:
        ledger.broken("receipts", key, f"is missing, but version {walk.version} took it")
        return None
    except Corrupt as error:
        ledger.broken("receipts", walk.place, f"{item.island} {item.seq}: {error.message}")
        return None
    if record_digest(data) != item.receipt:
        ledger.broken("receipts", key, f"has digest {record_digest(data)}, the close says {item.receipt}")
    if receipt is None:
        return None
    for name in ("island", "seq", "generation", "base_version", "steps", "tokens", "parts"):
        if getattr(receipt, name) != getattr(item, name):
            ledger.broken("receipts", key, f"differs from the close of version {walk.version} in {name}")
    if receipt.fragment != walk.fragment:
        ledger.broken("receipts", key, f"is for fragment {receipt.fragment}")
    newest = walk.generations.get(item.island, 0)
    if receipt.generation < newest:
        ledger.broken("numbering", key, f"is of generation {receipt.generation}, after one of generation {newest}")
    walk.generations[item.island] = max(newest, receipt.generation)
    island = walk.listing.islands.get(item.island)
    listed = island.generations.highest if island else 0
    if receipt.generation > listed and not exists(walk.store, keys.generation(item.island, receipt.generation)):
        ledger.note("numbering", key, f"is of generation {receipt.generation}, which does not exist")
    return receipt


def _check_weights(walk: _Walk, key: str, items: tuple[Chosen, ...] | tuple[Merged, ...]) -> None:
    """An island has one weight and one clipping factor, however many contributions; weights of all sum to 1."""
    weights = {item.island: item.weight for item in items}
    for item in items:
        if item.weight != weights[item.island]:
            walk.ledger.broken(
                "weights", key, f"{item.island} has two weights, {item.weight!r} and {weights[item.island]!r}"
            )
    clips = {item.island: item.clip for item in items if isinstance(item, Merged)}
    for item in items:
        if isinstance(item, Merged) and (item.clip != clips[item.island] or (item.clip < 1.0 and not walk.clips)):
            walk.ledger.broken("weights", key, f"{item.island} is clipped by {item.clip!r}, against the run's settings")
    total = math.fsum(weights.values())
    if not abs(total - 1.0) <= WEIGHT_TOLERANCE:
        walk.ledger.broken("weights", key, f"the weights of the islands sum to {total!r}")


def _audit_disposal(walk: _Walk, close: Close, commit: Commit) -> None:
    """Chosen = merged ∪ rejected, each once; merged as chosen; payloads of the merged are there."""
    key, ledger = keys.commit(walk.fragment, walk.version), walk.ledger
    chosen = {(item.island, item.seq): item for item in close.chosen}
    merged = Counter((item.island, item.seq) for item in commit.merged)
    rejected = Counter((item.island, item.seq) for item in commit.rejected)
    for island, seq in sorted(merged.keys() | rejected.keys() | chosen.keys()):
        one = (island, seq)
        mark = watermark_of(walk.watermarks or {}, island).seq
        if merged[one] > 1 or (merged[one] and walk.watermarks is not None and seq <= mark):
            ledger.broken("once", key, f"{island} {seq} is merged again (its watermark was {mark})")
        elif merged[one] + rejected[one] != 1 or one not in chosen:
            how = f"{merged[one]} times merged, {rejected[one]} times rejected"
            ledger.broken("accounted", key, f"{island} {seq} is {'' if one in chosen else 'not '}in the close, {how}")
    share = math.fsum({island: item.weight for (island, seq), item in chosen.items() if merged[island, seq]}.values())
    for found in commit.merged:
        item = chosen.get((found.island, found.seq))
        if item is None:
            continue
        if (found.staleness, found.tokens) != (item.staleness, item.tokens):
            ledger.broken("accounted", key, f"staleness or tokens of {found.island} {found.seq} are not the close's")
        # The weight of an island of which everything was rejected is shared out among those that are left.
        if share > 0.0 and not math.isclose(found.weight * share, item.weight, abs_tol=WEIGHT_TOLERANCE):
            ledger.broken(
                "weights", key, f"{found.island} {found.seq} has weight {found.weight!r}, not its share of the close"
            )
        _audit_payload(walk, item)
    walk.intervals.add({one: receipt for one, receipt in walk.receipts.items() if merged[one]})


def _audit_payload(walk: _Walk, item: Chosen) -> None:
    """The bytes of a merged contribution: needed to make this version again, as long as the one before is kept."""
    before = walk.version - 1
    if before < walk.kept.horizon:
        return
    with contextlib.suppress(Collected):
        for part in item.parts:
            audit_object(walk.store, part, before, "payloads", walk.kept, walk.ledger)


def _audit_tally(walk: _Walk, close: Close, commit: Commit) -> None:
    """The tally is that of the version before, plus what this one did. A fault is reported where it arises."""
    key = keys.commit(walk.fragment, walk.version)
    expected = dict(walk.tally)
    chosen = {(item.island, item.seq): item for item in close.chosen}

    def add(island: str, **counts: int) -> None:
        old = expected.get(island, Tally())
        expected[island] = msgspec.structs.replace(
            old, **{name: min(COUNT_MAX, getattr(old, name) + value) for name, value in counts.items()}
        )

    for item in commit.merged:
        source = chosen.get((item.island, item.seq))
        add(
            item.island,
            accepted=1,
            discounted=int(item.staleness > 0),
            steps=source.steps if source else 0,
            tokens=item.tokens,
        )
    for lost in close.skipped:
        add(lost.island, skipped=1)
    for lost in commit.rejected:
        add(lost.island, rejected=1)
    for name in sorted(expected.keys() | commit.tally.keys()):
        if expected.get(name, Tally()) != commit.tally.get(name, Tally()):
            walk.ledger.broken("tallies", key, f"that of {name} is not the one before plus this version")
    tokens = min(COUNT_MAX, walk.tokens + sum(item.tokens for item in commit.merged))
    if commit.tokens != tokens:
        walk.ledger.broken("tallies", key, f"{tokens} tokens were merged so far, it says {commit.tokens}")


def _read(walk: _Walk, key: str, kind: type[Record]) -> tuple[bytes, Record | None]:
    """A record and its bytes; a record that cannot be read is a finding.

    Raises:
        NotFound: It does not exist.
        Corrupt: `key` is no key, or a receipt is bigger than one may be.
    """
    data, _ = read_limited(walk.store, key) if kind is Receipt else walk.store.get(key)
    walk.ledger.count(objects_read=1, bytes_read=len(data))
    try:
        return data, decode(data, kind, run=walk.run.digest)
    except Corrupt as error:
        walk.ledger.broken("records", key, error.message)
        return data, None


def _shown(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    text = ", ".join(str(number) for number in numbers[:8])
    return text if len(numbers) <= 8 else f"{text} and {len(numbers) - 8} more"
