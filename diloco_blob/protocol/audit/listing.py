"""What lies in a bucket, by one LIST: the numbers of everything that is numbered, and what does not belong there."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco_blob.core.errors import Corrupt, InvalidSettings, NotFound
from diloco_blob.core.ids import check_island_name
from diloco_blob.core.limits import ISLANDS_MAX
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit.report import Ledger
from diloco_blob.protocol.heads import RunInfo
from diloco_blob.protocol.records import Departure, Generation, decode
from diloco_blob.store.base import ObjectStore

_FRAGMENT = re.compile(
    r"fragments/(?P<p>\d{4})/(?:(?P<record>closes|commits)/(?P<v>\d{10})\.json"
    r"|(?P<data>params|outer)/\d{10}-[0-9a-f]{32}\.safetensors"
    r"|(?P<update>updates)/\d{10}-[0-9a-f]{32}\.safetensors\.zst)"
)
_ISLAND = re.compile(
    r"islands/(?P<name>[^/]+)/(?:generations/(?P<g>\d{6})\.json"
    r"|receipts/(?P<p>\d{4})/(?P<seq>\d{10})\.json"
    r"|departures/(?P<dp>\d{4})/(?P<left>\d{10})\.json"
    r"|payloads/(?P<pp>\d{4})/\d{10}-\d+-[0-9a-f]{32}\.safetensors\.zst"
    r"|status\.json)"
)


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

    commits: Numbers = field(default_factory=Numbers)
    closes: Numbers = field(default_factory=Numbers)


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
    num_params: int = 0
    num_outers: int = 0
    num_updates: int = 0
    """Content-named objects, whoever names them."""


def list_bucket(store: ObjectStore, run: RunInfo, ledger: Ledger) -> Listing:
    """List everything; note what has no place in the layout."""
    listing = Listing(fragments=[FragmentListing() for _ in run.run.fragments])
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
    elif match["data"] == "params":
        listing.num_params += 1
    elif match["data"] == "outer":
        listing.num_outers += 1
    else:
        listing.num_updates += 1
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


def audit_numbers(store: ObjectStore, listing: Listing, ledger: Ledger) -> None:
    """Receipts and generations must be numbered from 1 without a gap."""
    for name, island in sorted(listing.islands.items()):
        if not island.generations.gapless:
            missing = _first_missing(
                store, (keys.generation(name, g) for g in range(1, island.generations.highest + 1))
            )
            if missing:
                ledger.broken("numbering", missing, f"is missing, generation {island.generations.highest} exists")
        for p, receipts in sorted(island.receipts.items()):
            if receipts.gapless:
                continue
            missing = _first_missing(store, (keys.receipt(name, p, seq) for seq in range(1, receipts.highest + 1)))
            if missing:
                ledger.broken("numbering", missing, f"is missing, receipt {receipts.highest} exists")


def audit_generations(store: ObjectStore, run: RunInfo, listing: Listing, ledger: Ledger) -> None:
    """Generations must be readable, and contributions must come from one of them."""
    for name, island in sorted(listing.islands.items()):
        if island.receipts and not island.generations.count and _first_missing(store, iter([keys.generation(name, 1)])):
            ledger.broken("numbering", keys.generation(name, 1), "is missing, but the island has receipts")
        for number in range(1, island.generations.highest + 1):
            key = keys.generation(name, number)
            try:
                data, _ = store.get(key)
                ledger.count(objects_read=1, bytes_read=len(data))
                record = decode(data, Generation, run=run.digest)
            except NotFound:
                break  # A gap, which `audit_numbers` reports.
            except Corrupt as error:
                ledger.broken("records", key, error.message)
                continue
            if (record.island, record.generation) != (name, number):
                ledger.broken("records", key, f"says that it is generation {record.generation} of {record.island!r}")


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
                    data, _ = store.get(key)
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


def _first_missing(store: ObjectStore, names: Iterator[str]) -> str | None:
    """The first of `names` that does not exist; None if all do (the run went on while we were listing)."""
    for key in names:
        try:
            store.head(key)
        except NotFound:
            return key
    return None
