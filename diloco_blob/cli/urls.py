"""What people type and can type again: a run's URL, whether it is a folder, where its logs go; and our own name."""

import hashlib
import re
import shlex
import shutil
import sys
from pathlib import Path

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.store.local import local_folder

RUNS = Path("diloco-runs")
"""Where runs that nobody named, and the logs of runs in buckets, are kept."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def folder_of(run: str) -> Path | None:
    """The folder that a URL names; None if it names a bucket.

    Raises:
        InvalidSettings: There is no such folder's name.
    """
    return local_folder(run) if run.startswith("file:") or not _SCHEME.match(run) else None


def absolute_url(run: str) -> str:
    """The URL as every process understands it wherever it runs, and the same one for the same run.

    A folder becomes an absolute path; a slash at the end of a bucket's URL means nothing.

    Raises:
        InvalidSettings: There is no such folder's name.
    """
    folder = folder_of(run)
    return run.rstrip("/") if folder is None else str(folder.absolute())


def default_workdir(run: str) -> Path:
    """Where logs and checkpoints of a run go: the same place for the same URL, so that the same command resumes.

    For a folder its neighbour `FOLDER.work`; for a bucket `diloco-runs/NAME.work`, where NAME comes from the URL.

    Raises:
        InvalidSettings: The run's folder has no neighbours.
    """
    folder = folder_of(run)
    if folder is not None:
        folder = folder.absolute()
        if folder.name in {"", ".."}:
            folder = folder.resolve()
        if not folder.name:
            raise InvalidSettings(f"beside {folder} is no place for logs and checkpoints", "give --dir")
        return folder.with_name(f"{folder.name}.work")
    run = absolute_url(run)
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:60]
    return RUNS / f"{slug}-{hashlib.sha256(run.encode()).hexdigest()[:8]}.work"


def short(path: Path) -> str:
    """A path as people would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def command_line(*words: str) -> str:
    """One of our commands as it can be pasted here, by the name that this one was called by."""
    name, called = "diloco-blob", Path(sys.argv[0])
    found = shutil.which(name)
    if called.parts[-2:] == ("cli", "main.py"):
        program = [short(Path(sys.executable)), "-m", "diloco_blob.cli.main"]
    elif called.name != name or (found and Path(found).resolve() == called.resolve()):
        program = [name]
    else:
        program = [short(called.absolute())]
    return shlex.join([*program, *words])
