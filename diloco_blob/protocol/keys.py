"""Object names of a run, in one place. See docs/protocol.md for who writes which.

Numbers are zero-padded, names are never re-used, no name is both an object and a directory. All keys are
relative to the run's URL.
"""

RUN = "run.json"
ISLANDS = "islands/"
FRAGMENTS = "fragments/"
PROBES = "probes/"


def close(fragment: int, version: int) -> str:
    """Who makes `version` of `fragment`."""
    return f"fragments/{fragment:04d}/closes/{version:010d}.json"


def commit(fragment: int, version: int) -> str:
    """`version` of `fragment` exists."""
    return f"fragments/{fragment:04d}/commits/{version:010d}.json"


def params(fragment: int, version: int, digest: str) -> str:
    """fp32 weights at `version`."""
    return f"fragments/{fragment:04d}/params/{version:010d}-{digest}.safetensors"


def outer(fragment: int, version: int, digest: str) -> str:
    """Outer momentum and the downlink's residual at `version`."""
    return f"fragments/{fragment:04d}/outer/{version:010d}-{digest}.safetensors"


def update(fragment: int, version: int, digest: str) -> str:
    """What is subtracted from `version` − 1, coded as islands must apply it."""
    return f"fragments/{fragment:04d}/updates/{version:010d}-{digest}.safetensors.zst"


def version_files(fragment: int, kind: str) -> str:
    """The prefix of the `params`, `outer` or `updates` of a fragment's versions."""
    return f"fragments/{fragment:04d}/{kind}/"


def island(name: str) -> str:
    """The prefix under which an island writes; it writes nowhere else."""
    return f"islands/{name}/"


def generations(name: str) -> str:
    """The prefix of an island's starts."""
    return f"islands/{name}/generations/"


def generation(name: str, number: int) -> str:
    """One start of an island: its fence."""
    return f"islands/{name}/generations/{number:06d}.json"


def receipt(name: str, fragment: int, seq: int) -> str:
    """Contribution `seq` of an island to `fragment` exists."""
    return f"islands/{name}/receipts/{fragment:04d}/{seq:010d}.json"


def departure(name: str, fragment: int, seq: int) -> str:
    """After contribution `seq` to `fragment` the island left: nobody need wait for the next one."""
    return f"islands/{name}/departures/{fragment:04d}/{seq:010d}.json"


def payloads(name: str, fragment: int) -> str:
    """The prefix of the bytes of an island's contributions to `fragment`."""
    return f"islands/{name}/payloads/{fragment:04d}/"


def payload(name: str, fragment: int, seq: int, part: int, digest: str) -> str:
    """Part `part` of the bytes of a contribution."""
    return f"islands/{name}/payloads/{fragment:04d}/{seq:010d}-{part}-{digest}.safetensors.zst"


def status(name: str) -> str:
    """Progress and figures of an island, for people; the one object that is overwritten."""
    return f"islands/{name}/status.json"
