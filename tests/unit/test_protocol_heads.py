"""Finding the newest version: the right one, in few requests, wherever one starts."""

import math

import msgspec
import pytest

from diloco_blob.core.errors import Corrupt, NotFound
from diloco_blob.core.settings import Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import find_head, read_head, read_run, watermark_of
from diloco_blob.protocol.records import Commit, Watermark, encode
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.metered import MeteredStore
from diloco_blob.testing.toy import ToyRun


@pytest.fixture(scope="module")
def made() -> ToyRun:
    toy = ToyRun(Settings(policy=Policy(quorum=1)))
    toy.send("a", 1)
    toy.aggregate()
    return toy


def with_versions(made: ToyRun, num: int) -> ToyRun:
    """A run with so many versions, of which only the commits are there."""
    toy = ToyRun(made.settings)
    commit = made.commit(1)
    for version in range(1, num + 1):
        record = msgspec.structs.replace(commit, version=version, run=toy.run.digest)
        toy.store.put(keys.commit(0, version), encode(record))
    return toy


def linear(toy: ToyRun) -> int:
    """What `find_head` must find, found without any thought."""
    return sum(1 for _ in toy.store.list("fragments/0000/commits/"))


def test_every_head_is_found_from_every_hint_in_few_requests(made: ToyRun) -> None:
    for num in range(71):
        toy = with_versions(made, num)
        assert linear(toy) == num
        for hint in range(num + 1):
            store = MeteredStore(toy.store)
            head = find_head(store, toy.run, 0, hint=hint)
            assert (head.version, head.fragment) == (num, 0)
            use = store.usage()
            assert use.heads <= 2 * math.ceil(math.log2(num - hint + 2)), (num, hint)
            assert (use.gets, use.lists, use.puts) == (1 if num else 0, 0, 0)


def test_a_good_hint_costs_two_small_requests(made: ToyRun) -> None:
    toy = with_versions(made, 50)
    store = MeteredStore(toy.store)
    find_head(store, toy.run, 0, hint=50)
    assert (store.usage().heads, store.usage().gets) == (1, 1)


def test_a_thousand_versions_cost_about_twenty(made: ToyRun) -> None:
    toy = with_versions(made, 1000)
    store = MeteredStore(toy.store)
    assert find_head(store, toy.run, 0).version == 1000
    assert store.usage().requests <= 21


def test_version_zero_is_the_run_itself(made: ToyRun) -> None:
    head = read_head(made.store, made.run, 0, 0)
    assert (head.digest, head.created_at, head.commit, head.tally) == (made.run.digest, made.run.created_at, None, {})
    assert head.weights == made.run.run.fragments[0]


def test_a_head_is_what_its_commit_says(made: ToyRun) -> None:
    head = read_head(made.store, made.run, 0, 1)
    data, info = made.store.get(keys.commit(0, 1))
    commit = msgspec.json.decode(data, type=Commit)
    assert (head.commit, head.weights, head.tally) == (commit, commit.weights, commit.tally)
    assert head.created_at == info.last_modified
    assert commit.parent == made.run.digest


def test_a_version_that_does_not_exist_is_not_found(made: ToyRun) -> None:
    with pytest.raises(NotFound):
        read_head(made.store, made.run, 0, 2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"version": 7}, "says it is of 0, 7"),
        ({"fragment": 1}, "says it is of 1, 2"),
        ({"run": "0" * 32}, "another run"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_commit_under_a_wrong_name_is_refused(made: ToyRun, changes: dict[str, object], word: str) -> None:
    toy = with_versions(made, 1)
    record = msgspec.structs.replace(made.commit(1), **{"version": 2, "run": toy.run.digest, **changes})
    toy.store.put(keys.commit(0, 2), encode(record))
    with pytest.raises(Corrupt, match=word):
        find_head(toy.store, toy.run, 0)


def test_fragments_have_heads_of_their_own() -> None:
    toy = ToyRun(Settings(policy=Policy(quorum=1), sync=Sync(num_fragments=2)))
    toy.send("a", 1, fragment=1)
    toy.aggregate(fragment=1)
    assert [find_head(toy.store, toy.run, number).version for number in (0, 1)] == [0, 1]


def test_a_url_without_a_run_says_so() -> None:
    with pytest.raises(NotFound, match="there is no run at memory://nothing-here"):
        read_run(MemoryStore("memory://nothing-here"))


def test_a_bucket_that_is_not_there_is_what_is_said() -> None:
    class NoBucket(MemoryStore):
        def get(self, key: str) -> tuple[bytes, ObjectInfo]:
            raise NotFound("there is no bucket 'lab'", f"no place for {key}")

    with pytest.raises(NotFound, match="there is no bucket 'lab'"):
        read_run(NoBucket("memory://no-bucket"))


def test_run_json_of_another_kind_is_refused(made: ToyRun) -> None:
    store = MemoryStore("memory://not-a-run")
    store.put(keys.RUN, b"[]")
    with pytest.raises(Corrupt, match=r"run\.json in memory://not-a-run: not a run record"):
        read_run(store)
    assert read_run(made.store) == made.run


def test_a_newcomer_has_watermark_zero() -> None:
    marks = {"a": Watermark(seq=3, version=2)}
    assert watermark_of(marks, "a") == marks["a"]
    assert watermark_of(marks, "b") == Watermark(seq=0, version=0)
