"""Real processes, killed with SIGKILL at every named step and started again with the same command: nothing is lost.

Two islands and an aggregator, three rounds of each fragment, coded with error feedback, quorum of all: what they make
depends on nothing but the seeds. So whoever is killed, wherever, the bucket ends with the history of the undisturbed
run, version by version to the bit, `verify` finds nothing, and a sweep leaves the same objects.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import servers
from crash_worker import ISLANDS

from diloco_blob.aggregate import STEPS as AGGREGATOR_STEPS
from diloco_blob.aggregate import aggregate
from diloco_blob.aggregate.collect import sweep
from diloco_blob.aggregate.context import Context
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.island.steps import STEPS as ISLAND_STEPS
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.heads import read_head, read_run
from diloco_blob.protocol.records import Receipt, decode
from diloco_blob.store import ObjectStore, open_store

STEPS = 5
"""Inner steps of each island: fragment 0 is due after 2 and 4, and `finish` sends the rest of it; fragment 1, if there
is one, after 1, 3 and 5."""
ROUNDS = 3
PATIENCE_S = 60.0
WORKER = Path(__file__).with_name("crash_worker.py")


# ---- processes


@dataclass
class Nursery:
    """Starts processes without the time that Python takes to start; see `crash_worker`."""

    process: subprocess.Popen[str]

    def start(self, words: list[str], env: dict[str, str], log: Path) -> int:
        return int(self._ask({"words": words, "env": env, "log": str(log)}))

    def wait(self) -> tuple[int, int]:
        """Process id and exit code of the next that ends."""
        ended = self._ask({"timeout_s": PATIENCE_S})
        assert ended is not None, f"no process ended within {PATIENCE_S} s"
        pid, code = ended
        return pid, code

    def _ask(self, order: dict[str, object]) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    # One thread of BLAS: a process with threads should not fork.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, str(WORKER), "nursery"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        yield Nursery(process)


@dataclass(frozen=True)
class Place:
    """Where a run lives, and what a process needs in its environment to reach it."""

    url: str
    num_fragments: int
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kill:
    """Who is killed at which step, the how many-eth time it gets there, and how many starts of it in a row."""

    victim: str
    step: str
    nth: int = 1
    kills: int = 1
    everybody: bool = False
    """All the others are killed as well, at that moment."""

    def __str__(self) -> str:
        group = "-everybody" if self.everybody else ""
        return f"{self.victim}-{self.step}-{self.nth}x{self.kills}{group}"


class Group:
    """Two islands and an aggregator: whoever is killed is started again with the same words."""

    def __init__(self, nursery: Nursery, place: Place, folder: Path, kill: Kill | None) -> None:
        self.nursery, self.place, self.folder, self.kill = nursery, place, folder, kill
        self.islands = [f"island-{number}" for number in range(ISLANDS)]
        self.marker = folder / "marker"
        self.pids: dict[int, str] = {}
        self.killed: Counter[str] = Counter()
        self.done: set[str] = set()

    def run(self) -> None:
        names = [*self.islands, "aggregator"]
        try:
            if self.kill is not None:
                names.remove(self.kill.victim)
                self._start(self.kill.victim)
                if self.kill.step.startswith(("create.", "generation.")):
                    self._next_end()  # alone, so that it is the one that creates the run
            for name in names:
                self._start(name)
            while self.done < set(self.islands):
                self._next_end()
            [(aggregator, _)] = self.pids.items()
            os.kill(aggregator, signal.SIGTERM)
            self._next_end()
        finally:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            for _ in self.pids:
                self.nursery.wait()
        expected = {} if self.kill is None else {self.kill.victim: self.kill.kills}
        if self.kill is not None and self.kill.everybody:
            expected = dict.fromkeys([*self.islands, "aggregator"], 1)
        assert dict(self.killed) == expected, self._logs()
        if self.kill is not None:
            assert self.marker.stat().st_size == self.kill.kills

    def _start(self, name: str) -> None:
        if name == "aggregator":
            words = ["aggregator", self.place.url]
        else:
            checkpoints = str(self.folder / name)
            words = ["island", self.place.url, "--name", name, "--checkpoints", checkpoints, "--steps", str(STEPS)]
            words += ["--fragments", str(self.place.num_fragments)]
        kill = self.kill
        if kill is not None and kill.victim == name:
            words += ["--kill-at", kill.step, "--nth", str(kill.nth), "--kills", str(kill.kills)]
            words += ["--marker", str(self.marker)]
        self.pids[self.nursery.start(words, self.place.env, self.folder / f"{name}.log")] = name

    def _next_end(self) -> None:
        """Wait for somebody's end; whoever was killed is started again."""
        pid, code = self.nursery.wait()
        name = self.pids.pop(pid)
        if code == 0:
            self.done.add(name)
            return
        assert code == -signal.SIGKILL, f"{name} ended with {code}\n{self._logs()}"
        dead = [name]
        if self.kill is not None and self.kill.everybody:
            for other in self.pids:
                os.kill(other, signal.SIGKILL)
            while self.pids:
                pid, code = self.nursery.wait()
                dead.append(self.pids.pop(pid))
                assert code == -signal.SIGKILL, f"{dead[-1]} was not killed, it ended with {code}"
        self.killed.update(dead)
        for one in dead:
            self._start(one)

    def _logs(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


# ---- what a run leaves


@dataclass(frozen=True)
class Left:
    """All that must be the same, whoever was killed."""

    versions: list[object]
    receipts: list[object]
    objects: list[str]


def checked(store: ObjectStore) -> Left:
    """Look for everything that may be wrong by itself; what is left to compare."""
    clock, ids = SystemClock(), SystemIds()
    run = read_run(store)
    for report in aggregate(store, clock=clock, ids=ids, run=run, drain=True):
        assert (report.action, report.version, report.arrived) == ("waiting", ROUNDS, ())
    found = audit(store)
    assert found.ok, found.findings
    counts, num_fragments = found.counts, len(run.run.fragments)
    merged = (counts.merged, counts.skipped, counts.rejected, counts.pending)
    assert merged == (ISLANDS * ROUNDS * num_fragments, 0, 0, 0)
    versions: list[object] = []
    for fragment in range(num_fragments):
        for version in range(1, ROUNDS + 1):
            commit = read_head(store, run, fragment, version).commit
            assert commit is not None
            files = (commit.weights.digest, *(ref.key for ref in (commit.weights.params, commit.outer, commit.update)))
            merged_as = [
                msgspec.structs.replace(entry, train_s=0.0) for entry in commit.merged
            ]  # how long training took is chance
            versions.append((fragment, version, files, merged_as, commit.tally))
    receipts: list[object] = []
    for number in range(ISLANDS):
        for fragment in range(num_fragments):
            for seq in range(1, ROUNDS + 1):
                data, _ = store.get(keys.receipt(f"island-{number}", fragment, seq))
                one = decode(data, Receipt, run=run.digest)
                receipts.append((one.island, fragment, seq, one.base_version, one.step_to, one.cursor, one.parts))
    list(sweep(Context(store=store, run=run, clock=clock, ids=ids)))
    names = sorted(info.key for info in store.list(""))
    return Left(versions, receipts, [name for name in names if "/generations/" not in name and "probes/" not in name])


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Left]:
    """By number of fragments."""
    left = {}
    for num_fragments in (1, 2):
        folder = tmp_path_factory.mktemp("undisturbed")
        place = Place(str(folder / "run"), num_fragments)
        Group(nursery, place, folder, None).run()
        left[num_fragments] = checked(open_store(place.url))
    return left


# ---- the matrix

ONCE = [
    *(Kill("island-1", step) for step in ISLAND_STEPS),
    *(Kill("aggregator", step) for step in AGGREGATOR_STEPS),
]
"""Each step of each, the first time that it is reached."""

EVERYBODY = [
    Kill("island-1", "checkpoint.after_write", nth=2, everybody=True),
    Kill("island-1", "send.payload.after_put", nth=2, everybody=True),
    Kill("island-1", "send.receipt.after_put", nth=2, everybody=True),
    Kill("island-1", "adopt.before_write", nth=2, everybody=True),
    Kill("aggregator", "close.after_put", nth=2, everybody=True),
    Kill("aggregator", "update.after_put", nth=2, everybody=True),
    Kill("aggregator", "commit.after_put", nth=2, everybody=True),
    Kill("aggregator", "collect.deleted", nth=2, everybody=True),
]

LATER = [
    Kill("island-1", "create.params.after_put", nth=2),
    Kill("island-1", "checkpoint.after_write", nth=5),
    Kill("island-1", "send.payload.after_put", nth=3),
    Kill("island-1", "send.receipt.after_put", nth=6),
    Kill("island-1", "version.fetched", nth=2),
    Kill("island-1", "adopt.after_write", nth=6),
    Kill("island-1", "departure.after_put", nth=2),
    Kill("aggregator", "close.after_put", nth=2),
    Kill("aggregator", "commit.before_put", nth=3),
    Kill("aggregator", "commit.after_put", nth=2),
    Kill("aggregator", "collect.deleted", nth=2),
]
"""With two fragments: the other one, the next rounds, the last exchange."""

AGAIN = [
    Kill("island-1", "generation.after_put", kills=3),
    Kill("island-1", "checkpoint.after_write", nth=2, kills=2),
    Kill("island-1", "send.receipt.before_put", nth=2, kills=2),
    Kill("island-1", "send.receipt.after_put", kills=3),
    Kill("island-1", "adopt.before_write", nth=2, kills=2),
    Kill("aggregator", "merge.fetched", kills=2),
    Kill("aggregator", "params.after_put", nth=2, kills=2),
    Kill("aggregator", "commit.before_put", kills=3),
    Kill("aggregator", "collect.deleted", kills=2),
]
"""The starts after it too."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, server_url: Callable[[servers.Server], str]) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "run"), num_fragments=2)
    server = request.getfixturevalue("seaweedfs_server")
    return Place(server_url(server), num_fragments=1, env=server.env)


SEAWEEDFS = pytest.mark.xdist_group("seaweedfs")


@pytest.mark.parametrize(
    ("place", "kill"),
    [
        *(("folder", kill) for kill in (None, *ONCE, *EVERYBODY, *LATER, *AGAIN)),
        *(pytest.param("seaweedfs", kill, marks=SEAWEEDFS) for kill in (None, *ONCE, *EVERYBODY[2::4])),
    ],
    ids=str,
    indirect=["place"],
)
def test_killed_anywhere_and_started_again_the_run_is_the_same(
    kill: Kill | None, place: Place, nursery: Nursery, undisturbed: dict[int, Left], tmp_path: Path
) -> None:
    """Nobody killed: what all is compared with depends on no chance, and on no kind of store."""
    Group(nursery, place, tmp_path, kill).run()
    assert checked(open_store(place.url)) == undisturbed[place.num_fragments]
