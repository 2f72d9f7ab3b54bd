"""`aggregate`: one pass, a drain or a loop; a line for each version; stops between passes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from diloco_blob.aggregate import FragmentReport
from diloco_blob.cli.aggregate import DRAIN_MARGIN_S, DRAIN_VERSIONS_MAX, drain, left_line
from diloco_blob.cli.lines import version_line
from diloco_blob.cli.main import main
from diloco_blob.core.ids import SystemIds
from diloco_blob.core.settings import Policy, Settings, Sync
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.layout import make_layout
from diloco_blob.protocol.records import Merged, Skipped
from diloco_blob.store import open_store
from diloco_blob.testing.clock import VirtualClock
from diloco_blob.testing.toy import ToyRun


def merged(island: str, weight: float, staleness: int = 0) -> Merged:
    return Merged(island=island, seq=1, staleness=staleness, weight=weight, tokens=1)


def test_version_lines() -> None:
    assert version_line(0, 1, 3, [merged("a", 0.5), merged("b", 0.5)]) == "version 3: a 0.500, b 0.500"
    assert version_line(2, 4, 3, [merged("a", 1.0, 2)]) == "fragment 2 version 3: a 1.000 (staleness 2)"
    twice = [merged("a", 0.25), merged("b", 0.75, 1), merged("b", 0.75)]
    assert version_line(0, 1, 3, twice) == "version 3: a 0.250, b 0.750 (2 contributions, staleness 1)"
    lost = Skipped(island="c", seq=4, reason="stale: 12 > 10")
    assert version_line(0, 1, 3, [], [lost]) == "version 3: nothing merged; skipped c 4 (stale: 12 > 10)"
    assert version_line(0, 1, 3, [], [], [lost]).endswith("; rejected c 4 (stale: 12 > 10)")


def test_one_pass_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    toy = ToyRun(clock=VirtualClock(time.time()), settings=Settings(policy=Policy(quorum=2, islands=2)))
    toy.join("a")
    toy.join("b")
    toy.send("a", 1)
    assert main(["aggregate", toy.store.url]) == 0
    said = capsys.readouterr().out
    assert said.startswith("version 0, round open: a arrived, waiting for b; look again in ")
    toy.send("b", 2)
    assert main(["aggregate", toy.store.url, "--once"]) == 0
    assert capsys.readouterr().out == "version 1: a 0.500, b 0.500 [all]\n"
    assert main(["aggregate", toy.store.url]) == 0
    assert capsys.readouterr().out == "version 1, round open: nobody arrived\n"


def test_drain_closes_every_fragment(capsys: pytest.CaptureFixture[str]) -> None:
    toy = ToyRun(
        clock=VirtualClock(time.time()),
        settings=Settings(sync=Sync(num_fragments=2), policy=Policy(quorum=2, islands=2)),
    )
    toy.join("a")
    for fragment in (0, 1):
        toy.send("a", 1, fragment=fragment)
    assert main(["aggregate", toy.store.url, "--drain", "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made = [(one["fragment"], one["version"], one["reason"]) for one in reports if one["action"] == "merged"]
    assert made == [(0, 1, "drain"), (1, 1, "drain")]


def closed_and_left(takeover_s: float) -> ToyRun:
    """A run whose aggregator closed version 1 and was killed; nothing else has come since."""
    toy = ToyRun(settings=Settings(policy=Policy(takeover_s=takeover_s)))
    toy.join("a")
    toy.send("a", 1)

    def die(step: str) -> None:
        if step == "close.after_put":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        toy.aggregate(drain=True, at=die)
    return toy


@pytest.mark.parametrize("takeover_s", [10.0, 1000.0])
def test_a_drain_waits_as_long_as_a_take_over_takes(takeover_s: float) -> None:
    toy, reports = closed_and_left(takeover_s), list[FragmentReport]()
    start = toy.clock.monotonic()
    left = drain(toy.store, clock=toy.clock, ids=toy.ids, stop=lambda: False, on_report=reports.append)
    assert left == ()
    assert toy.head().version == 1
    assert takeover_s <= toy.clock.monotonic() - start <= takeover_s + 2.0
    assert reports[0].action == "elsewhere"


def test_a_drain_gives_up_and_says_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's clock stands still, so that the close never becomes old enough to be taken over."""
    toy = closed_and_left(10.0)
    frozen, own = toy.store.now(), VirtualClock()
    monkeypatch.setattr(type(toy.store), "now", lambda _: frozen)
    left = drain(toy.store, clock=own, ids=toy.ids, stop=lambda: False, on_report=lambda _: None)
    assert [(report.action, report.version) for report in left] == [("elsewhere", 0)]
    assert 10.0 + DRAIN_MARGIN_S <= own.monotonic() <= 10.0 + DRAIN_MARGIN_S + 2.0
    monkeypatch.setattr("diloco_blob.cli.aggregate.drain", lambda *_, **__: left)
    assert main(["aggregate", toy.store.url, "--drain"]) == 1
    assert capsys.readouterr().err == "diloco-blob: version 1 is closed; another aggregator is merging it\n"


def test_a_drain_ends_though_islands_go_on() -> None:
    toy = ToyRun()
    toy.join("a")
    toy.send("a", 1)

    def send_more(report: FragmentReport) -> None:
        toy.send("a", report.version, base_version=report.version)

    left = drain(toy.store, clock=toy.clock, ids=toy.ids, stop=lambda: False, on_report=send_more)
    assert toy.head().version == DRAIN_VERSIONS_MAX
    assert left_line(left[0], 1) == f"version {DRAIN_VERSIONS_MAX} was merged, and islands go on contributing"


def test_one_fragment(capsys: pytest.CaptureFixture[str]) -> None:
    toy = ToyRun(clock=VirtualClock(time.time()), settings=Settings(sync=Sync(num_fragments=2)))
    assert main(["aggregate", toy.store.url, "--fragment", "1"]) == 0
    assert capsys.readouterr().out == "fragment 1 version 0, round open: nobody arrived\n"
    assert main(["aggregate", toy.store.url, "--fragment", "2"]) == 2
    assert "no fragment 2" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_watching_waits_for_the_run_and_stops_when_told(tmp_path: Path, number: int, code: int) -> None:
    url = str(tmp_path / "run")
    out = tmp_path / "out.txt"
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco_blob.cli.main", "aggregate", url, "--watch"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        wait_for(lambda: "waiting for a run at" in out.read_text())
        layout = make_layout([("w", (4,), "float32")], 1)
        create_run(
            open_store(url),
            Settings(),
            layout,
            {"w": np.zeros(4, np.float32)},
            ids=SystemIds(),
            created_by="test",
        )
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(30) == code
        assert out.read_text().count("\n") == 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for(condition: object, timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)
