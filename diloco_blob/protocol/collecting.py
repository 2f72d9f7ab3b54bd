"""What may be deleted: pure functions of a version number, the run's settings and an object's name.

Records are kept for ever: a name that is created with *if absent* must never become free again, or somebody who slept
for hours creates it again, and work is lost or the history forks. Only objects that are named by their content go, and
what may go is never needed again: heads and watermarks only rise, so an answer that was right once stays right, however
long whoever asked has slept. That is why the horizon needs no record of its own.
"""

import re
from typing import Literal, NamedTuple

Kind = Literal["params", "outer", "updates", "payloads"]

KINDS: tuple[Kind, ...] = ("params", "outer", "updates", "payloads")
"""What can be collected."""

_DIGEST = r"[0-9a-f]{32}"
_VERSION_FILE = re.compile(
    rf"fragments/(?P<p>\d{{4}})/(?:(?P<kind>params|outer)/(?P<v>\d{{10}})-{_DIGEST}\.safetensors"
    rf"|updates/(?P<u>\d{{10}})-{_DIGEST}\.safetensors\.zst)"
)
_PAYLOAD = re.compile(
    rf"islands/(?P<name>[^/]+)/payloads/(?P<p>\d{{4}})/(?P<seq>\d{{10}})-\d+-{_DIGEST}\.safetensors\.zst"
)


class VersionFile(NamedTuple):
    """What the name of params, outer state or an update says."""

    kind: Kind
    fragment: int
    version: int


class PayloadFile(NamedTuple):
    """What the name of a payload says."""

    island: str
    fragment: int
    seq: int


def horizon(head: int, keep_versions: int) -> int:
    """The oldest version of a fragment whose objects must be there.

    Kept are params, outer state and update of the versions from there on, and the payloads of all contributions above
    the watermarks of its close: so every later version can be recomputed, and what is pending can be merged.

    Args:
        head: The newest version; an older one gives an answer that is safe too.
        keep_versions: `collect.keep_versions`; 0 keeps everything.
    """
    return max(0, head - keep_versions + 1) if keep_versions else 0


def version_file(key: str) -> VersionFile | None:
    """The parts of a name that params, outer state or an update may have; None for any other name."""
    match = _VERSION_FILE.fullmatch(key)
    if match is None:
        return None
    kind: Kind = "updates" if match["u"] else "params" if match["kind"] == "params" else "outer"
    return VersionFile(kind, int(match["p"]), int(match["u"] or match["v"]))


def payload_file(key: str) -> PayloadFile | None:
    """The parts of a name that a payload may have; None for any other name."""
    match = _PAYLOAD.fullmatch(key)
    return None if match is None else PayloadFile(match["name"], int(match["p"]), int(match["seq"]))


def is_past(key: str, island: str, fragment: int, mark: int) -> bool:
    """Whether this is the name of a payload of that island whose number is history, so that nobody needs it.

    Names in receipts and closes are other people's words: nothing is deleted by a name that does not pass here.
    """
    found = payload_file(key)
    return found is not None and (found.island, found.fragment) == (island, fragment) and found.seq <= mark
