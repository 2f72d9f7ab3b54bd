"""What a credential may do under each prefix of the layout, and which roles it can play with that.

Each operation is tried, on names of the examination's own. What may only be read is tried on a name that does not
exist: *not found* is the answer of a store that would have shown it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from diloco_blob.core.errors import Denied, InvalidSettings, NotFound
from diloco_blob.protocol import keys
from diloco_blob.protocol.doctor.probes import AREAS, MARK, Area, Probes
from diloco_blob.protocol.doctor.report import Check

_READING = ("see what is absent", "read", "list")
_WRITING = ("create", "write", "write over", "delete")
OPERATIONS = (*_WRITING[:3], *_READING, _WRITING[3])


class Rights(Struct, frozen=True):
    """What is allowed under one prefix."""

    area: Area
    folder: str
    refused: Mapping[str, str]
    """By operation: what the store said."""

    def may(self, *operations: str) -> bool:
        """Whether all of these are allowed."""
        return not any(operation in self.refused for operation in operations)


class Role(Struct, frozen=True):
    """What somebody does in a run."""

    name: str
    does: str
    needs: Mapping[Area, tuple[str, ...]]

    def missing(self, rights: Mapping[Area, Rights]) -> list[str]:
        """What it would need and this credential may not do; empty if the role can be played."""
        found = []
        for area, operations in self.needs.items():
            refused = [operation for operation in operations if not rights[area].may(operation)]
            if refused:
                found.append(f"{', '.join(refused)} under {area}/")
        return found


ISLAND = Role(
    "island",
    "train, and send what was learned",
    {"islands": ("create", "write", "write over", *_READING), "fragments": ("see what is absent", "read")},
)
AGGREGATOR = Role(
    "aggregator",
    "merge and commit",
    {"islands": _READING, "fragments": ("create", "write", "see what is absent", "read")},
)
CREATOR = Role(
    "creator",
    "be the island that creates the run",
    {
        "islands": ISLAND.needs["islands"],
        "fragments": ("write", "see what is absent", "read"),
        "probes": ("create", *_READING),
    },
)
COLLECTOR = Role(
    "collector",
    "delete what no kept version needs (aggregators do, and `gc`)",
    {"islands": ("list", "delete"), "fragments": ("see what is absent", "read", "list", "delete")},
)
TRAINING = (ISLAND, AGGREGATOR)
"""Whoever can play one of these can take part in a run."""

_HINTS = {
    "island": "fine for an aggregator; a credential that is limited to an island's prefix is tested with --island NAME",
    "aggregator": "fine for an island; an aggregator needs to get, put and list under fragments/, and to read islands/",
    "creator": "let another credential create the run: its first island writes under fragments/ and probes/, too",
    "collector": "fine if another one collects; else the bucket grows: run `diloco-blob gc` with one that may delete",
}

_NEEDED = "allow it what is missing; one that is limited to an island's prefix is tested with --island NAME"


def examine_rights(probes: Probes, area: Area) -> Rights:
    """Try every operation under one prefix. Deletes what it wrote, if it may.

    Raises:
        Unavailable: The store did not answer.
    """
    store, folder, refused = probes.store, probes.folder(area), {}
    created, written, absent = probes.key(area), probes.key(area), probes.key(area)

    def attempt(operation: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except (Denied, InvalidSettings) as error:
            refused[operation] = error.message
            return False
        except NotFound as error:
            if operation in {"see what is absent", "read"}:
                return False  # Allowed, and not there.
            refused[operation] = error.message
            return False
        return True

    if not attempt("create", lambda: probes.put(created, probes.body(), if_absent=True)):
        created = absent
    if attempt("write", lambda: probes.put(written, probes.body())):
        attempt("write over", lambda: probes.put(written, probes.body()))
    else:
        refused["write over"] = refused["write"]
        written = absent
    attempt("see what is absent", lambda: store.head(absent))
    attempt("read", lambda: store.get(created if created != absent else written))
    attempt("list", lambda: [*store.list(folder)])
    if created == absent and written == absent and _is_folder(store.url):
        refused["delete"] = refused["create"]  # A file system says of an absent file that it is absent, whoever asks.
    else:
        for key in {created, written}:
            attempt("delete", partial(probes.delete, key))
    return Rights(area, folder, refused)


def rights_check(rights: Rights) -> Check:
    """What is allowed under one prefix, as one line: a fact. What it is enough for is for the roles to say."""
    where = rights.folder.partition(f"{MARK}/")[0] or f"{rights.area}/"
    allowed = [operation for operation in OPERATIONS if operation not in rights.refused]
    if not rights.refused:
        return Check(rights.area, "ok", f"may {', '.join(allowed)} under {where}")
    said = next(iter(rights.refused.values()))
    may = f"may {', '.join(allowed)}" if allowed else "may do nothing"
    return Check(rights.area, "ok", f"{may} under {where}, not {', '.join(rights.refused)}: {said}")


def role_checks(rights: Mapping[Area, Rights], *, run_exists: bool, wants_island: bool) -> list[Check]:
    """Which roles this credential can play.

    Args:
        rights: What it may do, by prefix.
        run_exists: Then nobody need create it.
        wants_island: Whether it must be an island's: being something else is not enough then.
    """
    roles = [ISLAND, AGGREGATOR, *([] if run_exists else [CREATOR]), COLLECTOR]
    missing = {role.name: role.missing(rights) for role in roles}
    can_train = not all(missing[role.name] for role in TRAINING)
    checks = []
    for role in roles:
        name, lacking = f"role {role.name}", missing[role.name]
        if not lacking:
            checks.append(Check(name, "ok", f"can {role.does}"))
            continue
        needed = (role in TRAINING and not can_train) or (role is ISLAND and wants_island)
        hint = _HINTS[role.name] if not needed else _NEEDED
        what = f"cannot {role.does}: may not {'; '.join(lacking)}"
        checks.append(Check(name, "broken" if needed else "warning", what, hint, kind="denied" if needed else ""))
    return checks


def writable(rights: Mapping[Area, Rights]) -> Area | None:
    """A prefix where the rest can be tried: of those where one can create, write, read and list."""
    for area in ("probes", "fragments", "islands"):
        if rights[area].may("create", "write", "see what is absent", "read", "list"):
            return area
    return None


def run_check(probes: Probes) -> tuple[Check, bool]:
    """Whether there is a run at the URL: as a line, and as a fact.

    Raises:
        Unavailable: The store did not answer.
    """
    try:
        probes.store.head(keys.RUN)
    except NotFound:
        return Check("run", "ok", "there is no run at this URL yet"), False
    except Denied as error:
        hint = "everybody reads run.json: allow it, and to list, else an absent object is answered as a forbidden one"
        return Check("run", "broken", error.message, hint, kind=error.kind), False
    return Check("run", "ok", "there is a run at this URL; nothing of it is touched"), True


def all_rights(probes: Probes) -> dict[Area, Rights]:
    """Under every prefix. Raises `Unavailable`."""
    return {area: examine_rights(probes, area) for area in AREAS}


def _is_folder(url: str) -> bool:
    return url.startswith("file:") or "://" not in url
