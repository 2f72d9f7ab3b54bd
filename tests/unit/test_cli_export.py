"""`export`: the Hugging Face layout, in the model's own types; foreign files survive, damaged weights do not pass."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from diloco_blob.cli.export import export
from diloco_blob.cli.main import main
from diloco_blob.core.ids import SeededIds
from diloco_blob.core.settings import Collect, Settings, Sync
from diloco_blob.protocol.creation import create_run
from diloco_blob.protocol.layout import make_layout
from diloco_blob.store import open_store
from diloco_blob.store.faulty import Fault, FaultyStore
from diloco_blob.testing.toy import ToyRun


@pytest.fixture
def toy() -> ToyRun:
    """Three fragments, of which the first has one version more."""
    toy = ToyRun(settings=Settings(sync=Sync(num_fragments=3)))
    toy.join("a")
    for fragment in (0, 1, 2):
        toy.send("a", 1, fragment=fragment)
        toy.aggregate(drain=True, fragment=fragment)
    toy.send("a", 2, base_version=1)
    toy.aggregate(drain=True)
    return toy


def test_newest(toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", toy.store.url, str(tmp_path / "model")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model' / 'model.safetensors'}\n"
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors.keys() == toy.shapes.keys()
    for fragment in (0, 1, 2):
        for name, values in toy.params(fragment=fragment).items():
            np.testing.assert_array_equal(tensors[name], values, strict=True)
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    about = json.loads((tmp_path / "model" / "diloco.json").read_text())
    assert about["versions"] == {"0": 2, "1": 1, "2": 1}
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == {}
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "diloco.json",
        "model.safetensors",
    ]


def test_help_says_what_is_not_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "frozen parameters (requires_grad=False), buffers" in text


def test_a_version(toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", toy.store.url, str(tmp_path), "--at", "0"]) == 0
    np.testing.assert_array_equal(
        load_file(tmp_path / "model.safetensors")["embed.weight"], toy.initial["embed.weight"]
    )
    capsys.readouterr()
    assert main(["export", toy.store.url, str(tmp_path), "--at", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "fragment 1 has no version 2 (its newest is 1" in said
    assert main(["export", toy.store.url, str(tmp_path), "--at", "-1"]) == 2


def test_types_of_the_model(tmp_path: Path) -> None:
    values = np.array([0.0, 1.0, -2.5, 3.1415927, 65504.0, 1e-8], np.float32)
    names = ("float32", "float16", "bfloat16")
    store = open_store("memory://export-types")
    layout = make_layout([(name, (6,), name) for name in names], 1)
    model = {"width": 6}
    create_run(store, Settings(), layout, dict.fromkeys(names, values), ids=SeededIds(0), created_by="a", model=model)
    assert main(["export", "memory://export-types", str(tmp_path)]) == 0
    data = (tmp_path / "model.safetensors").read_bytes()
    entries = dict(safetensors.deserialize(data))
    assert {name: entry["dtype"] for name, entry in entries.items()} == {
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
    }
    assert np.frombuffer(entries["float16"]["data"], np.float16).tolist() == values.astype(np.float16).tolist()
    bits = np.frombuffer(entries["bfloat16"]["data"], np.uint16)
    # 3.1415927 is 0x40490fdb; rounded to the upper half it is 0x4049.
    assert [hex(bit) for bit in bits[:4]] == ["0x0", "0x3f80", "0xc020", "0x4049"]
    assert json.loads((tmp_path / "config.json").read_text()) == model


def test_a_value_that_the_type_cannot_hold_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store("memory://export-overflow")
    layout = make_layout([("w", (1,), "float16")], 1)
    create_run(store, Settings(), layout, {"w": np.array([1e6], np.float32)}, ids=SeededIds(0), created_by="a")
    assert main(["export", "memory://export-overflow", str(tmp_path)]) == 1
    assert "tensor w has values that float16 cannot hold" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_our_own_export_is_replaced(toy: ToyRun, tmp_path: Path) -> None:
    assert main(["export", toy.store.url, str(tmp_path), "--at", "0"]) == 0
    assert main(["export", toy.store.url, str(tmp_path)]) == 0
    assert json.loads((tmp_path / "diloco.json").read_text())["versions"]["0"] == 2


def test_foreign_files_are_not_overwritten(toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_text("precious")
    (tmp_path / "tokenizer.json").write_text("in nobody's way")
    assert main(["export", toy.store.url, str(tmp_path)]) == 2
    assert "is there and not ours (choose another folder, or --force to overwrite)" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "precious"
    assert main(["export", toy.store.url, str(tmp_path), "--force"]) == 0
    assert (tmp_path / "tokenizer.json").read_text() == "in nobody's way"


def test_the_model_of_another_run_is_not_overwritten(
    toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", ToyRun().store.url, str(tmp_path)]) == 0
    assert main(["export", toy.store.url, str(tmp_path)]) == 2
    assert "holds the model of another run, memory://toy-" in capsys.readouterr().err


def test_a_file_instead_of_a_folder(toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("")
    assert main(["export", toy.store.url, str(tmp_path / "x")]) == 2
    assert main(["export", toy.store.url, str(tmp_path / "x" / "y")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_damaged_weights_leave_no_file(toy: ToyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = toy.head().weights.params.key
    data = bytearray(toy.store.get(key)[0])
    data[-1] ^= 1
    toy.store.put(key, bytes(data))
    assert main(["export", toy.store.url, str(tmp_path)]) == 1
    assert "digest" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- collected versions


def collecting_toy(num_fragments: int = 1) -> ToyRun:
    """Five versions of fragment 0 and one of every other fragment; two are kept of each."""
    settings = Settings(sync=Sync(num_fragments=num_fragments), collect=Collect(keep_versions=2))
    toy = ToyRun(settings=settings)
    toy.join("a")
    for fragment in range(num_fragments):
        for version in range(1 if fragment else 5):
            toy.send("a", version, fragment=fragment, base_version=version)
            toy.aggregate(drain=True, fragment=fragment)
    return toy


@pytest.mark.parametrize("at", [0, 3])
def test_a_collected_version_is_named_with_those_that_can_be_had(
    at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = collecting_toy()
    assert main(["export", toy.store.url, str(tmp_path), "--at", str(at)]) == 2
    said = capsys.readouterr().err
    assert said == f"diloco-blob: error: version {at} was collected (--at can be 4 to 5)\n"
    assert list(tmp_path.iterdir()) == []
    assert main(["export", toy.store.url, str(tmp_path), "--at", "4"]) == 0
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["scale"], toy.params(4)["scale"])


def test_fragments_that_have_no_kept_version_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = collecting_toy(num_fragments=2)
    assert main(["export", toy.store.url, str(tmp_path), "--at", "1"]) == 2
    assert "version 1 was collected (no version is kept of every fragment; " in capsys.readouterr().err
    assert main(["export", toy.store.url, str(tmp_path)]) == 0


def test_versions_that_are_collected_while_they_are_exported_are_left_for_newer_ones(tmp_path: Path) -> None:
    toy = collecting_toy()

    def go_on() -> None:
        for version in (5, 6):
            toy.send("a", version, base_version=version)
            toy.aggregate(drain=True)

    export(FaultyStore(toy.store, [Fault("get_range", "delay", key="params/", hook=go_on)]), tmp_path)
    assert json.loads((tmp_path / "diloco.json").read_text())["versions"] == {"0": 7}
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["scale"], toy.params(7)["scale"])


def test_weights_that_should_be_there_are_not_called_collected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = collecting_toy()
    toy.store.delete(toy.head().weights.params.key)
    for words in ([], ["--at", "5"]):
        assert main(["export", toy.store.url, str(tmp_path), *words]) == 1
        assert "weights that the run should keep are missing (diloco-blob verify says which)" in capsys.readouterr().err
