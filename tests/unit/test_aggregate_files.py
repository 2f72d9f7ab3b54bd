"""Temporary files of a merge: a disk without room is an outage, not a crash."""

import errno

import pytest

from diloco_blob.aggregate.files import VersionFile
from diloco_blob.core.errors import Unavailable


def test_a_full_disk_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    file = VersionFile()

    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file._file, "write", full)
    with pytest.raises(Unavailable, match="No space left on device") as caught:
        file.write(b"x")
    assert "TMPDIR" in caught.value.hint
    file.close()
