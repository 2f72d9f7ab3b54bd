"""Auditing which inner steps contributions cover: nobody's steps may be merged twice.

A contribution covers the steps `step_to` − `steps` to `step_to` of its island. One start of an island moves on from one
contribution to the next, so its contributions never overlap. Those of two starts may: where an older process was still
sending when a newer one began, both trained from the same step on, each on its own. That is two works under the same
step numbers, and harms nobody; it is noted. The same *bytes* over the same steps are one work that was merged twice.
"""

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from diloco_blob.protocol import keys
from diloco_blob.protocol.audit.report import Ledger
from diloco_blob.protocol.records import Receipt

INTERVALS_KEPT = 64
"""Merged contributions of each island that the next one is compared with: the newest."""


class Interval(Struct, frozen=True):
    """The steps of a merged contribution, and whose they are."""

    seq: int
    generation: int
    begin: int
    end: int
    payloads: tuple[str, ...]
    """Digests of its parts."""


class Intervals:
    """What was merged of each island into one fragment, lately.

    Args:
        fragment: Which fragment.
        ledger: Where findings go.
    """

    def __init__(self, fragment: int, ledger: Ledger) -> None:
        self._fragment = fragment
        self._ledger = ledger
        self._merged: dict[str, deque[Interval]] = {}

    def add(self, receipts: Mapping[tuple[str, int], Receipt]) -> None:
        """Compare the merged contributions of a version, by island and number, with those before."""
        for (island, seq), receipt in sorted(receipts.items(), key=lambda item: item[0]):
            new = Interval(
                seq=seq,
                generation=receipt.generation,
                begin=receipt.step_to - receipt.steps,
                end=receipt.step_to,
                payloads=tuple(part.digest for part in receipt.parts),
            )
            merged = self._merged.setdefault(island, deque(maxlen=INTERVALS_KEPT))
            # One number merged twice is another promise's matter.
            common = [old for old in merged if old.begin < new.end and new.begin < old.end and old.seq != new.seq]
            if common:
                self._judge(keys.receipt(island, self._fragment, seq), new, common)
            merged.append(new)

    def _judge(self, key: str, new: Interval, common: list[Interval]) -> None:
        again = next((old for old in common if old.payloads == new.payloads), None)
        if again is not None:
            self._ledger.broken("steps", key, f"has the very bytes of contribution {again.seq}, over the same steps")
            return
        own = next((old for old in common if old.generation == new.generation), None)
        old = own or common[0]
        what = f"covers steps {max(old.begin, new.begin) + 1} to {min(old.end, new.end)}, as contribution {old.seq}"
        if own is not None:
            self._ledger.broken("steps", key, f"{what} of the same start of the island does")
        else:
            self._ledger.count(overlaps=1)
            self._ledger.note("steps", key, f"{what} of start {old.generation} does, as work of its own")
