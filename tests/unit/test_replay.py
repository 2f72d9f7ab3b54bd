"""A replay finds nothing in what a right aggregator made, and in what a wrong one made just what it did wrong."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest

from diloco_blob.aggregate import closing, gather, merging, payloads, step
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.replay import REPLAY_PROMISES, ReplayReport, replay
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Collect, Merge, Outer, Policy, Settings, Sync
from diloco_blob.outer import weights as outer_weights
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.heads import read_run
from diloco_blob.protocol.records import Chosen, Commit, Skipped, decode
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.memory import MemoryStore
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.fleet import Fleet
from diloco_blob.testing.toy import ToyRun, random_tensors
from diloco_blob.wire import FloatArray

CODECS = [
    Codec(),
    Codec(name="bf16", error_feedback=True, decay=0.95),
    Codec(name="int8", block=16),
    Codec(name="int4", block=8, error_feedback=True),
]
MERGES = [
    Merge(),
    Merge(rule="rda", weights="tokens2_per_step", staleness="hinge", staleness_a=2.0, discount=True),
    Merge(rule="trimmed_mean", trim=0.3, discount=True),
    Merge(clip="median", weights="uniform", staleness="constant"),
]


class ReadOnly(MemoryStore):
    """A client that may not write; asking for the time may write too, on a folder."""

    def put(self, key: str, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{key} was written")

    def delete(self, key: str) -> NoReturn:
        raise AssertionError(f"{key} was deleted")

    def now(self) -> NoReturn:
        raise AssertionError("the time was asked for")


def context(url: str) -> Context:
    store = ReadOnly(url)
    return Context(store=store, run=read_run(store), clock=VirtualClock(), ids=SeededIds(7))


def replayed(toy: ToyRun) -> ReplayReport:
    return replay(context(toy.store.url))


def rounds(toy: ToyRun, versions: range, fragment: int = 0) -> None:
    """Each round: three islands, one late, one with two contributions, one payload missing, one receipt malformed."""
    for version in versions:
        toy.send("a", 10 * version, fragment=fragment, base_version=version, tokens=1000)
        toy.send("a", 10 * version + 1, fragment=fragment, base_version=version)
        toy.send("b", 10 * version + 2, fragment=fragment, base_version=max(0, version - 1))
        toy.send("c", 10 * version + 3, fragment=fragment, base_version=version, steps=7)
        toy.send("d", 10 * version + 4, fragment=fragment, base_version=version, upload=False)
        toy.send("e", 10 * version + 5, fragment=fragment, base_version=version, tokens=10, steps=9)
        toy.send_raw("f", b"{}", fragment)
        assert toy.aggregate(drain=True, fragment=fragment).version == version + 1


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: merge.rule + "-" + merge.clip)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_nothing_is_found_in_a_sound_run(codec: Codec, merge: Merge, num_fragments: int) -> None:
    toy = ToyRun(Settings(sync=Sync(num_fragments=num_fragments), up=codec, down=codec, merge=merge))
    for fragment in range(num_fragments):
        rounds(toy, range(3), fragment)
    report = replayed(toy)
    assert report.findings == ()
    assert report.ok
    assert (report.counts.recomputed, report.counts.collected, report.counts.failed) == (3 * num_fragments, 0, 0)


@pytest.mark.parametrize("outer", [Outer(), Outer(optimizer="sgd", lr=1.0, momentum=0.0)])
def test_nothing_is_found_in_a_trained_run(outer: Outer) -> None:
    fleet = Fleet(Settings(sync=Sync(sync_every=4, num_fragments=2), outer=outer))
    fleet.add_all()
    fleet.islands[1].slowness = 3
    fleet.run(16)
    report = replay(context(fleet.bare.url))
    assert report.findings == ()
    assert report.counts.recomputed + report.counts.collected == audit(fleet.bare).counts.commits


def test_a_version_of_a_backlog_is_replayed() -> None:
    toy = ToyRun(Settings(policy=Policy(max_staleness=0)))
    toy.send("a", 1)
    toy.aggregate(drain=True)
    for _ in range(gather.RECEIPTS_READ_MAX):
        toy.send("b", 2, base_version=0)  # All too stale.
    assert toy.aggregate(drain=True).reason == "backlog"
    assert replayed(toy).findings == ()


def test_what_is_collected_is_counted_and_not_read() -> None:
    toy = ToyRun(Settings(collect=Collect(keep_versions=2)))
    rounds(toy, range(5))
    report = replayed(toy)
    assert report.findings == ()
    assert (report.counts.recomputed, report.counts.collected) == (1, 4)


def test_what_a_running_run_collects_meanwhile_is_no_finding() -> None:
    toy = ToyRun(Settings(collect=Collect(keep_versions=3)))
    rounds(toy, range(4))
    newer = iter(range(4, 9))

    class Overtaken(ReadOnly):
        """The run makes a version whenever somebody looks into a payload."""

        def head(self, key: str) -> ObjectInfo:
            if "/payloads/" in key and (version := next(newer, None)) is not None:
                rounds(toy, range(version, version + 1))
            return super().head(key)

    store = Overtaken(toy.store.url)
    report = replay(Context(store=store, run=toy.run, clock=VirtualClock(), ids=SeededIds(1)))
    assert next(newer, None) is None
    assert report.findings == ()
    assert report.counts.collected > 2
    assert report.counts.recomputed + report.counts.collected == 4


# ---- wrong aggregators: each makes version 2 of a run wrongly, and records that consistently

Patch = pytest.MonkeyPatch
WRONG: dict[str, tuple[str, str, Callable[[ToyRun, Patch], None]]] = {}
"""By name: the promise, the kind of object in which it is found, and what is wrong."""

LIVELY = Settings(
    down=Codec(name="int8", error_feedback=True),
    merge=Merge(discount=True, clip="median"),
    policy=Policy(max_staleness=2),
)


def wrong(promise: str, kind: str) -> Callable[[Callable[[ToyRun, Patch], None]], Callable[[ToyRun, Patch], None]]:
    def add(fault: Callable[[ToyRun, Patch], None]) -> Callable[[ToyRun, Patch], None]:
        WRONG[fault.__name__] = (promise, kind, fault)
        return fault

    return add


def after(patch: Patch, module: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Change what a function returns."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args, **kwargs: change(right(*args, **kwargs)))


@wrong("decision", "closes")
def weights_are_exchanged(_: ToyRun, patch: Patch) -> None:
    after(patch, closing, "island_weights", lambda found: (found[0][::-1], found[1]))


@wrong("decision", "closes")
def staleness_changes_no_weight(_: ToyRun, patch: Patch) -> None:
    patch.setattr(outer_weights, "staleness_factor", lambda *_: 1.0)


@wrong("decision", "closes")
def staleness_counts_twice(_: ToyRun, patch: Patch) -> None:
    after(patch, outer_weights, "staleness_factor", lambda factor: factor**2)


@wrong("decision", "closes")
def the_discount_is_another(_: ToyRun, patch: Patch) -> None:
    after(patch, closing, "island_weights", lambda found: (found[0], found[1] * 0.5))


@wrong("decision", "closes")
def claims_are_not_bounded(_: ToyRun, patch: Patch) -> None:
    patch.setattr(closing, "_bounded", lambda works, _: [work._replace(tokens=work.tokens**2) for work in works])


@wrong("decision", "closes")
def a_sound_contribution_is_skipped(_: ToyRun, patch: Patch) -> None:
    right = gather._fault
    patch.setattr(
        gather, "_fault", lambda receipt, *rest: "parts: 2" if receipt.island == "c" else right(receipt, *rest)
    )


@wrong("decision", "closes")
def a_malformed_contribution_is_chosen(toy: ToyRun, patch: Patch) -> None:
    toy.send("g", 99, base_version=1, tokens=1 << 40)  # In 10 steps.
    patch.setattr(gather, "_fault", lambda *_: None)


@wrong("decision", "closes")
def a_contribution_is_skipped_for_no_reason_of_its_own(_: ToyRun, patch: Patch) -> None:
    after(
        patch,
        gather,
        "skip",
        lambda found: msgspec.structs.replace(found, reason="stale: 9 > 2") if found.island == "f" else found,
    )


@wrong("rejections", "commits")
def a_sound_contribution_is_rejected(_: ToyRun, patch: Patch) -> None:
    right = payloads.Payloads.fetch

    def fetch(self: payloads.Payloads, chosen: Chosen) -> payloads.Fetched | Skipped:
        return gather.skip("c", chosen.seq, "digest: no") if chosen.island == "c" else right(self, chosen)

    patch.setattr(payloads.Payloads, "fetch", fetch)


@wrong("rejections", "commits")
def a_contribution_of_huge_values_is_merged(toy: ToyRun, patch: Patch) -> None:
    toy.send("g", {name: values * np.float32(1e12) for name, values in random_tensors(3).items()}, base_version=1)
    patch.setattr(payloads, "_check_magnitude", lambda *_: None)


@wrong("rejections", "commits")
def a_contribution_is_rejected_for_another_reason(_: ToyRun, patch: Patch) -> None:
    after(
        patch,
        payloads,
        "skip",
        lambda found: msgspec.structs.replace(found, reason="huge: tensor 'x'"),
    )


@wrong("merge", "params")
def the_merge_is_another(_: ToyRun, patch: Patch) -> None:
    after(patch, step, "merge_tensor", lambda delta: np.asarray(delta * np.float32(1.5)))


@wrong("merge", "params")
def one_tensor_is_not_merged(_: ToyRun, patch: Patch) -> None:
    calls = itertools.count()
    after(patch, step, "merge_tensor", lambda delta: delta if next(calls) else np.zeros_like(delta))


@wrong("merge", "params")
def the_discount_is_not_applied(_: ToyRun, patch: Patch) -> None:
    right = step.Stepper.compute

    def compute(self: step.Stepper, shares: Any, discount: float, files: ExitStack) -> step.NewVersion:
        assert discount < 1.0
        return right(self, shares, 1.0, files)

    patch.setattr(step.Stepper, "compute", compute)


@wrong("merge", "params")
def weights_of_the_close_are_not_applied(_: ToyRun, patch: Patch) -> None:
    right = merging._shares
    patch.setattr(merging, "_shares", lambda *args: [share._replace(weight=0.25) for share in right(*args)])


@wrong("merge", "outer")
def momentum_is_lost(_: ToyRun, patch: Patch) -> None:
    after(patch, step, "outer_step", lambda found: (found[0], {"momentum": np.zeros_like(found[1]["momentum"])}))


@wrong("merge", "outer")
def the_residual_is_lost(_: ToyRun, patch: Patch) -> None:
    after(patch, step, "code", lambda found: (found[0], found[1], np.zeros_like(found[2])))


@wrong("merge", "commits")
def nobody_is_clipped(_: ToyRun, patch: Patch) -> None:
    patch.setattr(merging, "clip_factors", lambda norms: [1.0] * len(norms))


@wrong("merge", "commits")
def the_norm_of_the_step_is_made_up(_: ToyRun, patch: Patch) -> None:
    after(patch, merging, "make_commit", lambda commit: msgspec.structs.replace(commit, step_norm=1.0))


@wrong("merge", "commits")
def a_weight_in_the_commit_is_a_hair_off(_: ToyRun, patch: Patch) -> None:
    def change(commit: Commit) -> Commit:
        first, *rest = commit.merged
        off = [msgspec.structs.replace(first, weight=first.weight * (1 + 1e-12))]
        # Both contributions of the island.
        off += [
            msgspec.structs.replace(other, weight=off[0].weight) if other.island == first.island else other
            for other in rest
        ]
        return msgspec.structs.replace(commit, merged=tuple(off))

    after(patch, merging, "make_commit", change)


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_aggregator_is_found_by_a_replay_alone(name: str, monkeypatch: Patch) -> None:
    promise, kind, fault = WRONG[name]
    toy = ToyRun(LIVELY)
    for island in "abcdefg":
        toy.join(island)
    rounds(toy, range(1))
    with monkeypatch.context() as patch:
        fault(toy, patch)
        rounds(toy, range(1, 2))
    rounds(toy, range(2, 4))
    assert audit(toy.store).ok, audit(toy.store).findings
    report = replayed(toy)
    assert not report.ok
    assert {finding.promise for finding in report.findings} == {promise}, report.findings
    places = [finding.where for finding in report.findings]
    assert all("/0000000002" in place for place in places), places
    assert places[0].split("/")[2] == kind
    assert all("\n" not in finding.what for finding in report.findings)


def test_every_promise_of_a_replay_is_broken_by_some_test() -> None:
    assert {promise for promise, _, _ in WRONG.values()} == set(REPLAY_PROMISES)


def test_the_first_tensor_that_differs_is_named_with_by_how_much(monkeypatch: Patch) -> None:
    toy = ToyRun(Settings(outer=Outer(optimizer="sgd", lr=1.0, momentum=0.0)))
    names = [name for name, _ in toy.layout()]
    toy.send("a", {name: np.ones(shape, np.float32) for name, shape in toy.layout()})
    calls = itertools.count()

    def change(delta: FloatArray) -> FloatArray:
        return np.asarray(delta * np.float32(2.0)) if next(calls) == 1 else delta

    with monkeypatch.context() as patch:
        after(patch, step, "merge_tensor", change)
        toy.aggregate(drain=True)
    [params, update] = [one.what for one in replayed(toy).findings if "norm" not in one.what]
    expected = f"are not what the close gives: tensor {names[1]!r} differs by up to 1"
    assert params == f"its tensors {expected}"
    assert update == f"its tensors {expected}"


# ---- damaged runs


def test_an_update_that_another_zstd_made_is_a_note(monkeypatch: Patch) -> None:
    toy = ToyRun()
    toy.send("a", 1)
    toy.aggregate(drain=True)
    right = step.pack_stream

    def otherwise(*args: Any) -> Iterator[bytes]:
        import zstandard

        plain = zstandard.ZstdDecompressor().decompress(b"".join(right(*args)))
        yield zstandard.ZstdCompressor(level=19, write_checksum=True).compress(plain)

    monkeypatch.setattr(step, "pack_stream", otherwise)
    report = replayed(toy)
    assert [(finding.level, finding.promise, finding.where) for finding in report.findings] == [
        ("note", "merge", toy.commit(1).update.key)
    ]
    assert report.ok


@pytest.mark.parametrize("kind", ["params", "outer", "closes", "payloads", "receipts"])
def test_what_cannot_be_recomputed_is_a_finding(kind: str) -> None:
    toy = ToyRun()
    rounds(toy, range(3))
    [*gone] = [info.key for info in toy.store.list("") if f"/{kind}/" in info.key]
    key = {
        "params": toy.commit(1).weights.params.key,
        "outer": toy.commit(1).outer.key,
        "closes": keys.close(0, 2),
        "payloads": toy.close(2).chosen[0].parts[0].key,
        "receipts": keys.receipt("a", 0, 3),
    }[kind]
    assert key in gone
    toy.store.delete(key)
    report = replayed(toy)
    assert not report.ok
    assert any("0000000002" in finding.where for finding in report.findings), report.findings


def test_a_version_that_cannot_be_made_is_a_finding(monkeypatch: Patch) -> None:
    toy = ToyRun()
    rounds(toy, range(1))
    # The optimizer of a program that made this version all the same: here its step is infinite.
    monkeypatch.setattr(step, "outer_step", lambda _, delta, state, __: (delta * np.float32(np.inf), state))
    findings = replayed(toy).findings
    assert [finding.promise for finding in findings] == ["merge"]
    assert findings[0].what.startswith("cannot be recomputed: version 1 of fragment 0 cannot be made: ")


def test_reading_a_run_needs_no_clock_and_writes_nothing_on_a_folder(tmp_path: Path) -> None:
    from diloco_blob.store.local import LocalStore

    toy = ToyRun()
    rounds(toy, range(2))
    folder: ObjectStore = LocalStore(str(tmp_path / "run"), clock=VirtualClock(), ids=SeededIds(3))
    for info in list(toy.store.list("")):
        folder.put(info.key, toy.store.get(info.key)[0])
    before = sorted(_entries(tmp_path))
    ctx = Context(store=folder, run=toy.run, clock=VirtualClock(), ids=SeededIds(1))
    assert replay(dataclasses.replace(ctx, run=read_run(folder))).ok
    assert sorted(_entries(tmp_path)) == before


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    for path in folder.rglob("*"):
        yield str(path), path.stat().st_mtime_ns


def test_records_are_what_tests_believe() -> None:
    toy = ToyRun()
    rounds(toy, range(2))
    commit = decode(toy.store.get(keys.commit(0, 2))[0], Commit)
    assert [entry.island for entry in commit.merged] == ["a", "a", "b", "c", "e"]
    assert [entry.island for entry in commit.rejected] == ["d"]
    assert [entry.island for entry in toy.close(2).skipped] == ["f"]
    assert [entry.staleness for entry in commit.merged] == [0, 0, 1, 0, 0]
