"""Object keys, prefixes and island names: refused as documented, or harmless on every store, a folder included."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from diloco_blob.core.errors import Corrupt, InvalidSettings
from diloco_blob.core.ids import check_island_name
from diloco_blob.protocol import keys
from diloco_blob.store.keys import check_key, check_list_prefix


def run(data: bytes) -> None:
    """The target: the bytes as text of each sort."""
    text = data.decode(errors="surrogateescape")
    try:
        key = check_key(text)
    except Corrupt as error:
        error.message.encode()
    else:
        _harmless(key)
        assert check_list_prefix(key) == key
    try:
        check_list_prefix(text)
    except Corrupt as error:
        error.message.encode()
    try:
        name = check_island_name(text)
    except InvalidSettings as error:
        error.message.encode()
    else:
        assert len(PurePosixPath(name).parts) == 1
        for key in (keys.status(name), keys.receipt(name, 0, 1), keys.generation(name, 1), keys.departure(name, 0, 0)):
            _harmless(check_key(key))
            assert key.startswith(keys.island(name))


def _harmless(key: str) -> None:
    parts = PurePosixPath(key).parts
    assert "/".join(parts) == key, "another spelling of the same place"
    assert not any(part.startswith(".") for part in parts)
    assert key.isascii()
    assert key.lower() == key
    assert not set(key) & set('\\:*?"<>|\0\n\r ')


def seeds() -> Iterator[bytes]:
    """Names that are allowed, and tricks."""
    for text in (
        "islands/a/payloads/0000/0000000001-0-0123.safetensors.zst",
        "island-0",
        "a/../b", "a//b", "/a", "a/", ".a", "a\n", "A", "a\0b", "a/./b", "a\\b", "..", "a..b", "é", "a" * 64,
    ):  # fmt: skip
        yield text.encode()
