"""The pages say what the code does: settings, presets, links, blocks, named files, the worked round, requests."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from diloco_blob.aggregate import FragmentReport, aggregate
from diloco_blob.aggregate.collect import sweep
from diloco_blob.aggregate.context import Context
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import PRESETS, Collect, Policy, Settings, Sync, parse_settings, preset
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import FORMAT, Close, Departure, encode
from diloco_blob.store import MeteredStore
from diloco_blob.testing.toy import ToyRun

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
page = pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


# Settings


def flat(struct: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def allowed(kind: inspect.Type) -> set[str]:
    if isinstance(kind, inspect.LiteralType):
        return {toml(value) for value in kind.values}
    if isinstance(kind, inspect.BoolType):
        return {"`true`", "`false`"}
    assert isinstance(kind, inspect.IntType | inspect.FloatType)
    bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    return {f"{sign} {bound:g}" for sign, bound in bounds if bound is not None}


def toml(value: object) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def rows(path: str) -> list[list[str]]:
    lines = (ROOT / path).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]


def test_every_setting_has_its_row_with_default_and_allowed_values() -> None:
    table = [row for row in rows("docs/settings.md") if len(row) == 5]
    found = {row[0]: (row[1], set(row[2].split(", "))) for row in table}
    kinds = {
        f"{section.name}.{field.name}": field.type
        for section in typing.cast("inspect.StructType", inspect.type_info(Settings)).fields
        for field in typing.cast("inspect.StructType", section.type).fields
    }
    expected = {f"`{name}`": (toml(value), allowed(kinds[name])) for name, value in flat(Settings())}
    assert found == expected
    assert len(table) == len(expected), "a setting has two rows"


def test_the_table_of_presets_is_the_presets() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    assert f"| setting | {' | '.join(f'`{name}`' for name in PRESETS)} |" in text
    found = {row[0]: row[1:] for row in rows("docs/settings.md") if len(row) == 1 + len(PRESETS)}
    presets = [dict(flat(preset(name))) for name in PRESETS]
    differing = {name for name, default in flat(Settings()) if any(values[name] != default for values in presets)}
    assert found == {f"`{name}`": [toml(values[name]) for values in presets] for name in differing}


# Links, blocks, names


def slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), target
        assert not anchor or anchor in slugs(there), target


@page
def test_blocks_of_python_and_toml_can_be_read(path: Path) -> None:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            ast.parse(text)
        elif language == "toml":
            parse_settings(text, source=path.name)


@page
def test_files_and_words_of_make_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"`((?:diloco_blob|tests|workers|benchmarks|docs)/[\w./-]*\w)/?`", text):
        assert (ROOT / name).exists(), name
    words = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
        assert word in words, word


def test_the_modules_of_the_architecture_are_those_of_the_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    block = text.partition("## Modules")[2].partition("Outside the package")[0]
    named, folder = set(), "diloco_blob/"
    for line in block.splitlines():
        if match := re.fullmatch(r"    (\w+/)", line):
            folder = f"diloco_blob/{match[1]}"
        first = line.strip().partition("   ")[0]
        named |= {folder + name for name in re.findall(r"[\w/]+\.py", first) if "/" not in name}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    packages = {path.parent.name for path in ROOT.glob("diloco_blob/*/__init__.py")}
    layers = text.partition("## Layers")[2].partition("## Modules")[0]
    assert packages == set(re.findall(r"`(\w+)/`", layers)) - {"workers"}


# The worked round of docs/protocol.md


class Killed(Exception):  # noqa: N818 - what happened
    pass


def test_the_worked_round_happens_as_it_is_written() -> None:
    toy = ToyRun(
        Settings(
            sync=Sync(sync_every=20),
            policy=Policy(islands=3, quorum=2, grace_s=10.0, deadline_s=60.0, takeover_s=30.0),
        )
    )

    def send(island: str, base: int) -> None:
        toy.send(island, base, base_version=base, steps=20, tokens=16_000)

    def outcome(report: FragmentReport) -> tuple[str, int, str]:
        return report.action, report.version, report.reason

    def weights(close: Close) -> list[tuple[str, int, int, float]]:
        return [(one.island, one.seq, one.staleness, round(one.weight, 4)) for one in close.chosen]

    def die(step: str) -> None:
        if step == "merge.begin":
            raise Killed

    for name in "abc":
        toy.join(name)
    for version in range(7):
        for name in "abc":
            send(name, version)
        assert outcome(toy.aggregate()) == ("merged", version + 1, "all")
    start = toy.clock.wall()

    def at(second: float) -> None:
        toy.clock.sleep(start + second - toy.clock.wall())

    at(20)
    send("a", 7)
    assert toy.aggregate().waiting_for == ("b", "c")
    at(26)
    send("b", 7)
    open_round = toy.aggregate()
    assert (open_round.waiting_for, open_round.look_again_s) == (("c",), 10.0)
    at(36)
    with pytest.raises(Killed):
        toy.aggregate(at=die)
    assert weights(toy.close(8)) == [("a", 8, 0, 0.5), ("b", 8, 0, 0.5)]
    at(37)
    elsewhere = toy.aggregate()
    assert (elsewhere.action, elsewhere.look_again_s) == ("elsewhere", 29.0)
    at(41)
    send("c", 7)
    assert toy.aggregate().look_again_s == 25.0
    at(66)
    taken_over = toy.aggregate()
    assert (outcome(taken_over), taken_over.takeover) == (("merged", 8, "grace"), True)
    assert toy.aggregate().arrived == ("c",)
    at(86)
    send("a", 8)
    assert toy.aggregate().look_again_s == 10.0
    at(92)
    send("b", 8)
    assert outcome(toy.aggregate()) == ("merged", 9, "all")
    assert weights(toy.close(9)) == [("a", 9, 0, 0.3694), ("b", 9, 0, 0.3694), ("c", 8, 1, 0.2612)]
    text = (ROOT / "docs/protocol.md").read_text()
    assert "**0.3694**" in text
    assert "**0.2612**" in text


def leave(toy: ToyRun, island: str, seq: int) -> None:
    record = Departure(
        format=FORMAT,
        run=toy.run.digest,
        write_id=toy.ids.fresh(),
        island=island,
        generation=1,
        fragment=0,
        seq=seq,
    )
    toy.store.put(keys.departure(island, 0, seq), encode(record), if_absent=True)


def test_a_pass_asks_for_what_the_page_says() -> None:
    toy = ToyRun(Settings(policy=Policy(islands=3, quorum=3)))
    names = "abc"
    for name in names:
        toy.join(name)
        toy.send(name, 0)
    toy.aggregate()
    meter = MeteredStore(toy.store)

    def asked(version: int) -> tuple[int, int, int, int]:
        before = meter.usage()
        toy.aggregate(store=meter, hints={0: version})
        used = meter.usage().since(before)
        return used.gets, used.heads, used.puts, used.lists

    assert asked(1) == (3, 1 + 3, 0, 1)
    toy.send("a", 1, base_version=1)
    assert asked(1) == (3 + 1, 1 + 3 + 1 + 2, 0, 1)  # the two more: whether b and c have left
    leave(toy, "c", 1)
    assert asked(1) == (3 + 1 + 1, 1 + 3 + 1 + 2 + 1, 0, 1)  # that it has, and whether c is back
    toy.send("b", 2, base_version=1)
    toy.send("c", 3, base_version=1)
    assert asked(1) == (5 + 2 * 3, 1 + 3 + 2 * 3, 5, 1)


@pytest.mark.parametrize("skipping", [False, True])
def test_a_collection_asks_for_what_the_page_says(skipping: bool) -> None:
    used = []
    for keep_versions in (0, 1):
        toy = ToyRun(Settings(policy=Policy(islands=2, quorum=2), collect=Collect(keep_versions=keep_versions)))
        meter = MeteredStore(toy.store)
        for version in range(2):
            before = meter.usage()
            for name in "ab":
                toy.send(name, version, base_version=version)
            if skipping and version == 1:
                toy.send("a", 9, base_version=99)
            assert toy.aggregate(store=meter, drain=True).version == version + 1
            used.append(meter.usage().since(before))
    asked = [
        (with_it.gets - free.gets, with_it.heads - free.heads, with_it.puts - free.puts, with_it.lists - free.lists)
        for free, with_it in zip(used[:2], used[2:], strict=True)
    ]
    assert asked == [(1, 0, 0, 0), (2, 0, 0, int(skipping))]
    # The payload of what is skipped is one more.
    assert [one.deletes for one in used] == [0, 0, 3 + 2 - 2, 3 + 2 + int(skipping)]


def test_a_sweep_asks_for_what_the_page_says() -> None:
    toy = ToyRun(Settings(policy=Policy(islands=2, quorum=2), collect=Collect(keep_versions=3)))
    meter = MeteredStore(toy.store)
    for version in range(5):
        for name in "ab":
            toy.send(name, version, base_version=version)
        toy.aggregate(drain=True)
    toy.store.put(keys.params(0, 4, "0" * 32), b"of a merge that lost")
    list(sweep(Context(store=meter, run=toy.run, clock=toy.clock, ids=toy.ids)))
    used = meter.usage()
    # Heads 1, 3, 7, 5, 6 are asked for.
    assert (used.gets, used.heads, used.puts, used.lists, used.deletes) == (3 + 1, 5, 0, 3 + 2, 1)


def test_lists_are_shared_as_the_page_says() -> None:
    toy = ToyRun(Settings(policy=Policy(islands=2, quorum=2), sync=Sync(num_fragments=4)))
    meter = MeteredStore(toy.store)

    def lists() -> int:
        before = meter.usage()
        aggregate(meter, clock=toy.clock, ids=SeededIds(0), run=toy.run)
        return meter.usage().since(before).lists

    for name in "ab":
        toy.join(name)
    assert lists() == 1  # For all fragments.
    for number in (1, 3):
        for name in "ab":
            toy.send(name, number, fragment=number)
    assert lists() == 1 + 2  # Two rounds are due.
    assert [toy.head(number).version for number in range(4)] == [0, 1, 0, 1]
