"""`verify`: exit 0 only if every promise holds, and a line for each that does not."""

import json

import pytest

from diloco_blob.cli.main import main
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import PROMISES
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


def test_help_explains_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    text = capsys.readouterr().out
    assert all(name in text and what in text for name, what in PROMISES.items())
