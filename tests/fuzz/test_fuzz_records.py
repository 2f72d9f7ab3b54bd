"""Records that anybody may have written: refused in one way only, in bounded memory, or read as they were meant."""

import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import almost, damaged, trees
from targets import names, records

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.limits import RECORD_BYTES_MAX
from diloco_blob.protocol.records import COUNT_MAX, Commit, Merged, Receipt, Run, decode, encode

kinds = st.sampled_from(records.KINDS)

BYTES_PER_BYTE = 40
"""What a byte of JSON may cost while it is read. The dearest is an empty container with its comma, 3 bytes: 64 of the
object, 16 of the garbage collector's, 8 in the list around it, an eighth more as that grows, and once more while it is
copied into a tuple, or 16 + 2/3 of a hash table's 24-byte places: below 120 for 3."""


@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), damaged(encode(records.valid()[kind])))))
@settings(max_examples=1000)
def test_damaged_records(item: tuple[type[msgspec.Struct], bytes]) -> None:
    kind, data = item
    records.check(data, kind)


@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), almost(records.valid()[kind]))))
@settings(max_examples=1000)
def test_almost_records(item: tuple[type[msgspec.Struct], bytes]) -> None:
    kind, data = item
    records.check(data, kind)


@given(kinds, trees)
def test_other_json(kind: type[msgspec.Struct], tree: object) -> None:
    assert records.check(json.dumps(tree).encode(errors="surrogatepass"), kind) is None


@given(kinds, kinds)
def test_a_record_of_one_kind_is_none_of_another(kind: type[msgspec.Struct], other: type[msgspec.Struct]) -> None:
    found = records.check(encode(records.valid()[other]), kind)
    assert found == (records.valid()[kind] if kind is other else None)


@pytest.mark.parametrize("kind", records.KINDS[1:])
def test_records_of_another_run_are_refused(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(Corrupt, match="another run"):
        decode(encode(records.valid()[kind]), kind, run="0" * 32)


def test_a_key_that_occurs_twice_means_the_same_to_everybody() -> None:
    """JSON leaves it open; here the last one counts, and what is passed on is written anew with one."""
    data = encode(records.valid()[Receipt])
    twice = b'{"tokens":1,' + data[1:]
    assert records.check(twice, Receipt) == records.valid()[Receipt]


@pytest.mark.parametrize("clip", [0, 0.0, -0.5, 1.0000001, 2, "1", None])
def test_a_clipping_factor_is_above_zero_and_at_most_one(clip: object) -> None:
    commit = records.valid()[Commit]
    tree = msgspec.to_builtins(commit)
    tree["merged"][0]["clip"] = clip
    with pytest.raises(Corrupt):
        decode(json.dumps(tree).encode(), Commit)
    del tree["merged"][0]["clip"]
    assert decode(json.dumps(tree).encode(), Commit) == commit, "records from before there was clipping"


SIZE = 1 << 20
"""An eighth of the largest record: memory goes with it."""

FILLERS = {  # What a hostile writer would fill a record with: its kind, the field, before, again and again, after.
    "free lists": (Run, "model", b'{"x":[', b"[],", b"0]}"),
    "free objects": (Run, "model", b'{"x":[', b"{},", b"0]}"),
    "deep": (Run, "model", b'{"x":', b"[", b""),
    "many names": (Run, "model", b"{", b'"%07d":{},', b'"z":0}'),
    "shape": (Run, "tensors", b'[{"name":"w","dtype":"f","fragment":0,"shape":[', b"9,", b"9]}]"),
    "parts": (Receipt, "parts", b"[", b'{"key":"a","digest":"' + b"0" * 32 + b'","size":1},', b"0]"),
    "merged": (Commit, "merged", b"[", b'{"island":"","seq":1,"staleness":0,"weight":0,"tokens":1},', b"0]"),
    "tally": (Commit, "tally", b"{", b'"%07d":{},', b'"z":{}}'),
    "digits": (Receipt, "tokens", b"", b"9", b""),
    "cursor": (Receipt, "cursor", b'"', b"x", b'"'),
    "escapes": (Receipt, "cursor", b'"', b"\\u0041", b'"'),
}


@pytest.mark.parametrize("filler", FILLERS)
def test_memory_is_bounded_by_the_size_of_the_record(filler: str) -> None:
    kind, field, before, piece, after = FILLERS[filler]
    tree = msgspec.to_builtins(records.valid()[kind])
    tree[field] = "@here@"
    shell = json.dumps(tree).encode()
    count = ((RECORD_BYTES_MAX >> 3) - len(shell) - len(before) - len(after)) // len(
        piece % 0 if b"%" in piece else piece
    )
    body = b"".join(piece % n for n in range(count)) if b"%" in piece else piece * count
    data = shell.replace(b'"@here@"', before + body + after)
    assert RECORD_BYTES_MAX >> 4 < len(data) <= RECORD_BYTES_MAX
    tracemalloc.start()
    try:
        decode(data, kind, run=None if kind is Run else records.run_digest())
    except Corrupt as error:
        records.refused(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BYTES_PER_BYTE * len(data)


def test_figures_at_their_limits_are_read() -> None:
    merged = Merged(island="a", seq=COUNT_MAX, staleness=COUNT_MAX, weight=1.0, tokens=COUNT_MAX, clip=5e-324)
    commit = msgspec.structs.replace(records.valid()[Commit], merged=(merged,))
    assert records.check(encode(commit), Commit) == commit


@given(st.one_of(st.text(max_size=80), st.from_regex(r"[a-z0-9._=/-]{1,80}", fullmatch=True)))
@settings(max_examples=500)
def test_names(text: str) -> None:
    names.run(text.encode(errors="surrogatepass"))


@given(damaged(next(names.seeds())))
@settings(max_examples=500)
def test_damaged_names(data: bytes) -> None:
    names.run(data)
