"""What was never merged is owed again; laggards fetch what is cheaper; slow islands keep step."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Codec, Collect, Merge, Outer, Policy, Settings, Sync, parse_settings
from diloco_blob.island import fates, saving
from diloco_blob.island.inbox import Inbox
from diloco_blob.island.pace import RATIO_MAX, Pace
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.heads import find_head
from diloco_blob.protocol.records import Close, Commit, Receipt, decode
from diloco_blob.testing.fleet import Fleet, ToyIsland
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import codec_for, decode_payload, weights_digest

INT4 = Codec(name="int4", block=8, error_feedback=True)


def late_world(owe: bool, *, checkpoints: Path | None = None) -> Fleet:
    """Two islands; what the second, slower one sends is always too stale."""
    sync = Sync(sync_every=5, overlap=1, adopt="carry", owe_unmerged=owe)
    policy = Policy(islands=2, quorum=1, grace_s=0.0, deadline_s=1000.0, max_staleness=0, active_versions=1)
    settings = Settings(
        sync=sync, up=INT4, outer=Outer(lr=1.0, momentum=0.0), policy=policy, collect=Collect(keep_versions=0)
    )
    fleet = Fleet(settings, num_islands=2, checkpoints=checkpoints)
    fleet.add_all()
    fleet.islands[1].slowness = 3
    return fleet


def recorded(patch: pytest.MonkeyPatch, owner: object, name: str, note: Callable[..., object]) -> None:
    """Have each call of a method noted before it is made."""
    real = getattr(owner, name)

    def call(*args: Any, **more: Any) -> Any:
        note(*args)
        return real(*args, **more)

    patch.setattr(owner, name, call)


def decoded(fleet: Fleet, island: ToyIsland, seq: int) -> dict[str, np.ndarray]:
    name, run = island.name, island.core.run
    [part] = decode(fleet.bare.get(keys.receipt(name, 0, seq))[0], Receipt, run=run.digest).parts
    layout = [(spec.name, spec.shape) for spec in run.run.tensors]
    return dict(decode_payload([fleet.bare.get(part.key)[0]], layout, codec_for(run.run.settings.up, 1)))


def skipped(fleet: Fleet, island: ToyIsland) -> list[int]:
    run, found = island.core.run, []
    for info in fleet.bare.list("fragments/0000/closes/"):
        close = decode(fleet.bare.get(info.key)[0], Close, run=run.digest)
        found += [entry.seq for entry in close.skipped if entry.island == island.name]
    return found


def test_a_close_that_cannot_be_read_stops_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, real = late_world(owe=True), fates.decode

    def damaged(data: bytes, kind: Any, **more: Any) -> Any:
        return real(data[:1] if kind is Close else data, kind, **more)

    monkeypatch.setattr(fates, "decode", damaged)
    with caplog.at_level(logging.WARNING, logger=fates.__name__):
        for _ in range(200):
            fleet.tick(1000)
    assert fleet.islands[1].core.version > 10
    assert "is not owed again" in caplog.text


def test_what_was_skipped_is_owed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = late_world(owe=True)
    slow = fleet.islands[1]
    owed: list[dict[str, np.ndarray]] = []
    feedback = slow.core.outbox.feedback[0]
    recorded(monkeypatch, feedback, "owe", lambda sent: owed.append(dict(sent)))
    fleet.run(100)
    numbers = skipped(fleet, slow)
    assert len(numbers) > 2
    # All but what was skipped after its last adoption; to the bit what anybody would have decoded.
    assert len(numbers) - 2 <= len(owed) <= len(numbers)
    for seq, sent in zip(numbers, owed, strict=False):
        right = decoded(fleet, slow, seq)
        assert {name: array.tobytes() for name, array in sent.items()} == {
            name: array.tobytes() for name, array in right.items()
        }
    assert audit(fleet.bare).ok


def test_all_progress_is_either_sent_and_counts_or_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    # β = 1: what was taken = what was sent, without what was owed again, + the residual.
    fleet = late_world(owe=True)
    slow = fleet.islands[1]
    outbox = slow.core.outbox
    taken: list[dict[str, np.ndarray]] = []
    again: list[int] = []
    recorded(monkeypatch, outbox, "submit", lambda items: taken.extend(dict(item.delta) for item in items))
    recorded(monkeypatch, outbox, "owe", lambda _, numbers: again.extend(numbers))
    for _ in range(100):
        fleet.tick(1000)
    assert outbox.empty()
    assert len(again) > 2
    balance = {name: sum(item[name].astype(np.float64) for item in taken) for name in slow.port.weights}
    for seq in range(1, outbox.next_seq[0]):
        if seq not in again:
            for name, array in decoded(fleet, slow, seq).items():
                balance[name] = balance[name] - array
    for name, residual in outbox.residuals()[0].items():
        np.testing.assert_allclose(residual, balance[name], atol=1e-5)
        assert name != "layer.weight" or np.abs(residual).max() > 0.1  # far more than coding ever leaves


def test_a_restart_owes_again_what_its_checkpoint_did_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CHECKPOINT_EVERY_S", 0.0)  # one at each due step
    fleet = late_world(owe=True, checkpoints=tmp_path)
    seen: list[int] = []

    def watched(island: ToyIsland) -> ToyIsland:
        recorded(monkeypatch, island.core.outbox, "owe", lambda _, numbers: seen.extend(numbers))
        return island

    watched(fleet.islands[1])
    while not seen:
        fleet.tick(1000)
    first = list(seen)  # owed since the last checkpoint, and not in it
    slow = watched(fleet.add("island-1", slowness=3))
    assert slow.core.joined.sent_at is not None, "it goes on from the checkpoint"
    while len(seen) < 2 * len(first) + 2:
        fleet.tick(1000)
    assert seen[len(first) : 2 * len(first)] == first
    assert seen[len(first) :] == skipped(fleet, slow)[: len(seen) - len(first)]


def test_an_island_that_was_never_skipped_reads_no_close() -> None:
    reads: list[str] = []
    fleet = Fleet(
        Settings(sync=Sync(sync_every=5, owe_unmerged=True), up=INT4, policy=Policy(islands=2)), num_islands=2
    )
    fleet.add_all()
    for island in fleet.islands:
        island.core.inbox.store = _Reading(island.core.inbox.store, reads)  # type: ignore[assignment]
    fleet.run(20)
    assert reads
    assert not [key for key in reads if "/closes/" in key]


class _Reading:
    """A store that remembers what was read."""

    def __init__(self, store: object, reads: list[str]) -> None:
        self._store, self._reads = store, reads

    def get(self, key: str) -> object:
        self._reads.append(key)
        return self._store.get(key)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_to_owe_something_it_has_to_be_kept() -> None:
    with pytest.raises(InvalidSettings, match=r"owe_unmerged needs up\.error_feedback = true"):
        parse_settings("[sync]\nowe_unmerged = true", source="t")
    with pytest.raises(InvalidSettings, match=r"up\.decay above 0"):
        parse_settings("[sync]\nowe_unmerged = true\n[up]\nerror_feedback = true\ndecay = 0.0", source="t")


# ---- laggards


SHAPES = {"w": (64, 64)}


def lagging_run(down: Codec, versions: int, *, keep_versions: int = 0) -> ToyRun:
    """A run of one island that has made so many versions."""
    toy = ToyRun(settings=Settings(down=down, collect=Collect(keep_versions=keep_versions)), shapes=SHAPES)
    toy.join("a")
    for seed in range(versions):
        toy.send("a", seed, base_version=seed)
        toy.aggregate(drain=True)
    return toy


def caught_up(toy: ToyRun, mirror: dict[str, np.ndarray], version: int) -> list[str]:
    """What an island of version 1 fetches to be there."""
    reads: list[str] = []
    store = _Reading(toy.store, reads)
    inbox = Inbox(store, toy.run, "b", toy.clock, SeededIds(3))  # type: ignore[arg-type]
    inbox.start(0, 1, mirror)
    inbox.pump()
    arrival = inbox.take(0)
    assert arrival is not None
    assert arrival.version == version
    assert weights_digest(arrival.weights) == toy.commit(version).weights.digest
    return [key.split("/")[2] for key in reads if "/updates/" in key or "/params/" in key]


@pytest.mark.parametrize(
    ("down", "versions", "fetched"),
    [
        ("fp32", 1, ["updates"]),
        ("fp32", 3, ["params"]),
        ("int4", 2, ["updates"] * 2),
        ("int4", 6, ["updates"] * 6),  # an update is about an eighth of the params
        ("int4", 20, ["params"]),
    ],
)
def test_a_laggard_fetches_what_is_fewer_bytes_and_says_which(
    down: str, versions: int, fetched: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    toy = lagging_run(Codec(name=down), 1 + versions)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, logger="diloco_blob.island.catchup"):
        assert caught_up(toy, toy.params(1), 1 + versions) == fetched
    updates = sum(toy.commit(version).update.size for version in range(2, 2 + versions))
    params = toy.commit(1 + versions).weights.params.size
    assert (updates <= params) == (fetched[0] == "updates")
    said = {
        "updates": f"their updates, {updates:,} bytes, rather than the params, {params:,}",
        "params": "the params, ",
    }
    assert (f"fetching {said[fetched[0]]}" in caplog.text) == (versions > 1)


def test_a_laggard_whose_updates_were_collected_takes_the_params() -> None:
    toy = lagging_run(Codec(name="int4"), 1)
    mirror = toy.params(1)
    toy = lagging_run(Codec(name="int4"), 7, keep_versions=3)
    assert caught_up(toy, mirror, 7) == ["params"]


# ---- islands that keep step


def test_the_pace_by_hand() -> None:
    pace = Pace(Sync(sync_every=10, num_fragments=2, match_speed=True))
    assert [step for step in range(1, 31) if 0 in pace.due(step)] == [10, 20, 30]
    pace.took(0, 30, 10, 20.0)  # half a step a second
    pace.learned(0, 2.0)  # a quarter of the fastest
    assert pace.interval(0) == 2
    assert pace.interval(1) == 10
    assert [step for step in range(31, 50) if 0 in pace.due(step)] == [32, 34, 36, 38, 40, 42, 44, 46, 48]
    pace.learned(0, 1e9)
    assert pace.interval(0) == max(1, 10 // RATIO_MAX)
    pace.learned(0, 0.25)  # it is the fastest itself
    assert pace.interval(0) == 10


def test_offsets_of_fragments_are_kept_where_speeds_are_not_matched() -> None:
    pace = Pace(Sync(sync_every=10, num_fragments=2))
    pace.took(0, 10, 10, 20.0)
    pace.learned(0, 2.0)
    assert [step for step in range(1, 31) if 1 in pace.due(step)] == [5, 15, 25]
    assert [step for step in range(1, 31) if 0 in pace.due(step)] == [10, 20, 30]


def test_a_restarted_island_keeps_its_pace() -> None:
    # A restart does what was due at its checkpoint without asking `due`, and learns the speeds from the next version.
    pace = Pace(Sync(sync_every=64, match_speed=True))
    pace.took(0, 144, 16, 64.0)
    pace.learned(0, 1.0)
    assert [step for step in range(145, 200) if 0 in pace.due(step)] == [160, 176, 192]


def test_overlap_stays_shorter_than_the_interval() -> None:
    pace = Pace(Sync(sync_every=10, overlap=4, match_speed=True))
    pace.took(0, 10, 10, 100.0)
    pace.learned(0, 10.0)
    assert pace.interval(0) == 5


def test_slow_islands_make_fewer_steps_and_all_send_at_the_same_time() -> None:
    def world(match_speed: bool) -> Fleet:
        policy = Policy(islands=2, quorum=2, grace_s=1000.0, deadline_s=1000.0)
        sync = Sync(sync_every=12, overlap=1, adopt="carry", match_speed=match_speed)
        fleet = Fleet(Settings(sync=sync, merge=Merge(weights="tokens"), policy=policy), num_islands=2)
        fleet.add_all()
        fleet.islands[1].slowness = 3
        for _ in range(600):
            fleet.tick(10_000)
        assert audit(fleet.bare).ok
        return fleet

    matched, unmatched = world(True), world(False)
    assert sorted(entry.steps for entry in _newest(matched).merged) == [4, 12]
    assert sorted(entry.steps for entry in _newest(unmatched).merged) == [12, 12, 12, 12]
    assert _newest(matched).version > 2.5 * _newest(unmatched).version


def _newest(fleet: Fleet) -> Commit:
    head = find_head(fleet.bare, fleet.islands[0].core.run, 0)
    assert head.commit is not None
    return head.commit


def test_a_restart_advances_the_weights_of_its_checkpoint_where_that_is_cheaper(tmp_path: Path) -> None:
    reads: list[str] = []
    fleet = Fleet(
        Settings(
            sync=Sync(sync_every=5, overlap=1, adopt="carry"),
            up=INT4,
            down=Codec(name="int4"),
            policy=Policy(islands=2),
        ),
        num_islands=2,
        checkpoints=tmp_path,
        shapes={"w": (64, 64)},
        wrap=lambda store: _Reading(store, reads),  # type: ignore[arg-type,return-value]
    )
    fleet.add_all()
    for _ in range(30):  # 7.5 s: one checkpoint at the first send, and more sends since, which it does not know
        fleet.tick(1000)
    del reads[:]
    again = fleet.add("island-1")
    assert again.core.joined.sent_at is None, "it goes on from the bucket"
    assert again.core.version > 1
    assert not [key for key in reads if "/params/" in key]
    assert len([key for key in reads if "/updates/" in key]) == again.core.version
    head = find_head(fleet.bare, again.core.run, 0)
    assert weights_digest(again.port.weights) == head.weights.digest
    fleet.run(60)
    assert audit(fleet.bare).ok
