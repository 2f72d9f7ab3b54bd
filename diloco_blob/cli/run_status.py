"""What the bucket says about a run: the figures that `status`, `launch` and scripts show.

One pure look: heads found by name, one `status.json` per island, nothing that grows with history. What became of
contributions comes from the head commits, which are the record; speed, bytes and losses are the islands' own words.

`status --json` prints a `RunStatus`; the docstrings below say what each field is.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.ids import check_island_name
from diloco_blob.core.limits import RECORD_BYTES_MAX
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import Head, RunInfo, exists, find_head, read_run
from diloco_blob.protocol.layout import fragment_tensors, num_elements
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import Eval, IslandStatus, Tally, decode
from diloco_blob.store.base import ObjectStore

FRESH_S = 10.0
"""An island's own word on how far it is behind counts this long; after that, it is reckoned from what it last had."""

SILENT_S = 60.0
"""An island that says it works, but has not written its status for this long, is shown as silent; or as left, if that
is on record."""

ENDED = ("done", "stopped", "fenced", "failed", "left")


class FragmentView(Struct, frozen=True):
    """One fragment."""

    fragment: int
    version: int
    tokens: int
    """Merged into it from version 1 on."""
    committed_at: float
    """When `version` appeared: seconds since the Unix epoch, by the store's clock."""
    parameters: int
    step_norm: float | None
    """L2 norm of the last outer step; null at version 0."""


class IslandView(Struct, frozen=True):
    """One island. Contributions are counted once per fragment: with P fragments each inner step is in P of them."""

    name: str
    state: str
    """The island's own word; `silent` if it says that it works but has not been heard for a minute, `left` if after its
    last contribution it said that no more will come; `unknown` without status."""
    generation: int
    """How often it was started."""
    steps: int
    """Inner steps."""
    tokens: int
    """Tokens trained on."""
    version: int
    """Lowest version that it adopted, over the fragments."""
    versions_behind: int
    """Of the fragment where that is most."""
    accepted: int
    """Contributions merged, the discounted ones included."""
    discounted: int
    """Contributions merged with staleness ≥ 1."""
    skipped: int
    rejected: int
    tokens_merged: int
    """Tokens of its accepted contributions; a mean over the fragments, weighted by their parameters."""
    staleness: int
    """Of its last merged contribution."""
    bytes_up: int
    bytes_down: int
    requests: int
    wait_s: float
    train_s: float
    loss: float | None
    """Of the last inner step that reported one."""
    tokens_per_s: float
    heard_s: float | None
    """Seconds since it last wrote its status, by the store's clock."""
    message: str = ""


class Totals(Struct, frozen=True):
    """Sums over the islands."""

    islands: int
    parameters: int
    rounds: float
    """Versions made; a mean over the fragments, weighted by their parameters."""
    steps: int
    tokens: int
    accepted: int
    discounted: int
    skipped: int
    rejected: int
    tokens_merged: int
    bytes_up: int
    bytes_down: int
    requests: int
    wait_s: float
    train_s: float
    bytes_per_param_up: float | None
    """`bytes_up` / (parameters × rounds × islands): per island, parameter and round, everything included that the
    islands sent: payloads, receipts, status, and for the creator also version 0. Null before round 1."""
    bytes_per_param_down: float | None
    """The same of `bytes_down`, in which each start of an island counts with the weights that it fetches."""


class EvalView(Struct, frozen=True):
    """A held-out evaluation."""

    island: str
    step: int
    version: int
    loss: float
    bits_per_byte: float
    sample: str = ""


class Evals(Struct, frozen=True):
    """Held-out evaluations: the first and the last that any island reported. Nulls if none did."""

    loss: float | None = None
    bits_per_byte: float | None = None
    step: int | None = None
    before: EvalView | None = None
    last: EvalView | None = None


class RunStatus(Struct, frozen=True):
    """A run at one moment."""

    run: str
    """Its URL."""
    created_at: float
    now: float
    """When this was looked at; both by the store's clock."""
    fragments: tuple[FragmentView, ...]
    islands: tuple[IslandView, ...]
    totals: Totals
    eval: Evals
    """Last held-out loss and bits per byte, with the step; `before` and `last` whole."""


class Look(Struct, frozen=True):
    """What one look at a bucket found, to begin the next one from."""

    info: RunInfo
    heads: tuple[Head, ...]
    status: RunStatus


def run_status(store: ObjectStore) -> RunStatus:
    """Look at a run once.

    Raises:
        NotFound: There is no run at this URL.
    """
    return look(store).status


def look(store: ObjectStore, previous: Look | None = None) -> Look:
    """Look at a run; with a `previous` look, its heads need not be searched from the start.

    Raises:
        NotFound: There is no run at this URL.
    """
    info = previous.info if previous else read_run(store)
    hints = [head.version for head in previous.heads] if previous else [0] * len(info.run.fragments)
    heads = tuple(find_head(store, info, p, hint=hint) for p, hint in enumerate(hints))
    names = _island_names(store, heads)
    now = store.now()
    sizes = tuple(num_elements(fragment_tensors(info.run.tensors, p)) for p in range(len(heads)))
    reports = {name: _read_status(store, info, name) for name in names}
    islands = tuple(_told_left(store, _island(name, reports[name], heads, sizes, now), heads) for name in names)
    status = RunStatus(
        run=store.url,
        created_at=info.created_at,
        now=now,
        fragments=tuple(_fragment(head, sizes[p]) for p, head in enumerate(heads)),
        islands=islands,
        totals=_totals(islands, heads, sizes),
        eval=_evals({name: found[0] for name, found in reports.items() if found}),
    )
    return Look(info=info, heads=heads, status=status)


def _island_names(store: ObjectStore, heads: tuple[Head, ...]) -> list[str]:
    names = {name for head in heads for name in head.tally}
    for name in store.list_dirs(keys.ISLANDS):
        try:
            names.add(check_island_name(name))
        except InvalidSettings:
            continue  # Nothing of ours; `verify` reports it.
    return sorted(names)


def _read_status(store: ObjectStore, info: RunInfo, name: str) -> tuple[IslandStatus, float] | None:
    """An island's status and when it was written, by the store's clock; None if there is none that can be read."""
    try:
        data, found = read_limited(store, keys.status(name), RECORD_BYTES_MAX)
        return decode(data, IslandStatus, run=info.digest), found.last_modified
    except (NotFound, Corrupt):
        return None


def _fragment(head: Head, parameters: int) -> FragmentView:
    return FragmentView(
        fragment=head.fragment,
        version=head.version,
        tokens=head.commit.tokens if head.commit else 0,
        committed_at=head.created_at,
        parameters=parameters,
        step_norm=head.commit.step_norm if head.commit else None,
    )


def _island(
    name: str, report: tuple[IslandStatus, float] | None, heads: tuple[Head, ...], sizes: tuple[int, ...], now: float
) -> IslandView:
    tallies = [head.tally.get(name, Tally()) for head in heads]
    merged = sum(tally.tokens * size for tally, size in zip(tallies, sizes, strict=True)) // max(1, sum(sizes))
    found, written_at = report or (None, None)
    heard_s = None if written_at is None else max(0.0, now - written_at)
    state = found.state if found else "unknown"
    if heard_s is not None and heard_s > SILENT_S and state not in ENDED:
        state = "silent"
    version = found.version if found else 0
    behind = found.versions_behind if found else 0
    if heard_s is None or heard_s > FRESH_S or state in ENDED:
        behind = max(behind, min(head.version for head in heads) - version)
    return IslandView(
        name=name,
        state=state,
        generation=found.generation if found else 0,
        steps=found.steps if found else 0,
        tokens=found.tokens if found else 0,
        version=version,
        versions_behind=behind,
        accepted=sum(tally.accepted for tally in tallies),
        discounted=sum(tally.discounted for tally in tallies),
        skipped=sum(tally.skipped for tally in tallies),
        rejected=sum(tally.rejected for tally in tallies),
        tokens_merged=merged,
        staleness=found.staleness if found else 0,
        bytes_up=found.bytes_up if found else 0,
        bytes_down=found.bytes_down if found else 0,
        requests=found.requests if found else 0,
        wait_s=found.wait_s if found else 0.0,
        train_s=found.train_s if found else 0.0,
        loss=found.loss if found else None,
        tokens_per_s=found.tokens_per_s if found else 0.0,
        heard_s=heard_s,
        message=found.message if found else "",
    )


def _told_left(store: ObjectStore, island: IslandView, heads: tuple[Head, ...]) -> IslandView:
    """A silent island that has left after its last merged contribution is not missing. One HEAD for a silent one."""
    if island.state != "silent":
        return island
    merged = heads[0].tally.get(island.name, Tally()).consumed
    left = exists(store, keys.departure(island.name, heads[0].fragment, merged))
    return msgspec.structs.replace(island, state="left") if left else island


def _totals(islands: tuple[IslandView, ...], heads: tuple[Head, ...], sizes: tuple[int, ...]) -> Totals:
    parameters = sum(sizes)
    exchanged = sum(head.version * size for head, size in zip(heads, sizes, strict=True))
    bytes_up = sum(island.bytes_up for island in islands)
    bytes_down = sum(island.bytes_down for island in islands)
    per = exchanged * len(islands)
    return Totals(
        islands=len(islands),
        parameters=parameters,
        rounds=exchanged / max(1, parameters),
        steps=sum(island.steps for island in islands),
        tokens=sum(island.tokens for island in islands),
        accepted=sum(island.accepted for island in islands),
        discounted=sum(island.discounted for island in islands),
        skipped=sum(island.skipped for island in islands),
        rejected=sum(island.rejected for island in islands),
        tokens_merged=sum(island.tokens_merged for island in islands),
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        requests=sum(island.requests for island in islands),
        wait_s=sum(island.wait_s for island in islands),
        train_s=sum(island.train_s for island in islands),
        bytes_per_param_up=bytes_up / per if per else None,
        bytes_per_param_down=bytes_down / per if per else None,
    )


def _evals(reports: Mapping[str, IslandStatus]) -> Evals:
    first = [_eval(name, report.first_eval) for name, report in reports.items() if report.first_eval]
    last = [_eval(name, report.last_eval) for name, report in reports.items() if report.last_eval]
    if not last:
        return Evals(before=min(first, key=_progress, default=None))
    newest = max(last, key=_progress)
    return Evals(
        loss=newest.loss,
        bits_per_byte=newest.bits_per_byte,
        step=newest.step,
        before=min(first, key=_progress, default=None),
        last=newest,
    )


def _progress(view: EvalView) -> tuple[int, int, str]:
    return view.version, view.step, view.island


def _eval(name: str, found: Eval) -> EvalView:
    return EvalView(
        island=name,
        step=found.step,
        version=found.version,
        loss=found.loss,
        bits_per_byte=found.bits_per_byte,
        sample=found.sample,
    )
