"""Results on disk: a line of JSON for each run, appended as soon as it ends, so that a queue can stop at any time."""

import fcntl
from pathlib import Path

import msgspec

from quality.training import METHOD, Result

PATH = Path(__file__).parent / "results.jsonl"


def read(path: Path = PATH) -> dict[str, Result]:
    """All results of this version of the bench, by key."""
    if not path.exists():
        return {}
    lines = path.read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=Result) for line in lines if line]
    return {result.key: result for result in found if result.config.method == METHOD}


def append(result: Result, path: Path = PATH) -> None:
    """Add a result; several processes may."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(result) + b"\n")
