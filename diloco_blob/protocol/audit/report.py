"""What an audit can find, by stable names, and what it found."""

from collections import Counter
from typing import Literal

import msgspec
from msgspec import Struct

PROMISES = {
    "run": "run.json describes one layout, and version 0 of every fragment",
    "records": "every record that decides what is merged can be read, is of this run, and is what its name says",
    "chain": "the commits of a fragment run from 1 to the head without a gap, each naming its parent by digest",
    "closes": "every version has its close, named by the commit's digest, which names the same parent",
    "head": "nothing lies beyond the head except, perhaps, the close of the next version",
    "watermarks": "watermarks only rise, and each close disposes of exactly the contributions in between",
    "accounted": "every contribution that a close chose was either merged, as the close says, or rejected",
    "once": "no contribution was merged twice",
    "steps": "no steps were merged twice: by the same bytes, or by contributions of one start of an island",
    "weights": "each island has one weight in a version, none negative, and they sum to 1",
    "staleness": "staleness is the version before minus the version that the contribution started from",
    "receipts": "every chosen contribution has its receipt, with the digest and the figures that the close names",
    "payloads": "the payload of every contribution merged since the oldest kept version is what its receipt says",
    "objects": "params, outer state and update of every kept version are there and are what the commit says",
    "digest": "the weights of every kept version have the digest in its commit",
    "update": "every kept version is the kept one before minus its update, bit for bit",
    "tallies": "what commits say became of each island's contributions adds up",
    "numbering": "merged and skipped receipts are numbered from 1 without a gap, and their generations only rise",
    "layout": "nothing lies in the bucket that does not belong there",
    "decision": "with --replay: skips, staleness, weights and discount of a close are what receipts and settings give",
    "rejections": "with --replay: what was rejected while merging is exactly what must be, for such reasons",
    "merge": "with --replay: clipping, weights, params, outer state and update follow bit for bit from the close",
}
"""Stable identifiers of what is checked, and what each promises."""

FINDINGS_MAX = 10_000
"""Findings of each level that are kept; a bucket with more is not worth a longer list. However many notes there are,
what is broken is heard of."""


class Finding(Struct, frozen=True):
    """One thing that is not as it should be."""

    promise: str
    """A key of `PROMISES`."""
    where: str
    """Object key or place."""
    what: str
    """In one line."""
    level: Literal["broken", "note"] = "broken"
    """A note breaks no promise."""


class AuditCounts(Struct, frozen=True):
    """What was looked at."""

    fragments: int = 0
    islands: int = 0
    commits: int = 0
    """Versions from 1 on, over all fragments."""
    merged: int = 0
    skipped: int = 0
    rejected: int = 0
    overlaps: int = 0
    """Merged contributions whose steps an earlier start of their island had sent too, as different work: each is noted,
    and breaks no promise."""
    pending: int = 0
    """Contributions whose receipts are above the watermark: still to be merged."""
    pending_closes: int = 0
    """Rounds that are closed and not yet committed."""
    orphans: int = 0
    """Params, outer and update objects that no kept version names: `diloco-blob gc` deletes them, but for those of
    versions still to come."""
    collected: int = 0
    """Versions, 0 included, over all fragments, whose objects may be deleted and were not read."""
    objects_read: int = 0
    bytes_read: int = 0


class AuditReport(Struct, frozen=True):
    """What an audit found."""

    findings: tuple[Finding, ...]
    counts: AuditCounts

    @property
    def ok(self) -> bool:
        """Whether no promise is broken."""
        return all(finding.level != "broken" for finding in self.findings)


class Ledger:
    """Where the parts of an audit write what they find."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._num_kept: Counter[str] = Counter()
        self._counts = AuditCounts()

    @property
    def commits(self) -> int:
        """Versions seen so far."""
        return self._counts.commits

    def broken(self, promise: str, where: str, what: str) -> None:
        """A promise does not hold."""
        self._add(Finding(promise=promise, where=where, what=what))

    def note(self, promise: str, where: str, what: str) -> None:
        """Something is odd, but no promise is broken."""
        self._add(Finding(promise=promise, where=where, what=what, level="note"))

    def count(self, **added: int) -> None:
        """Add to the counts, by the names of `AuditCounts`."""
        counts = {name: getattr(self._counts, name) + value for name, value in added.items()}
        self._counts = msgspec.structs.replace(self._counts, **counts)

    def report(self) -> AuditReport:
        """All that was found."""
        return AuditReport(findings=tuple(self._findings), counts=self._counts)

    def _add(self, finding: Finding) -> None:
        assert finding.promise in PROMISES, finding.promise  # noqa: S101 - a programmer's error
        if self._num_kept[finding.level] < FINDINGS_MAX:
            self._num_kept[finding.level] += 1
            self._findings.append(finding)
