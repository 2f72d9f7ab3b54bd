"""Reading a small record that somebody else wrote: how much there is to read is asked before memory is spent on it."""

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.limits import ISLAND_RECORD_BYTES_MAX
from diloco_blob.store.base import ObjectInfo, ObjectStore


def read_limited(store: ObjectStore, key: str, bytes_max: int = ISLAND_RECORD_BYTES_MAX) -> tuple[bytes, ObjectInfo]:
    """A record's bytes, by a HEAD and a GET of no more than that said.

    Args:
        store: Where it is.
        key: Its name.
        bytes_max: The most that such a record may have.

    Returns:
        Its bytes, and what the store says about it.

    Raises:
        NotFound: It does not exist.
        Corrupt: It is bigger than such a record may be, or `key` is no key.
    """
    info = store.head(key)
    if info.size > bytes_max:
        raise Corrupt(f"{info.size} bytes, and such a record has {bytes_max} at most")
    if info.size == 0:
        return b"", info  # a range of nothing is refused by some stores
    return store.get_range(key, 0, info.size), info
