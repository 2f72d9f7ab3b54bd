"""What lies in a bucket, by one LIST: the numbers of everything that is numbered, and what does not belong there.

What an island writes under its own name and what decides nothing (its generations, its departures, receipts that no
aggregator gets to) breaks no promise, whatever it is: else anybody who may write there could call a sound run broken.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.ids import check_island_name
from diloco_blob.core.limits import ISLANDS_MAX
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit.kept import Kept
from diloco_blob.protocol.audit.report import Ledger
from diloco_blob.protocol.collecting import Kind, version_file
from diloco_blob.protocol.heads import RunInfo, exists, watermark_of
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import Departure, Generation, Watermark, decode
from diloco_blob.store.base import ObjectStore

_FRAGMENT = re.compile(
    r"fragments/(?P<p>\d{4})/(?:(?P<record>closes|commits)/(?P<v>\d{10})\.json"
    r"|(?:params|outer|updates)/.+)"
)
_ISLAND = re.compile(
    r"islands/(?P<name>[^/]+)/(?:generations/(?P<g>\d{6})\.json"
    r"|receipts/(?P<p>\d{4})/(?P<seq>\d{10})\.json"
    r"|departures/(?P<dp>\d{4})/(?P<left>\d{10})\.json"
    r"|payloads/(?P<pp>\d{4})/\d{10}-\d+-[0-9a-f]{32}\.safetensors\.zst"
    r"|status\.json)"
)


_FIRST_VERSIONS: dict[Kind, int] = {"params": 0, "outer": 1, "updates": 1}
"""The first version that has such an object."""

DEPARTURES_READ_MAX = 64
"""Departures of one island and fragment that are looked into: the newest."""


@dataclass
class Numbers:
    """Names that carry a number: how many there are, and the highest. Without a gap both are the same."""

    count: int = 0
    highest: int = 0

    def add(self, number: int) -> None:
        """One more name; each is listed once."""
        self.count += 1
        self.highest = max(self.highest, number)

    @property
    def gapless(self) -> bool:
        """Whether the numbers are 1 to `highest`."""
        return self.count == self.highest


@dataclass
class FragmentListing:
    """Records of one fragment."""

    horizon: int
    """The oldest version that was kept when the list was begun."""
    commits: Numbers = field(default_factory=Numbers)
    closes: Numbers = field(default_factory=Numbers)
    num_files: Counter[Kind] = field(default_factory=Counter)
    """Params, outer and update objects of versions from the horizon on, whoever names them."""
    num_collectable: int = 0
    """Those of older versions."""

    def num_orphans(self, head: int) -> int:
        """Params, outer and update objects that no version names which is kept, given the newest version."""
        named = Counter({kind: head + 1 - max(first, self.horizon) for kind, first in _FIRST_VERSIONS.items()})
        return self.num_collectable + (self.num_files - named).total()


@dataclass
class IslandListing:
    """Records of one island."""

    generations: Numbers = field(default_factory=Numbers)
    receipts: dict[int, Numbers] = field(default_factory=dict)
    departures: dict[int, deque[int]] = field(default_factory=dict)
    """By fragment: after which contributions it left."""

    def num_receipts(self, fragment: int) -> int:
        """Receipts for one fragment."""
        return self.receipts.get(fragment, Numbers()).count


@dataclass
class Listing:
    """The whole bucket."""

    fragments: list[FragmentListing]
    islands: dict[str, IslandListing] = field(default_factory=dict)


def list_bucket(store: ObjectStore, kept: Sequence[Kept], ledger: Ledger) -> Listing:
    """List everything; note what has no place in the layout."""
    listing = Listing(fragments=[FragmentListing(horizon=fragment.first) for fragment in kept])
    for info in store.list(""):
        if info.key != keys.RUN and not (_in_fragment(info.key, listing) or _of_island(info.key, listing)):
            ledger.note("layout", info.key, "has no place in the layout")
    ledger.count(islands=len(listing.islands))
    return listing


def _in_fragment(key: str, listing: Listing) -> bool:
    match = _FRAGMENT.fullmatch(key)
    if match is None or int(match["p"]) >= len(listing.fragments):
        return False
    fragment = listing.fragments[int(match["p"])]
    if match["record"] == "commits":
        fragment.commits.add(int(match["v"]))
    elif match["record"] == "closes":
        fragment.closes.add(int(match["v"]))
    else:
        file = version_file(key)
        if file is None:
            return False
        if file.version < fragment.horizon:
            fragment.num_collectable += 1
        else:
            fragment.num_files[file.kind] += 1
    return True


def _of_island(key: str, listing: Listing) -> bool:
    match = _ISLAND.fullmatch(key)
    if match is None:
        return False
    try:
        name = check_island_name(match["name"])
    except InvalidSettings:
        return False
    if name not in listing.islands and len(listing.islands) >= ISLANDS_MAX:
        return False
    island = listing.islands.setdefault(name, IslandListing())
    fragment = int(match["p"] or match["dp"] or match["pp"] or 0)
    if fragment >= len(listing.fragments):
        return False
    if match["g"]:
        island.generations.add(int(match["g"]))
    elif match["seq"]:
        island.receipts.setdefault(fragment, Numbers()).add(int(match["seq"]))
    elif match["left"]:
        island.departures.setdefault(fragment, deque(maxlen=DEPARTURES_READ_MAX)).append(int(match["left"]))
    return True


def audit_receipt_numbers(
    store: ObjectStore, listing: Listing, fragment: int, watermarks: Mapping[str, Watermark], ledger: Ledger
) -> None:
    """Receipts must be numbered from 1 to the watermark without a gap, and should be beyond it."""
    for name, island in sorted(listing.islands.items()):
        receipts = island.receipts.get(fragment, Numbers())
        if receipts.gapless:
            continue
        numbers = range(1, receipts.highest + 1)
        missing = _first_missing(store, (keys.receipt(name, fragment, seq) for seq in numbers))
        if missing is None:
            continue
        if missing <= watermark_of(watermarks, name).seq:
            find, what = ledger.broken, "is missing, but the watermark says that it is history"
        else:
            find, what = ledger.note, f"is missing, receipt {receipts.highest} exists: nobody will ever read that"
        find("numbering", keys.receipt(name, fragment, missing), what)


def audit_generations(store: ObjectStore, run: RunInfo, listing: Listing, ledger: Ledger) -> None:
    """Generations should be numbered from 1 without a gap, and readable.

    That an island had another start is all that is asked of them, by the island itself and when it has left.
    """
    for name, island in sorted(listing.islands.items()):
        highest = island.generations.highest
        if island.receipts and not highest and not exists(store, keys.generation(name, 1)):
            ledger.note("numbering", keys.generation(name, 1), "is missing, but the island has receipts")
        for number in range(1, highest + 1):
            key = keys.generation(name, number)
            try:
                data, _ = read_limited(store, key)
                ledger.count(objects_read=1, bytes_read=len(data))
                record = decode(data, Generation, run=run.digest)
            except NotFound:
                ledger.note("numbering", key, f"is missing, generation {highest} exists")
                break
            except Corrupt as error:
                ledger.note("records", key, error.message)
                continue
            if (record.island, record.generation) != (name, number):
                ledger.note("records", key, f"says that it is generation {record.generation} of {record.island!r}")


def audit_departures(store: ObjectStore, run: RunInfo, listing: Listing, ledger: Ledger) -> None:
    """Departures should be readable and speak of contributions that exist.

    One that does not is noted and breaks no promise: that there is one is all that an aggregator asks, and it decides
    who is waited for, never what is merged (docs/decisions/0007).
    """
    for name, island in sorted(listing.islands.items()):
        for p, left in sorted(island.departures.items()):
            for seq in left:
                key = keys.departure(name, p, seq)
                try:
                    data, _ = read_limited(store, key)
                    ledger.count(objects_read=1, bytes_read=len(data))
                    record = decode(data, Departure, run=run.digest)
                except NotFound:
                    continue
                except Corrupt as error:
                    ledger.note("records", key, error.message)
                    continue
                if (record.island, record.fragment, record.seq) != (name, p, seq):
                    what = f"{record.island!r} left fragment {record.fragment} after {record.seq}"
                    ledger.note("records", key, f"says that {what}")
                elif seq > island.num_receipts(p):
                    ledger.note("records", key, f"is after contribution {seq}, which does not exist")


def _first_missing(store: ObjectStore, names: Iterator[str]) -> int | None:
    """Which of `names`, counted from 1, is the first that does not exist; None if all do, by now at least."""
    for number, key in enumerate(names, start=1):
        if not exists(store, key):
            return number
    return None
