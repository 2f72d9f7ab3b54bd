"""What a run's URL says by itself: whether it is a folder, and where its logs go."""

import hashlib
import re
from pathlib import Path
from urllib.parse import unquote

RUNS = Path("diloco-runs")
"""Where runs that nobody named, and the logs of runs in buckets, are kept."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def folder_of(run: str) -> Path | None:
    """The folder that a URL names; None if it names a bucket."""
    if run.startswith("file://"):
        return Path(unquote(run.removeprefix("file://")))
    return None if _SCHEME.match(run) else Path(run).expanduser()


def absolute_url(run: str) -> str:
    """The URL as every process understands it wherever it runs: a folder becomes an absolute path."""
    folder = folder_of(run)
    return run if folder is None else str(folder.absolute())


def default_workdir(run: str) -> Path:
    """Where logs and checkpoints of a run go: the same place for the same URL, so that the same command resumes.

    For a folder its neighbour `FOLDER.work`; for a bucket `diloco-runs/NAME.work`, where NAME comes from the URL.
    """
    folder = folder_of(run)
    if folder is not None:
        folder = folder.absolute()
        return folder.with_name(f"{folder.name}.work")
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:60]
    return RUNS / f"{slug}-{hashlib.sha256(run.encode()).hexdigest()[:8]}.work"
