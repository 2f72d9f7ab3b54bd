"""What became of an island's contributions that no version has: read from closes and commits.

A close says whom it skipped, a commit whom its merge rejected; the commit's tally says how many of an island there were
so far. So closes are read only for versions between which the tally has grown.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.core.limits import PSEUDO_GRADIENT_ABS_MAX
from diloco_blob.core.settings import Codec
from diloco_blob.island.arrays import Arrays
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, RunInfo, read_head
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import Close, Receipt, Skipped, Tally, decode
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import codec_for, decode_payload, verified

log = logging.getLogger(__name__)

_VERSIONS_MAX = 256
"""Versions that are looked through at once; whoever was away for longer starts with nothing owed from before."""


def num_unmerged(tally: Mapping[str, Tally], island: str) -> int:
    """How many contributions of an island no version has, though they are history."""
    mine = tally.get(island, Tally())
    return mine.skipped + mine.rejected


def unmerged(store: ObjectStore, run: RunInfo, island: str, after: Head, heads: Sequence[Head]) -> tuple[int, ...]:
    """Numbers of the island's contributions that became history without being merged, oldest first.

    Args:
        store: The run's store.
        run: Its `run.json`.
        island: Whose.
        after: The version whose history is known.
        heads: Later versions of the fragment that are at hand, the newest last.

    Raises:
        Unavailable: The store did not answer.
        Corrupt: A commit is not what its name says.
    """
    newest = heads[-1]
    if num_unmerged(newest.tally, island) == num_unmerged(after.tally, island):
        return ()
    known = {head.version: head for head in heads}
    first = max(after.version, newest.version - _VERSIONS_MAX) + 1
    found: list[int] = []
    for version in range(first, newest.version + 1):
        head = known.get(version) or read_head(store, run, newest.fragment, version)
        found += _numbers((*_skipped(store, run, island, head), *(head.commit.rejected if head.commit else ())), island)
    return tuple(sorted(found))


def _skipped(store: ObjectStore, run: RunInfo, island: str, head: Head) -> tuple[Skipped, ...]:
    """What the close of a version skipped; nothing if it cannot be read: the weights are there all the same."""
    try:
        return decode(store.get(keys.close(head.fragment, head.version))[0], Close, run=run.digest).skipped
    except (NotFound, Corrupt) as error:
        log.warning("island %s: what version %d skipped is not owed again: %s", island, head.version, error)
        return ()


def _numbers(entries: Iterable[Skipped], island: str) -> list[int]:
    """Not of what was malformed: sent again it would be so again, and what is owed would grow without end."""
    return [entry.seq for entry in entries if entry.island == island and not entry.reason.startswith("malformed")]


def sent_before(store: ObjectStore, run: RunInfo, island: str, fragment: int, seq: int, codec: Codec) -> Arrays | None:
    """What a contribution of this island decodes to, from its own payload in the bucket.

    Returns:
        Its tensors; None if it cannot be had any more, or was rejected rightly: then nothing is owed of it.

    Raises:
        Unavailable: The store did not answer.
    """
    layout = fragment_layout(run.run.tensors, fragment)
    try:
        data, _ = read_limited(store, keys.receipt(island, fragment, seq))
        receipt = decode(data, Receipt, run=run.digest)
        (part,) = receipt.parts
        chunks: Iterator[bytes] = verified([store.get(part.key)[0]], part.digest)
        found = dict(decode_payload(chunks, layout, codec_for(codec, receipt.base_version + 1)))
    except (NotFound, Corrupt, ValueError) as error:
        log.warning("island %s: contribution %d to fragment %d is not owed again: %s", island, seq, fragment, error)
        return None
    # Rejected for its size, it would be rejected again.
    return found if all(_moderate(values) for values in found.values()) else None


def _moderate(values: np.ndarray) -> bool:
    return bool(np.max(np.abs(values), initial=0.0) <= PSEUDO_GRADIENT_ABS_MAX)
