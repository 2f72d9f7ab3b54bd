"""Starting: create the run or find it, take a generation, and continue where this island was.

Two ways to continue. *Exactly*: the local checkpoint fits the receipts in the bucket, so the island stands
again at the step where it was written, with every point of its trajectory. *From the bucket*: the heads'
params are the weights; numbering, counters and data cursor go on from the last receipts; what the checkpoint
knows of optimizer and random state is used if there is one, and the progress since the last receipt is lost. A
joiner never seeds.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.ids import Ids
from diloco_blob.core.settings import Settings, conflicts
from diloco_blob.island.arrays import Arrays, subset
from diloco_blob.island.catchup import advance, fetch_params, newer
from diloco_blob.island.checkpoint import Checkpoint, load_checkpoint
from diloco_blob.island.membership import Membership, join
from diloco_blob.island.port import ModelPort
from diloco_blob.island.steps import ignore
from diloco_blob.island.trajectory import Contribution, Trajectory
from diloco_blob.protocol import keys
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.heads import Head, RunInfo, find_head, read_run
from diloco_blob.protocol.layout import check_same_model, fragment_layout, fragment_tensors, make_layout
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import Receipt, decode
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import weights_digest

log = logging.getLogger(__name__)


class IslandOptions(Struct, frozen=True):
    """What an island is told about itself."""

    name: str
    settings: Settings | None = None
    """None: the run's own; the defaults if this island creates the run."""
    islands: int = 0
    """Islands that are expected, if somebody knows."""
    model_config: dict[str, object] = {}
    checkpoint_dir: Path | None = None
    host: str = ""
    pid: int = 0


@dataclass
class Joined:
    """Where an island stands after its start."""

    run: RunInfo
    membership: Membership
    trajectories: list[Trajectory]
    next_seq: dict[int, int]
    steps: int = 0
    tokens: int = 0
    cursor: str = ""
    residuals: Arrays = field(default_factory=dict)
    due: tuple[int, ...] = ()
    """Fragments whose exchange is to be done first, as it was due when the checkpoint was written."""
    sent: frozenset[int] = frozenset()
    """Those of `due` whose receipt exists already."""
    resumed: bool = False
    sent_at: list[int] | None = None
    """Step at which each fragment was last sent, where that is known."""


def join_run(
    store: ObjectStore,
    port: ModelPort,
    options: IslandOptions,
    *,
    ids: Ids,
    at: Callable[[str], None] = ignore,
) -> Joined:
    """Start an island: see the module's docstring.

    Raises:
        InvalidSettings: Other settings or another model than the run's, or a store that cannot hold a run.
        NotFound: No such bucket.
    """
    run = _open_run(store, port, options, ids, at)
    membership = join(store, run, options.name, ids=ids, host=options.host, pid=options.pid, at=at)
    num_fragments = run.run.settings.sync.num_fragments
    heads = [find_head(store, run, p) for p in range(num_fragments)]
    last = [_last_receipt(store, run, options.name, head) for head in heads]
    checkpoint = None
    if options.checkpoint_dir is not None:
        checkpoint = load_checkpoint(options.checkpoint_dir, run=run.digest, island=options.name)
    if checkpoint is not None and _fits(checkpoint, last):
        try:
            return _exactly(run, membership, port, checkpoint, last)
        except Corrupt as error:
            log.warning("island %s: not from the local checkpoint: %s", options.name, error)
    return _from_bucket(store, run, membership, port, heads, last, checkpoint)


def _open_run(
    store: ObjectStore, port: ModelPort, options: IslandOptions, ids: Ids, at: Callable[[str], None]
) -> RunInfo:
    try:
        run = read_run(store)
    except NotFound:
        settings = (options.settings or Settings()).resolved(options.islands)
        layout = make_layout(port.tensors(), settings.sync.num_fragments)
        arrays = port.read([spec.name for spec in layout])
        run = create_run(
            store, settings, layout, arrays, ids=ids, created_by=options.name, model=options.model_config, at=at
        )
    if options.settings is not None:
        found = conflicts(run.run.settings, options.settings)
        if found:
            raise InvalidSettings(
                f"the run at {store.url} has other settings: {'; '.join(found)}",
                "settings of a run never change: use its own, or another run URL",
            )
    check_same_model(make_layout(port.tensors(), run.run.settings.sync.num_fragments), run.run.tensors)
    return run


def _last_receipt(store: ObjectStore, run: RunInfo, name: str, head: Head) -> tuple[int, Receipt | None]:
    """Number of the island's newest contribution to a fragment, and its receipt unless that was collected."""
    tally = head.tally.get(name)
    seq = tally.consumed if tally else 0
    newest = None
    with contextlib.suppress(NotFound):
        newest = _read_receipt(store, run, name, head.fragment, seq) if seq else None
    while True:
        try:
            following = _read_receipt(store, run, name, head.fragment, seq + 1)
        except NotFound:
            return seq, newest
        seq, newest = seq + 1, following or newest


def _read_receipt(store: ObjectStore, run: RunInfo, name: str, fragment: int, seq: int) -> Receipt | None:
    """A receipt of this island; None if it is none: its number is taken all the same, and every aggregator skips it.

    Raises:
        NotFound: There is none of this number.
    """
    key = keys.receipt(name, fragment, seq)
    try:
        return decode(read_limited(store, key)[0], Receipt, run=run.digest)
    except Corrupt as error:
        log.warning("island %s: %s is not one of its receipts: %s", name, key, error)
        return None


def _fits(checkpoint: Checkpoint, last: list[tuple[int, Receipt | None]]) -> bool:
    """Whether the bucket holds exactly what had been sent at the checkpoint, plus at most what was due at that step."""
    state = checkpoint.state
    if len(state.fragments) != len(last):
        return False
    for p, (seq, receipt) in enumerate(last):
        expected = state.fragments[p].next_seq
        if seq == expected - 1:
            continue
        due_and_sent = p in state.due and seq == expected and receipt is not None and receipt.step_to == state.steps
        if not due_and_sent:
            return False
    return True


def _exactly(
    run: RunInfo,
    membership: Membership,
    port: ModelPort,
    checkpoint: Checkpoint,
    last: list[tuple[int, Receipt | None]],
) -> Joined:
    state = checkpoint.state
    local, mark, mirror, reference = (checkpoint.group(kind) for kind in ("local", "mark", "mirror", "reference"))
    trajectories = []
    for p, fragment in enumerate(state.fragments):
        names = [spec.name for spec in fragment_tensors(run.run.tensors, p)]
        trajectory = Trajectory(
            fragment=p,
            version=fragment.version,
            mirror=subset(mirror, names),
            mark=subset(mark, names),
            reference=subset(reference, names) if names[0] in reference else None,
            steps=fragment.steps,
            tokens=fragment.tokens,
            train_s=fragment.train_s,
        )
        for seq in fragment.in_flight:
            end = checkpoint.group(f"end/{p}/{seq}")
            trajectory.in_flight.append(_sent_before(p, seq, fragment.version, end or None))
        trajectories.append(trajectory)
    port.restore(checkpoint.group("port"), state.port)
    port.write(local)
    log.info("island %s goes on exactly from step %d", membership.name, state.steps)
    return Joined(
        run=run,
        membership=membership,
        trajectories=trajectories,
        next_seq={p: fragment.next_seq for p, fragment in enumerate(state.fragments)},
        steps=state.steps,
        tokens=state.tokens,
        cursor=state.cursor,
        residuals=checkpoint.group("residual"),
        due=state.due,
        sent=frozenset(p for p in state.due if last[p][0] == state.fragments[p].next_seq),
        resumed=True,
        sent_at=[fragment.sent_at for fragment in state.fragments],
    )


def _from_bucket(
    store: ObjectStore,
    run: RunInfo,
    membership: Membership,
    port: ModelPort,
    heads: list[Head],
    last: list[tuple[int, Receipt | None]],
    checkpoint: Checkpoint | None,
) -> Joined:
    joined = Joined(
        run=run,
        membership=membership,
        trajectories=[],
        next_seq={p: seq + 1 for p, (seq, _) in enumerate(last)},
        resumed=any(seq for seq, _ in last),
    )
    if checkpoint is not None:
        try:
            port.restore(checkpoint.group("port"), checkpoint.state.port)
        except Corrupt as error:
            log.warning("island %s: the local checkpoint's optimizer state is not used: %s", membership.name, error)
        joined.residuals = _still_owed(run, checkpoint, joined.next_seq)
        state = checkpoint.state
        joined.steps, joined.tokens, joined.cursor = state.steps, state.tokens, state.cursor
    for _, receipt in last:
        if receipt is not None and receipt.step_to > joined.steps:
            joined.steps, joined.tokens, joined.cursor = receipt.step_to, receipt.tokens_to, receipt.cursor
    for head in heads:
        found, arrays = _weights(store, run, membership.name, head, checkpoint)
        trajectory = Trajectory(fragment=found.fragment, version=found.version, mirror=arrays, mark=arrays)
        put(port, trajectory, arrays)
        tally = found.tally.get(membership.name)
        unmerged = range((tally.consumed if tally else 0) + 1, joined.next_seq[found.fragment])
        # Their ends are not known: `carry` then keeps to the mirror, as after any fresh start.
        trajectory.in_flight = [_sent_before(found.fragment, seq, found.version, None) for seq in unmerged]
        joined.trajectories.append(trajectory)
    return joined


def _weights(
    store: ObjectStore, run: RunInfo, island: str, head: Head, checkpoint: Checkpoint | None
) -> tuple[Head, Arrays]:
    """The weights of a head, from the version that the checkpoint holds if that is cheaper."""
    fragments = checkpoint.state.fragments if checkpoint else ()
    if checkpoint is None or head.fragment >= len(fragments) or fragments[head.fragment].version > head.version:
        return fetch_params(store, run, head)
    version, mirrors = fragments[head.fragment].version, checkpoint.group("mirror")
    mirror = {name: mirrors[name] for name, _ in fragment_layout(run.run.tensors, head.fragment)}
    heads = newer(store, run, head.fragment, version)
    if heads:
        return advance(store, run, island, heads, version, mirror)
    return (head, mirror) if weights_digest(mirror) == head.weights.digest else fetch_params(store, run, head)


def put(port: ModelPort, trajectory: Trajectory, arrays: Arrays) -> None:
    """Write a fragment's weights into the model, and account for what the model rounds away."""
    port.write(arrays)
    if not port.exact:
        trajectory.rounded(arrays, port.read(list(arrays)))


def _sent_before(fragment: int, seq: int, version: int, end: Arrays | None) -> Contribution:
    """A contribution that an earlier process of this island sent; only its number and its end matter now."""
    return Contribution(
        fragment=fragment,
        base_version=version,
        delta={},
        steps=0,
        tokens=0,
        step_to=0,
        tokens_to=0,
        cursor="",
        train_s=0.0,
        end=end,
        seq=seq,
    )


def _still_owed(run: RunInfo, checkpoint: Checkpoint, next_seq: dict[int, int]) -> Arrays:
    """The residuals of fragments to which nothing was sent since the checkpoint; older ones have been paid."""
    residuals = checkpoint.group("residual")
    names = [
        spec.name
        for p, fragment in enumerate(checkpoint.state.fragments)
        if fragment.next_seq == next_seq.get(p)
        for spec in fragment_tensors(run.run.tensors, p)
    ]
    return {name: residuals[name] for name in names if name in residuals}
