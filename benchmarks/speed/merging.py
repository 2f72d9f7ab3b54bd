"""One merge of a large model by one real pass of the aggregator: seconds, and the most memory that it ever held.

The bucket is a folder. A child process makes the run and the islands' contributions, another one aggregates and
says what `VmHWM` of /proc/self/status was: the peak of its resident memory.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diloco_blob.aggregate import aggregate
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.core.settings import Codec, Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.heads import RunInfo
from diloco_blob.protocol.layout import fragment_layout, make_layout
from diloco_blob.protocol.records import FORMAT, Generation, ObjectRef, Receipt, encode
from diloco_blob.store import ObjectStore, open_store
from diloco_blob.wire import codec_for, digest, encode_payload
from speed.model import Model

CODEC = Codec(name="int4", error_feedback=True)


class Merged(NamedTuple):
    """What was measured of one merge."""

    parameters: int
    largest: int
    """Parameters of the largest tensor."""
    islands: int
    seconds: float
    cpu_s: float
    """Of all threads."""
    peak_mib: float
    before_mib: float
    """When everything was imported and nothing done."""
    fetched_s: float
    computed_s: float
    """Until all contributions were fetched and checked; until the version was computed. The rest is writing."""


def measure(folder: Path, model: Model, islands: int) -> Merged:
    """Make a run in an empty folder, merge one round of it, and say what it took."""
    words = [str(folder), str(model.layers), str(model.vocabulary), str(islands)]
    _child("prepare", words)
    return Merged(**json.loads(_child("merge", words)))


def _child(what: str, words: list[str]) -> str:
    command = [sys.executable, "-m", "speed.merging", what, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def prepare(folder: str, model: Model, islands: int) -> None:
    """A run with a contribution of each island."""
    store, ids = open_store(folder), SystemIds()
    settings = Settings(policy=Policy(islands=islands, quorum=islands), up=CODEC, down=CODEC).resolved(islands)
    tensors = make_layout([(name, shape, "float32") for name, shape in model.shapes().items()], 1)
    rng = np.random.default_rng(0)
    initial = {name: rng.standard_normal(shape, np.float32) for name, shape in model.shapes().items()}
    run = create_run(store, settings, tensors, initial, ids=ids, created_by="benchmark")
    del initial
    for number in range(islands):
        _contribute(store, run, f"island-{number}", number)


def _contribute(store: ObjectStore, run: RunInfo, island: str, seed: int) -> None:
    ids, rng, layout = SystemIds(), np.random.default_rng(seed + 1), fragment_layout(run.run.tensors, 0)
    data = encode_payload(
        ((name, rng.standard_normal(shape, np.float32)) for name, shape in layout), layout, codec_for(CODEC, 1)
    )
    part = ObjectRef(key=keys.payload(island, 0, 1, 0, digest(data)), digest=digest(data), size=len(data))
    generation = Generation(
        format=FORMAT, run=run.digest, write_id=ids.fresh(), island=island, generation=1, host="benchmark", pid=1
    )
    receipt = Receipt(
        format=FORMAT,
        run=run.digest,
        write_id=ids.fresh(),
        island=island,
        generation=1,
        fragment=0,
        seq=1,
        base_version=0,
        steps=10,
        tokens=1000,
        step_to=10,
        tokens_to=1000,
        cursor="",
        parts=(part,),
    )
    store.put(keys.generation(island, 1), encode(generation), if_absent=True)
    store.put(part.key, data)
    store.put(keys.receipt(island, 0, 1), encode(receipt), if_absent=True)


def merge(folder: str, model: Model, islands: int) -> Merged:
    """Aggregate in this process."""
    sizes = [int(np.prod(shape)) for shape in model.shapes().values()]
    store, moments, before = open_store(folder), {}, _resident("VmHWM")
    started, cpu = time.monotonic(), time.process_time()

    def at(step: str) -> None:
        moments[step] = time.monotonic() - started

    [report] = aggregate(store, clock=SystemClock(), ids=SystemIds(), drain=True, at=at)
    seconds = time.monotonic() - started
    assert len(report.merged) == islands
    return Merged(
        parameters=sum(sizes),
        largest=max(sizes),
        islands=islands,
        seconds=seconds,
        cpu_s=time.process_time() - cpu,
        peak_mib=_resident("VmHWM"),
        before_mib=before,
        fetched_s=moments["merge.fetched"],
        computed_s=moments["merge.computed"],
    )


def _resident(name: str) -> float:
    """A figure of /proc/self/status, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """What a child does."""
    what, folder, layers, vocabulary, islands = sys.argv[1:]
    model = Model(int(layers), int(vocabulary))
    if what == "prepare":
        prepare(folder, model, int(islands))
    else:
        print(json.dumps(merge(folder, model, int(islands))._asdict()))


if __name__ == "__main__":
    main()
