"""A hostile island in a round of two honest ones, end to end: see `targets/rounds.py` for what must hold."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import almost, damaged
from targets import rounds

from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import ObjectRef
from diloco_blob.testing.toy import ToyRun
from diloco_blob.wire import codec_for, digest
from diloco_blob.wire.payload import payload_specs
from diloco_blob.wire.tensorfile import header_bytes

SEEDS = [(rounds.WHAT[seed[0]], seed[1:]) for seed in rounds.seeds()]


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_the_seeds_themselves(seed: int) -> None:
    what, data = SEEDS[seed]
    report = rounds.check(what, data)
    valid = what in {"content", "payload"}
    assert (rounds.HOSTILE in [entry.island for entry in report.merged]) == valid


@given(st.sampled_from(SEEDS).flatmap(lambda seed: st.tuples(st.just(seed[0]), damaged(seed[1]))))
@settings(max_examples=300)
def test_damaged_bytes(item: tuple[str, bytes]) -> None:
    rounds.check(*item)


@given(almost(rounds.valid_receipt()))
@settings(max_examples=150)
def test_almost_receipts(data: bytes) -> None:
    rounds.check("receipt", data)


@given(st.data())
@settings(max_examples=200)
def test_payloads_whose_header_is_almost_right(draw: st.DataObject) -> None:
    toy = ToyRun(rounds.SETTINGS)
    header = header_bytes(payload_specs(toy.layout(), codec_for(rounds.SETTINGS.up, 1)))
    [content] = [data for what, data in SEEDS if what == "content"]
    changed = draw.draw(almost(json.loads(header[8:])))
    rounds.check("content", len(changed).to_bytes(8, "little") + changed + content[len(header) :])


@given(st.binary(max_size=200), st.sampled_from(rounds.WHAT))
def test_any_bytes(data: bytes, what: str) -> None:
    rounds.check(what, data)


LIES = st.fixed_dictionaries(
    {},
    optional={
        "generation": st.sampled_from([1, 2, 1 << 62]),
        "base_version": st.integers(0, 3),
        "steps": st.sampled_from([1, 10, 1 << 62]),
        "tokens": st.sampled_from([1, 640, 1 << 62]),
        "step_to": st.sampled_from([1, 10, 1 << 62]),
        "seq": st.integers(1, 3),
        "run": st.just("0" * 32),
        "cursor": st.sampled_from(["\0", "x" * 4096]),
    },
)
ACTIONS = st.one_of(
    st.tuples(st.just("lie"), LIES),
    st.tuples(st.just("missing"), LIES),
    st.tuples(st.just("junk"), st.binary(max_size=30)),
    st.tuples(st.just("theft"), st.sampled_from(rounds.HONEST)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("start"), st.integers(2, 3)),
)


def act(toy: ToyRun, action: str, detail: Any) -> int:
    """What a hostile island does; how many contributions it makes by that."""
    name = rounds.HOSTILE
    if action in {"lie", "missing"}:
        toy.send(name, 9, upload=action == "lie", **detail)
    elif action == "junk":
        toy.send_raw(name, detail)
    elif action == "theft":  # Somebody else's payload, as if it were its own.
        key = next(info.key for info in toy.store.list(keys.payloads(detail, 0)))
        data = toy.store.get(key)[0]
        toy.send(name, 9, upload=False, parts=(ObjectRef(key=key, digest=digest(data), size=len(data)),))
    elif action == "leave":
        toy.store.put(keys.departure(name, 0, detail), b"{}")
    else:
        toy.store.put(keys.generation(name, detail), b"{}")
    return action not in {"leave", "start"}


@given(st.lists(st.lists(ACTIONS, max_size=5), min_size=1, max_size=3))
@settings(max_examples=200)
def test_a_whole_campaign_is_accounted_for(campaign: list[list[tuple[str, Any]]]) -> None:
    """Several rounds: each of its contributions has one fate, and what is broken afterwards is its own."""
    toy = ToyRun(rounds.SETTINGS)
    for name in (*rounds.HONEST, rounds.HOSTILE):
        toy.join(name)
    sent = 0
    for version, actions in enumerate(campaign):
        for name in rounds.HONEST:
            toy.send(name, version, base_version=version, step_to=10 * (version + 1))
        for action, detail in actions:
            sent += act(toy, action, detail)
        report = toy.aggregate()
        assert (report.action, report.version) == ("merged", version + 1)
        merged = [entry.island for entry in report.merged]
        assert [name for name in merged if name != rounds.HOSTILE] == list(rounds.HONEST)
        assert 1 / 3 <= sum(entry.weight for entry in report.merged if entry.island != rounds.HOSTILE) <= 1
    fates = toy.audit()
    assert sum(island == rounds.HOSTILE for island, _ in fates) == sent
    assert all(fate == "merged" for (island, _), fate in fates.items() if island != rounds.HOSTILE)
    broken = [finding for finding in audit(toy.store).findings if finding.level == "broken"]
    # What was merged may lie about its steps and starts, and is found out; all else breaks nothing.
    own = keys.receipt(rounds.HOSTILE, 0, 1).rpartition("/")[0]
    assert all(finding.where.startswith(own) for finding in broken), broken
    assert {finding.promise for finding in broken} <= {"steps", "numbering"}, broken
