"""One `launch` at a time in a working folder: two would write the same logs and the same checkpoints.

The lock is the kernel's (`flock`), so it ends with the process that holds it, however that ends; its children do not
inherit it. Where the file system has no such locks, nothing is locked and nothing is said.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco_blob.core.errors import InvalidSettings

LOCK = "launch.lock"


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Hold a working folder, which must be there.

    Raises:
        InvalidSettings: Another process holds it, or it cannot be written to.
    """
    try:
        file = (workdir / LOCK).open("a+")
    except OSError as error:
        raise InvalidSettings(f"cannot write to {workdir}: {error.strerror}", "give another --dir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            process = file.read(20).strip()
            raise InvalidSettings(
                f"another launch{f' (process {process})' if process else ''} is at work in {workdir}",
                "stop it, or wait for its end; another run needs another --dir",
            ) from None
        except OSError:
            pass  # No locks on this file system.
        else:
            try:  # Who holds it is for people: a full disk is no reason not to start.
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            except OSError:
                pass
        yield
