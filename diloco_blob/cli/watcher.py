"""Looks at the bucket from a thread, so that a store that does not answer never keeps `launch` from its processes."""

import threading
from collections import deque

from diloco_blob.cli.lines import commit_line
from diloco_blob.cli.run_status import Look, look
from diloco_blob.core.errors import DilocoError, NotFound
from diloco_blob.protocol.heads import Head, read_head
from diloco_blob.store import ObjectStore

LINES_MAX = 100
"""Versions of a fragment that are told one by one after a single look; of more, the newest."""


class Watcher:
    """Keeps the newest look at a run, and a line for each version that appeared since the first one.

    Args:
        store: The run's store; used by the thread alone.
        interval_s: Between two looks.
    """

    def __init__(self, store: ObjectStore, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._look: Look | None = None
        self._trouble = ""
        self._lines: deque[str] = deque(maxlen=10 * LINES_MAX)
        self._thread = threading.Thread(target=self._watch, name="diloco-watcher", daemon=True)

    def start(self) -> None:
        """Look once, so that nothing that was there before is told of, and go on in the thread."""
        self.look_once()
        with self._lock:
            self._lines.clear()
        self._thread.start()

    def stop(self) -> None:
        """Look no more; does not wait for a look that is under way."""
        self._stop.set()

    def latest(self) -> Look | None:
        """The newest look; None while there is no run."""
        with self._lock:
            return self._look

    def trouble(self) -> str:
        """Why the newest look failed; empty if it did not."""
        with self._lock:
            return self._trouble

    def new_lines(self) -> list[str]:
        """A line for each version that appeared since the last call."""
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.look_once()

    def look_once(self) -> None:
        """Look; a failure is kept for `trouble`, and the next look may succeed."""
        with self._looking:
            self._look_once()

    def _look_once(self) -> None:
        try:
            found = look(self._store, self._look)
            lines = self._told(found)
        except NotFound:
            return  # No run yet.
        except DilocoError as error:
            with self._lock:
                self._trouble = str(error)
            return
        with self._lock:
            self._look, self._trouble = found, ""
            self._lines.extend(lines)

    def _told(self, found: Look) -> list[str]:
        """The versions between the last look and this one; all of them if there was no run before."""
        before = [head.version for head in self._look.heads] if self._look else [0] * len(found.heads)
        lines: list[str] = []
        for old, now in zip(before, found.heads, strict=True):
            first = max(old + 1, now.version - LINES_MAX + 1)
            lines += [
                _line(read_head(self._store, found.info, now.fragment, version), found)
                for version in range(first, now.version)
            ]
            if now.version > old:
                lines.append(_line(now, found))
        return lines


def _line(head: Head, found: Look) -> str:
    assert head.commit is not None  # noqa: S101 - only version 0 has none
    return commit_line(head.commit, len(found.heads))
