"""Decoding ahead: the same results in the same order, no more at once than allowed, errors where they belong."""

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from diloco_blob.aggregate import ahead
from diloco_blob.aggregate.ahead import AHEAD_BYTES_MAX, VALUES_MIN, Ahead
from diloco_blob.core.settings import Codec, Merge, Policy, Settings
from diloco_blob.testing.toy import ToyRun

LARGE = VALUES_MIN


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "num_cpus", lambda: 4)


def test_results_come_in_order_from_other_threads() -> None:
    def task(number: int) -> tuple[int, bool]:
        return number, threading.current_thread() is threading.main_thread()

    with Ahead(LARGE, 10) as threads:
        assert list(threads.results(partial(task, n) for n in range(50))) == [(n, False) for n in range(50)]
    with Ahead(VALUES_MIN - 1, 10) as threads:
        assert list(threads.results(partial(task, n) for n in range(50))) == [(n, True) for n in range(50)]


@pytest.mark.parametrize(("depth", "expected"), [(None, 4), (9, 4), (2, 2), (1, 1)])
def test_no_more_are_under_way_than_allowed(depth: int | None, expected: int) -> None:
    """Begun tasks whose results were not asked for yet: counted as they are handed out, by the thread that asks."""
    begun = itertools.count()

    def tasks() -> Iterator[Callable[[], None]]:
        for _ in range(20):
            next(begun)
            yield lambda: None

    with Ahead(LARGE, 10) as threads:
        results = threads.results(tasks(), depth)
        for taken in range(1, 15):
            next(results)
            assert int(repr(begun)[6:-1]) == taken + expected


def test_one_is_decoded_ahead_however_large() -> None:
    with Ahead(1 << 40, AHEAD_BYTES_MAX) as threads:
        assert threads.depth == 1
    with Ahead(1 << 40, AHEAD_BYTES_MAX // 12) as threads:
        assert threads.depth == 3


def test_an_error_comes_when_its_turn_comes() -> None:
    def task(number: int) -> int:
        if number == 3:
            raise ValueError("third")
        return number

    with Ahead(LARGE, 10) as threads:
        results = threads.results(partial(task, n) for n in range(10))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="third"):
            next(results)


@pytest.mark.parametrize("rule", ["mean", "rda", "trimmed_mean"])
def test_threads_change_no_bit_of_a_merge(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(values_min: int) -> tuple[str, str, str]:
        monkeypatch.setattr(ahead, "VALUES_MIN", values_min)
        toy = ToyRun(
            Settings(
                policy=Policy(islands=3, quorum=3),
                merge=Merge(rule=rule, clip="median"),  # type: ignore[arg-type]
                up=Codec(name="int8"),
                down=Codec(name="int4", error_feedback=True),
            ),
            shapes={f"layer.{number}": (50, 40) for number in range(9)} | {"scale": (), "empty": (0, 3)},
        )
        for version in range(2):
            for number, island in enumerate("abc"):
                toy.send(island, 10 * version + number, base_version=version)
            toy.send("d", b"junk", base_version=version)
            toy.aggregate(drain=True)
        commit = toy.commit(2)
        assert len(commit.merged) == 3
        assert len(commit.rejected) == 1
        return commit.weights.params.digest, commit.outer.digest, commit.update.digest

    assert files(VALUES_MIN) == files(0)


def test_a_huge_value_is_found_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "VALUES_MIN", 0)
    for value in (2e9, -2e9):
        toy = ToyRun(Settings(policy=Policy(islands=2, quorum=2)), shapes={"w": (3,)})
        toy.send("a", {"w": np.array([0.0, value, 1.0], np.float32)})
        toy.send("b", {"w": np.array([0.0, 1.0, 1.0], np.float32)})
        toy.aggregate(drain=True)
        assert [entry.reason for entry in toy.commit(1).rejected] == [
            f"huge: tensor 'w' has a value of {abs(value):.3g}"
        ]
