"""Records: the same bytes for the same record, and nothing read that is not exactly one."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.limits import CURSOR_CHARS_MAX, PARTS_MAX, RECORD_BYTES_MAX
from diloco_blob.core.settings import Policy, Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.records import (
    COUNT_MAX,
    FORMAT,
    Close,
    Commit,
    Eval,
    Generation,
    IslandStatus,
    ObjectRef,
    Receipt,
    Run,
    decode,
    encode,
    record_digest,
)
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import digest


@pytest.fixture(scope="module")
def records() -> dict[type[msgspec.Struct], msgspec.Struct]:
    """One true record of each kind."""
    toy = ToyRun(Settings(policy=Policy(quorum=1)))
    toy.join("a")
    receipt = toy.send("a", 1)
    toy.send_raw("b", b"junk")
    toy.send("c", b"junk")
    toy.aggregate()
    status = IslandStatus(
        format=FORMAT, run=toy.run.digest, island="a", generation=1, state="training", steps=1, tokens=2, version=0,
        versions_behind=0, loss=None, tokens_per_s=1.5, staleness=0, requests=3, requests_by_class={"gets": 3},
        bytes_up=0, bytes_down=0, wait_s=0.0, train_s=0.0, written_at=1.0,
        last_eval=Eval(step=1, version=0, loss=2.5, bits_per_byte=1.1),
    )  # fmt: skip
    generation = decode(toy.store.get(keys.generation("a", 1))[0], Generation, run=toy.run.digest)
    found = [toy.run.run, generation, receipt, toy.close(1), toy.commit(1), status]
    return {type(record): record for record in found}


KINDS = [Run, Generation, Receipt, Close, Commit, IslandStatus]


def test_written_and_read_again_every_record_is_the_same(records: dict[Any, Any]) -> None:
    for kind in KINDS:
        data = encode(records[kind])
        assert decode(data, kind) == records[kind]
        assert encode(decode(data, kind)) == data
        assert record_digest(data) == digest(data)
        assert b"\n" not in data
        assert b'": ' not in data


def test_every_record_carries_format_and_run(records: dict[Any, Any]) -> None:
    for kind in KINDS:
        fields = json.loads(encode(records[kind]))
        assert fields["format"] == FORMAT
        assert kind is Run or len(fields["run"]) == 32
        assert kind is IslandStatus or len(fields["write_id"]) == 32


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_unknown_or_a_missing_field_or_another_type_is_refused(records: dict[Any, Any], kind: Any) -> None:
    fields = json.loads(encode(records[kind]))
    for damaged in (
        {**fields, "surprise": 1},
        {name: value for name, value in fields.items() if name != "run" and name != "write_id"},
        {**fields, "format": "1"},
        {**fields, "format": None},
        [fields],
        None,
    ):
        with pytest.raises(Corrupt, match=f"not a {kind.__name__.lower()} record"):
            decode(json.dumps(damaged).encode(), kind)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"nan", b"[" * 1_000_000, b'{"format":1e999}'])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(Corrupt):
            decode(data, kind)


def test_another_format_or_run_is_refused_with_a_word_on_what_to_do(records: dict[Any, Any]) -> None:
    receipt: Receipt = records[Receipt]
    newer = encode(msgspec.structs.replace(receipt, format=2))
    with pytest.raises(Corrupt, match=r"format 2, this program reads 1 \(update diloco-blob\)"):
        decode(newer, Receipt, run=receipt.run)
    with pytest.raises(Corrupt, match="another run"):
        decode(encode(receipt), Receipt, run="0" * 32)
    assert decode(encode(receipt), Receipt, run=receipt.run) == receipt


def test_a_record_beyond_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(Corrupt, match="exceeds the limit"):
        decode(b" " * (RECORD_BYTES_MAX + 1), Receipt)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0}, {"steps": -1}, {"steps": 1.5}, {"steps": True}, {"steps": COUNT_MAX + 1}, {"steps": 1 << 70},
        {"tokens": 0}, {"seq": 0}, {"generation": 0}, {"fragment": -1}, {"base_version": 10_000_000_000},
        {"cursor": "x" * (CURSOR_CHARS_MAX + 1)}, {"cursor": None}, {"run": "0" * 31}, {"run": "A" * 32},
        {"run": "0" * 32 + "\n"}, {"parts": []}, {"parts": [{}]},
    ],
)  # fmt: skip
def test_figures_and_names_out_of_bounds_are_refused(records: dict[Any, Any], change: dict[str, Any]) -> None:
    fields = json.loads(encode(records[Receipt]))
    with pytest.raises(Corrupt):
        decode(json.dumps({**fields, **change}).encode(), Receipt)


def test_too_many_parts_are_refused(records: dict[Any, Any]) -> None:
    receipt: Receipt = records[Receipt]
    with pytest.raises(Corrupt):
        decode(encode(msgspec.structs.replace(receipt, parts=receipt.parts * (PARTS_MAX + 1))), Receipt)


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "A", "a b", "a\n", "a/b\n", "ä", "a\\b", "a\x00", "x" * 513, "a/?", "a/%2e%2e/b"],
)
def test_a_key_that_no_store_need_keep_is_refused(key: str) -> None:
    with pytest.raises(Corrupt):
        decode(json.dumps({"key": key, "digest": "0" * 32, "size": 1}).encode(), ObjectRef)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_in_one_way_only(data: bytes) -> None:
    for kind in (Receipt, Close, Commit):
        with pytest.raises(Corrupt):
            decode(data, kind)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(Receipt.__struct_fields__), JSON)
def test_any_value_in_any_field_is_a_receipt_or_corrupt(records: dict[Any, Any], field: str, value: object) -> None:
    fields = {**json.loads(encode(records[Receipt])), field: value}
    try:
        data = json.dumps(fields).encode()
    except UnicodeEncodeError:
        return
    try:
        found = decode(data, Receipt)
    except Corrupt:
        return
    assert decode(encode(found), Receipt) == found
