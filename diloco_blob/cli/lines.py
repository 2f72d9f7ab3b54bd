"""How versions read in one line: who was merged, with what weight, and who was not."""

from collections.abc import Iterable

from diloco_blob.protocol.records import Commit, Merged, Skipped


def version_line(
    fragment: int,
    num_fragments: int,
    version: int,
    merged: Iterable[Merged],
    skipped: Iterable[Skipped] = (),
    rejected: Iterable[Skipped] = (),
) -> str:
    """One version, for people.

    Args:
        fragment: Of which fragment.
        num_fragments: Of how many; a run with one does not name it.
        version: Its number.
        merged: What is in it.
        skipped: What the close left out, and why.
        rejected: What could not be merged, and why.
    """
    where = f"fragment {fragment} " if num_fragments > 1 else ""
    islands: dict[str, list[Merged]] = {}
    for item in merged:
        islands.setdefault(item.island, []).append(item)
    told = ", ".join(_island(items) for items in islands.values())
    parts = [f"{where}version {version}: {told or 'nothing merged'}"]
    parts += [f"skipped {item.island} {item.seq} ({item.reason})" for item in skipped]
    parts += [f"rejected {item.island} {item.seq} ({item.reason})" for item in rejected]
    return "; ".join(parts)


def commit_line(commit: Commit, num_fragments: int) -> str:
    """One version as its commit has it; what its close skipped is not in there."""
    return version_line(commit.fragment, num_fragments, commit.version, commit.merged, rejected=commit.rejected)


def _island(items: list[Merged]) -> str:
    """One island: its weight, and how many contributions there are if more than one, how stale if not fresh."""
    staleness = max(item.staleness for item in items)
    details = [f"{len(items)} contributions"] if len(items) > 1 else []
    details += [f"staleness {staleness}"] if staleness else []
    return f"{items[0].island} {items[0].weight:.3f}" + (f" ({', '.join(details)})" if details else "")
