"""Floods: a million names under `islands/`, as many bad receipts as there is room for, receipts of any size."""

import itertools
import tracemalloc
from collections.abc import Iterator

import pytest

from diloco_blob.aggregate.gather import CONTRIBUTIONS_PER_CLOSE_MAX, RECEIPTS_READ_MAX
from diloco_blob.aggregate.roster import STRANGERS_MAX
from diloco_blob.core.limits import CURSOR_CHARS_MAX, ISLAND_RECORD_BYTES_MAX, ISLANDS_MAX
from diloco_blob.core.settings import Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import encode
from diloco_blob.store.metered import MeteredStore
from diloco_blob.testing.toy import ToyRun

POLICY = Policy(islands=2, quorum=2, grace_s=10.0, deadline_s=100.0)


class FloodedStore(MeteredStore):
    """A double of a bucket in which somebody made names: `num` of them, which sort before any real one.

    The listing is generated name by name, as a store's pages come; `taken` counts how far a reader went. The names lead
    to nothing, unless the store below has objects there.
    """

    def __init__(self, toy: ToyRun, num: int) -> None:
        super().__init__(toy.store)
        self.num = num
        self.taken = 0

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        assert prefix == keys.ISLANDS
        self.taken = 0
        for name in itertools.chain((fake(n) for n in range(self.num)), super().list_dirs(prefix)):
            self.taken += 1
            yield name


def fake(number: int) -> str:
    return f"0-{number:07d}"


def test_a_million_names_do_not_keep_contributors_from_being_merged() -> None:
    toy = ToyRun(Settings(policy=POLICY))
    for name in "ab":
        toy.join(name)
        toy.send(name, 1)
    assert toy.aggregate().version == 1
    flooded = FloodedStore(toy, 1_000_000)
    for name in "ab":
        toy.send(name, 2, base_version=1)
    tracemalloc.start()
    report = toy.aggregate(store=flooded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.version, report.reason) == (2, "all")
    assert [entry.island for entry in report.merged] == ["a", "b"]
    assert set(toy.close(2).watermarks) == {"a", "b"}, "who never contributed is not carried along"
    assert flooded.taken == STRANGERS_MAX + 1
    # Of each of 20,000 names a string (56 bytes and a place in two lists); of each admitted one its Mail (an object
    # with a dictionary, 400), places in a set and two dictionaries (3 · 100), a watermark (64). Two of these exist.
    assert peak < STRANGERS_MAX * 80 + 2 * ISLANDS_MAX * 800 + (2 << 20)
    assert audit(toy.store).ok


def test_no_more_than_the_limit_is_admitted_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    toy = ToyRun(Settings(policy=POLICY))
    for name in "ab":
        toy.join(name)
        toy.send(name, 1)
    toy.aggregate()
    flooded = FloodedStore(toy, 1_000_000)
    for name in "ab":
        toy.send(name, 2, base_version=1)
    toy.aggregate(store=flooded)
    # Three HEADs find the head; of each admitted island one for its next receipt (of a and b one more, and of their
    # payloads), and of each newcomer one for its first start.
    assert flooded.usage().heads == 3 + ISLANDS_MAX + 2 + 2 + (ISLANDS_MAX - 2)
    assert f"{ISLANDS_MAX} islands are tracked, no more are admitted" in caplog.text


def test_a_newcomer_behind_the_flood_waits_until_the_names_are_removed() -> None:
    """Names are all that a LIST shows, so nothing tells it from the others: who may write to the bucket decides."""
    toy = ToyRun(Settings(policy=POLICY))
    flooded = FloodedStore(toy, STRANGERS_MAX)
    for name in "ab":
        toy.join(name)
        toy.send(name, 1)
    assert toy.aggregate(store=flooded).arrived == ()
    flooded.num = ISLANDS_MAX - 2
    assert [entry.island for entry in toy.aggregate(store=flooded).merged] == ["a", "b"]


def test_bad_receipts_under_thousands_of_names_cannot_stop_the_run() -> None:
    """They sort first, they never contributed, and there are more of them than one close can skip."""
    toy = ToyRun(Settings(policy=POLICY))
    for name in "ab":
        toy.join(name)
        toy.send(name, 1)
    toy.aggregate()
    for number in range(CONTRIBUTIONS_PER_CLOSE_MAX + 10):
        for _ in range(2):
            toy.send_raw(fake(number), b"{")
    for base in (1, 2, 3):
        for name in "ab":
            toy.send(name, base, base_version=base)
        report = toy.aggregate()
        assert (report.reason, [entry.island for entry in report.merged]) == ("all", ["a", "b"])
        assert len(report.skipped) <= CONTRIBUTIONS_PER_CLOSE_MAX - 2
    skipped = sum(fate == "skipped" for fate in toy.audit().values())
    assert skipped == 2 * (CONTRIBUTIONS_PER_CLOSE_MAX + 10), "where there is room they are skipped, each once"


def test_an_island_with_many_bad_receipts_before_a_good_one_does_not_go_before_the_others() -> None:
    toy = ToyRun(Settings(policy=POLICY))
    for name in "ab":
        toy.join(name)
        toy.send(name, 1)
    toy.aggregate()
    num = CONTRIBUTIONS_PER_CLOSE_MAX // RECEIPTS_READ_MAX + 10
    for number in range(num):
        for _ in range(RECEIPTS_READ_MAX - 1):
            toy.send_raw(fake(number), b"{")
        toy.send(fake(number), b"junk", base_version=1)
    for name in "ab":
        toy.send(name, 2, base_version=1)
    report = toy.aggregate()
    assert {"a", "b"} == {entry.island for entry in report.merged}
    fates = toy.audit()
    assert sum(fate == "rejected" for fate in fates.values()) == (CONTRIBUTIONS_PER_CLOSE_MAX - 2) // RECEIPTS_READ_MAX


def test_what_is_cut_from_a_full_backlog_closes_nothing() -> None:
    """Enough good work to fill a close, too little by the policy: the backlog beside it has no room, and must wait."""
    toy = ToyRun(Settings(policy=Policy(islands=1000, quorum=1000, min_contributions=1000, grace_s=0.0)))
    for number in range(CONTRIBUTIONS_PER_CLOSE_MAX // 8):
        for _ in range(8):
            toy.send(f"good-{number:04d}", b"junk")
    for _ in range(RECEIPTS_READ_MAX):
        toy.send_raw("bad", b"{")
    toy.clock.advance(10_000)
    assert toy.aggregate().action == "waiting"


def test_no_receipt_of_ours_is_as_large_as_the_limit() -> None:
    toy = ToyRun(Settings(policy=POLICY))
    receipt = toy.send("i" * 63, 1, cursor="\x01" * CURSOR_CHARS_MAX, tokens=1 << 62, steps=1 << 62)
    assert len(encode(receipt)) < ISLAND_RECORD_BYTES_MAX / 2
    assert toy.aggregate(drain=True).version == 1
