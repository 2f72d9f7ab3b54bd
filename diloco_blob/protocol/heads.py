"""Finding a fragment's newest version without walking its history.

Commits are created in order and never deleted, so "commit v exists" is true up to the head and false after it. Doubling
steps find an upper bound and bisection the head: O(log v) small requests, or two when a good hint is at hand.
"""

from collections.abc import Mapping

from msgspec import Struct

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import Commit, Run, Tally, Watermark, Weights, decode, record_digest
from diloco_blob.store.base import ObjectStore


class Head(Struct, frozen=True):
    """A version of a fragment, as its commit (or `run.json` for version 0) describes it."""

    fragment: int
    version: int
    digest: str
    """Of the commit record; the parent of the next one."""
    weights: Weights
    created_at: float
    """When the version appeared, by the store's clock."""
    commit: Commit | None = None
    """None for version 0."""

    @property
    def tally(self) -> dict[str, Tally]:
        """What became of each island's contributions so far."""
        return self.commit.tally if self.commit else {}


class RunInfo(Struct, frozen=True):
    """`run.json` as read: the record, the digest of its bytes, and when it was created."""

    run: Run
    digest: str
    created_at: float


def read_run(store: ObjectStore) -> RunInfo:
    """Read `run.json`.

    Raises:
        NotFound: There is no run at this URL, or not even the bucket.
        Corrupt: It cannot be read by this program.
    """
    try:
        data, info = store.get(keys.RUN)
    except NotFound as error:
        if keys.RUN not in error.message:
            raise  # It is the bucket that does not exist, and the store says so.
        raise NotFound(
            f"there is no run at {store.url}", "check the URL; an island creates the run when it starts"
        ) from error
    try:
        run = decode(data, Run)
    except Corrupt as error:
        raise Corrupt(f"{keys.RUN} in {store.url}: {error.message}", error.hint) from error
    return RunInfo(run=run, digest=record_digest(data), created_at=info.last_modified)


def read_head(store: ObjectStore, run: RunInfo, fragment: int, version: int) -> Head:
    """One version of a fragment.

    Raises:
        NotFound: It does not exist (yet).
        Corrupt: The record is not readable, or not the one its name says.
    """
    if version == 0:
        return Head(
            fragment=fragment,
            version=0,
            digest=run.digest,
            weights=run.run.fragments[fragment],
            created_at=run.created_at,
        )
    data, info = store.get(keys.commit(fragment, version))
    commit = decode(data, Commit, run=run.digest)
    _check_place(commit.fragment, commit.version, fragment, version)
    return Head(
        fragment=fragment,
        version=version,
        digest=record_digest(data),
        weights=commit.weights,
        created_at=info.last_modified,
        commit=commit,
    )


def find_head(store: ObjectStore, run: RunInfo, fragment: int, *, hint: int = 0) -> Head:
    """The newest version of a fragment.

    Args:
        store: The run's store.
        run: Its `run.json`.
        fragment: Which fragment.
        hint: A version that is known to exist.
    """
    return read_head(store, run, fragment, newest_version(store, fragment, hint=hint))


def newest_version(store: ObjectStore, fragment: int, *, hint: int = 0) -> int:
    """The number of the newest version, without reading its commit; `hint` as for `find_head`."""
    low, step = hint, 1
    while exists(store, keys.commit(fragment, low + step)):
        low += step
        step *= 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if exists(store, keys.commit(fragment, middle)):
            low = middle
        else:
            high = middle
    return low


def exists(store: ObjectStore, key: str) -> bool:
    """Whether there is an object of this name: one HEAD."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def _check_place(found_fragment: int, found_version: int, fragment: int, version: int) -> None:
    if (found_fragment, found_version) != (fragment, version):
        raise Corrupt(
            f"the commit of fragment {fragment}, version {version}, says it is of {found_fragment}, {found_version}"
        )


def watermark_of(watermarks: Mapping[str, Watermark], island: str) -> Watermark:
    """An island's watermark; that of a newcomer is zero."""
    return watermarks.get(island, Watermark(seq=0, version=0))
