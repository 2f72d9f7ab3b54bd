"""Who this process is: an island's name and generation. The newest generation is the island; older ones are fenced."""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_blob.core.errors import Conflict, Fenced, NotFound
from diloco_blob.core.ids import Ids
from diloco_blob.island.steps import ignore
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import RunInfo
from diloco_blob.protocol.records import FORMAT, Departure, Generation, encode
from diloco_blob.store.base import ObjectStore

_NUMBER = re.compile(r"/(\d{6})\.json$")


@dataclass(frozen=True)
class Membership:
    """One start of one island in one run."""

    store: ObjectStore
    run: RunInfo
    name: str
    generation: int
    at: Callable[[str], None] = ignore
    """Told of each step (`steps.STEPS`)."""

    def check_fence(self) -> None:
        """Raise `Fenced` if this island has been started again elsewhere. One small request."""
        try:
            self.store.head(keys.generation(self.name, self.generation + 1))
        except NotFound:
            return
        raise self.fenced(self.generation + 1)

    def depart(self, next_seq: Mapping[int, int], ids: Ids) -> None:
        """Say that this island contributes no more for now, so that nobody waits for it.

        Args:
            next_seq: Number of the contribution that will not come, by fragment.
            ids: Source of write ids.
        """
        for fragment, seq in next_seq.items():
            record = Departure(
                format=FORMAT,
                run=self.run.digest,
                write_id=ids.fresh(),
                island=self.name,
                generation=self.generation,
                fragment=fragment,
                seq=seq - 1,
            )
            self.at("departure.before_put")
            with contextlib.suppress(Conflict):  # said before, after the same contribution
                self.store.put(keys.departure(self.name, fragment, seq - 1), encode(record), if_absent=True)
                self.at("departure.after_put")

    def fenced(self, newer: int) -> Fenced:
        """The error that says so."""
        return Fenced(
            f"island {self.name} was started again by another process (start {newer}, this one is {self.generation})",
            "this one stops, what it has sent counts; give each island a name of its own",
        )


def join(
    store: ObjectStore,
    run: RunInfo,
    name: str,
    *,
    ids: Ids,
    host: str,
    pid: int,
    at: Callable[[str], None] = ignore,
) -> Membership:
    """Become the newest generation of an island. A LIST, once a start."""
    newest = 0
    for info in store.list(keys.generations(name)):
        match = _NUMBER.search(info.key)
        if match:
            newest = max(newest, int(match.group(1)))
    while True:
        newest += 1
        record = Generation(
            format=FORMAT,
            run=run.digest,
            write_id=ids.fresh(),
            island=name,
            generation=newest,
            host=host,
            pid=pid,
        )
        at("generation.before_put")
        try:
            store.put(keys.generation(name, newest), encode(record), if_absent=True)
        except Conflict:
            continue  # Two starts at once: the other has this number, the next one is newer still.
        at("generation.after_put")
        return Membership(store=store, run=run, name=name, generation=newest, at=at)
