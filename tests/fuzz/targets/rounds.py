"""A round with a hostile island in it: whatever it writes under its own prefix, one pass makes the next version.

The first byte of an input says what the rest is: a receipt, the content of a payload, a payload as it is, a departure,
a generation, or a status. Two honest islands contribute; if the hostile one's contribution is not a valid one, the
version must be the one that is made without it, to the bit.
"""

from collections.abc import Iterator
from functools import cache

import msgspec
import numpy as np

from diloco_blob.aggregate import FragmentReport
from diloco_blob.core.settings import Codec, Merge, Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import FORMAT, Departure, Receipt, encode
from diloco_blob.testing.toy import ToyRun, random_tensors
from diloco_blob.wire.frame import compress

HOSTILE = "b"
HONEST = ("a", "c")
WHAT = ("receipt", "content", "payload", "departure", "generation", "status")
SETTINGS = Settings(
    up=Codec(name="int8", block=8), merge=Merge(weights="uniform"), policy=Policy(islands=3, quorum=1, grace_s=0.0)
)


def world() -> ToyRun:
    """A run in which two honest islands have contributed."""
    toy = ToyRun(SETTINGS)
    for seed, name in enumerate(HONEST):
        toy.join(name)
        toy.send(name, seed)
    return toy


@cache
def without() -> dict[str, bytes]:
    """Version 1 as the honest islands make it."""
    toy = world()
    toy.aggregate()
    return {name: values.tobytes() for name, values in toy.params().items()}


def attack(toy: ToyRun, what: str, data: bytes) -> None:
    """Put the bytes where the hostile island may write; then all that it needs to be taken seriously."""
    if what == "generation":
        toy.store.put(keys.generation(HOSTILE, 1), data)
    else:
        toy.join(HOSTILE)
    if what == "receipt":
        toy.send_raw(HOSTILE, data)
    elif what == "content":
        toy.send(HOSTILE, compress([data], len(data)))
    elif what == "payload":
        toy.send(HOSTILE, data)
    elif what == "departure":
        toy.store.put(keys.departure(HOSTILE, 0, 0), data)
    elif what == "status":
        toy.store.put(keys.status(HOSTILE), data)


def check(what: str, data: bytes) -> FragmentReport:
    """One pass with this attack; everything that must hold afterwards."""
    toy = world()
    attack(toy, what, data)
    report = toy.aggregate()
    assert (report.action, report.version) == ("merged", 1)
    merged = [entry.island for entry in report.merged]
    assert [name for name in merged if name != HOSTILE] == list(HONEST)
    lost = [*report.skipped, *report.rejected]
    sent = what in {"receipt", "content", "payload"}
    assert (HOSTILE in merged) + len(lost) == sent, "a contribution has one fate"
    for entry in lost:
        assert (entry.island, entry.seq) == (HOSTILE, 1)
        assert 0 < len(entry.reason) <= 200
        assert entry.reason.isprintable()
    for values in toy.params().values():
        assert np.isfinite(values).all()
    if HOSTILE not in merged:
        assert {name: values.tobytes() for name, values in toy.params().items()} == without()
    assert sum({entry.island: entry.weight for entry in report.merged}.values()) == 1.0 or HOSTILE in merged
    toy.audit()
    audited = audit(toy.store)
    assert audited.ok, audited.findings
    # The run goes on.
    toy.send("a", 7, base_version=1)
    assert toy.aggregate().version == 2
    return report


def run(data: bytes) -> None:
    """The target."""
    if data:
        check(WHAT[data[0] % len(WHAT)], data[1:])


def seeds() -> Iterator[bytes]:
    """Valid bytes of each sort, and a receipt that lies."""
    toy = world()
    toy.join(HOSTILE)
    receipt = toy.send(HOSTILE, 5)
    lying = msgspec.structs.replace(receipt, tokens=1 << 62, steps=1 << 62, generation=1 << 62)
    departure = Departure(
        format=FORMAT, run=toy.run.digest, write_id="w", island=HOSTILE, generation=1 << 62, fragment=0, seq=0
    )
    payload = toy.payload(random_tensors(5))
    content = b"".join(_content(payload))
    for what, data in (
        ("receipt", encode(receipt)),
        ("receipt", encode(lying)),
        ("content", content),
        ("payload", payload),
        ("departure", encode(departure)),
        ("generation", toy.store.get(keys.generation(HOSTILE, 1))[0]),
        ("status", b"{}"),
    ):
        yield bytes([WHAT.index(what)]) + data


def valid_receipt() -> Receipt:
    """One that the hostile island could send honestly."""
    toy = world()
    return toy.send(HOSTILE, 5)


def _content(payload: bytes) -> Iterator[bytes]:
    from diloco_blob.wire.frame import open_frame

    yield from open_frame([payload], 1 << 20)[1]
