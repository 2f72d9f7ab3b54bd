"""`status`: every figure from the bucket alone, with the right value; other people's text is harmless."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from diloco_blob.cli import status as status_command
from diloco_blob.cli.main import main
from diloco_blob.cli.run_status import FRESH_S, SILENT_S, look, run_status
from diloco_blob.cli.tables import human_bytes, human_count, human_seconds, make_console, status_view
from diloco_blob.core.limits import RECORD_BYTES_MAX
from diloco_blob.core.settings import Policy, Settings, Sync
from diloco_blob.island.reporter import earlier_status
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import FORMAT, Eval, IslandStatus, encode
from diloco_blob.testing.toy import ToyRun

NUM_PARAMS = 32 + 16 + 4 + 1


def report(toy: ToyRun, name: str, **changes: object) -> None:
    """Write an island's status."""
    status = IslandStatus(
        format=FORMAT,
        run=toy.run.digest,
        island=name,
        generation=1,
        state="training",
        steps=20,
        tokens=1280,
        version=2,
        versions_behind=0,
        loss=1.5,
        tokens_per_s=100.0,
        staleness=0,
        requests=10,
        requests_by_class={},
        bytes_up=2120,
        bytes_down=4240,
        wait_s=1.0,
        train_s=3.0,
        written_at=0.0,
    )
    toy.store.put(keys.status(name), encode(msgspec.structs.replace(status, **changes)))


@pytest.fixture
def toy() -> ToyRun:
    """Two versions: a twice fresh; b fresh, then one stale; c skipped once."""
    toy = ToyRun(settings=Settings(policy=Policy(max_staleness=1)))
    for name in ("a", "b", "c"):
        toy.join(name)
    toy.send("a", 1)
    toy.send("b", 2)
    toy.aggregate(drain=True)
    toy.send("a", 3, base_version=1)
    toy.send("b", 4, base_version=0)
    toy.send("c", 5, base_version=1)
    toy.send("c", b"rubbish", base_version=1)
    toy.aggregate(drain=True)
    for name in ("a", "b", "c"):
        report(toy, name)
    return toy


def test_figures(toy: ToyRun) -> None:
    status = run_status(toy.store)
    [fragment] = status.fragments
    assert (fragment.version, fragment.tokens, fragment.parameters) == (2, 5 * 640, NUM_PARAMS)
    a, b, c = status.islands
    assert (a.accepted, a.discounted, a.skipped, a.rejected, a.tokens_merged) == (2, 0, 0, 0, 1280)
    assert (b.accepted, b.discounted, b.skipped, b.rejected) == (2, 1, 0, 0)
    assert (c.accepted, c.discounted, c.skipped, c.rejected) == (1, 0, 0, 1)
    totals = status.totals
    assert (totals.accepted, totals.discounted, totals.rejected, totals.steps) == (5, 1, 1, 60)
    assert (totals.parameters, totals.rounds, totals.tokens_merged) == (NUM_PARAMS, 2.0, 5 * 640)
    # 3 islands sent 2120 bytes each, in 2 rounds of 53 parameters: 20 bytes per island, parameter and round.
    assert totals.bytes_per_param_up == pytest.approx(20.0)
    assert totals.bytes_per_param_down == pytest.approx(40.0)


def test_fragments_are_weighted_by_their_parameters() -> None:
    toy = ToyRun(settings=Settings(sync=Sync(num_fragments=2)))
    toy.join("a")
    toy.send("a", 1, fragment=1)
    toy.aggregate(drain=True, fragment=1)
    report(toy, "a", bytes_up=210)
    status = run_status(toy.store)
    small, large = status.fragments[1].parameters, status.fragments[0].parameters
    assert small + large == NUM_PARAMS
    assert status.totals.rounds == pytest.approx(small / NUM_PARAMS)
    assert status.totals.bytes_per_param_up == pytest.approx(210 / small)
    assert status.islands[0].accepted == 1
    assert status.islands[0].tokens_merged == 640 * small // NUM_PARAMS


def test_a_fresh_run_divides_by_nothing() -> None:
    status = run_status(ToyRun().store)
    assert status.islands == ()
    assert status.totals.bytes_per_param_up is None
    assert status.eval.last is None
    render(status)


def test_silent_and_unknown_islands(toy: ToyRun) -> None:
    report(toy, "a", state="done")
    toy.clock.sleep(SILENT_S + 1)
    toy.join("d")
    toy.store.put(keys.status("c"), b"no json")
    states = {island.name: island.state for island in run_status(toy.store).islands}
    assert states == {"a": "done", "b": "silent", "c": "unknown", "d": "unknown"}


def test_a_silent_island_that_left_is_not_missing(toy: ToyRun) -> None:
    for name in ("a", "b", "c"):
        report(toy, name, state="finishing")
    toy.store.put(keys.departure("a", 0, 2), b"{}")
    toy.store.put(keys.departure("b", 0, 1), b"{}")  # and it came back
    assert {island.state for island in run_status(toy.store).islands} == {"finishing"}
    toy.clock.sleep(SILENT_S + 1)
    states = {island.name: island.state for island in run_status(toy.store).islands}
    assert states == {"a": "left", "b": "silent", "c": "silent"}


def test_behind_is_the_islands_word_while_it_is_fresh(toy: ToyRun) -> None:
    report(toy, "a", version=1, versions_behind=0)
    assert run_status(toy.store).islands[0].versions_behind == 0
    toy.clock.sleep(FRESH_S + 1)
    assert run_status(toy.store).islands[0].versions_behind == 1


def test_evaluations_are_the_first_and_the_newest(toy: ToyRun) -> None:
    first = Eval(step=0, version=0, loss=5.5, bits_per_byte=8.0)
    late = Eval(step=1, version=1, loss=5.0, bits_per_byte=7.0)
    last = Eval(step=20, version=2, loss=2.0, bits_per_byte=2.9, sample="x")
    report(toy, "a", first_eval=first, last_eval=late)
    report(toy, "b", first_eval=late, last_eval=last)
    found = run_status(toy.store).eval
    assert found.before is not None
    assert (found.before.island, found.before.bits_per_byte) == ("a", 8.0)
    assert found.last is not None
    assert (found.last.island, found.step, found.loss, found.bits_per_byte) == ("b", 20, 2.0, 2.9)


def test_a_first_evaluation_stands_alone(toy: ToyRun) -> None:
    first = Eval(step=0, version=0, loss=5.5, bits_per_byte=8.0)
    for name in ("a", "b"):
        report(toy, name, first_eval=first, last_eval=first)
    assert "held-out bits per byte   8.000 at version 0\n" in render(run_status(toy.store))
    report(toy, "b", first_eval=first, last_eval=msgspec.structs.replace(first, step=9, version=1, bits_per_byte=7.0))
    assert "   8.000 at version 0, 7.000 at version 1 (b, step 9)\n" in render(run_status(toy.store))


def test_a_sample_has_no_blanks_at_the_ends(toy: ToyRun) -> None:
    report(toy, "a", last_eval=Eval(step=1, version=1, loss=1.0, bits_per_byte=1.0, sample="one  \n\n" + "two " * 30))
    lines = render(run_status(toy.store), width=80).splitlines()
    sample = lines[lines.index("    one") :]
    assert [line[:8] for line in sample] == ["    one", "", "    two ", "    two "]
    assert all(line == line.rstrip() for line in sample)


def test_work_that_no_aggregator_merges_is_told_of() -> None:
    policy = Policy(grace_s=10.0, deadline_s=600.0, islands=2)
    toy = ToyRun(settings=Settings(policy=policy).resolved())
    for name in ("a", "b"):
        toy.join(name)
        report(toy, name, state="waiting")

    def overdue() -> int:
        return status_command.num_overdue(toy.store, look(toy.store))

    toy.clock.sleep(100.0)
    assert overdue() == 0  # nothing waits
    toy.send("a", 1)
    toy.clock.sleep(100.0)
    assert overdue() == 0  # the round is open for b
    toy.send("b", 2)
    assert overdue() == 0  # just now
    toy.clock.sleep(policy.grace_s + status_command.OVERDUE_S + 1)
    assert overdue() == 2
    toy.aggregate()
    assert overdue() == 0
    toy.send("a", 3, base_version=1)
    toy.clock.sleep(policy.deadline_s + status_command.OVERDUE_S + 1)
    assert overdue() == 1


def test_json_has_what_the_design_promises(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    report(toy, "a", last_eval=Eval(step=20, version=2, loss=2.0, bits_per_byte=2.9))
    assert main(["status", toy.store.url, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["run"] == toy.store.url
    assert {"fragment", "version", "tokens", "committed_at"} <= status["fragments"][0].keys()
    sums = {"steps", "tokens", "accepted", "discounted", "skipped", "rejected", "bytes_up", "bytes_down", "requests"}
    sums |= {"wait_s", "train_s"}
    assert sums | {"name", "state", "versions_behind"} <= status["islands"][0].keys()
    assert sums | {"bytes_per_param_up", "bytes_per_param_down"} <= status["totals"].keys()
    assert (status["eval"]["loss"], status["eval"]["bits_per_byte"], status["eval"]["step"]) == (2.0, 2.9, 20)


def test_table(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", toy.store.url]) == 0
    text = capsys.readouterr().out
    assert "version 2, 53 parameters, 3 islands" in text
    assert "20.00 up, 40.00 down, per island and round" in text
    assert "25% of the islands' time" in text
    assert "\x1b" not in text


def test_text_of_others_steers_nothing(toy: ToyRun) -> None:
    evil = Eval(step=1, version=1, loss=1.0, bits_per_byte=1.0, sample="[red]x[/red] \x1b[2J\x07\r end\nnext")
    report(toy, "a", state="[bold]\x1b[31m", last_eval=evil)
    text = render(run_status(toy.store))
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\r" not in text


def test_tables_fit_a_terminal_of_80_columns(toy: ToyRun) -> None:
    for name in ("a", "b", "c"):
        report(toy, name, bytes_up=123_400_000, bytes_down=999_900_000, tokens=123_400, steps=12_000)
    text = render(run_status(toy.store), width=80)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_a_second_look_goes_on_from_the_first(toy: ToyRun) -> None:
    before = look(toy.store)
    toy.send("a", 6, base_version=2)
    toy.aggregate(drain=True)
    assert look(toy.store, before).heads[0].version == 3


def test_a_pipe_gets_a_wide_table_without_colours() -> None:
    console = make_console(io.StringIO())
    assert console.width == 120
    assert not console.is_terminal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (human_bytes(999), "999 B"),
        (human_bytes(1234), "1.2 kB"),
        (human_bytes(123_456_789), "123 MB"),
        (human_bytes(2e15), "2000 TB"),
        (human_count(12), "12"),
        (human_count(851_968), "852 k"),
        (human_count(1.5e9), "1.5 B"),
        (human_seconds(3.2), "3 s"),
        (human_seconds(75), "1 min 15 s"),
        (human_seconds(59.7), "1 min 00 s"),
        (human_seconds(3725), "1 h 02 min"),
    ],
)
def test_figures_for_people(text: str, expected: str) -> None:
    assert text == expected


def render(status: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    console.print(status_view(status))  # type: ignore[arg-type]
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_status_bigger_than_a_record_may_be_is_not_read(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    report(toy, "a")
    report(toy, "b", message="x" * RECORD_BYTES_MAX)
    read: list[str] = []
    for name in ("get", "get_range"):
        method = getattr(toy.store, name)
        monkeypatch.setattr(toy.store, name, lambda key, *args, method=method: read.append(key) or method(key, *args))
    found = {island.name: island.state for island in run_status(toy.store).islands}
    assert (found["a"], found["b"]) == ("training", "unknown")
    assert earlier_status(toy.store, "a", toy.run.digest) is not None
    assert earlier_status(toy.store, "b", toy.run.digest) is None
    assert keys.status("a") in read
    assert keys.status("b") not in read
