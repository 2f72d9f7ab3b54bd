"""`diloco-blob doctor`: its words, its lines, its JSON, its exit codes."""

import json
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_blob.cli import doctor
from diloco_blob.cli.main import main
from diloco_blob.protocol.doctor import Check
from diloco_blob.protocol.doctor.probes import MARK

QUICK = ("--racers", "2", "--rounds", "1", "--samples", "2", "--megabytes", "0.001")


def test_a_folder_that_is_not_there_is_sound_and_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path / "some" / "run"), *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in {"ok", "warning"} for line in lines[:-1])
    assert [line.split()[1] for line in lines[:3]] == ["credentials", "bucket", "run"]
    assert lines[-2].split()[:2] == ["ok", "cleanup"]
    assert lines[-1].startswith("a run can be trained here; this credential can be: island, aggregator, creator")
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "islands").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["doctor", tmp_path.as_uri(), *QUICK]) == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) in (["islands", "notes.txt"], ["notes.txt"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    assert main(["doctor", url, "--json", "--parameters", "2e6", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"url", "ok", "roles", "checks"}
    assert (document["url"], document["ok"]) == (url, True)
    assert document["roles"] == ["island", "aggregator", "creator", "collector"]
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["race"]["figures"] == {"racers": 2, "rounds": 1}
    assert checks["exchange"]["figures"]["parameters"] == 2e6
    assert all(set(check) == {"name", "verdict", "what", "hint", "figures", "kind"} for check in checks.values())


@pytest.mark.parametrize(("kind", "code"), [("", 1), ("denied", 1), ("invalid-settings", 2), ("unavailable", 4)])
def test_exit_codes_and_hints(
    kind: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: Any, **__: Any) -> Iterator[Check]:
        yield Check("bucket", "ok", "there")
        yield Check("race", "broken", "two \x1b[31mwinners", "use another", kind=kind)
        yield Check("clock", "broken", "wrong", kind="unavailable")

    monkeypatch.setattr(doctor, "diagnose", found)
    url = f"memory://{uuid.uuid4().hex}"
    assert main(["doctor", url]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["broken", "race", "two", "\N{REPLACEMENT CHARACTER}[31mwinners", "→", "use", "another"]
    assert lines[3] == "a run can NOT be trained here like this: race, clock"
    assert main(["doctor", url, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    "words",
    [
        ("s3://x y/run",),
        ("ftp://there/run",),
        ("memory://m", "--racers", "1"),
        ("memory://m", "--megabytes", "inf"),
        ("memory://m", "--parameters", "nan"),
        ("memory://m", "--island", "No!"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("diloco-blob: error: ")
    assert captured.err.count("\n") == 1


def test_sigterm_ends_it_after_cleaning_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def terminated(check: Check) -> None:
        if check.name == "latency":
            seen.append([str(path) for path in tmp_path.rglob("*") if path.is_file()])
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(doctor, "_print", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", str(tmp_path), *QUICK])
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    [files] = seen
    assert files
    assert all(f"/{MARK}/" in name for name in files)
    assert [*tmp_path.iterdir()] == []
