"""What if: recomputing by another rule gives what a run with that rule would have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.replay import WhatIfReport, changed_merge, what_if
from diloco_blob.cli.export import export
from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Collect, Merge, Outer, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import find_head, read_head, read_run
from diloco_blob.store.memory import MemoryStore, forget
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import read_tensors

UNIFORM = Merge(weights="uniform")
PLAIN = Outer(optimizer="sgd", lr=1.0, momentum=0.0)
CODEC = Codec(name="int8", block=16, error_feedback=True)


@pytest.fixture
def into() -> MemoryStore:
    forget("memory://what-if")
    return MemoryStore("memory://what-if", clock=VirtualClock())


def rounds(toy: ToyRun, num: int, islands: str = "abc", fragment: int = 0) -> None:
    for version in range(num):
        for number, island in enumerate(islands):
            toy.send(
                island,
                10 * version + number,
                fragment=fragment,
                base_version=max(0, version - number),
                tokens=1000 * (number + 1),
            )
        toy.aggregate(drain=True, fragment=fragment)


def asked(toy: ToyRun, into: MemoryStore, *without: str, **changes: Any) -> WhatIfReport:
    before = [(info.key, info.etag) for info in toy.store.list("")]
    ctx = Context(store=toy.store, run=read_run(toy.store), clock=VirtualClock(), ids=SeededIds(5))
    report = what_if(ctx, into, merge=changed_merge(toy.settings.merge, changes), without=without)
    assert [(info.key, info.etag) for info in toy.store.list("")] == before
    return report


def digests(store: Any, num: int, fragment: int = 0) -> list[str]:
    run = read_run(store)
    return [read_head(store, run, fragment, version).weights.digest for version in range(num + 1)]


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_no_change_makes_no_difference(into: MemoryStore, num_fragments: int) -> None:
    toy = ToyRun(Settings(sync=Sync(num_fragments=num_fragments), up=CODEC, down=CODEC))
    for fragment in range(num_fragments):
        rounds(toy, 3, fragment=fragment)
    report = asked(toy, into)
    assert [(effect.fragment, effect.version) for effect in report.effects] == [
        (fragment, version) for fragment in range(num_fragments) for version in (1, 2, 3)
    ]
    for effect in report.effects:
        assert effect.difference == 0.0 < effect.distance
        assert effect.step_norm == effect.what_if_step_norm
        assert (effect.num_merged, effect.num_left_out) == (3, 0)
    assert report.difference == 0.0 < report.distance
    for fragment in range(num_fragments):
        assert digests(into, 3, fragment) == digests(toy.store, 3, fragment)


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "rda"},
        {"rule": "trimmed_mean", "trim": 0.25},
        {"clip": "median"},
        {"staleness": "hinge", "staleness_a": 3.0, "staleness_b": 0.0},
        {"staleness": "constant"},
    ],
)
def test_another_rule_gives_what_a_run_with_that_rule_gives(into: MemoryStore, changes: dict[str, Any]) -> None:
    settings = Settings(up=CODEC, down=CODEC)
    toy, other = ToyRun(settings), ToyRun(Settings(up=CODEC, down=CODEC, merge=Merge(**changes)))
    rounds(toy, 4)
    rounds(other, 4)
    report = asked(toy, into, **changes)
    assert digests(into, 4) == digests(other.store, 4) != digests(toy.store, 4)
    assert [effect.what_if_step_norm for effect in report.effects] == [
        other.commit(version).step_norm for version in range(1, 5)
    ]
    assert [effect.step_norm for effect in report.effects] == [toy.commit(v).step_norm for v in range(1, 5)]
    mine = np.concatenate([values.ravel() for values in other.params().values()]).astype(np.float64)
    real = np.concatenate([values.ravel() for values in toy.params().values()]).astype(np.float64)
    start = np.concatenate([values.ravel() for values in toy.initial.values()]).astype(np.float64)
    np.testing.assert_allclose(report.difference, np.linalg.norm(mine - real), rtol=1e-12)
    np.testing.assert_allclose(report.distance, np.linalg.norm(real - start), rtol=1e-12)


@pytest.mark.parametrize("merge", [UNIFORM, Merge(), Merge(rule="rda"), Merge(rule="trimmed_mean")])
def test_without_an_island_is_a_run_in_which_it_was_absent(into: MemoryStore, merge: Merge) -> None:
    settings = Settings(merge=merge, outer=PLAIN)
    toy, absent = ToyRun(settings), ToyRun(settings)
    rounds(toy, 1)
    rounds(absent, 1, "ab")
    report = asked(toy, into, "c")
    assert digests(into, 1) == digests(absent.store, 1) != digests(toy.store, 1)
    assert [(effect.num_merged, effect.num_left_out) for effect in report.effects] == [(2, 1)]


def test_without_everybody_nothing_moves(into: MemoryStore) -> None:
    toy = ToyRun()
    rounds(toy, 2)
    report = asked(toy, into, "a", "b", "c")
    assert digests(into, 2) == [toy.run.run.fragments[0].digest] * 3
    assert [effect.what_if_step_norm for effect in report.effects] == [0.0, 0.0]
    assert report.difference == report.distance


def test_it_starts_from_the_oldest_version_that_is_kept_with_its_outer_state(into: MemoryStore) -> None:
    toy = ToyRun(Settings(collect=Collect(keep_versions=3), down=CODEC))
    rounds(toy, 6)
    report = asked(toy, into)
    assert report.bases == (4,)
    assert [effect.version for effect in report.effects] == [5, 6]
    assert report.difference == 0.0
    run = read_run(into)
    assert read_head(into, run, 0, 0).weights.digest == toy.commit(4).weights.digest
    assert find_head(into, run, 0).weights.digest == toy.commit(6).weights.digest
    assert run.run.settings.collect.keep_versions == 0


def test_a_what_if_is_exported_like_a_run(into: MemoryStore, tmp_path: Path) -> None:
    toy = ToyRun()
    rounds(toy, 2)
    asked(toy, into, "b")
    path = export(into, tmp_path / "model")
    layout = sorted(toy.layout())
    data = read_head(into, read_run(into), 0, 2).weights.params
    right = read_tensors(into.get(data.key)[0], toy.layout())
    from safetensors.numpy import load_file

    found = load_file(path)
    assert sorted(found) == [name for name, _ in layout]
    for name, values in right.items():
        np.testing.assert_array_equal(found[name], values)


def test_rejected_stays_rejected(into: MemoryStore) -> None:
    toy = ToyRun()
    toy.send("a", 1)
    toy.send("b", 2, upload=False)
    toy.aggregate(drain=True)
    [effect] = asked(toy, into, staleness="constant").effects
    assert (effect.num_merged, effect.num_left_out, effect.difference) == (1, 0, 0.0)


def test_an_island_that_is_not_in_the_run(into: MemoryStore) -> None:
    toy = ToyRun()
    rounds(toy, 1)
    with pytest.raises(InvalidSettings, match=r"no island 'z' contributed to this run \(there are a, b, c\)"):
        asked(toy, into, "z")


def test_no_version_left(into: MemoryStore) -> None:
    with pytest.raises(NotFound, match="no version of this run can be recomputed"):
        asked(ToyRun(), into)
    toy = ToyRun(Settings(collect=Collect(keep_versions=1)))
    rounds(toy, 2)
    with pytest.raises(NotFound, match="no version of this run can be recomputed"):
        asked(toy, into)
    assert list(into.list("")) == []


def test_a_damaged_run_is_one_line(into: MemoryStore) -> None:
    toy = ToyRun()
    rounds(toy, 2)
    toy.store.delete(keys.close(0, 2))
    with pytest.raises(Corrupt, match=r"closes/0000000002\.json is missing"):
        asked(toy, into)


@pytest.mark.parametrize("changes", [{"rule": "median"}, {"trim": 0.5}, {"staleness_a": -1.0}, {"clip": "mean"}])
def test_a_rule_that_does_not_exist(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match="no such rule"):
        changed_merge(Merge(), changes)


def test_a_figure_that_is_not_finite(into: MemoryStore) -> None:
    toy = ToyRun()
    rounds(toy, 1)
    with pytest.raises(InvalidSettings, match="must be a finite number"):
        asked(toy, into, staleness_a=float("inf"))
