"""The audit of a run that collects: what may be gone is not missed, what must be there is, even while it goes on."""

from collections.abc import Callable

import pytest

from diloco_blob.core.settings import Collect, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import AuditReport, audit
from diloco_blob.protocol.records import Commit
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.testing.toy import ToyRun

HEAD, KEEP = 6, 3
HORIZON = 4


def make_toy(num_fragments: int = 1) -> ToyRun:
    """Six versions of fragment 0, of which three are kept: 4, 5 and 6."""
    toy = ToyRun(
        Settings(
            sync=Sync(num_fragments=num_fragments),
            policy=Policy(islands=2, quorum=1),
            collect=Collect(keep_versions=KEEP),
        )
    )
    for name in "ab":
        toy.join(name)
    for _ in range(HEAD):
        more(toy)
    return toy


def more(toy: ToyRun) -> None:
    version = toy.head().version
    for name in "ab":
        toy.send(name, 2 * version + ord(name), base_version=version)
    toy.aggregate(drain=True)


@pytest.fixture
def toy() -> ToyRun:
    return make_toy()


def params(commit: Commit) -> str:
    return commit.weights.params.key


def outer(commit: Commit) -> str:
    return commit.outer.key


def update(commit: Commit) -> str:
    return commit.update.key


def places(report: AuditReport) -> set[tuple[str, str]]:
    return {(finding.promise, finding.where) for finding in report.findings if finding.level == "broken"}


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_collected_versions_are_counted_and_their_records_audited(num_fragments: int) -> None:
    report = audit(make_toy(num_fragments).store)
    assert report.findings == ()
    counts = report.counts
    assert (counts.commits, counts.merged, counts.collected, counts.orphans) == (HEAD, 2 * HEAD, HORIZON, 0)


def test_a_run_that_collected_nothing_says_so() -> None:
    toy = ToyRun()
    toy.join("a")
    toy.send("a", 1)
    toy.aggregate(drain=True)
    assert audit(toy.store).counts.collected == 0


@pytest.mark.parametrize("which", [params, outer, update])
@pytest.mark.parametrize("version", [4, 5, 6])
@pytest.mark.parametrize("damaged", [False, True])
def test_objects_from_the_horizon_on_must_be_there_and_sound(
    toy: ToyRun, which: Callable[[Commit], str], version: int, damaged: bool
) -> None:
    key = which(toy.commit(version))
    if damaged:
        toy.store.put(key, bytes([toy.store.get(key)[0][0] ^ 1]) + toy.store.get(key)[0][1:])
    else:
        toy.store.delete(key)
    assert places(audit(toy.store)) == {("objects", key)}


@pytest.mark.parametrize("version", [5, 6])
def test_payloads_above_the_watermarks_of_the_horizon_must_be_there(toy: ToyRun, version: int) -> None:
    [part] = toy.close(version).chosen[0].parts
    toy.store.delete(part.key)
    assert places(audit(toy.store)) == {("payloads", part.key)}


@pytest.mark.parametrize("version", [1, 4])
def test_records_of_collected_versions_must_be_there(toy: ToyRun, version: int) -> None:
    toy.store.delete(keys.receipt("a", 0, version))
    assert ("receipts", keys.receipt("a", 0, version)) in places(audit(toy.store))
    toy.store.delete(keys.close(0, version))
    assert ("closes", keys.close(0, version)) in places(audit(toy.store))


def test_what_is_left_below_the_horizon_is_an_orphan_and_not_read(toy: ToyRun) -> None:
    """A collector was killed, or somebody slept over the collection and wrote a file again."""
    toy.store.put(params(toy.commit(2)), b"not what the commit says")
    toy.store.put(toy.close(2).chosen[0].parts[0].key, b"nor this")
    before = audit(make_toy().store).counts
    report = audit(toy.store)
    assert report.findings == ()
    assert report.counts.orphans == 1
    assert report.counts.objects_read == before.objects_read


def test_orphans_of_kept_versions_are_counted_as_before(toy: ToyRun) -> None:
    for version, folder in ((4, "params"), (5, "outer"), (6, "updates"), (7, "params")):
        end = ".zst" if folder == "updates" else ""
        toy.store.put(f"{keys.version_files(0, folder)}{version:010}-{'0' * 32}.safetensors{end}", b"")
    assert audit(toy.store).counts.orphans == 4


@pytest.mark.parametrize("which", [params, outer, update])
@pytest.mark.parametrize("version", [4, 5, 6])
@pytest.mark.parametrize("num_more", [1, 2, 7])
def test_a_run_that_goes_on_and_collects_while_it_is_audited_is_sound(
    toy: ToyRun, which: Callable[[Commit], str], version: int, num_more: int
) -> None:
    def go_on() -> None:
        for _ in range(num_more):
            more(toy)

    moving = FaultyStore(toy.store, [Fault("head", "delay", key=which(toy.commit(version)), hook=go_on)])
    report = audit(moving)
    assert report.findings == ()
    assert report.counts.commits == HEAD + num_more
    assert HORIZON <= report.counts.collected <= HORIZON + num_more


@pytest.mark.parametrize("version", [5, 6])
def test_payloads_that_are_collected_while_they_are_audited_are_not_missed(toy: ToyRun, version: int) -> None:
    key = toy.close(version).chosen[0].parts[0].key
    moving = FaultyStore(
        toy.store, [Fault("head", "delay", key=key, hook=lambda: [more(toy) for _ in range(4)] and None)]
    )
    report = audit(moving)
    assert report.findings == ()
    assert report.counts.collected > HORIZON


def test_version_0_that_is_collected_while_the_audit_begins_is_not_missed() -> None:
    toy = ToyRun(Settings(policy=Policy(islands=2, quorum=1), collect=Collect(keep_versions=1)))
    for name in "ab":
        toy.join(name)
    key = toy.run.run.fragments[0].params.key
    moving = FaultyStore(toy.store, [Fault("head", "delay", key=key, hook=lambda: more(toy))])
    report = audit(moving)
    assert report.findings == ()
    assert (report.counts.commits, report.counts.collected) == (1, 1)
    assert key not in {info.key for info in toy.store.list("")}
