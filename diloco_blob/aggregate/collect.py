"""Garbage collection: deletes what no version that is kept needs, and nothing that anybody may still come to need.

Two ways to the same end. After a commit its maker deletes what that version pushed over the horizon, by names that
records give, so without a LIST. A sweep lists and finds the rest: what a killed collector left, and the files of merges
that were killed or lost; the maker of every 64th version sweeps, and so does `diloco-blob gc`. Which names may go is
decided by `protocol/collecting.py`: once such an answer is right it stays right, so a collector may be killed anywhere,
sleep for hours and then go on, or run ten times at once.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping

from msgspec import Struct

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.gather import CONTRIBUTIONS_PER_CLOSE_MAX
from diloco_blob.core.errors import Corrupt, DilocoError, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.collecting import KINDS, Kind, horizon, is_past, payload_file, version_file
from diloco_blob.protocol.heads import Head, newest_version, read_head
from diloco_blob.protocol.records import Close, Commit, Watermark, decode
from diloco_blob.store.base import ObjectInfo

_LOG = logging.getLogger(__name__)

SWEEP_EVERY = 64
"""Versions of a fragment after which its collector looks for what others left."""

LISTED_MAX = 10_000
"""Names of one island's payloads that a pass looks at; a sweep looks at all."""

DELETES_MAX = CONTRIBUTIONS_PER_CLOSE_MAX
"""Objects that a pass deletes at most: an island may put any number of names under its prefix, and rounds go on."""

PROBE_AGE_MIN_S = 86_400.0
"""A test of the store that is as old was left by a process that was killed; one that goes on must not be disturbed."""


class Amount(Struct):
    """How much was deleted, or would be."""

    objects: int = 0
    bytes: int = 0

    def add(self, info: ObjectInfo) -> None:
        """One more object."""
        self.objects += 1
        self.bytes += info.size


class Swept(Struct):
    """What a sweep of one fragment deleted, or would delete."""

    fragment: int
    version: int
    """The newest."""
    horizon: int
    """The oldest version that is kept."""
    deleted: dict[Kind, Amount]


# ---- after a commit


def collect_after_commit(ctx: Context, commit: Commit) -> None:
    """Delete what a version that was just made pushed over the horizon: O(contributions) requests.

    Never raises what a store does: the version is made, whatever becomes of its garbage; a sweep finds what is left.

    Args:
        ctx: The pass that made the version.
        commit: Its commit; of a merge that lost, the winner collects.
    """
    keep_versions = ctx.run.run.settings.collect.keep_versions
    oldest = horizon(commit.version, keep_versions)
    if oldest == horizon(commit.version - 1, keep_versions):
        return
    ctx.at("collect.begin")
    try:
        names = _pushed_over(ctx, commit.fragment, oldest)
        if commit.version % SWEEP_EVERY == 0:
            names = itertools.chain(names, _left_behind(ctx, commit.fragment))
        for key in itertools.islice(names, DELETES_MAX):
            _delete(ctx, key)
    except DilocoError as error:
        # At the first failure: a store that is away takes its time to say so, and the round goes on.
        _LOG.warning(
            "fragment %d: what version %d needed no longer was not all deleted, `diloco-blob gc` will do it: %s",
            *(commit.fragment, commit.version, error),
            extra={"run": ctx.store.url, "fragment": commit.fragment, "version": commit.version},
        )
    ctx.at("collect.end")


def _pushed_over(ctx: Context, fragment: int, oldest: int) -> Iterator[str]:
    """Names of what was needed as long as version `oldest` − 1 was kept."""
    # Both records first: of a damaged run nothing is deleted.
    close = _read_close(ctx, fragment, oldest)
    gone = read_head(ctx.store, ctx.run, fragment, oldest - 1)
    for key in _files(gone):
        file = version_file(key)
        if file is not None and (file.fragment, file.version) == (fragment, oldest - 1):
            yield key
    marks = {island: mark.seq for island, mark in close.watermarks.items()}
    # What was skipped may have left bytes that no record can be trusted to name.
    to_list = {one.island for one in close.skipped}
    for chosen in close.chosen:
        if chosen.island in to_list:
            continue
        for part in chosen.parts:
            if is_past(part.key, chosen.island, fragment, marks.get(chosen.island, 0)):
                yield part.key
    for island in sorted(to_list):
        for info in _past_payloads(ctx, island, fragment, marks.get(island, 0), LISTED_MAX):
            yield info.key


# ---- sweep


def sweep(ctx: Context, fragment: int | None = None, *, dry_run: bool = False) -> Iterator[Swept]:
    """Find and delete everything that may go, fragment by fragment. Memory holds the names of what is kept, and a list.

    Args:
        ctx: Store, run, and who is told of the steps.
        fragment: Only this one; all of them by default.
        dry_run: Only say what would be deleted.

    Yields:
        What was done to each fragment; nothing if the run keeps everything.

    Raises:
        Unavailable, Denied: The store did not answer, or refused; what was deleted by then may go at any time.
        Corrupt: A record that is needed is damaged or missing; nothing of its fragment was deleted.
    """
    if ctx.run.run.settings.collect.keep_versions:
        for number in range(len(ctx.run.run.fragments)) if fragment is None else (fragment,):
            yield _sweep_fragment(ctx, number, dry_run=dry_run)


def _left_behind(ctx: Context, fragment: int) -> Iterator[str]:
    """Names of everything of a fragment that may go."""
    for _, info in _look(ctx, fragment)[2]:
        yield info.key


def _look(ctx: Context, fragment: int) -> tuple[int, int, Iterator[tuple[Kind, ObjectInfo]]]:
    """The head, the horizon, and everything that may go.

    Raises:
        Corrupt: A record that is needed is damaged or missing.
    """
    # The head first, then the lists: so one look at each name decides, and no list has to be kept until the head is
    # known. The other order would be as safe, since of a name that may go by an old head no newer one says otherwise.
    head = newest_version(ctx.store, fragment)
    oldest = horizon(head, ctx.run.run.settings.collect.keep_versions)
    named = _named(ctx, fragment, oldest, head)
    marks: Mapping[str, Watermark] = _read_close(ctx, fragment, oldest).watermarks if oldest else {}
    return head, oldest, _collectable(ctx, fragment, oldest, head, named, marks)


def _sweep_fragment(ctx: Context, fragment: int, *, dry_run: bool) -> Swept:
    head, oldest, found = _look(ctx, fragment)
    swept = Swept(fragment=fragment, version=head, horizon=oldest, deleted={kind: Amount() for kind in KINDS})
    if not dry_run:
        ctx.at("collect.begin")
    for kind, info in found:
        swept.deleted[kind].add(info)
        if not dry_run:
            _delete(ctx, info.key)
    if not dry_run:
        ctx.at("collect.end")
    return swept


def _named(ctx: Context, fragment: int, oldest: int, head: int) -> set[str]:
    """The files of the versions that are kept.

    Raises:
        Corrupt: A commit is damaged or missing.
    """
    named: set[str] = set()
    for version in range(oldest, head + 1):
        try:
            found = read_head(ctx.store, ctx.run, fragment, version)
        except NotFound as error:
            raise Corrupt(f"{keys.commit(fragment, version)} is missing, but version {head} exists") from error
        named.update(_files(found))
    return named


def _collectable(
    ctx: Context, fragment: int, oldest: int, head: int, named: set[str], marks: Mapping[str, Watermark]
) -> Iterator[tuple[Kind, ObjectInfo]]:
    """Everything of a fragment that may go."""
    for kind in KINDS[:3]:
        for info in ctx.store.list(keys.version_files(fragment, kind)):
            found = version_file(info.key)
            if found is None or found.kind != kind:
                continue  # Not ours.
            # Of a version up to the head it is settled what is named, so the rest is the files of merges that lost or
            # were killed; and whoever is still writing such files writes them for nothing. (A file of a loser that has
            # the winner's bytes has its name too, and stays.) Beyond the head somebody may be about to name them.
            if found.version < oldest or (found.version <= head and info.key not in named):
                yield kind, info
    for island, mark in sorted(marks.items()):
        for info in _past_payloads(ctx, island, fragment, mark.seq):
            yield "payloads", info


def sweep_probes(ctx: Context, *, dry_run: bool = False) -> Amount:
    """Delete the tests of the store that killed processes left; returns how much.

    Raises:
        Unavailable, Denied: The store did not answer, or refused.
    """
    amount, now = Amount(), ctx.store.now()
    for info in ctx.store.list(keys.PROBES):
        if now - info.last_modified >= PROBE_AGE_MIN_S:
            amount.add(info)
            if not dry_run:
                ctx.store.delete(info.key)
    return amount


# ---- both


def _past_payloads(
    ctx: Context, island: str, fragment: int, mark: int, looked_at_max: int | None = None
) -> Iterator[ObjectInfo]:
    """An island's payloads up to a watermark, whether a receipt names them or not, among so many names.

    A receipt's payload has the receipt's number, and every number up to a watermark has its receipt: so none of these
    can still come to be named.
    """
    for info in itertools.islice(ctx.store.list(keys.payloads(island, fragment)), looked_at_max):
        if is_past(info.key, island, fragment, mark):
            yield info


def _files(head: Head) -> tuple[str, ...]:
    """Names of the files of a version; version 0 has weights alone."""
    if head.commit is None:
        return (head.weights.params.key,)
    return (head.weights.params.key, head.commit.outer.key, head.commit.update.key)


def _read_close(ctx: Context, fragment: int, version: int) -> Close:
    key = keys.close(fragment, version)
    try:
        data, _ = ctx.store.get(key)
    except NotFound as error:
        raise Corrupt(f"{key} is missing, although that version exists: the run was damaged") from error
    close = decode(data, Close, run=ctx.run.digest)
    if (close.fragment, close.version) != (fragment, version):
        raise Corrupt(f"{key} says that it is of fragment {close.fragment}, version {close.version}")
    return close


def _delete(ctx: Context, key: str) -> None:
    # A second line of defence: whatever the reasoning above is worth, records are never deleted.
    if version_file(key) is None and payload_file(key) is None:
        raise Corrupt(f"{key} is not an object that may be collected")
    ctx.store.delete(key)
    ctx.at("collect.deleted")
