"""One launch at a time in a working folder, and nothing said where there are no locks."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_blob.cli.lock import LOCK, locked
from diloco_blob.core.errors import InvalidSettings


def test_the_second_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(InvalidSettings) as refused, locked(tmp_path):
            raise AssertionError("never gets here")
        assert refused.value.message == f"another launch (process {os.getpid()}) is at work in {tmp_path}"
    with locked(tmp_path):
        pass


def test_children_do_not_inherit_it(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('here', flush=True); input()"]
    with locked(tmp_path):
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    assert child.stdout is not None
    # Its exec closes what is not to be inherited, but wakes us a little earlier: wait until it is through.
    assert child.stdout.readline() == b"here\n"
    try:
        with locked(tmp_path):
            pass
    finally:
        child.communicate(b"\n")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(InvalidSettings, match="cannot write to"), locked(tmp_path):
        pass


def test_a_failure_inside_is_not_ours(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="inside"), locked(tmp_path):
        raise OSError("inside")
