"""Makes the example run of a format.

    python tests/format/make_example.py tests/format/N

Only ever used for a new format. The examples of earlier formats are what earlier programs wrote, and stay as they are.
"""

import sys
from pathlib import Path

from diloco_blob.core.settings import Codec, Collect, Merge, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import read_run
from diloco_blob.protocol.records import FORMAT, Generation, ObjectRef, Receipt, encode
from diloco_blob.testing.fleet import Fleet
from diloco_blob.wire import digest

SETTINGS = Settings(
    sync=Sync(sync_every=2, num_fragments=2, overlap=1, adopt="carry"),
    up=Codec(name="int4", block=8, error_feedback=True),
    down=Codec(name="int8", block=16, error_feedback=True),
    merge=Merge(rule="rda", clip="median", discount=True),
    policy=Policy(quorum=2, grace_s=1.0, deadline_s=10.0),
    collect=Collect(keep_versions=4),
)


def main(folder: Path) -> None:
    fleet = Fleet(SETTINGS, num_islands=2)
    fleet.add_all()
    _strange_island(fleet)
    fleet.run(steps=8)
    fleet.aggregate(drain=True)
    for info in fleet.bare.list(""):
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fleet.bare.get(info.key)[0])
        print(path)


def _strange_island(fleet: Fleet) -> None:
    """Sends a receipt that is skipped, and one that is rejected: so that records of both are in the example."""
    run, name = read_run(fleet.store()), "island-9"
    start = Generation(
        format=FORMAT, run=run.digest, write_id=fleet.ids.fresh(), island=name, generation=1, host="elsewhere", pid=1
    )
    fleet.bare.put(keys.generation(name, 1), encode(start), if_absent=True)
    fleet.bare.put(keys.receipt(name, 0, 1), b"not a receipt", if_absent=True)
    payload = b"not a payload"
    part = ObjectRef(key=keys.payload(name, 0, 2, 0, digest(payload)), digest=digest(payload), size=len(payload))
    fleet.bare.put(part.key, payload)
    receipt = Receipt(
        format=FORMAT,
        run=run.digest,
        write_id=fleet.ids.fresh(),
        island=name,
        generation=1,
        fragment=0,
        seq=2,
        base_version=0,
        steps=2,
        tokens=128,
        step_to=2,
        tokens_to=128,
        cursor="",
        parts=(part,),
    )
    fleet.bare.put(keys.receipt(name, 0, 2), encode(receipt), if_absent=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
