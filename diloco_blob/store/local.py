"""A folder as a bucket: one machine, or several that mount the same file system.

An object appears whole or not at all, also to readers on other machines and after a crash: its bytes are
written to a temporary file beside it and synced, and only then does that file get the object's name, by a
hard link, which the file system refuses if the name is taken, or by a rename, which replaces what was there.
Temporary names start with a dot, which no key may, so that whatever a killed process leaves is never read or
listed. User metadata is not kept.

What others put below the root must not stop anybody: only regular files are objects, and folders that are symbolic
links are not listed, and nothing is deleted through them. The root itself may be a link.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import BinaryIO
from urllib.parse import unquote

from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import Conflict, Denied, InvalidSettings, NotFound, Unavailable
from diloco_blob.core.ids import Ids, SystemIds
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.body import COPY_BYTES, Body, body_file
from diloco_blob.store.dates import StoreDate
from diloco_blob.store.keys import check_key, check_list_prefix

_MTIME_RESOLUTION_S = 0.02
"""The kernel stamps files from a clock that ticks at least this often."""

_REMEDIES = {
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "raise the quota or free some space there, or use another folder",
    errno.EACCES: "give this user the right to read and write there, or use another folder",
    errno.EPERM: "give this user the right to read and write there, or use another folder",
    errno.EROFS: "mount it for writing, or use another folder",
    errno.ENOTDIR: "a file is in the way: move it, or use another folder",
    errno.EEXIST: "a file is in the way: move it, or use another folder",
    errno.EISDIR: "a folder is in the way: move it, or use another folder",
    errno.ENAMETOOLONG: "use a folder with a shorter path",
    errno.ELOOP: "its symbolic links go in a circle: use another folder",
}
"""What trying again cannot change. All else that the system may say (EIO, ESTALE, EMFILE …) is `Unavailable`."""

_FOLDER_TRIES = 100

_NO_OBJECT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
"""What the system says of a path at which there is no regular file: a socket is ENXIO."""

_LEADS_NOWHERE = {errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.ENAMETOOLONG}
"""What the system says of a symbolic link that points to nothing that one could read."""

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalStore:
    """Objects as files below a folder. The folder is created by the first write, and only then.

    If it has been there and is gone, as a disk that is not mounted any more, that is an outage: to make an empty one in
    its place would be to go on in another bucket. (So give a run a folder *below* the place where a disk is mounted.)

    Args:
        url: `file:///folder`, or a path, relative to the working directory unless it starts with `/` or `~`.
        clock: Measures the time since the file system last told its own.
        ids: Names temporary files.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        self.url = url
        self.root = local_folder(url).absolute()
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        self._date = StoreDate(self._clock, _MTIME_RESOLUTION_S)
        self._was_there = False

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        with self._translated(key), _opened(self._path(key)) as file:
            self._was_there = True
            return file.read(), _info(key, os.fstat(file.fileno()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with self._translated(key), _opened(self._path(key)) as file:
            file.seek(start)
            return file.read(length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        path = self._path(key)
        with self._translated(key):
            stat = path.stat()
            self._was_there = True
            _check_regular(stat)
            return _info(key, stat)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`; `metadata` is not kept."""
        del metadata
        path = self._path(key)
        with self._translated():
            temporary = self._write_temporary(path.parent, data)
            try:
                if if_absent:
                    self._link(temporary, path)
                else:
                    temporary.replace(path)
                info = _info(key, path.stat())
                _sync_folder(path.parent)
                self._was_there = True
            finally:
                temporary.unlink(missing_ok=True)
        return info

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`; sorted by the bytes of the keys."""
        check_list_prefix(prefix)
        folder, slash, _ = prefix.rpartition("/")
        with self._translated():
            if self._through_link(folder):
                return
            for key in self._walk(folder + slash):
                if key.startswith(prefix) and key > start_after:
                    with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                        yield _info(key, (self.root / key).stat())

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`; a folder with no object in it does not count, as in a bucket."""
        check_list_prefix(prefix)
        folder, slash, begin = prefix.rpartition("/")
        with self._translated():
            if self._through_link(folder):
                return
            for name in self._names(folder + slash):
                is_folder = name.endswith("/") and name.startswith(begin)
                if is_folder and next(self._walk(folder + slash + name), None) is not None:
                    yield name[len(begin) : -1]

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`. Folders that are empty then are removed too: a bucket has none."""
        path = self._path(key)
        with contextlib.suppress(NotFound), self._translated(key):
            if self._through_link(key.rpartition("/")[0]):  # what is there has another name, and may be another's
                return
            path.unlink()
            _sync_folder(path.parent)
            self._remove_empty(path.parent)

    def now(self) -> float:
        """See `ObjectStore.now`: the clock that stamps files, on a network file system the server's."""
        if not self._date.known:
            try:
                self._write_temporary(self.root, b"").unlink(missing_ok=True)
            except OSError:  # only readable: this machine's clock is the best guess
                self._date.observe(self._clock.wall())
        return self._date.now()

    def close(self) -> None:
        """See `ObjectStore.close`; there is nothing to give back."""

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _write_temporary(self, folder: Path, data: Body) -> Path:
        """Write and sync a file that no key can name, and learn the file system's time from it."""
        path = folder / f".tmp-{self._ids.fresh()}"
        try:
            with _created(
                path, self.root if self._was_there else None
            ) as file:  # from here on nobody can remove the folder: it is not empty
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    shutil.copyfileobj(body_file(data), file, COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
                self._date.observe(os.fstat(file.fileno()).st_mtime)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder and its parents below the root, up to the first that is not empty, which no system removes.

        Whoever is about to write there makes them again (`_created`).
        """
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _link(self, temporary: Path, path: Path) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) from None
            raise Conflict(f"{path.relative_to(self.root)} exists already in {self.url}") from None
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise InvalidSettings(
                f"the file system of {self.root} makes no hard links, so that races cannot be decided there",
                "use a folder on a local disk or on NFS, or a bucket",
            ) from error

    def _walk(self, folder: str) -> Iterator[str]:
        """The keys below `folder`, which is empty or ends in a slash, in the order of their bytes."""
        for name in self._names(folder):
            if name.endswith("/"):
                yield from self._walk(folder + name)
            else:
                yield folder + name

    def _names(self, folder: str) -> Sequence[str]:
        """What a folder holds, in the order of keys: folders' names end in a slash. Nothing if it is not there."""
        try:
            with os.scandir(self.root / folder) as entries:
                found = [entry for entry in entries if not entry.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            if self._is_gone() or self._blocked():
                raise
            return []
        return sorted(name for entry in found if (name := _listed_name(entry)))

    def _through_link(self, folder: str) -> bool:
        """Whether a part of the way from the root to this folder is a symbolic link."""
        parts = folder.split("/") if folder else []
        return any(self.root.joinpath(*parts[: end + 1]).is_symlink() for end in range(len(parts)))

    @contextlib.contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        """Turn the system's errors, all of them, into ours. `key` is what is being read, if anything."""
        try:
            yield
        except OSError as error:
            raise self._translate(error, key) from error

    def _translate(self, error: OSError, key: str) -> NotFound | Denied | Unavailable:
        code = error.errno or 0
        if code in _NO_OBJECT and key and not self._blocked() and not self._is_gone():
            return NotFound(f"no object {key} in {self.url}")
        reason = error.strerror or str(error)
        if code in _REMEDIES:
            return Denied(f"cannot use the folder {self.root}: {reason}", _REMEDIES[code])
        what = "has gone" if self._is_gone() else "did not answer"
        return Unavailable(f"the folder {self.root} {what}: {reason}", "is its disk mounted?" * self._is_gone())

    def _is_gone(self) -> bool:
        """Whether the folder has been there, and is there no more."""
        return self._was_there and not self.root.exists()

    def _blocked(self) -> bool:
        """Whether a file, or links in a circle, are where the folder should be."""
        try:
            return not S_ISDIR(self.root.stat().st_mode)
        except OSError as error:
            return error.errno in {errno.ENOTDIR, errno.ELOOP}


def local_folder(url: str) -> Path:
    """The folder that a path or a `file:` URL names; relative if the path is.

    Raises:
        InvalidSettings: The URL names none, or the path begins with `~user` and there is no such user.
    """
    if not url.startswith("file:"):
        try:
            return Path(url).expanduser()
        except RuntimeError as error:
            raise InvalidSettings(
                f"{url!r}: no home folder is known for {Path(url).parts[0]}", "write the path in full"
            ) from error
    path = unquote(url.removeprefix("file://"))
    if not url.startswith("file://") or not path.startswith("/"):
        raise InvalidSettings(f"{url!r} does not name a folder", "write it with three slashes: file:///folder/run")
    return Path(path)


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        key=key,
        size=stat.st_size,
        etag=f"{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}",
        last_modified=stat.st_mtime,
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, for reading. Without waiting: a FIFO would otherwise hold whoever opens it until one writes."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check_regular(os.fstat(file.fileno()))
        yield file


def _check_regular(stat: os.stat_result) -> None:
    if not S_ISREG(stat.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file")


def _listed_name(entry: os.DirEntry[str]) -> str:
    """A folder's name with a slash, a file's as it is; empty for what is neither, links to folders included."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return f"{entry.name}/"
        return entry.name if entry.is_file() else ""
    except OSError as error:
        if error.errno not in _LEADS_NOWHERE:
            raise
        return ""


def _created(path: Path, root: Path | None) -> BinaryIO:
    """A new file, for writing, in a folder that is made as often as somebody removes it for being empty.

    Args:
        path: The file.
        root: A folder that must be there already; None: every parent may be made.
    """
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent, root)
            return path.open("xb")
    _make_folder(path.parent, root)
    return path.open("xb")


def _make_folder(folder: Path, root: Path | None) -> None:
    """Make a folder and its parents, those below `root` if that is given, so that they survive a crash."""
    if folder.is_dir():
        return
    if folder == root:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    if folder.parent != folder:
        _make_folder(folder.parent, root)
    try:
        folder.mkdir()
    except FileExistsError:
        # Another made it just now; and may have removed it since, so this looks once: FileNotFoundError is tried again.
        mode = folder.lstat().st_mode
        if not S_ISDIR(mode) and not (S_ISLNK(mode) and folder.is_dir()):
            raise
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
