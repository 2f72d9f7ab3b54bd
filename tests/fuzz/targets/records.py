"""Records: `Corrupt`, or a record that is written and read again as the same.

The first byte of an input chooses the kind, the rest is the record.
"""

from collections.abc import Iterator
from functools import cache

import msgspec

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import (
    FORMAT,
    Close,
    Commit,
    Departure,
    Eval,
    Generation,
    IslandStatus,
    Receipt,
    Run,
    decode,
    encode,
)
from diloco_blob.testing.toy import ToyRun

KINDS: tuple[type[msgspec.Struct], ...] = (Run, Close, Commit, Receipt, Generation, Departure, IslandStatus)


@cache
def valid() -> dict[type[msgspec.Struct], msgspec.Struct]:
    """One true record of each kind, all of one run."""
    toy = ToyRun(Settings(policy=Policy(quorum=1)))
    toy.join("a")
    receipt = toy.send("a", 1)
    toy.send_raw("b", b"junk")
    toy.send("c", b"junk")
    toy.aggregate()
    status = IslandStatus(
        format=FORMAT, run=toy.run.digest, island="a", generation=1, state="training", steps=1, tokens=2, version=0,
        versions_behind=0, loss=None, tokens_per_s=1.5, staleness=0, requests=3, requests_by_class={"gets": 3},
        bytes_up=0, bytes_down=0, wait_s=0.0, train_s=0.0, written_at=1.0,
        last_eval=Eval(step=1, version=0, loss=2.5, bits_per_byte=1.1),
    )  # fmt: skip
    departure = Departure(format=FORMAT, run=toy.run.digest, write_id="w", island="a", generation=1, fragment=0, seq=1)
    generation = decode(toy.store.get(keys.generation("a", 1))[0], Generation, run=toy.run.digest)
    run = msgspec.structs.replace(toy.run.run, model={"layers": [1, {"width": 2.5}], "name": "é"})
    found = (run, toy.close(1), toy.commit(1), receipt, generation, departure, status)
    return dict(zip(KINDS, found, strict=True))


def run_digest() -> str:
    """The run to which the true records belong."""
    return getattr(valid()[Receipt], "run")  # noqa: B009 - the values are of the base class


def check(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
    """Read bytes as a record of this kind; None if they were refused as they should be."""
    run = None if kind is Run else run_digest()
    try:
        found = decode(data, kind, run=run)
    except Corrupt as error:
        refused(error)
        return None
    assert decode(encode(found), kind, run=run) == found
    return found


def refused(error: Corrupt) -> None:
    """A refusal must fit into a record and a log line, since that is where it goes."""
    error.message.encode()
    assert error.message
    assert error.message.isprintable()


def run(data: bytes) -> None:
    """The target."""
    if data:
        check(data[1:], KINDS[data[0] % len(KINDS)])


def seeds() -> Iterator[bytes]:
    """A true record of each kind."""
    for number, kind in enumerate(KINDS):
        yield bytes([number]) + encode(valid()[kind])
