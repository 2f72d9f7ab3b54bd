"""Islands and an aggregator in one virtual world: the whole exchange, restarts, fences and lost answers."""

import msgspec
import numpy as np
import pytest

from diloco_blob.core.errors import Conflict, Fenced, Unavailable
from diloco_blob.core.settings import Codec, Collect, Outer, Policy, Settings, Sync
from diloco_blob.island.core import start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.island.steps import STEPS
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import find_head, read_head, read_run
from diloco_blob.protocol.records import ObjectRef, Receipt, decode, encode
from diloco_blob.testing.fleet import Fleet, HandDriver
from diloco_blob.testing.port import ArrayPort
from diloco_blob.wire import digest

CODED = {
    "up": Codec(name="int4", block=8, error_feedback=True),
    "down": Codec(name="int8", block=8, error_feedback=True),
    "outer": Outer(lr=0.7, momentum=0.5),
}


def world(sync: Sync, *, islands: int = 3, quorum: int = 0, grace_s: float = 5.0, deadline_s: float = 30.0, **rest):
    policy = Policy(islands=islands, quorum=quorum or islands, grace_s=grace_s, deadline_s=deadline_s, takeover_s=5.0)
    coded = CODED | {name: rest.pop(name) for name in list(rest) if name in CODED}
    return Fleet(Settings(sync=sync, policy=policy, **coded), num_islands=islands, **rest)


def digests(fleet: Fleet) -> list[list[str]]:
    """Weights digest of every version of every fragment."""
    run = read_run(fleet.bare)
    result = []
    for p in range(run.run.settings.sync.num_fragments):
        newest = find_head(fleet.bare, run, p).version
        result.append([read_head(fleet.bare, run, p, v).weights.digest for v in range(newest + 1)])
    return result


def merged(fleet: Fleet) -> list[tuple[int, str, int]]:
    """Everything that was merged, from the commits: fragment, island, number."""
    run = read_run(fleet.bare)
    found = []
    for p in range(run.run.settings.sync.num_fragments):
        for v in range(1, find_head(fleet.bare, run, p).version + 1):
            commit = read_head(fleet.bare, run, p, v).commit
            assert commit is not None
            found += [(p, item.island, item.seq) for item in commit.merged]
    return found


def receipts(fleet: Fleet) -> list[tuple[int, str, int]]:
    """Everything that was receipted."""
    run = read_run(fleet.bare)
    found = []
    for info in fleet.bare.list("islands/"):
        if "/receipts/" in info.key:
            receipt = decode(fleet.bare.get(info.key)[0], Receipt, run=run.digest)
            found.append((receipt.fragment, receipt.island, receipt.seq))
    return sorted(found)


ALL_WAYS = [
    Sync(sync_every=10),
    Sync(sync_every=12, num_fragments=4),
    Sync(sync_every=10, overlap=3, adopt="overwrite"),
    Sync(sync_every=10, overlap=3, adopt="mix", num_fragments=2),
    Sync(sync_every=10, overlap=3, adopt="carry"),
    Sync(sync_every=12, overlap=1, adopt="carry", num_fragments=4),
]


@pytest.mark.parametrize("sync", ALL_WAYS, ids=lambda s: f"{s.adopt}-{s.overlap}-{s.num_fragments}")
def test_islands_of_different_speeds_end_with_one_model(sync):
    fleet = world(sync, quorum=2)
    fleet.add_all()
    fleet.islands[2].slowness = 3
    first_loss = fleet.islands[0].port.train()
    fleet.run(60)
    for island in fleet.islands:
        assert island.core.steps == 60
        assert island.core.loss is not None
        assert float(island.core.loss) < first_loss
        for p, trajectory in enumerate(island.core.trajectories):
            run = read_run(fleet.bare)
            head = read_head(fleet.bare, run, p, trajectory.version)
            assert head.weights.digest in digests(fleet)[p]
    assert sorted(merged(fleet)) == receipts(fleet), "everything receipted was merged, once"


@pytest.mark.parametrize("sync", ALL_WAYS, ids=lambda s: f"{s.adopt}-{s.overlap}-{s.num_fragments}")
def test_the_same_world_twice_gives_the_same_bits(sync):
    histories = []
    for _ in range(2):
        fleet = world(sync, quorum=2, seed=3)
        fleet.add_all()
        fleet.run(36)
        histories.append(digests(fleet))
    assert histories[0] == histories[1]


def test_an_island_holds_the_committed_weights_to_the_bit():
    fleet = world(Sync(sync_every=10))
    fleet.add_all()
    fleet.run(30)
    final = [island.port.weights for island in fleet.islands]
    for other in final[1:]:
        assert all(np.array_equal(final[0][name], other[name]) for name in final[0])


@pytest.mark.parametrize("sync", [ALL_WAYS[0], ALL_WAYS[1], ALL_WAYS[4]], ids=lambda s: f"{s.adopt}-{s.num_fragments}")
def test_an_island_killed_at_any_tick_resumes_and_nothing_is_merged_twice(sync, tmp_path):
    for kill_at in range(1, 60, 7):
        fleet = world(sync, quorum=2, checkpoints=tmp_path / f"{kill_at}")
        fleet.add_all()
        for _ in range(kill_at):
            fleet.tick(30)
        fleet.add("island-1")  # the old process is gone; the same command starts it again
        fleet.run(30)
        history = merged(fleet)
        assert len(history) == len(set(history))
        assert sorted(history) == receipts(fleet)
        assert all(island.core.steps == 30 for island in fleet.islands)


class Killed(BaseException):
    """What a SIGKILL is to a process that is only simulated."""


@pytest.mark.parametrize("step", [step for step in STEPS if not step.startswith(("create.", "generation.", "depart"))])
@pytest.mark.parametrize("fragments", [1, 4])
def test_killed_at_a_named_step_a_classic_run_ends_with_the_very_same_weights(step, fragments, tmp_path):
    """With the local checkpoint, a restart repeats exactly what was lost: overlap 0, quorum of all."""
    sync = Sync(sync_every=8, num_fragments=fragments)
    undisturbed = world(sync, deadline_s=1e6, checkpoints=tmp_path / "undisturbed")
    undisturbed.add_all()
    undisturbed.run(32)

    fleet = world(sync, deadline_s=1e6, checkpoints=tmp_path / "killed")
    fleet.add_all()
    seen = 0

    def at(name: str) -> None:
        nonlocal seen
        seen += name == step
        if name == step and seen == 2:
            raise Killed

    fleet.add("island-1", at=at)
    with pytest.raises(Killed):
        fleet.run(32)
    fleet.add("island-1")
    fleet.run(32)
    assert digests(fleet) == digests(undisturbed)
    assert sorted(merged(fleet)) == receipts(fleet)


def test_without_a_checkpoint_an_island_goes_on_from_the_bucket():
    fleet = world(Sync(sync_every=10), quorum=2)
    fleet.add_all()
    for _ in range(27):
        fleet.tick(40)
    again = fleet.add("island-1")
    assert again.core.joined.resumed
    assert again.core.steps in (10, 20)
    assert again.core.cursor == str(again.core.steps)
    fleet.run(40)
    assert sorted(merged(fleet)) == receipts(fleet)


def test_the_older_of_two_processes_of_one_island_is_fenced():
    fleet = world(Sync(sync_every=10), quorum=2)
    fleet.add_all()
    zombie = fleet.islands[1]
    for _ in range(5):
        fleet.tick(40)
    fleet.add("island-1")
    fleet.islands.append(zombie)
    with pytest.raises(Fenced, match="island-1 was started again"):
        fleet.run(40)


def test_a_zombies_receipt_that_was_already_on_its_way_counts_and_the_newer_takes_the_next_number():
    """It lands between the newer's payload and receipt; all up to it is merged and collected before the next try."""
    fleet = world(Sync(sync_every=10), quorum=2)
    fleet.settings = msgspec.structs.replace(fleet.settings, collect=Collect(keep_versions=1))
    fleet.add_all()
    fleet.run(10)  # receipt 1 of each island
    taken = []

    def at(step: str) -> None:
        if step != "send.receipt.before_put" or taken:
            return
        (mine,) = [info.key for info in fleet.bare.list(keys.payloads("island-1", 0)) if "/0000000002-" in info.key]
        taken.append(mine)
        # The zombie looked at the fence just before the newer start.
        first = decode(fleet.bare.get(keys.receipt("island-1", 0, 1))[0], Receipt)
        data = fleet.bare.get(mine)[0]
        part = ObjectRef(key=keys.payload("island-1", 0, 2, 0, digest(data)), digest=digest(data), size=len(data))
        fleet.bare.put(part.key, data)
        late = msgspec.structs.replace(first, seq=2, write_id="z", parts=(part,))
        fleet.bare.put(keys.receipt("island-1", 0, 2), encode(late), if_absent=True)
        fleet.aggregate(drain=True)
        assert mine not in [info.key for info in fleet.bare.list("islands/")], "collected with the zombie's"

    fleet.add("island-1", at=at)
    fleet.run(30)
    assert taken
    of_newer = [seq for _, island, seq in receipts(fleet) if island == "island-1"]
    assert of_newer == [1, 2, 3, 4]
    assert sorted(merged(fleet)) == receipts(fleet)


def test_a_late_island_is_merged_with_staleness_and_less_weight_and_nobody_waits_beyond_the_deadline():
    fleet = world(Sync(sync_every=10), islands=3, quorum=2, grace_s=2.0, deadline_s=20.0)
    fleet.add_all()
    fleet.islands[2].slowness = 4
    fleet.run(120)
    stale = [item for report in fleet.reports for item in report.merged if item.staleness > 0]
    assert stale, "the slow island's work was late at least once"
    compared = 0
    for report in fleet.reports:
        tokens = {item.island: 0 for item in report.merged}
        for item in report.merged:
            tokens[item.island] += item.tokens
        for late in (item for item in report.merged if item.staleness > 0 and item.island == "island-2"):
            for other in report.merged:
                if other.staleness < late.staleness and other.island != late.island:
                    compared += 1
                    assert late.weight / tokens[late.island] < other.weight / tokens[other.island]
    assert compared, "late and fresher work met in one version"
    run = read_run(fleet.bare)
    newest = find_head(fleet.bare, run, 0).version
    opened = [run.created_at] + [read_head(fleet.bare, run, 0, v).created_at for v in range(1, newest + 1)]
    assert max(np.diff(opened)) <= 20.0 + 2 * fleet.tick_s


def test_a_joiner_never_seeds_and_contributes_from_the_next_round():
    fleet = world(Sync(sync_every=10), islands=2, quorum=2)
    fleet.add_all()
    for _ in range(60):
        fleet.tick(60)
    joiner = fleet.add("island-9")
    run = read_run(fleet.bare)
    assert joiner.core.version == find_head(fleet.bare, run, 0).version > 0
    fleet.run(60)
    assert any(island == "island-9" for _, island, _ in merged(fleet))


def test_two_aggregators_at_once_make_one_history():
    fleet = world(Sync(sync_every=10), quorum=2)
    fleet.add_all()
    for island in fleet.islands:
        island.slowness = 1 + int(island.name[-1])
    fleet.run(40, aggregators=2)
    assert sorted(merged(fleet)) == receipts(fleet)


def test_an_abandoned_island_pauses_and_goes_on_when_an_aggregator_is_back(caplog):
    sync = Sync(sync_every=10, overlap=1, adopt="carry", pause_after=2, max_in_flight=8)
    fleet = world(sync, islands=1, quorum=1, deadline_s=10.0)
    island = fleet.add("island-0")
    for _ in range(400):
        fleet.tick(10_000, aggregators=0)
    assert island.core.state == "paused"
    assert "paused: no version for 2 deadlines" in caplog.text
    before = island.core.steps
    for _ in range(50):
        fleet.tick(10_000)
    assert island.core.state == "training"
    assert island.core.steps > before


def test_an_outage_while_sending_is_ridden_out_and_nothing_is_lost():
    down = False

    class Down:
        def __init__(self, inner):
            self._inner = inner
            self.url = inner.url

        def __getattr__(self, name):
            if down and name in {"get", "put", "head", "list", "list_dirs", "get_range"}:
                raise Unavailable("the store is down")
            return getattr(self._inner, name)

    fleet = world(Sync(sync_every=10, overlap=1, adopt="carry"), islands=2, quorum=2, wrap=Down)
    fleet.add_all()
    for tick in range(200):
        down = 30 <= tick < 36
        for island in fleet.islands:
            island.tick(tick, 60)
            island.pump()
        if not down:
            fleet.aggregate()
        fleet.clock.sleep(fleet.tick_s)
    fleet.run(60)
    assert sorted(merged(fleet)) == receipts(fleet)
    assert len(receipts(fleet)) == 12


def test_another_model_for_an_existing_run_is_refused():
    fleet = world(Sync(sync_every=10))
    fleet.add_all()
    other = ArrayPort(0, {"embed": (8, 4), "layer.weight": (4, 5)})
    options = IslandOptions(name="stranger", settings=None)
    with pytest.raises(Exception, match=r"another model: layer.weight is \[4, 4\] there, \[4, 5\] here"):
        start(fleet.store(), other, options, clock=fleet.clock, ids=fleet.ids, driver=HandDriver())
    assert list(fleet.bare.list("islands/stranger/")) == []


def test_other_settings_for_an_existing_run_are_refused():
    fleet = world(Sync(sync_every=10))
    fleet.add_all()
    options = IslandOptions(name="stranger", settings=Settings(sync=Sync(sync_every=20)))
    with pytest.raises(Exception, match=r"sync\.sync_every: 10 → 20"):
        start(fleet.store(), ArrayPort(0), options, clock=fleet.clock, ids=fleet.ids, driver=HandDriver())


def test_creating_a_run_twice_adopts_the_first():
    fleet = world(Sync(sync_every=10))
    first, *others = fleet.add_all()
    run = read_run(fleet.bare)
    assert run.run.created_by == first.name
    assert all(other.core.run.digest == run.digest for other in others)
    with pytest.raises(Conflict):
        fleet.bare.put(keys.RUN, b"{}", if_absent=True)


@pytest.mark.parametrize("overlap", [0, 3])
def test_an_island_alone_trains_as_if_alone_even_if_a_close_takes_several_of_its_contributions(overlap):
    sync = Sync(sync_every=10, overlap=overlap, adopt="carry", max_in_flight=8)
    plain_codecs = {"up": Codec(), "down": Codec(), "outer": Outer(optimizer="sgd", lr=1.0, momentum=0.0)}
    fleet = world(sync, islands=1, quorum=1, grace_s=0.0, **plain_codecs)
    island = fleet.add("island-0")
    for tick in range(1, 400):
        fleet.tick(65, aggregators=int(tick % 27 == 0))
    assert island.done
    assert island.core.steps == 65
    counts = [len(report.merged) for report in fleet.reports]
    assert max(counts) == (1 if overlap == 0 else 3)
    plain = ArrayPort(1000, None, ArrayPort(0).weights)
    for _ in range(65):
        plain.train()
    for name, expected in plain.weights.items():
        error = np.linalg.norm(island.port.weights[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-6, f"{name}: {error:.2e}"


def test_figures_for_people_go_on_after_a_restart():
    fleet = world(Sync(sync_every=10), islands=1, quorum=1)
    first = fleet.add("island-0")
    first.core.record_eval(5.0, 8.0)
    for _ in range(40):
        fleet.tick(30)
    before = first.core.status()
    first.core.end("stopped")
    again = fleet.add("island-0")
    again.core.record_eval(2.0, 3.0, sample="text")
    after = again.core.status()
    assert (after.first_eval, after.last_eval.bits_per_byte) == (before.first_eval, 3.0)
    assert after.bytes_up >= before.bytes_up > 0
    assert after.requests > before.requests
    assert after.train_s >= before.train_s > 0


def test_nobody_waits_for_islands_that_are_done():
    """Two islands finish, the third has far to go: its rounds close at once, not at the deadline."""
    fleet = world(Sync(sync_every=10), islands=3, quorum=2, grace_s=5.0, deadline_s=1000.0)
    fleet.add_all()
    for island in fleet.islands[:2]:
        island.core.steps = 90  # as if they had done most of it before
    started = fleet.clock.monotonic()
    fleet.run(120)
    assert fleet.clock.monotonic() - started < 200
    assert [len(report.merged) for report in fleet.reports].count(1) >= 8
    assert {report.reason for report in fleet.reports} <= {"all", "grace"}
    assert sorted(merged(fleet)) == receipts(fleet)


def test_an_island_that_left_is_waited_for_again_once_it_has_contributed():
    fleet = world(Sync(sync_every=10), islands=2, quorum=2, grace_s=5.0, deadline_s=1000.0)
    fleet.add_all()
    for _ in range(30):
        fleet.tick(100)
    fleet.islands[1].core.end("stopped")
    stopped = fleet.islands.pop()
    alone = len(fleet.reports)
    for _ in range(60):
        fleet.tick(100)
    assert [[item.island for item in report.merged] for report in fleet.reports[alone + 1 :]][:3] == [["island-0"]] * 3
    again = fleet.add(stopped.name)
    fleet.run(100)
    assert again.core.steps == 100
    assert len(fleet.reports[-1].merged) == 1
    together = [report for report in fleet.reports if len({item.island for item in report.merged}) == 2]
    assert len(together) >= 4
    assert sorted(merged(fleet)) == receipts(fleet)
