"""Every format that was ever written is read, audited and computed again; and docs/format.md describes the records."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from test_docs import rows

from diloco_blob.cli.main import main
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol import records
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.heads import find_head, read_run
from diloco_blob.store.local import LocalStore

EXAMPLES = Path(__file__).parents[1] / "format"
WEIGHTS = {"1": ("810249bf4b3280cc844bb5406fd3bffb", "893f7496dbc1cfa4bbe34ee484ef37c4")}
"""Digests of the newest weights of each fragment, as the program that wrote the example had them."""

RECORDS = {
    "run.json": records.Run,
    "closes": records.Close,
    "commits": records.Commit,
    "generations": records.Generation,
    "receipts": records.Receipt,
    "departures": records.Departure,
    "status.json": records.IslandStatus,
}


@pytest.fixture(params=sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name.isdigit()))
def example(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, LocalStore]:
    folder = tmp_path / "run"
    shutil.copytree(EXAMPLES / request.param, folder)
    return request.param, LocalStore(str(folder), clock=SystemClock(), ids=SystemIds())


def says(found: object, written: object) -> bool:
    """Whether what was read holds all that was written; fields that came later may be there too."""
    if isinstance(written, dict) and isinstance(found, dict):
        return all(name in found and says(found[name], value) for name, value in written.items())
    if isinstance(written, list) and isinstance(found, list):
        return len(found) == len(written) and all(map(says, found, written))
    return found == written


def test_this_programs_own_format_has_an_example() -> None:
    assert (EXAMPLES / str(records.FORMAT) / "run.json").exists()


def test_every_record_is_read_and_says_what_it_said(example: tuple[str, LocalStore]) -> None:
    _, store = example
    seen = set()
    for info in store.list(""):
        kind = next((name for name in RECORDS if name in info.key.split("/")), None)
        if kind is None or info.key == "islands/island-9/receipts/0000/0000000001.json":  # no receipt: it was skipped
            continue
        data, _ = store.get(info.key)
        found = json.loads(records.encode(records.decode(data, RECORDS[kind])))
        written = json.loads(data)
        assert says(found, written)
        seen.add(kind)
    assert seen == set(RECORDS)


def test_every_promise_still_holds_and_every_version_is_computed_again(
    example: tuple[str, LocalStore], capsys: pytest.CaptureFixture[str]
) -> None:
    number, store = example
    report = audit(store)
    assert report.ok, report.findings
    assert report.counts.skipped > 0
    assert report.counts.rejected > 0
    assert main(["verify", store.url, "--replay"]) == 0, capsys.readouterr().out
    run = read_run(store)
    heads = [find_head(store, run, fragment) for fragment in range(len(run.run.fragments))]
    assert tuple(head.weights.digest for head in heads) == WEIGHTS[number]


@pytest.mark.parametrize("kind", [name for name, kind in vars(records).items() if isinstance(kind, type)
                                  and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
                                  and kind.__module__ == records.__name__])  # fmt: skip
def test_the_page_has_every_field_of_every_record(kind: str) -> None:
    page = (EXAMPLES.parents[1] / "docs" / "format.md").read_text()
    section = page.partition(f"### {kind}\n")[2].partition("\n#")[0]
    fields = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert fields == list(getattr(records, kind).__struct_fields__)


def test_the_page_has_every_object() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "format.md").read_text()
    table = page.partition("## Objects\n")[2].partition("\n\np is")[0]
    protocol = {
        row[0]
        for row in rows("docs/protocol.md")
        if row[0].startswith(("`run.json", "`fragments/", "`islands/", "`probes/"))
    }
    assert protocol <= {line.split(" | ")[0].strip("| ") for line in table.splitlines()} | {
        "`islands/{name}/payloads/{p:04}/{seq:010}-0-{digest}.safetensors.zst`"
    }
