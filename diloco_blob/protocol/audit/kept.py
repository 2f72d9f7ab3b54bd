"""Which versions' objects must be there, while a run goes on and collects."""

from diloco_blob.protocol import keys
from diloco_blob.protocol.collecting import horizon
from diloco_blob.protocol.heads import RunInfo, exists, newest_version
from diloco_blob.store.base import ObjectStore


class Collected(Exception):  # noqa: N818 - what happened
    """An object is missing, as it may be: its version was collected while it was looked at."""


class Kept:
    """The horizon of one fragment: it stands still until something is found missing, and then says who is right.

    What lies below it is not read: it may vanish at any moment, nothing depends on it, and a sweep deletes it.

    Args:
        store: The run's store.
        run: `run.json`.
        fragment: Which fragment.
    """

    def __init__(self, store: ObjectStore, run: RunInfo, fragment: int) -> None:
        self._store = store
        self._fragment = fragment
        self._keep_versions = run.run.settings.collect.keep_versions
        self._newest = newest_version(store, fragment)
        self.first = self.horizon
        """The horizon before anything was listed."""

    @property
    def horizon(self) -> int:
        """The oldest version that must be there, as far as is known."""
        return horizon(self._newest, self._keep_versions)

    def check_missing(self, version: int) -> None:
        """Something that is needed as long as `version` is kept is missing.

        Raises:
            Collected: That is right, since newer versions were made meanwhile.
        """
        while version >= self.horizon and exists(self._store, keys.commit(self._fragment, self._newest + 1)):
            self._newest += 1
        if version < self.horizon:
            raise Collected
