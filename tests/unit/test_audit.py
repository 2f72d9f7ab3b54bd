"""The audit finds nothing in a sound bucket, and in a tampered one exactly the promise that was broken."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from diloco_blob.aggregate.replay import REPLAY_PROMISES
from diloco_blob.core.errors import NotFound
from diloco_blob.core.limits import ISLAND_RECORD_BYTES_MAX
from diloco_blob.core.settings import Codec, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import PROMISES, AuditReport, audit
from diloco_blob.protocol.audit import report as audit_report
from diloco_blob.protocol.creation import write_params
from diloco_blob.protocol.records import (
    FORMAT,
    Chosen,
    Close,
    Commit,
    Departure,
    Generation,
    Merged,
    ObjectRef,
    Receipt,
    Run,
    Skipped,
    Tally,
    Watermark,
    decode,
    encode,
    record_digest,
)
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import digest


def make_toy(num_fragments: int = 1) -> ToyRun:
    """Four versions of every fragment, with everything that may happen to a contribution, and one still pending."""
    toy = ToyRun(
        settings=Settings(
            sync=Sync(num_fragments=num_fragments),
            up=Codec(name="int8"),
            down=Codec(name="int8", error_feedback=True),
            policy=Policy(max_staleness=2),
        )
    )
    for island in ("a", "b", "c"):
        toy.join(island)
    for p in range(num_fragments):
        for version in range(3):
            toy.send("a", 10 * version, fragment=p, base_version=version)
            if version == 0:
                toy.send("a", 5, fragment=p)
            toy.send("b", 10 * version + 1, fragment=p, base_version=max(0, version - 1))
            toy.send("c", 10 * version + 2, fragment=p, base_version=version, upload=version != 1)
            assert toy.aggregate(drain=True, fragment=p).action == "merged"
        toy.send("b", 50, fragment=p, base_version=0)  # too stale: skipped
        toy.send("a", 51, fragment=p, base_version=3)
        assert toy.aggregate(drain=True, fragment=p).action == "merged"
        toy.send("c", 52, fragment=p, base_version=4)
    return toy


@pytest.fixture
def toy() -> ToyRun:
    return make_toy()


def broken(report: AuditReport) -> set[str]:
    return {finding.promise for finding in report.findings if finding.level == "broken"}


def overwrite(toy: ToyRun, key: str, data: bytes) -> None:
    toy.store.put(key, data)


def edit(toy: ToyRun, key: str, kind: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Replace some fields of a record, then repair the chain, so that only what the fields say is wrong."""
    record = decode(toy.store.get(key)[0], kind)
    overwrite(toy, key, encode(msgspec.structs.replace(record, **change(record))))
    rechain(toy)


def replace_receipt(toy: ToyRun, island: str, seq: int, **changes: Any) -> None:
    """Replace some fields of a receipt that version 4 took, there and in the close."""
    key = keys.receipt(island, 0, seq)
    data = encode(msgspec.structs.replace(decode(toy.store.get(key)[0], Receipt), **changes))
    overwrite(toy, key, data)
    in_close = {name: value for name, value in changes.items() if name in Chosen.__struct_fields__}

    def choose(close: Close) -> dict[str, Any]:
        assert (close.chosen[0].island, close.chosen[0].seq) == (island, seq)
        return {"chosen": first(close.chosen, receipt=record_digest(data), **in_close)}

    edit(toy, keys.close(0, 4), Close, choose)


def rechain(toy: ToyRun) -> None:
    """Make every parent and close digest of fragment 0 right again."""
    parent, version = toy.run.digest, 1
    while True:
        try:
            commit = decode(toy.store.get(keys.commit(0, version))[0], Commit)
        except NotFound:
            return
        close = decode(toy.store.get(keys.close(0, version))[0], Close)
        close_data = encode(msgspec.structs.replace(close, parent=parent))
        overwrite(toy, keys.close(0, version), close_data)
        commit_data = encode(msgspec.structs.replace(commit, parent=parent, close=record_digest(close_data)))
        overwrite(toy, keys.commit(0, version), commit_data)
        parent, version = record_digest(commit_data), version + 1


def start_again(toy: ToyRun, island: str) -> None:
    generation = decode(toy.store.get(keys.generation(island, 1))[0], Generation)
    overwrite(toy, keys.generation(island, 2), encode(msgspec.structs.replace(generation, generation=2)))


def first(items: tuple[Any, ...], **changes: Any) -> tuple[Any, ...]:
    """The same, with some fields of the first one changed."""
    return (msgspec.structs.replace(items[0], **changes), *items[1:])


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_sound_bucket_has_no_findings(num_fragments: int) -> None:
    report = audit(make_toy(num_fragments).store)
    assert report.findings == ()
    assert report.ok
    assert report.counts == msgspec.structs.replace(
        report.counts,
        fragments=num_fragments,
        islands=3,
        commits=4 * num_fragments,
        merged=10 * num_fragments,
        skipped=1 * num_fragments,
        rejected=1 * num_fragments,
        pending=1 * num_fragments,
        pending_closes=0,
        orphans=0,
    )
    assert report.counts.bytes_read > 0


def test_fresh_run_is_sound() -> None:
    report = audit(ToyRun().store)
    assert report.ok
    assert report.counts.commits == 0


def test_no_run_raises() -> None:
    from diloco_blob.store.memory import MemoryStore

    with pytest.raises(NotFound):
        audit(MemoryStore("memory://nothing-here"))


def test_a_closed_round_that_nobody_merged_is_sound(toy: ToyRun) -> None:
    class KilledError(Exception):
        pass

    def die(step: str) -> None:
        if step == "close.after_put":
            raise KilledError

    with pytest.raises(KilledError):
        toy.aggregate(drain=True, at=die)
    report = audit(toy.store)
    assert report.findings == ()
    assert report.counts.pending_closes == 1
    assert report.counts.pending == 1


def test_files_of_a_killed_merge_are_counted_not_blamed(toy: ToyRun) -> None:
    class KilledError(Exception):
        pass

    def die(step: str) -> None:
        if step == "commit.before_put":
            raise KilledError

    with pytest.raises(KilledError):
        toy.aggregate(drain=True, at=die)
    report = audit(toy.store)
    assert report.ok
    assert report.counts.orphans == 3


# Each of these breaks one promise, in a way that a chain of right digests does not show.


TAMPERED: dict[str, tuple[str, Callable[[ToyRun], None], set[str]]] = {}
"""By name: the promise that must be found broken, how to break it, and other promises that then are broken too."""


def tamper(promise: str, *also: str) -> Callable[[Callable[[ToyRun], None]], Callable[[ToyRun], None]]:
    def register(function: Callable[[ToyRun], None]) -> Callable[[ToyRun], None]:
        TAMPERED[function.__name__] = (promise, function, set(also))
        return function

    return register


@tamper("run")
def run_is_no_record(toy: ToyRun) -> None:
    overwrite(toy, keys.RUN, b'{"format": 1}')


@tamper("run")
def run_has_a_fragment_too_few(toy: ToyRun) -> None:
    run = decode(toy.store.get(keys.RUN)[0], Run)
    settings = msgspec.structs.replace(run.settings, sync=Sync(num_fragments=2))
    overwrite(toy, keys.RUN, encode(msgspec.structs.replace(run, settings=settings)))


@tamper("records")
def commit_is_of_another_run(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 4), Commit, lambda _: {"run": "0" * 32})


@tamper("records")
def commit_says_it_is_another(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 4), Commit, lambda _: {"version": 5})


@tamper("chain")
def commit_has_another_parent(toy: ToyRun) -> None:
    commit = decode(toy.store.get(keys.commit(0, 4))[0], Commit)
    overwrite(toy, keys.commit(0, 4), encode(msgspec.structs.replace(commit, parent="0" * 32)))


@tamper("chain")
def commit_is_missing(toy: ToyRun) -> None:
    toy.store.delete(keys.commit(0, 2))


@tamper("chain", "closes")
def commit_was_edited_later(toy: ToyRun) -> None:
    commit = decode(toy.store.get(keys.commit(0, 2))[0], Commit)
    overwrite(toy, keys.commit(0, 2), encode(msgspec.structs.replace(commit, merge_s=99.0)))


@tamper("closes")
def close_is_missing(toy: ToyRun) -> None:
    toy.store.delete(keys.close(0, 3))


@tamper("closes")
def close_was_edited_later(toy: ToyRun) -> None:
    close = decode(toy.store.get(keys.close(0, 3))[0], Close)
    overwrite(toy, keys.close(0, 3), encode(msgspec.structs.replace(close, reason="grace")))


@tamper("closes")
def close_follows_another_parent(toy: ToyRun) -> None:
    close = decode(toy.store.get(keys.close(0, 4))[0], Close)
    data = encode(msgspec.structs.replace(close, parent="0" * 32))
    overwrite(toy, keys.close(0, 4), data)
    commit = decode(toy.store.get(keys.commit(0, 4))[0], Commit)
    overwrite(toy, keys.commit(0, 4), encode(msgspec.structs.replace(commit, close=record_digest(data))))


@tamper("head")
def close_lies_beyond_the_head(toy: ToyRun) -> None:
    overwrite(toy, keys.close(0, 6), toy.store.get(keys.close(0, 4))[0])


@tamper("watermarks", "receipts")
def watermark_jumps(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 4), Close, lambda c: {"watermarks": {**c.watermarks, "a": Watermark(seq=9, version=4)}})


@tamper("watermarks")
def watermark_falls(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 4), Close, lambda c: {"watermarks": {**c.watermarks, "c": Watermark(seq=1, version=3)}})


@tamper("watermarks")
def watermark_is_forgotten(toy: ToyRun) -> None:
    def forget(close: Close) -> dict[str, Any]:
        return {"watermarks": {name: mark for name, mark in close.watermarks.items() if name != "c"}}

    edit(toy, keys.close(0, 4), Close, forget)


@tamper("watermarks")
def watermark_has_the_wrong_version(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 4), Close, lambda c: {"watermarks": {**c.watermarks, "a": Watermark(seq=5, version=2)}})


@tamper("watermarks", "tallies")
def contribution_is_lost_without_a_reason(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 4), Close, lambda _: {"skipped": ()})


@tamper("accounted", "tallies")
def chosen_contribution_is_neither_merged_nor_rejected(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 2), Commit, lambda _: {"rejected": ()})


@tamper("accounted", "tallies")
def rejected_contribution_was_never_chosen(toy: ToyRun) -> None:
    stranger = Skipped(island="a", seq=77, reason="made up")
    edit(toy, keys.commit(0, 4), Commit, lambda commit: {"rejected": (*commit.rejected, stranger)})


@tamper("accounted", "tallies")
def merged_tokens_are_not_the_closes(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 4), Commit, lambda commit: {"merged": first(commit.merged, tokens=1)})


@tamper("once", "watermarks", "tallies")
def contribution_is_merged_in_two_versions(toy: ToyRun) -> None:
    old = toy.close(3).chosen[2]
    again = msgspec.structs.replace(old, weight=0.5, staleness=3 - old.base_version)

    def choose(close: Close) -> dict[str, Any]:
        return {"chosen": (*first(close.chosen, weight=0.5), again)}

    def take(commit: Commit) -> dict[str, Any]:
        twice = Merged(island=old.island, seq=old.seq, staleness=again.staleness, weight=0.5, tokens=old.tokens)
        return {"merged": (*first(commit.merged, weight=0.5), twice)}

    edit(toy, keys.close(0, 4), Close, choose)
    edit(toy, keys.commit(0, 4), Commit, take)


@tamper("once", "tallies", "weights")
def contribution_is_merged_twice_in_one_version(toy: ToyRun) -> None:
    def twice(commit: Commit) -> dict[str, Any]:
        half = msgspec.structs.replace(commit.merged[0], weight=0.5)
        return {"merged": (half, half)}

    edit(toy, keys.commit(0, 4), Commit, twice)


@tamper("steps")
def one_start_sends_the_same_steps_twice(toy: ToyRun) -> None:
    """As different bytes: with error feedback a second coding of the same progress is another one."""
    replace_receipt(toy, "a", 5, step_to=45)


@tamper("steps")
def the_same_bytes_are_merged_under_two_numbers(toy: ToyRun) -> None:
    """By another start of the island, as if it had not noticed that its work was there already."""
    start_again(toy, "a")
    again = decode(toy.store.get(keys.receipt("a", 0, 4))[0], Receipt)
    replace_receipt(toy, "a", 5, generation=2, step_to=again.step_to, parts=again.parts)


@tamper("weights")
def weights_of_a_close_do_not_sum_to_one(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 3), Close, lambda close: {"chosen": first(close.chosen, weight=0.9)})


@tamper("weights")
def weights_of_a_commit_are_not_the_closes(toy: ToyRun) -> None:
    def shifted(commit: Commit) -> dict[str, Any]:
        one, two, three = commit.merged
        swapped = (
            msgspec.structs.replace(one, weight=one.weight + 0.1),
            msgspec.structs.replace(two, weight=two.weight - 0.1),
        )
        return {"merged": (*swapped, three)}

    edit(toy, keys.commit(0, 3), Commit, shifted)


@tamper("weights")
def an_island_has_two_weights(toy: ToyRun) -> None:
    assert [item.island for item in toy.close(1).chosen] == ["a", "a", "b", "c"]
    weight = toy.close(1).chosen[0].weight + 1e-12
    edit(toy, keys.close(0, 1), Close, lambda close: {"chosen": first(close.chosen, weight=weight)})


@tamper("staleness", "accounted")
def staleness_is_played_down(toy: ToyRun) -> None:
    def younger(close: Close) -> dict[str, Any]:
        chosen = [msgspec.structs.replace(item, staleness=0) for item in close.chosen]
        return {"chosen": tuple(chosen)}

    edit(toy, keys.close(0, 3), Close, younger)


@tamper("receipts")
def receipt_is_missing(toy: ToyRun) -> None:
    # The last of its island, so that the numbers still have no gap.
    toy.store.delete(keys.receipt("a", 0, 5))


@tamper("receipts")
def receipt_was_edited_later(toy: ToyRun) -> None:
    receipt = decode(toy.store.get(keys.receipt("a", 0, 2))[0], Receipt)
    overwrite(toy, keys.receipt("a", 0, 2), encode(msgspec.structs.replace(receipt, cursor="elsewhere")))


@tamper("receipts", "tallies")
def close_says_other_steps_than_the_receipt(toy: ToyRun) -> None:
    edit(toy, keys.close(0, 4), Close, lambda close: {"chosen": first(close.chosen, steps=11)})


@tamper("payloads")
def payload_is_missing(toy: ToyRun) -> None:
    toy.store.delete(toy.close(1).chosen[0].parts[0].key)


@tamper("payloads")
def payload_has_a_flipped_bit(toy: ToyRun) -> None:
    flip(toy, toy.close(1).chosen[0].parts[0].key)


def flip(toy: ToyRun, key: str) -> None:
    data = bytearray(toy.store.get(key)[0])
    data[-1] ^= 1
    overwrite(toy, key, bytes(data))


@tamper("objects")
def params_are_missing(toy: ToyRun) -> None:
    toy.store.delete(toy.commit(2).weights.params.key)


@tamper("objects")
def params_have_a_flipped_bit(toy: ToyRun) -> None:
    flip(toy, toy.commit(4).weights.params.key)


@tamper("objects")
def initial_params_have_a_flipped_bit(toy: ToyRun) -> None:
    flip(toy, toy.run.run.fragments[0].params.key)


@tamper("objects")
def update_is_shorter(toy: ToyRun) -> None:
    key = toy.commit(2).update.key
    overwrite(toy, key, toy.store.get(key)[0][:-1])


@tamper("objects")
def outer_state_is_missing(toy: ToyRun) -> None:
    toy.store.delete(toy.commit(3).outer.key)


@tamper("digest")
def weights_digest_is_another(toy: ToyRun) -> None:
    def lie(commit: Commit) -> dict[str, Any]:
        return {"weights": msgspec.structs.replace(commit.weights, digest="0" * 32)}

    edit(toy, keys.commit(0, 4), Commit, lie)


@tamper("update")
def weights_do_not_follow_from_the_update(toy: ToyRun) -> None:
    """One value of one tensor differs in its last bit, with every digest right."""
    arrays = toy.params(4)
    arrays["layer.bias"][1] = np.nextafter(arrays["layer.bias"][1], np.float32(np.inf))
    toy.store.delete(toy.commit(4).weights.params.key)
    weights = write_params(toy.store, 0, 4, arrays)
    edit(toy, keys.commit(0, 4), Commit, lambda _: {"weights": weights})


@tamper("tallies")
def tally_is_embellished(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 2), Commit, lambda commit: {"tally": {**commit.tally, "a": Tally(accepted=99)}})


@tamper("tallies")
def tokens_are_embellished(toy: ToyRun) -> None:
    edit(toy, keys.commit(0, 4), Commit, lambda _: {"tokens": 10**9})


@tamper("numbering", "receipts")
def history_has_a_gap(toy: ToyRun) -> None:
    toy.store.delete(keys.receipt("a", 0, 2))


@tamper("numbering", "receipts")
def history_has_a_gap_and_a_stray_number_makes_up_for_it(toy: ToyRun) -> None:
    """As many receipts as the watermark says, but not those."""
    overwrite(toy, keys.receipt("a", 0, 9), toy.store.get(keys.receipt("a", 0, 2))[0])
    toy.store.delete(keys.receipt("a", 0, 2))


@tamper("receipts")
def receipt_is_bigger_than_one_may_be(toy: ToyRun) -> None:
    overwrite(toy, keys.receipt("a", 0, 2), b" " * (ISLAND_RECORD_BYTES_MAX + 1))


@pytest.mark.parametrize("name", sorted(TAMPERED))
def test_tampering_is_found_as_the_promise_that_it_breaks(toy: ToyRun, name: str) -> None:
    promise, break_it, also = TAMPERED[name]
    break_it(toy)
    report = audit(toy.store)
    assert not report.ok
    assert promise in broken(report)
    assert broken(report) <= {promise} | also, report.findings
    assert all("\n" not in finding.what for finding in report.findings)


# Each of these an island can do under its own name, and it decides nothing: the run is as promised.


def generation_says_it_is_another(toy: ToyRun) -> str:
    overwrite(toy, keys.generation("a", 1), toy.store.get(keys.generation("b", 1))[0])
    return keys.generation("a", 1)


def generation_is_huge(toy: ToyRun) -> str:
    overwrite(toy, keys.generation("a", 2), b" " * (ISLAND_RECORD_BYTES_MAX + 1))
    return keys.generation("a", 2)


def generation_is_junk(toy: ToyRun) -> str:
    overwrite(toy, keys.generation("a", 1), b"\xff{")
    return keys.generation("a", 1)


def generations_have_a_gap(toy: ToyRun) -> str:
    overwrite(toy, keys.generation("a", 3), toy.store.get(keys.generation("a", 1))[0])
    return keys.generation("a", 2)


def an_island_has_no_generation(toy: ToyRun) -> str:
    toy.store.delete(keys.generation("b", 1))
    return keys.generation("b", 1)


def a_merged_contribution_names_a_generation_that_is_not_there(toy: ToyRun) -> str:
    replace_receipt(toy, "a", 5, generation=7)
    return keys.receipt("a", 0, 5)


def pending_receipts_leave_a_gap(toy: ToyRun) -> str:
    overwrite(toy, keys.receipt("c", 0, 6), toy.store.get(keys.receipt("c", 0, 4))[0])
    return keys.receipt("c", 0, 5)


def pending_receipts_of_a_stranger_leave_a_gap(toy: ToyRun) -> str:
    toy.join("evil")
    overwrite(toy, keys.receipt("evil", 0, 9999999999), b"{}")
    return keys.receipt("evil", 0, 1)


def a_pending_receipt_started_from_a_version_that_is_not_there(toy: ToyRun) -> str:
    """Or it is there no more: an honest island's word is all that is left of a newest commit that somebody deleted."""
    toy.store.delete(keys.commit(0, 4))
    return keys.receipt("c", 0, 4)


def a_departure_is_huge(toy: ToyRun) -> str:
    overwrite(toy, keys.departure("a", 0, 5), b" " * (ISLAND_RECORD_BYTES_MAX + 1))
    return keys.departure("a", 0, 5)


@pytest.mark.parametrize(
    "do",
    [
        generation_says_it_is_another,
        generation_is_huge,
        generation_is_junk,
        generations_have_a_gap,
        an_island_has_no_generation,
        a_merged_contribution_names_a_generation_that_is_not_there,
        pending_receipts_leave_a_gap,
        pending_receipts_of_a_stranger_leave_a_gap,
        a_pending_receipt_started_from_a_version_that_is_not_there,
        a_departure_is_huge,
    ],
)
def test_what_an_island_gets_wrong_under_its_own_name_is_noted_and_breaks_nothing(
    toy: ToyRun, do: Callable[[ToyRun], str]
) -> None:
    where = do(toy)
    report = audit(toy.store)
    assert report.ok, report.findings
    assert where in {finding.where for finding in report.findings}


def test_what_is_bigger_than_it_may_be_is_not_read(toy: ToyRun) -> None:
    big = b" " * (ISLAND_RECORD_BYTES_MAX + 1)
    for key in (keys.generation("a", 2), keys.departure("a", 0, 5), keys.receipt("c", 0, 4), keys.receipt("a", 0, 2)):
        overwrite(toy, key, big)
    before = audit(make_toy().store).counts.bytes_read
    assert audit(toy.store).counts.bytes_read < before


def test_many_notes_do_not_hide_what_is_broken(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_report, "FINDINGS_MAX", 5)
    for number in range(9):
        overwrite(toy, f"islands/evil/stray-{number}", b"")
    flip(toy, toy.commit(4).weights.params.key)
    report = audit(toy.store)
    assert not report.ok
    assert [finding.level for finding in report.findings] == ["note"] * 5 + ["broken"]


def test_every_promise_is_broken_by_some_test() -> None:
    assert {promise for promise, _, _ in TAMPERED.values()} == PROMISES.keys() - {"layout", *REPLAY_PROMISES}


def test_every_object_matters(toy: ToyRun) -> None:
    """Whatever happens to any object, the audit ends, and finds it unless nothing depends on the object."""
    num_tried = 0
    for info in list(toy.store.list("")):
        good, _ = toy.store.get(info.key)
        for name, bad in mutations(good).items():
            if bad is None:
                toy.store.delete(info.key)
            else:
                overwrite(toy, info.key, bad)
            try:
                ok = audit(toy.store).ok
            except NotFound:
                ok = info.key != keys.RUN
            overwrite(toy, info.key, good)
            assert not ok or nothing_depends_on(info.key, name), (info.key, name)
            num_tried += 1
    assert audit(toy.store).ok
    assert num_tried > 200


def mutations(good: bytes) -> dict[str, bytes | None]:
    middle = len(good) // 2
    return {
        "gone": None,
        "empty": b"",
        "braces": b"{}",
        "cut": good[:-1],
        "longer": good + b" ",
        "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
    }


def nothing_depends_on(key: str, mutation: str) -> bool:
    """What is pending, skipped or rejected may be damaged: that is what the aggregator decides about on record."""
    if "/generations/" in key:
        return True  # an island's own matter
    if key == keys.commit(0, 4):  # nobody has named the newest record by its digest yet; without, it is to be made
        return mutation in {"gone", "longer", "flipped"}
    undecided = ("c/receipts/0000/0000000004", "c/payloads/0000/0000000004", "b/payloads/0000/0000000004")
    if any(name in key for name in undecided):
        return True
    return "b/receipts/0000/0000000004" in key and mutation != "gone"


def test_tampering_elsewhere_is_found_in_every_fragment() -> None:
    toy = make_toy(num_fragments=3)
    flip(toy, toy.commit(4, fragment=2).weights.params.key)
    [finding] = audit(toy.store).findings
    assert finding.promise == "objects"
    assert "fragments/0002/params" in finding.where


def test_strays_are_noted_but_break_nothing(toy: ToyRun) -> None:
    for key in (
        "notes.txt",
        "probes/123/race.json",
        "fragments/0007/commits/0000000001.json",
        "islands/a/receipts/0009/0000000001.json",
        "islands/a/other/x.json",
    ):
        overwrite(toy, key, b"{}")
    report = audit(toy.store)
    assert report.ok
    assert [finding.promise for finding in report.findings] == ["layout"] * 5
    assert {finding.level for finding in report.findings} == {"note"}


def test_two_starts_that_trained_the_same_steps_on_their_own_are_noted(toy: ToyRun) -> None:
    start_again(toy, "a")
    replace_receipt(toy, "a", 5, generation=2, step_to=45)
    report = audit(toy.store)
    assert report.ok
    [finding] = report.findings
    assert (finding.level, finding.promise, finding.where) == ("note", "steps", keys.receipt("a", 0, 5))
    assert finding.what == "covers steps 36 to 40, as contribution 4 of start 1 does, as work of its own"
    assert report.counts.overlaps == 1


def test_a_gap_between_steps_is_no_matter(toy: ToyRun) -> None:
    replace_receipt(toy, "a", 5, step_to=1000)
    assert audit(toy.store).findings == ()


def departure(toy: ToyRun, island: str, number: int, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "format": FORMAT,
        "run": toy.run.digest,
        "write_id": "x",
        "island": island,
        "generation": 1,
        "fragment": 0,
        "seq": number,
    }
    overwrite(toy, keys.departure(island, 0, number), encode(Departure(**{**fields, **changes})))


def test_departures_belong_there(toy: ToyRun) -> None:
    departure(toy, "a", 0)
    departure(toy, "a", 5)
    report = audit(toy.store)
    assert report.findings == ()
    assert report.counts.objects_read == audit(make_toy().store).counts.objects_read + 2


def test_departures_that_cannot_be_read_are_noted_and_break_nothing(toy: ToyRun) -> None:
    departure(toy, "a", 1, run="0" * 32)
    departure(toy, "a", 2, seq=3)
    departure(toy, "b", 99)
    overwrite(toy, keys.departure("c", 0, 1), b"{}")
    overwrite(toy, keys.departure("c", 7, 1), b"{}")  # there is no fragment 7
    report = audit(toy.store)
    assert report.ok
    assert [(finding.promise, finding.where) for finding in report.findings] == [
        ("layout", keys.departure("c", 7, 1)),
        ("records", keys.departure("a", 0, 1)),
        ("records", keys.departure("a", 0, 2)),
        ("records", keys.departure("b", 0, 99)),
        ("records", keys.departure("c", 0, 1)),
    ]


def test_status_belongs_there(toy: ToyRun) -> None:
    overwrite(toy, keys.status("a"), b"{}")
    assert audit(toy.store).findings == ()


def test_made_up_numbers_do_not_cost_memory(toy: ToyRun) -> None:
    huge = Watermark(seq=10**18, version=4)
    edit(toy, keys.close(0, 4), Close, lambda close: {"watermarks": {**close.watermarks, "a": huge}})
    assert "watermarks" in broken(audit(toy.store))


def test_payload_key_from_outside_the_alphabet_is_a_finding(toy: ToyRun) -> None:
    chosen = toy.close(4).chosen[0]
    bad = Chosen(**{name: getattr(chosen, name) for name in Chosen.__struct_fields__} | {"island": "../evil"})
    edit(toy, keys.close(0, 4), Close, lambda close: {"chosen": (bad, *close.chosen[1:])})
    assert "receipts" in broken(audit(toy.store))


def test_object_names_are_digests(toy: ToyRun) -> None:
    """What the tampering tests rely on: in a sound bucket a name is the digest of the bytes."""
    ref: ObjectRef = toy.commit(1).update
    assert digest(toy.store.get(ref.key)[0]) == ref.digest
