"""Examining a store: can a run be trained there, by whom, how fast, and what to do if not? That is `doctor`.

Nothing of a run is written or deleted: every object that an examination makes has a segment `_doctor` in its name
(`probes.py`), and is deleted at the end, also after an error or Ctrl-C. Each question is a `Check`; the questions come
in an order in which each may rely on the answers before it, and what makes no sense after a broken one is left out.
"""

import re
from collections.abc import Callable, Generator, Iterator

from msgspec import Struct

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Conflict, Corrupt, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.protocol import keys
from diloco_blob.protocol.doctor.measuring import (
    clock_check,
    exchange_check,
    measure_latency,
    measure_throughput,
)
from diloco_blob.protocol.doctor.probes import Area, Probes
from diloco_blob.protocol.doctor.races import consistency_check, race_check
from diloco_blob.protocol.doctor.report import Check, Verdict, exit_code, failed
from diloco_blob.protocol.doctor.rights import (
    Rights,
    all_rights,
    rights_check,
    role_checks,
    run_check,
    writable,
)
from diloco_blob.protocol.heads import read_run
from diloco_blob.protocol.layout import num_elements
from diloco_blob.store import RetryingStore

__all__ = ["Check", "Examination", "Verdict", "diagnose", "exit_code"]

_NOT_KNOWN = re.compile(
    r"no credentials|cannot be renewed|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|InvalidClientTokenId|"
    r"NotSignedUp|Invalid Credentials|\b401\b"
)
"""In what a store says when it does not know who asks, rather than knowing and refusing."""

_WRONG_KEY = (
    "the key or its secret is wrong, or of another endpoint: correct it where the SDK finds it (docs/stores.md)"
)

PARAMETERS = 100_000_000
"""Of the model for which an exchange is reckoned, where there is no run to ask."""


class Examination(Struct, frozen=True):
    """How thoroughly to look."""

    island: str | None = None
    """Whose credential this is: its own prefix is tried, and to be anybody else is not enough."""
    racers: int = 8
    rounds: int = 3
    samples: int = 20
    """Small requests of each kind that are timed."""
    transfer_bytes: int = 8_000_000
    parameters: int = 0
    """Of the model; 0 asks the run, or takes `PARAMETERS`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if not 2 <= self.racers <= 64 or not 1 <= self.rounds <= 1000:
            raise InvalidSettings("races need 2 to 64 racers and 1 to 1000 rounds")
        if not 1 <= self.samples <= 10_000 or not 1 <= self.transfer_bytes <= 1_000_000_000 or self.parameters < 0:
            raise InvalidSettings("measuring needs 1 to 10000 samples, 1 byte to 1 GB, and no negative parameters")


def diagnose(store: RetryingStore, *, clock: Clock, ids: Ids, how: Examination) -> Generator[Check, None, None]:
    """Examine a store. Deletes what it wrote, however it ends.

    Args:
        store: The run's URL, whether a run is there or not.
        clock: This machine's.
        ids: Makes names and bodies.
        how: How thoroughly.

    Yields:
        Each answer as soon as it is known.

    Raises:
        InvalidSettings: No island may have this name.
    """
    probes = Probes(store, ids, how.island)
    try:
        yield from _examine(probes, clock, how)
    finally:
        probes.clear()
    if probes.num_written:
        yield probes.cleanup()


def _examine(probes: Probes, clock: Clock, how: Examination) -> Iterator[Check]:
    for check in _access(probes.store):
        yield check
        if check.verdict == "broken":
            return
    try:
        check, exists = run_check(probes)
        yield check
        rights = all_rights(probes)
    except DilocoError as error:
        yield failed("rights", error)
        return
    yield from map(rights_check, rights.values())
    yield from role_checks(rights, run_exists=exists, wants_island=how.island is not None)
    area = writable(rights)
    if area is None:
        yield Check(
            "race",
            "warning",
            "not tried, nor what follows: this credential may not create, write, read and list under any prefix",
            "run doctor again with one that may",
        )
        return
    refused = probes.store.meter.usage().failed
    probes.sweep()
    for question in (_race, _consistency):
        yield _asked(question, probes, rights[area], how)
    yield from _measure(probes, area, clock, how)
    yield _reliability(probes.store, refused)


def _access(store: RetryingStore) -> Iterator[Check]:
    """Is anybody there, are we known, and is there a bucket?"""
    try:
        for _ in store.list_dirs(keys.ISLANDS):
            break
    except Unavailable as error:
        yield failed("answer", error)
    except NotFound as error:
        yield Check("credentials", "ok", "accepted")
        yield failed("bucket", error)
    except Denied as error:
        if _NOT_KNOWN.search(error.message):
            known = error.message.startswith("no credentials") or not error.hint
            yield Check("credentials", "broken", error.message, error.hint if known else _WRONG_KEY, kind=error.kind)
            return
        yield Check("credentials", "warning", f"no listing of islands/: {error.message}", error.hint)
    except DilocoError as error:
        yield failed("answer", error)
    else:
        yield Check("credentials", "ok", "accepted")
        yield Check("bucket", "ok", f"{store.url} can be listed")


def _asked(
    question: Callable[[Probes, Rights, Examination], Check], probes: Probes, rights: Rights, how: Examination
) -> Check:
    try:
        return question(probes, rights, how)
    except DilocoError as error:
        return failed(question.__name__.removeprefix("_"), error)


def _race(probes: Probes, rights: Rights, how: Examination) -> Check:
    return race_check(probes, rights.area, how.racers, how.rounds)


def _consistency(probes: Probes, rights: Rights, how: Examination) -> Check:
    del how
    return consistency_check(probes, rights.area, may_delete=rights.may("delete"))


def _measure(probes: Probes, area: Area, clock: Clock, how: Examination) -> Iterator[Check]:
    name = "latency"
    try:
        check, stamps, speed = measure_latency(probes, area, clock, how.samples)
        yield check
        name = "clock"
        yield clock_check(probes, area, stamps)
        name = "upload"
        checks, speed = measure_throughput(probes, area, clock, how.transfer_bytes, speed)
        yield from checks
        name = "exchange"
        yield exchange_check(speed, how.parameters or _parameters(probes.store))
    except DilocoError as error:
        yield failed(name, error)


def _parameters(store: RetryingStore) -> int:
    """Of the run's model, if there is a run that can be read."""
    try:
        return num_elements(read_run(store).run.tensors) or PARAMETERS
    except (NotFound, Denied, Corrupt, Conflict):
        return PARAMETERS


def _reliability(store: RetryingStore, refused_before: int) -> Check:
    """How many requests had to be repeated; those that were refused while rights were tried do not count."""
    usage = store.meter.usage()
    repeated = usage.failed - refused_before
    figures = {"requests": float(usage.requests), "repeated": float(repeated)}
    if not repeated:
        return Check("reliability", "ok", f"{usage.requests} requests, each answered at once", figures=figures)
    hint = "a run rides out such failures, but waits; if they go on, look at the network and at the store's limits"
    return Check("reliability", "warning", f"{repeated} of {usage.requests} requests failed", hint, figures)
