"""Auditing bytes: objects are what the records say, and each version follows from the one before.

Of versions that were collected nothing is asked, and the first one that is kept is checked by its digest alone, since
the weights before it are gone.
"""

import contextlib
from collections.abc import Iterable, Iterator

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.protocol.audit.kept import Collected, Kept
from diloco_blob.protocol.audit.report import Ledger
from diloco_blob.protocol.heads import RunInfo
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.records import Commit, ObjectRef, Weights
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import (
    FloatArray,
    Layout,
    WeightsDigest,
    codec_for,
    decode_payload,
    read_tensor_stream,
    verified,
)

CHUNK_BYTES = 8 << 20

Tensors = Iterator[tuple[str, FloatArray]]


class _Broken(Exception):  # noqa: N818 - never leaves this module
    """One of several objects that are read side by side is not what it should be."""

    def __init__(self, ref: ObjectRef, error: NotFound | Corrupt) -> None:
        super().__init__(_missing_or(error))
        self.ref = ref
        self.error = error


def audit_initial(store: ObjectStore, run: RunInfo, fragment: int, kept: Kept, ledger: Ledger) -> bool:
    """Version 0 of a fragment; returns whether its weights are there and sound."""
    layout = fragment_layout(run.run.tensors, fragment)
    try:
        return kept.horizon == 0 and _audit_params(store, run.run.fragments[fragment], 0, layout, kept, ledger)
    except Collected:
        return False


def audit_objects(
    store: ObjectStore, run: RunInfo, commit: Commit, previous: Weights | None, kept: Kept, ledger: Ledger
) -> bool:
    """The objects that a commit names, and that its weights follow from those before.

    Args:
        store: The run's store.
        run: Its `run.json`.
        commit: The version.
        previous: Weights of the version before; None if they are collected or known to be broken.
        kept: Which versions must be there.
        ledger: Where findings go.

    Returns:
        Whether the weights of this version are there and sound.
    """
    try:
        return commit.version >= kept.horizon and _audit_version(store, run, commit, previous, kept, ledger)
    except Collected:
        return False


def _audit_version(
    store: ObjectStore, run: RunInfo, commit: Commit, previous: Weights | None, kept: Kept, ledger: Ledger
) -> bool:
    version = commit.version
    audit_object(store, commit.outer, version, "objects", kept, ledger)
    layout = fragment_layout(run.run.tensors, commit.fragment)
    if previous is None:
        audit_object(store, commit.update, version, "objects", kept, ledger)
        return _audit_params(store, commit.weights, version, layout, kept, ledger)
    try:
        difference, found = _walk(store, run, commit, previous, layout, ledger)
    except _Broken as broken:
        if broken.ref == previous.params and isinstance(broken.error, NotFound):
            with contextlib.suppress(Collected):
                kept.check_missing(version - 1)
                ledger.broken("objects", broken.ref.key, _missing_or(broken.error))
            return _audit_version(store, run, commit, None, kept, ledger)
        _report(broken.ref, version, "objects", broken.error, kept, ledger)
        if broken.ref == commit.weights.params:
            audit_object(store, commit.update, version, "objects", kept, ledger)
            return False
        return _audit_params(store, commit.weights, version, layout, kept, ledger)
    if difference is not None:
        ledger.broken(
            "update",
            commit.update.key,
            f"tensor {difference!r} of version {commit.version} is not the one before minus this",
        )
    return _check_digest(commit.weights, found, ledger)


def audit_object(store: ObjectStore, ref: ObjectRef, version: int, promise: str, kept: Kept, ledger: Ledger) -> None:
    """That an object, needed as long as `version` is kept, is there and has the bytes that a record says.

    Raises:
        Collected: It is not there and need not be: the run went on meanwhile.
    """
    try:
        for _ in _bytes(store, ref, ledger):
            pass
    except (NotFound, Corrupt) as error:
        _report(ref, version, promise, error, kept, ledger)


def _report(ref: ObjectRef, version: int, promise: str, error: NotFound | Corrupt, kept: Kept, ledger: Ledger) -> None:
    if isinstance(error, NotFound):
        kept.check_missing(version)
    ledger.broken(promise, ref.key, _missing_or(error))


def _audit_params(
    store: ObjectStore, weights: Weights, version: int, layout: Layout, kept: Kept, ledger: Ledger
) -> bool:
    state = WeightsDigest()
    try:
        for name, values in read_tensor_stream(_bytes(store, weights.params, ledger), layout, weights.params.size):
            state.update(name, values)
    except (NotFound, Corrupt) as error:
        _report(weights.params, version, "objects", error, kept, ledger)
        return False
    return _check_digest(weights, state.hexdigest(), ledger)


def _check_digest(weights: Weights, found: str, ledger: Ledger) -> bool:
    if found == weights.digest:
        return True
    ledger.broken("digest", weights.params.key, f"its weights have digest {found}, the commit says {weights.digest}")
    return False


def _walk(
    store: ObjectStore, run: RunInfo, commit: Commit, previous: Weights, layout: Layout, ledger: Ledger
) -> tuple[str | None, str]:
    """Read old, update and new side by side: the first tensor that does not follow, and the digest of the new."""
    codec = codec_for(run.run.settings.down, commit.version)
    old_ref, new_ref = previous.params, commit.weights.params
    old = _blamed(old_ref, read_tensor_stream(_bytes(store, old_ref, ledger), layout, old_ref.size))
    update = _blamed(commit.update, decode_payload(_bytes(store, commit.update, ledger), layout, codec))
    new = _blamed(new_ref, read_tensor_stream(_bytes(store, new_ref, ledger), layout, new_ref.size))
    state, difference = WeightsDigest(), None
    for (name, before), (_, change), (_, after) in zip(old, update, new, strict=True):
        state.update(name, after)
        if difference is None and (before - change).tobytes() != after.tobytes():
            difference = name
    return difference, state.hexdigest()


def _blamed(ref: ObjectRef, tensors: Iterable[tuple[str, FloatArray]]) -> Tensors:
    try:
        yield from tensors
    except (NotFound, Corrupt) as error:
        raise _Broken(ref, error) from error


def _bytes(store: ObjectStore, ref: ObjectRef, ledger: Ledger) -> Iterator[bytes]:
    """The bytes of an object in pieces; at their end it is certain that they are the right ones."""
    return verified(_pieces(store, ref, ledger), ref.digest)


def _pieces(store: ObjectStore, ref: ObjectRef, ledger: Ledger) -> Iterator[bytes]:
    size = store.head(ref.key).size
    if size != ref.size:
        raise Corrupt(f"has {size} bytes, the record says {ref.size}")
    ledger.count(objects_read=1)
    for start in range(0, size, CHUNK_BYTES):
        piece = store.get_range(ref.key, start, min(CHUNK_BYTES, size - start))
        ledger.count(bytes_read=len(piece))
        yield piece


def _missing_or(error: NotFound | Corrupt) -> str:
    return "is missing" if isinstance(error, NotFound) else error.message
