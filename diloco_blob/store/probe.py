"""Tests whether a store does what the protocol relies on, before anything relies on it.

Several popular gateways answer 200 to *create if absent* and overwrite; others are right one request at a
time and wrong in a race. A run on such a store would lose work without a word, so run creation and `launch`
refuse it.
"""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound
from diloco_blob.core.ids import Ids
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.retrying import RetryingStore

_CLOCK_TOLERANCE_S = 30.0
_RACE_TIMEOUT_S = 120.0
_SOMETHING = "run.json"
"""Asked for, whether it is there or not, before anything is written: a store that does not answer is told by one
request and its retries, not by a race of them."""


def probe(store: ObjectStore, ids: Ids, racers: int = 4) -> list[str]:
    """Race creates for one new name and look at what the store makes of it. Removes what it wrote.

    Args:
        store: A backend, or one with retries around it.
        ids: Makes the name, which is never used again, and the racers' write ids.
        racers: Threads that create the same object at the same moment.

    Returns:
        What was found to be right, a line each.

    Raises:
        InvalidSettings: The store cannot carry a run, with the reason.
        Unavailable, Denied, NotFound: It could not be tested.
    """
    with contextlib.suppress(NotFound, Denied):  # of these, what is asked next says more
        store.head(_SOMETHING)
    key = f"probes/{ids.fresh()}/race.json"
    bodies = [json.dumps({"racer": racer, "write_id": ids.fresh()}).encode() for racer in range(racers)]
    try:
        return _examine(store, key, bodies)
    finally:
        with contextlib.suppress(DilocoError):  # no run needs the right to delete, and one small object harms nobody
            _bare(store).delete(key)


def _bare(store: ObjectStore) -> ObjectStore:
    """What makes one attempt: what may as well fail is not worth waiting for."""
    return store.meter if isinstance(store, RetryingStore) else store


def _examine(store: ObjectStore, key: str, bodies: list[bytes]) -> list[str]:
    winners = _race(store, key, bodies)
    if len(winners) != 1:
        raise _refused(store, f"{len(winners)} of {len(bodies)} racing creates of one object succeeded, not one")
    try:
        data, info = store.get(key)
    except NotFound:
        raise _refused(store, "an object cannot be read right after it was created") from None
    if data != winners[0]:
        raise _refused(store, "the object has other bytes than those of the create that succeeded")
    try:
        store.put(key, b"{}", if_absent=True)
    except Conflict:
        pass
    else:
        raise _refused(store, "creating an object that exists succeeded: the precondition is ignored")
    if store.get(key)[0] != data:
        raise _refused(store, "a refused create changed the object")
    folder = key.rpartition("/")[0] + "/"
    if [listed.key for listed in store.list(folder)] != [key]:
        raise _refused(store, "a listing does not show an object right after it was created")
    skew_s = store.now() - info.last_modified
    if abs(skew_s) > _CLOCK_TOLERANCE_S:
        raise _refused(store, f"it dates an object {skew_s:.0f} s away from its own clock")
    return [
        f"{len(bodies)} racing creates of one object: one winner",
        "creating an object that exists: refused, and its bytes are untouched",
        "reading and listing right after writing: complete",
        "the clock that dates objects: the clock of the answers",
    ]


def _race(store: ObjectStore, key: str, bodies: list[bytes]) -> list[bytes]:
    """Create `key` from as many threads as there are bodies, at once. Returns the bodies whose create succeeded."""
    start = threading.Barrier(len(bodies))

    def create(body: bytes) -> bool:
        start.wait(_RACE_TIMEOUT_S)
        try:
            store.put(key, body, if_absent=True)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(len(bodies), thread_name_prefix="diloco-probe") as pool:
        won = [*pool.map(create, bodies)]
    return [body for body, winner in zip(bodies, won, strict=True) if winner]


def _refused(store: ObjectStore, reason: str) -> InvalidSettings:
    return InvalidSettings(
        f"{store.url} cannot carry a run: {reason}",
        "use a store that honours 'create if absent': S3, R2, GCS, MinIO since 2024, SeaweedFS, Ceph, or a folder",
    )
