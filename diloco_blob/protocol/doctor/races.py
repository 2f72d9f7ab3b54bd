"""Whether *create if absent* holds when many try at once, and whether what was written is seen at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

from diloco_blob.core.errors import Conflict, NotFound
from diloco_blob.protocol.doctor.probes import Area, Probes
from diloco_blob.protocol.doctor.report import Check

_START_TIMEOUT_S = 120.0
_NUM_LISTED = 5

_HINT = (
    "a run would lose work here without a word, and is refused: use a store that honours 'create if absent' "
    "(S3, R2, GCS, MinIO since 2024, SeaweedFS, Ceph, or a folder)"
)


def race_check(probes: Probes, area: Area, racers: int, rounds: int) -> Check:
    """Race creates of one new name, `rounds` times; each racer then reads what is there.

    Raises:
        Unavailable, Denied: It could not be tested.
    """
    with ThreadPoolExecutor(racers, thread_name_prefix="diloco-doctor") as pool:
        for number in range(1, rounds + 1):
            wrong = _race(probes, area, racers, pool)
            if wrong:
                return Check("race", "broken", f"round {number} of {rounds}: {wrong}", _HINT)
    figures = {"racers": float(racers), "rounds": float(rounds)}
    what = f"{rounds} times {racers} creates of one name at once: one wins, all others are refused and read its bytes"
    return Check("race", "ok", what, figures=figures)


def _race(probes: Probes, area: Area, racers: int, pool: ThreadPoolExecutor) -> str:
    """One race. Returns what is wrong with it, if anything."""
    key, bodies = probes.key(area), [probes.body() for _ in range(racers)]
    start = threading.Barrier(racers)

    def create(body: bytes) -> tuple[bool, bytes | None]:
        start.wait(_START_TIMEOUT_S)
        try:
            probes.put(key, body, if_absent=True)
            won = True
        except Conflict:
            won = False
        try:
            return won, probes.store.get(key)[0]
        except NotFound:
            return won, None

    ends = [*pool.map(create, bodies)]
    winners = [body for body, (won, _) in zip(bodies, ends, strict=True) if won]
    if len(winners) != 1:
        return f"{len(winners)} of {racers} creates of one name succeeded, not one"
    seen = [data for _, data in ends]
    if None in seen:
        return "the object could not be read right after it was created"
    if any(data != winners[0] for data in seen):
        return "the object has other bytes than those of the create that succeeded"
    try:
        probes.put(key, probes.body(), if_absent=True)
    except Conflict:
        pass
    else:
        return "creating an object that exists succeeded: the precondition is ignored"
    return "" if probes.store.get(key)[0] == winners[0] else "a refused create changed the object"


def consistency_check(probes: Probes, area: Area, *, may_delete: bool) -> Check:
    """Write, write over, list, delete, and look each time whether it is seen at once.

    Raises:
        Unavailable, Denied: It could not be tested.
    """
    wrong = _stale(probes, area, may_delete=may_delete)
    if wrong:
        hint = "islands and aggregators would miss each other's work: use a store that shows at once what was written"
        return Check("consistency", "broken", wrong, hint)
    deleted = ", deleted objects are gone" if may_delete else ""
    return Check("consistency", "ok", f"what was written can be read and is listed at once{deleted}")


def _stale(probes: Probes, area: Area, *, may_delete: bool) -> str:
    store, folder = probes.store, probes.folder(area)
    before = {info.key for info in store.list(folder)}
    bodies = {probes.key(area): probes.body() for _ in range(_NUM_LISTED)}
    for key, body in bodies.items():
        probes.put(key, body)
        if store.head(key).size != len(body) or store.get(key)[0] != body:
            return "an object has not its own bytes right after it was written"
    listed = {info.key for info in store.list(folder)}
    if listed != before | bodies.keys():
        missing = len((before | bodies.keys()) - listed)
        return f"a listing right after writing lacks {missing} of {len(bodies)} objects"
    if not may_delete:
        return ""
    for key in bodies:
        probes.delete(key)
        try:
            store.head(key)
        except NotFound:
            continue
        return "an object is still there right after it was deleted"
    return "deleted objects are still listed" if bodies.keys() & {info.key for info in store.list(folder)} else ""
