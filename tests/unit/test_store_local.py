"""A folder as a bucket: races between processes, kills, and every way in which a disk says no."""

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.store import local
from diloco_blob.store.local import LocalStore
from diloco_blob.testing.clock import VirtualClock


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


RACER = """
    import sys
    from diloco_blob.core.errors import Conflict
    from diloco_blob.store.local import LocalStore
    store, me = LocalStore(sys.argv[1]), sys.argv[2]
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(50):
        try:
            store.put(f"closes/{number:04d}", me.encode() * 1000, if_absent=True)
        except Conflict:
            continue
        print(number)
"""


def test_eight_processes_race_and_each_object_has_one_creator(tmp_path: Path) -> None:
    racers = [start(RACER, tmp_path / "run", number) for number in range(8)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = {number: racer.communicate()[0].split() for number, racer in enumerate(racers)}
    assert sorted(int(name) for names in won.values() for name in names) == list(range(50))
    store = LocalStore(str(tmp_path / "run"))
    for number, names in won.items():
        for name in names:
            assert store.get(f"closes/{int(name):04d}")[0] == str(number).encode() * 1000


WRITER = """
    import sys
    from diloco_blob.store.local import LocalStore
    store = LocalStore(sys.argv[1])
    for number in range(10**6):
        store.put(f"objects/{number:06d}", b"%06d" % number * 50_000, if_absent=number % 2 == 0)
        store.put("objects/last", b"%06d" % number * 50_000)
        if number == 5:
            print("busy", flush=True)
"""


def test_a_killed_process_leaves_nothing_half_readable(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    for _ in range(2):
        writer = start(WRITER, tmp_path)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "busy\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        for info in store.list(""):
            data, _ = store.get(info.key)
            assert len(data) == 300_000
            assert data == data[:6] * 50_000
            store.delete(info.key)


def test_what_a_killed_process_left_is_not_seen(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"1")
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / ".tmp-4567").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a/b"]
    assert [*store.list_dirs("")] == ["a"]


def test_no_temporary_files_stay(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"1", if_absent=True)
    store.put("a/b", b"2")
    with pytest.raises(Conflict):
        store.put("a/b", b"3", if_absent=True)
    store.now()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]


def test_files_and_folders_are_synced_before_a_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    LocalStore(str(tmp_path / "run")).put("a/b", b"1", if_absent=True)
    # The new folders in theirs, the bytes, and at last the name.
    assert [name if not name.startswith(".tmp-") else "bytes" for name in synced] == [
        tmp_path.name,
        "run",
        "bytes",
        "a",
    ]


def refuse(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "expected", "says"),
    [
        (errno.ENOSPC, Denied, "No space left on device.*free some space"),
        (errno.EDQUOT, Denied, "quota"),
        (errno.EROFS, Denied, "Read-only file system.*mount it for writing"),
        (errno.EACCES, Denied, "Permission denied.*right to read and write"),
        (errno.EIO, Unavailable, "did not answer"),
        (errno.ESTALE, Unavailable, "did not answer"),
    ],
)
def test_what_the_disk_says_is_told_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[DilocoError], says: str
) -> None:
    store = LocalStore(str(tmp_path))
    monkeypatch.setattr(os, "fsync", refuse(code))
    with pytest.raises(expected, match=says) as caught:
        store.put("b", b"1", if_absent=True)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.put("status.json", b"old")
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(Denied):
        store.put("status.json", b"new")
    assert store.get("status.json")[0] == b"old"


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.ENOTSUP))
    with pytest.raises(InvalidSettings, match="no hard links"):
        LocalStore(str(tmp_path)).put("b", b"1", if_absent=True)
    assert [*tmp_path.iterdir()] == []


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    for url in (str(tmp_path / "run"), str(tmp_path / "run" / "below")):
        store = LocalStore(url)
        for attempt in (
            lambda store=store: store.put("a", b"1"),
            lambda store=store: store.get("a"),
            lambda store=store: store.head("a"),
            lambda store=store: [*store.list("")],
        ):
            with pytest.raises(Denied, match=r"run.*a file is in the way"):
                attempt()


def test_a_key_and_a_key_below_it_cannot_both_exist(tmp_path: Path) -> None:
    """The layout never asks for it; the error must not look like an absent object or a lost race."""
    store = LocalStore(str(tmp_path))
    store.put("a", b"1")
    store.put("d/b", b"1")
    for if_absent in (True, False):
        with pytest.raises(Denied):
            store.put("a/b", b"1", if_absent=if_absent)
        with pytest.raises(Denied):
            store.put("d", b"1", if_absent=if_absent)
    for read in (store.get, store.head):
        for key in ("a/b", "d"):
            with pytest.raises(NotFound):
                read(key)


def test_listing_is_in_the_order_of_bytes(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    names = ["o/a-b", "o/a.b", "o/a/x", "o/a0", "o/a_b"]
    for name in reversed(names):
        store.put(name, b"")
    assert [info.key for info in store.list("o/")] == sorted(names)


def test_a_delete_takes_the_folders_that_become_empty_but_not_the_root(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    for key in ("probes/a/race.json", "probes/b/race.json", "run.json"):
        store.put(key, b"1")
    store.delete("probes/a/race.json")
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["b", "probes", "race.json", "run.json"]
    store.delete("probes/b/race.json")
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["run.json"]
    store.delete("run.json")
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]


def test_a_put_whose_folder_is_removed_meanwhile_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, make = LocalStore(str(tmp_path)), local._make_folder
    calls = []

    def make_and_lose(folder: Path, root: Path | None) -> None:
        make(folder, root)
        if folder.name == "b" and len(calls) < 3:
            calls.append(folder)
            folder.rmdir()
            folder.parent.rmdir()

    monkeypatch.setattr(local, "_make_folder", make_and_lose)
    store.put("a/b/c", b"1", if_absent=True)
    assert store.get("a/b/c")[0] == b"1"


DELETER = """
    import sys
    from diloco_blob.store.local import LocalStore
    store, me = LocalStore(sys.argv[1]), sys.argv[2]
    for number in range(200):
        key = f"a/b/{me}-{number}"
        store.put(key, b"1", if_absent=number % 2 == 0)
        assert store.get(key)[0] == b"1"
        store.delete(key)
    store.put(f"a/b/last-{me}", b"1")
"""


def test_processes_that_put_and_delete_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    racers = [start(DELETER, tmp_path / "run", number) for number in range(4)]
    for racer in racers:
        racer.communicate(timeout=60)
    assert [racer.returncode for racer in racers] == [0] * 4
    found = [info.key for info in LocalStore(str(tmp_path / "run")).list("")]
    assert found == [f"a/b/last-{number}" for number in range(4)]


def test_a_folder_that_is_not_there_is_empty_and_stays_away(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    assert [*store.list("")] == []
    assert [*store.list_dirs("")] == []
    store.delete("a")
    with pytest.raises(NotFound):
        store.get("run.json")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file:///data/run", "/data/run"),
        ("file:///with%20space/run", "/with space/run"),
        ("/data/run/", "/data/run"),
        ("run", f"{Path.cwd()}/run"),
        ("./a/run", f"{Path.cwd()}/a/run"),
        ("~/run", f"{Path.home()}/run"),
    ],
)
def test_urls_of_folders(url: str, folder: str) -> None:
    store = LocalStore(url)
    assert store.root == Path(folder)
    assert store.url == url


@pytest.mark.parametrize("url", ["file://run", "file:run", "file://"])
def test_other_file_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidSettings, match="three slashes"):
        LocalStore(url)


def test_now_follows_the_clock_of_the_file_system_not_of_this_machine(tmp_path: Path) -> None:
    clock = VirtualClock(start=0.0)  # this machine believes that it is 1970
    store = LocalStore(str(tmp_path), clock=clock)
    info = store.put("a", b"1")
    assert abs(store.now() - info.last_modified) < 1
    clock.advance(100)
    assert abs(store.now() - info.last_modified - 100) < 1


def test_now_of_a_folder_that_may_only_be_read_is_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.EROFS))
    assert LocalStore(str(tmp_path), clock=VirtualClock(start=1000.0)).now() == 1000.0


def test_a_folder_that_was_there_and_is_gone_is_an_outage_and_not_an_empty_bucket(tmp_path: Path) -> None:
    """A disk that is not mounted any more: whoever made the folder again would go on in another bucket."""
    root = tmp_path / "disk" / "run"
    store, late = LocalStore(str(root)), LocalStore(str(root))
    with pytest.raises(NotFound):
        store.get("run.json")  # nobody has made it yet
    assert list(store.list("")) == []
    store.put("run.json", b"1")
    assert late.head("run.json").size == 1
    moved = root.rename(tmp_path / "elsewhere")
    for one in (store, late):
        for action in (
            lambda one=one: one.get("run.json"),
            lambda one=one: one.head("islands/a/receipts/0000/0000000001.json"),
            lambda one=one: list(one.list("islands/")),
            lambda one=one: list(one.list_dirs("islands/")),
            lambda one=one: one.put("islands/a/receipts/0000/0000000001.json", b"2", if_absent=True),
            lambda one=one: one.delete("islands/a/status.json"),
        ):
            with pytest.raises(Unavailable, match="has gone"):
                action()
    assert not root.exists()
    moved.rename(root)
    store.put("islands/a/receipts/0000/0000000001.json", b"2", if_absent=True)
    assert [info.key for info in late.list("")] == ["islands/a/receipts/0000/0000000001.json", "run.json"]


@pytest.mark.parametrize("kind", ["fifo", "socket", "link to a device", "link to a FIFO"])
def test_what_is_not_a_regular_file_is_no_object_and_holds_nobody(tmp_path: Path, kind: str) -> None:
    store = LocalStore(str(tmp_path))
    store.put("islands/evil/ok", b"1")
    path = tmp_path / "islands" / "evil" / "status.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # short: a socket's path may have 107 bytes
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / ".fifo")
        path.symlink_to(tmp_path / ".fifo")
    key = "islands/evil/status.json"
    for read in (store.get, store.head, lambda key: store.get_range(key, 0, 10)):
        with pytest.raises(NotFound):
            read(key)
    assert [info.key for info in store.list("")] == ["islands/evil/ok"]


def test_symbolic_links_below_the_root_stop_nobody(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")  # the root itself may be one
    root, store = tmp_path / "run", LocalStore(str(tmp_path / "run"))
    evil = root / "islands" / "evil"
    store.put("islands/a/ok", b"1")
    store.put("islands/evil/b", b"2")
    (evil / "a").symlink_to(".")
    (evil / "receipts").symlink_to("receipts")
    (evil / "nowhere").symlink_to("absent")
    (evil / "through").symlink_to("b/c")
    (evil / "other").symlink_to("../a")
    (evil / "z").symlink_to("b")
    found = ["islands/a/ok", "islands/evil/b", "islands/evil/z"]
    assert [info.key for info in store.list("")] == found
    assert [*store.list_dirs("islands/")] == ["a", "evil"]
    assert [*store.list_dirs("islands/evil/")] == []
    for prefix in ("receipts/", "receipts/0000/", "a/", "other/", "nowhere/"):
        assert [*store.list(f"islands/evil/{prefix}")] == []
        assert [*store.list_dirs(f"islands/evil/{prefix}")] == []
    for key in ("receipts", "receipts/0000/0000000001.json", "a", "nowhere", "through"):
        for read in (store.get, store.head):
            with pytest.raises(NotFound):
                read(f"islands/evil/{key}")
    store.delete("islands/evil/other/ok")  # another's, by another name
    assert [info.key for info in store.list("")] == found


def test_a_root_whose_links_go_in_a_circle_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    store = LocalStore(str(tmp_path / "run"))
    for attempt in (lambda: store.get("a"), lambda: [*store.list("")], lambda: store.put("a", b"1")):
        with pytest.raises(Denied, match=r"circle|in the way"):
            attempt()


def test_a_file_where_a_folder_is_expected_has_nothing_below_it(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put("islands/evil/payloads", b"1")
    for prefix in ("islands/evil/payloads/", "islands/evil/payloads/0000/", "islands/evil/payloads/0000/0"):
        assert [*store.list(prefix)] == []
        assert [*store.list_dirs(prefix)] == []
    assert [info.key for info in store.list("islands/evil/payloads")] == ["islands/evil/payloads"]
    store.delete("islands/evil/payloads/0000/x")
