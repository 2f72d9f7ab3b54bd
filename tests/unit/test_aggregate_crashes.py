"""Whoever is killed, overtaken or cut off, wherever: one chain, the same bytes, every contribution used once."""

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from diloco_blob.aggregate import STEPS
from diloco_blob.core.errors import Conflict, Corrupt, Unavailable
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Collect, Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import Commit
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.store.retrying import RetryingStore
from diloco_blob.testing.toy import ToyRun

TAKEOVER_S = 60.0

UNCOMMITTED = STEPS[: STEPS.index("commit.after_put")]


class Killed(BaseException):
    """What SIGKILL is to a process: nobody catches it."""


def toy_run(takeover_s: float = TAKEOVER_S, keep_versions: int = 1) -> ToyRun:
    """A run at version 1, with a second round that is due: two islands, one of them also with work that is late.

    By default each version makes the one before collectable.
    """
    policy = Policy(islands=2, quorum=2, takeover_s=takeover_s)
    down = Codec(name="int8", error_feedback=True)
    toy = ToyRun(Settings(policy=policy, down=down, collect=Collect(keep_versions=keep_versions)))
    for name in "ab":
        toy.send(name, ord(name))
    assert toy.aggregate().version == 1
    toy.send("a", 1, base_version=0)
    toy.send("a", 2, base_version=1)
    toy.send("b", b"junk", base_version=1)
    toy.send("b", 3, base_version=1)
    return toy


def files(commit: Commit) -> tuple[str, ...]:
    """What must be the same whoever merges."""
    return (commit.weights.digest, *(ref.key for ref in (commit.weights.params, commit.outer, commit.update)))


@pytest.fixture(scope="module")
def undisturbed() -> Commit:
    toy = toy_run()
    assert toy.aggregate().action == "merged"
    return toy.commit(2)


FATE = {("a", 1): "merged", ("b", 1): "merged", ("a", 2): "merged", ("a", 3): "merged", ("b", 2): "rejected",
        ("b", 3): "merged"}  # fmt: skip


def finished(toy: ToyRun, undisturbed: Commit) -> None:
    assert toy.head().version == 2
    assert files(toy.commit(2)) == files(undisturbed)
    assert (toy.commit(2).merged, toy.commit(2).rejected) == (undisturbed.merged, undisturbed.rejected)
    assert toy.commit(2).tally == undisturbed.tally
    assert toy.audit() == FATE


def killer(step: str) -> Callable[[str], None]:
    def at(reached: str) -> None:
        if reached == step:
            raise Killed

    return at


# ---- killed


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_another_aggregator_finishes_with_the_same_bytes(step: str, undisturbed: Commit) -> None:
    toy = toy_run()
    with pytest.raises(Killed):
        toy.aggregate(at=killer(step))
    report = toy.aggregate()
    before_close = STEPS.index(step) <= STEPS.index("close.before_put")
    if step not in UNCOMMITTED:
        assert (report.action, report.version) == ("waiting", 2)
    elif before_close:
        assert report.action == "merged"
    else:
        assert (report.action, report.look_again_s) == ("elsewhere", TAKEOVER_S)
        toy.clock.advance(TAKEOVER_S - 1)
        assert toy.aggregate().look_again_s == 1.0
        toy.clock.advance(1)
        report = toy.aggregate()
        assert (report.action, report.takeover) == ("merged", True)
    finished(toy, undisturbed)


@pytest.mark.parametrize("steps", list(itertools.combinations_with_replacement(UNCOMMITTED[4:], 2)))
def test_killed_twice(steps: tuple[str, str], undisturbed: Commit) -> None:
    toy = toy_run()
    for step in steps:
        with pytest.raises(Killed):
            toy.aggregate(at=killer(step))
        toy.clock.advance(TAKEOVER_S)
    assert toy.aggregate().takeover
    finished(toy, undisturbed)


# ---- overtaken


@pytest.mark.parametrize("step", UNCOMMITTED)
@pytest.mark.parametrize("keep_versions", [0, 1])
def test_an_aggregator_that_sleeps_while_history_goes_on_and_is_collected_changes_nothing(
    step: str, keep_versions: int, undisturbed: Commit
) -> None:
    toy = toy_run(keep_versions=keep_versions)
    asleep = [True]

    def at(reached: str) -> None:
        if reached != step or not asleep:
            return
        asleep.clear()
        toy.clock.advance(TAKEOVER_S)
        toy.aggregate(drain=True)
        assert toy.head().version == 2
        finished(toy, undisturbed)
        toy.send("a", 9, base_version=2)
        assert toy.aggregate(drain=True).version == 3
        left = [info.key for info in toy.store.list("fragments/0000/params/")]
        assert len(left) == (1 if keep_versions else 4)

    report = toy.aggregate(at=at)
    assert report.action in {"lost", "elsewhere"} or step == "head.found"
    assert toy.head().version == 3
    assert files(toy.commit(2)) == files(undisturbed)
    names = [info.key for info in toy.store.list("fragments/0000/commits/")]
    assert len(names) == 3


# ---- two at once

YIELDS = ("head.found", "close.before_put", "close.after_put", "commit.before_put")
"""Where the two can see of each other; all else that they write has the same bytes under the same names."""


class Stage:
    """Runs passes in threads, one at a time, each until its next yield, in the order of a script."""

    def __init__(self, passes: list[Callable[[Callable[[str], None]], object]]) -> None:
        self.results: list[object] = [None] * len(passes)
        self._go = [threading.Semaphore(0) for _ in passes]
        self._back = threading.Semaphore(0)
        self._done = [False] * len(passes)
        self._threads = [
            threading.Thread(target=self._act, args=(number, run), daemon=True) for number, run in enumerate(passes)
        ]
        for thread in self._threads:
            thread.start()

    def _act(self, number: int, run: Callable[[Callable[[str], None]], object]) -> None:
        def at(step: str) -> None:
            if step in YIELDS:
                self._back.release()
                self._go[number].acquire()

        self._go[number].acquire()
        try:
            self.results[number] = run(at)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.results[number] = error
        self._done[number] = True
        self._back.release()

    def play(self, script: Iterator[int] | tuple[int, ...]) -> None:
        for number in script:
            if not self._done[number]:
                self._go[number].release()
                assert self._back.acquire(timeout=30)
        assert all(self._done)


def scripts(num_turns: int) -> Iterator[tuple[int, ...]]:
    """Every order of two actors with so many turns each."""
    for first in itertools.combinations(range(2 * num_turns), num_turns):
        yield tuple(0 if turn in first else 1 for turn in range(2 * num_turns))


@pytest.mark.parametrize("takeover_s", [TAKEOVER_S, 0.0])
def test_two_aggregators_in_every_order_make_one_chain(takeover_s: float, undisturbed: Commit) -> None:
    seen = set()
    for script in scripts(len(YIELDS) + 1):
        toy = toy_run(takeover_s)

        def one_pass(at: Callable[[str], None], toy: ToyRun = toy) -> object:
            return toy.aggregate(at=at)

        stage = Stage([one_pass, one_pass])
        stage.play(script)
        actions = tuple(getattr(result, "action", result) for result in stage.results)
        seen.add(actions)
        assert actions.count("merged") == 1, (script, stage.results)
        finished(toy, undisturbed)
        assert toy.aggregate().action == "waiting"
    others = {"waiting", "elsewhere"} if takeover_s else {"waiting", "lost"}
    assert {action for actions in seen for action in actions} == {"merged", *others}


# ---- cut off


def faulty(toy: ToyRun, *faults: Fault) -> ObjectStore:
    return RetryingStore(FaultyStore(toy.store, faults), toy.clock, SeededIds(1))


ANSWERS = [
    (put, effect)
    for put in ("closes/", "params/", "outer/", "updates/", "commits/")
    for effect in ("refuse", "lose_answer", "conflict_after")
    if effect != "conflict_after" or put in {"closes/", "commits/"}  # Only creates can be refused.
]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("put", "effect"), ANSWERS)
def test_a_lost_answer_to_any_write_is_settled(put: str, effect: str, times: int, undisturbed: Commit) -> None:
    toy = toy_run()
    report = toy.aggregate(store=faulty(toy, Fault("put", effect, key=put, times=times)))  # type: ignore[arg-type]
    assert (report.action, report.takeover) == ("merged", False)
    finished(toy, undisturbed)


@pytest.mark.parametrize("effect", ["refuse", "lose_answer"])
def test_an_outage_at_any_request_fails_the_pass_and_rejects_nobody(effect: str, undisturbed: Commit) -> None:
    num_failed = 0
    for number in range(60):
        toy = toy_run()
        broken = FaultyStore(toy.store, [Fault("any", effect, skip=number)])  # type: ignore[arg-type]
        try:
            toy.aggregate(store=broken)
        except Unavailable:
            num_failed += 1
        toy.clock.advance(TAKEOVER_S)
        toy.aggregate()
        finished(toy, undisturbed)
    assert num_failed > 20


@pytest.mark.parametrize("times", [1, 2])
def test_bytes_damaged_on_their_way_are_not_blamed_on_the_island(times: int, undisturbed: Commit) -> None:
    """Once. A second time it is taken for the object's own fault, on record; the chain stays whole."""
    toy = toy_run()
    toy.aggregate(store=FaultyStore(toy.store, [Fault("get_range", "truncate", key="a/payloads/", times=times)]))
    if times == 1:
        finished(toy, undisturbed)
    else:
        assert toy.audit() == {**FATE, ("a", 2): "rejected"}


def test_a_store_that_refuses_a_create_and_has_nothing_is_not_believed() -> None:
    toy = toy_run()
    lying = FaultyStore(toy.store, [Fault("put", "refuse", key="closes/", error=_conflict)])
    with pytest.raises(Corrupt, match="does not have it"):
        toy.aggregate(store=lying)


def _conflict() -> Conflict:
    return Conflict("on purpose")


# ---- damaged records


def test_records_of_the_run_that_are_damaged_stop_it_with_a_clear_word() -> None:
    for key, word in (
        (keys.close(0, 1), "not the record that the commit names"),
        (keys.commit(0, 1), "not a commit record"),
    ):
        toy = toy_run()
        toy.store.put(key, b"{}")
        with pytest.raises(Corrupt, match=word):
            toy.aggregate()
    toy = toy_run()
    toy.store.delete(keys.close(0, 1))
    with pytest.raises(Corrupt, match="is missing"):
        toy.aggregate()


def test_a_close_that_belongs_elsewhere_is_refused() -> None:
    toy = toy_run()
    toy.store.put(keys.close(0, 2), toy.store.get(keys.close(0, 1))[0])
    with pytest.raises(Corrupt, match="does not describe what follows version 1"):
        toy.aggregate()
