"""`gc`: what it says, what it deletes, and what it leaves."""

import json

import pytest

from diloco_blob.cli.main import main
from diloco_blob.core.settings import Collect, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.testing.toy import ToyRun


class Killed(BaseException):
    pass


def make_toy(keep_versions: int = 1) -> ToyRun:
    """Three versions of fragment 0, none of fragment 1; every collector was killed before it deleted anything."""
    toy = ToyRun(
        Settings(
            sync=Sync(num_fragments=2),
            policy=Policy(islands=1, quorum=1),
            collect=Collect(keep_versions=keep_versions),
        )
    )
    toy.join("a")

    def die(step: str) -> None:
        if step == "collect.begin":
            raise Killed

    for version in range(3):
        toy.send("a", version, base_version=version)
        try:
            toy.aggregate(at=die, drain=True)
        except Killed:
            continue
    assert toy.head().version == 3
    return toy


def names(toy: ToyRun) -> set[str]:
    return {info.key for info in toy.store.list("")}


def test_it_deletes_and_says_what(capsys: pytest.CaptureFixture[str]) -> None:
    toy = make_toy()
    before = names(toy)
    assert main(["gc", toy.store.url, "--dry-run"]) == 0
    dry = capsys.readouterr().out.splitlines()
    assert names(toy) == before
    assert dry[0].startswith("fragment 0: versions 3 to 3 are kept; would delete params: 3 objects of ")
    assert "outer: 2 objects of " in dry[0]
    assert "updates: 2 objects of " in dry[0]
    assert "payloads: 3 objects of " in dry[0]
    assert dry[1:] == ["fragment 1: versions 0 to 0 are kept; nothing to delete"]
    assert main(["gc", toy.store.url]) == 0
    assert capsys.readouterr().out.splitlines() == [line.replace("would delete", "deleted") for line in dry]
    assert len(before - names(toy)) == 10
    assert main(["gc", toy.store.url]) == 0
    assert capsys.readouterr().out.count("nothing to delete") == 2
    assert main(["verify", toy.store.url]) == 0
    assert "the objects of 3 versions are collected" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    toy = make_toy()
    toy.store.put(keys.PROBES + "0/race.json", b"{}")
    toy.clock.advance(86_400)
    before = names(toy)
    assert main(["gc", toy.store.url, "--json", "--dry-run"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert names(toy) == before
    assert (document["run"], document["dry_run"], document["keep_versions"]) == (toy.store.url, True, 1)
    assert [(one["fragment"], one["version"], one["horizon"]) for one in document["fragments"]] == [
        (0, 3, 3),
        (1, 0, 0),
    ]
    assert {kind: one["objects"] for kind, one in document["fragments"][0]["deleted"].items()} == {
        "params": 3,
        "outer": 2,
        "updates": 2,
        "payloads": 3,
    }


def test_one_fragment(capsys: pytest.CaptureFixture[str]) -> None:
    toy = make_toy()
    before = names(toy)
    assert main(["gc", toy.store.url, "--fragment", "1"]) == 0
    assert names(toy) == before
    assert main(["gc", toy.store.url, "--fragment", "2"]) == 2
    assert "there is no fragment 2" in capsys.readouterr().err


def test_a_run_that_keeps_everything(capsys: pytest.CaptureFixture[str]) -> None:
    toy = make_toy(keep_versions=0)
    before = names(toy)
    assert main(["gc", toy.store.url]) == 0
    said = capsys.readouterr().out
    assert said == "this run keeps everything (collect.keep_versions = 0): nothing is deleted\n"
    assert names(toy) == before
    assert main(["gc", toy.store.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fragments"] == []


def test_no_run_and_a_damaged_one_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", "memory://gc-of-nothing"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    toy = make_toy()
    toy.store.delete(keys.close(0, 3))
    assert main(["gc", toy.store.url]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "is missing" in said.err
