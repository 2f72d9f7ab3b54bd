"""How the weights of a version come to an island that has those of an earlier one: bit-exact, and in few bytes.

The mirror is advanced by the coded updates in between and checked against the digest in the commit; if it differs, if
an update is gone, or if the params are fewer bytes, the params are fetched. Whoever is behind by several versions is
told which it was.
"""

import logging

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.island.arrays import Arrays, difference
from diloco_blob.protocol.heads import Head, RunInfo, find_head, read_head
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import ObjectRef
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import codec_for, decode_payload, digest, read_tensors, weights_digest

log = logging.getLogger(__name__)

_WALK_MAX = 4
"""Versions that are followed one by one; from further behind the head is searched for."""

_UPDATES_MAX = 256
"""Updates that are fetched at once; from further behind the params are fetched, whatever their size."""


def newer(store: ObjectStore, run: RunInfo, fragment: int, version: int) -> list[Head]:
    """The versions after one that is known: all of them, without a gap, or the newest alone if the params are cheaper.

    Args:
        store: The run's store.
        run: Its `run.json`.
        fragment: Which fragment.
        version: The one whose weights are known.
    """
    heads: list[Head] = []
    while len(heads) < _WALK_MAX:
        try:
            heads.append(read_head(store, run, fragment, version + len(heads) + 1))
        except NotFound:
            return heads
    newest = find_head(store, run, fragment, hint=heads[-1].version)
    between = range(heads[-1].version + 1, newest.version)
    behind = newest.version - version
    mean_bytes = sum(head.commit.update.size for head in heads if head.commit) / len(heads)
    kept = run.run.settings.collect.keep_versions or _UPDATES_MAX
    if behind > min(kept, _UPDATES_MAX) or mean_bytes * behind > newest.weights.params.size:
        return [newest]
    heads += [read_head(store, run, fragment, other) for other in between]
    return heads if newest.version == heads[-1].version else [*heads, newest]


def advance(
    store: ObjectStore, run: RunInfo, island: str, heads: list[Head], version: int, mirror: Arrays
) -> tuple[Head, Arrays]:
    """The weights of the newest of `heads`, or of a later version where those were collected meanwhile.

    Args:
        store: The run's store.
        run: Its `run.json`.
        island: Who asks, for its log.
        heads: As `newer` gives them.
        version: The one whose weights are known.
        mirror: These weights; not written to.

    Raises:
        Corrupt: The newest weights do not match their digest.
        Unavailable: The store did not answer.
    """
    newest, behind = heads[-1], heads[-1].version - version
    updates = [head.commit.update for head in heads if head.commit]
    update_bytes, params_bytes = sum(update.size for update in updates), newest.weights.params.size
    by_updates = len(updates) == behind and update_bytes <= params_bytes
    if behind > 1:
        what = (
            f"their updates, {update_bytes:,} bytes, rather than the params, {params_bytes:,}"
            if by_updates
            else f"the params, {params_bytes:,} bytes, rather than {behind} updates"
        )
        log.info("island %s: %d versions of fragment %d behind: fetching %s", island, behind, newest.fragment, what)
    if by_updates:
        try:
            return newest, _updated(store, run, newest, updates, mirror)
        except NotFound as error:
            log.info("island %s: fetching the params instead: %s", island, error)
        except Corrupt as error:
            log.warning("island %s: fetching the params instead: %s", island, error)
    return fetch_params(store, run, newest)


def _updated(store: ObjectStore, run: RunInfo, newest: Head, updates: list[ObjectRef], mirror: Arrays) -> Arrays:
    layout = fragment_layout(run.run.tensors, newest.fragment)
    for version, update in enumerate(updates, newest.version - len(updates) + 1):
        codec = codec_for(run.run.settings.down, version)
        mirror = difference(mirror, dict(decode_payload([fetch(store, update)], layout, codec)))
    if weights_digest(mirror) != newest.weights.digest:
        raise Corrupt(f"fragment {newest.fragment} version {newest.version}: weights differ from the commit's")
    return mirror


def fetch(store: ObjectStore, ref: ObjectRef) -> bytes:
    """The bytes of an object, checked.

    Raises:
        NotFound: It does not exist (any more).
        Corrupt: Its bytes are not what the reference says.
    """
    data, _ = store.get(ref.key)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise Corrupt(f"{ref.key} does not match its digest")
    return data


def fetch_params(store: ObjectStore, run: RunInfo, head: Head) -> tuple[Head, Arrays]:
    """The weights of a version or, where they were collected meanwhile, of the newest one.

    Raises:
        Corrupt: The newest weights do not match their digest.
    """
    while True:
        try:
            data = fetch(store, head.weights.params)
        except NotFound:
            newer = find_head(store, run, head.fragment, hint=head.version)
            if newer.version == head.version:
                raise
            head = newer
            continue
        layout = fragment_layout(run.run.tensors, head.fragment)
        arrays = dict(read_tensors(data, layout))
        if weights_digest(arrays) != head.weights.digest:
            raise Corrupt(f"{head.weights.params.key}: weights differ from the commit's")
        return head, arrays
