"""`verify`: exit 0 only if every promise holds, and a line for each that does not."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from diloco_blob.aggregate import step
from diloco_blob.cli.main import main
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import PROMISES
from diloco_blob.store import open_store
from diloco_blob.testing.toy import ToyRun


@pytest.fixture
def toy() -> ToyRun:
    toy = ToyRun()
    toy.join("a")
    toy.send("a", 1)
    toy.aggregate(drain=True)
    return toy


def test_sound(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", toy.store.url]) == 0
    text = capsys.readouterr().out
    assert "1 contribution merged, 0 skipped, 0 rejected, 0 pending" in text
    assert text.endswith("every promise holds\n")


def test_broken(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    toy.store.delete(toy.commit(1).outer.key)
    toy.store.put("stray.txt", b"")
    assert main(["verify", toy.store.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "note: layout: stray.txt: has no place in the layout"
    assert lines[1] == f"broken: objects: {toy.close(1) and toy.commit(1).outer.key}: is missing"
    assert lines[-1] == "1 finding: the run is NOT as promised"


def test_a_note_breaks_nothing(toy: ToyRun) -> None:
    toy.store.put("stray.txt", b"")
    assert main(["verify", toy.store.url]) == 0


def test_json(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    toy.store.delete(keys.close(0, 1))
    assert main(["verify", toy.store.url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["counts"]["commits"] == 1
    assert report["findings"] == [
        {
            "promise": "closes",
            "where": "fragments/0000/closes/0000000001.json",
            "what": "is missing, but the version exists",
            "level": "broken",
        }
    ]


NAMES = ["a\nevery promise holds", "a\x1b[2J", "caf\udce9", "a\u202eb"]
SHOWN = [r"a\nevery promise holds", r"a\x1b[2J", r"caf\udce9", r"a\u202eb"]


@pytest.mark.parametrize(("name", "shown"), [*zip(NAMES, SHOWN, strict=True)])
def test_a_files_name_forges_no_line(
    toy: ToyRun, tmp_path: Path, name: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(toy, tmp_path / "run")
    (folder / "islands" / "a" / name).write_bytes(b"")
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"note: layout: islands/a/{shown}: has no place in the layout"
    assert main(["verify", str(folder), "--json"]) == 0
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["where"] == f"islands/a/{shown if chr(0xDCE9) in name else name}"


def copied(toy: ToyRun, folder: Path) -> Path:
    """The run as a folder."""
    store = open_store(str(folder))
    for info in list(toy.store.list("")):
        store.put(info.key, toy.store.get(info.key)[0])
    return folder


def test_help_explains_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    text = capsys.readouterr().out
    assert all(name in text and what in text for name, what in PROMISES.items())


# ---- --replay


@pytest.fixture
def two_islands(toy: ToyRun) -> ToyRun:
    toy.join("b")
    for island in ("a", "b"):
        toy.send(island, 2, base_version=1)
    toy.aggregate(drain=True)
    return toy


def merge_wrongly(toy: ToyRun, patch: pytest.MonkeyPatch) -> None:
    """A version that is twice what it should be, in a bucket that holds together."""
    right = step.merge_tensor
    toy.send("a", 3, base_version=2)
    with patch.context() as wrong:
        wrong.setattr(step, "merge_tensor", lambda *args, **kwargs: np.asarray(right(*args, **kwargs) * 2))
        toy.aggregate(drain=True)


def test_a_sound_run_is_recomputed(two_islands: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", two_islands.store.url, "--replay"]) == 0
    assert capsys.readouterr().out.endswith("2 versions recomputed\nevery promise holds\n")


def test_what_only_a_replay_finds(
    two_islands: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merge_wrongly(two_islands, monkeypatch)
    assert main(["verify", two_islands.store.url]) == 0
    capsys.readouterr()
    assert main(["verify", two_islands.store.url, "--replay"]) == 1
    lines = capsys.readouterr().out.splitlines()
    params = two_islands.commit(3).weights.params.key
    assert lines[0].startswith(f"broken: merge: {params}: its tensors are not what the close gives: tensor ")
    assert lines[-2] == "3 versions recomputed"
    assert lines[-1] == "3 findings: the run is NOT as promised"


def test_json_of_a_replay(
    two_islands: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    merge_wrongly(two_islands, monkeypatch)
    assert main(["verify", two_islands.store.url, "--replay", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["counts"]["commits"] == 3
    assert report["replay"] == {"recomputed": 3, "collected": 0, "failed": 0}
    assert {finding["promise"] for finding in report["findings"]} == {"merge"}


def test_a_broken_layout_is_not_replayed(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    toy.store.put(keys.RUN, b"{}")
    assert main(["verify", toy.store.url, "--replay"]) == 1
    assert "recomputed" not in capsys.readouterr().out


def test_what_if_prints_a_line_for_each_version(two_islands: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", two_islands.store.url, "--replay", "--without", "b"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("fragment 0 version 1: 1 merged; step ")
    assert "weights differ by 0, 0 % of the" in first
    assert second.startswith("fragment 0 version 2: 1 merged, 1 left out; step ")
    assert last.startswith("in all: 2 versions recomputed; the newest weights differ by ")


def test_what_if_as_json(two_islands: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clip", "median", "--merge", "trimmed_mean:0.2", "--staleness", "hinge:2:0"]
    assert main(["verify", two_islands.store.url, "--replay", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)["what_if"]
    assert report["bases"] == [0]
    assert [effect["version"] for effect in report["effects"]] == [1, 2]


def test_what_if_is_kept_where_it_is_asked_for(two_islands: ToyRun, tmp_path: Path) -> None:
    words = ["--replay", "--without", "b", "--into", str(tmp_path / "scratch")]
    assert main(["verify", two_islands.store.url, *words]) == 0
    assert main(["export", str(tmp_path / "scratch"), str(tmp_path / "model")]) == 0
    about = json.loads((tmp_path / "model/diloco.json").read_text())
    assert about["versions"] == {"0": 2}
    assert main(["verify", two_islands.store.url, *words]) == 2  # It is not empty any more.


def test_what_if_leaves_nothing_behind(two_islands: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["verify", two_islands.store.url, "--replay", "--merge", "rda"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--without", "a"], "--without is for a replay (add --replay)"),
        (["--into", "x"], "--into is for a replay"),
        (["--replay", "--into", "x"], "say what to change: --without, --staleness, --merge, --clip"),
        (["--replay", "--without", "z"], "no island 'z' contributed to this run (there are a, b)"),
        (
            ["--replay", "--merge", "median"],
            "--merge median: there is no rule 'median' (there are mean, rda, trimmed_mean)",
        ),
        (["--replay", "--merge", "mean:1"], "--merge mean:1: at most 0 figures for mean"),
        (["--replay", "--staleness", "polynomial:1:2"], "at most 1 figures for polynomial"),
        (["--replay", "--staleness", "hinge:a"], "a figure is not a number"),
        (["--replay", "--staleness", "hinge:inf"], "must be a finite number"),
        (["--replay", "--merge", "trimmed_mean:0.7"], "no such rule"),
        (["--replay", "--merge", "mean:\nevery promise holds"], r"--merge mean:\nevery promise holds"),
        (["--replay", "--merge", "rda", "--into", "s3://bucket/what-if"], "--into s3://bucket/what-if is a URL"),
        (["--replay", "--merge", "rda", "--into", "file:///tmp/what-if"], "--into file:///tmp/what-if is a URL"),
        (["--replay", "--merge", ""], "--merge is empty"),
        (["--replay", "--clip", ""], "--clip is empty"),
        (["--replay", "--staleness", ""], "--staleness is empty"),
        (["--replay", "--without", "b", "--without", ""], "--without is empty"),
        (["--replay", "--without", "b", "--into", ""], "--into is empty"),
        (["--into", ""], "--into is empty"),
    ],
)
def test_wrong_words_are_one_line(
    two_islands: ToyRun, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", two_islands.store.url, *words]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_a_run_without_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", ToyRun().store.url, "--replay", "--merge", "rda"]) == 1
    assert "no version of this run can be recomputed" in capsys.readouterr().err


def test_nothing_is_written_into_the_runs_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy, folder = ToyRun(), tmp_path / "run"
    toy.send("a", 1)
    toy.aggregate(drain=True)
    copied(toy, folder)
    words = ["verify", str(folder), "--replay", "--merge", "rda", "--into"]
    assert main([*words, str(folder / "what-if")]) == 2
    assert "is in the run's own folder" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "what-if")]) == 0
