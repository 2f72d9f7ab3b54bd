"""What became of each island's contributions, carried from commit to commit so that nobody need walk the history."""

from collections.abc import Iterable, Mapping

import msgspec

from diloco_blob.protocol.records import COUNT_MAX, Chosen, Skipped, Tally


def capped_sum(*counts: int) -> int:
    """Their sum, at most what a record may hold: figures come from islands, and must not make a commit unreadable."""
    return min(sum(counts), COUNT_MAX)


def updated_tally(
    tally: Mapping[str, Tally],
    *,
    merged: Iterable[Chosen],
    skipped: Iterable[Skipped],
    rejected: Iterable[Skipped],
) -> dict[str, Tally]:
    """The tally after one more version, by island.

    Args:
        tally: As of the parent.
        merged: What is in the version.
        skipped: What its close skipped.
        rejected: What was rejected while merging.
    """
    after = dict(tally)

    def add(island: str, **counts: int) -> None:
        old = after.get(island, Tally())
        after[island] = msgspec.structs.replace(
            old, **{name: capped_sum(getattr(old, name), count) for name, count in counts.items()}
        )

    for chosen in merged:
        late = int(chosen.staleness > 0)
        add(chosen.island, accepted=1, discounted=late, steps=chosen.steps, tokens=chosen.tokens)
    for entry in skipped:
        add(entry.island, skipped=1)
    for entry in rejected:
        add(entry.island, rejected=1)
    return dict(sorted(after.items()))
