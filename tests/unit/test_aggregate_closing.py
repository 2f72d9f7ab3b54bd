"""Closing a round: who is waited for, what is chosen, what is skipped and why."""

import msgspec
import pytest

from diloco_blob.aggregate.gather import CONTRIBUTIONS_PER_CLOSE_MAX, RECEIPTS_READ_MAX, Candidate, Mail, _limited
from diloco_blob.core.errors import Corrupt
from diloco_blob.core.limits import CONTRIBUTIONS_PER_ISLAND_MAX, ISLAND_RECORD_BYTES_MAX, RECORD_BYTES_MAX
from diloco_blob.core.settings import Merge, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import Close, ObjectRef, Receipt, Skipped, Watermark, decode, encode
from diloco_blob.store.metered import MeteredStore
from diloco_blob.testing.toy import ToyRun

GRACE_S, DEADLINE_S = 10.0, 100.0
TOKENS = Policy().tokens_per_step_max


def toy_run(*, islands: int = 3, quorum: int = 2, merge: Merge | None = None, **policy: float) -> ToyRun:
    chosen = {"grace_s": GRACE_S, "deadline_s": DEADLINE_S, **policy}
    toy = ToyRun(Settings(merge=merge or Merge(), policy=Policy(islands=islands, quorum=quorum, **chosen)))
    for name in "abc"[:islands]:
        toy.join(name)
    return toy


# ---- when


def test_nothing_to_merge_waits_for_arrivals_only() -> None:
    report = toy_run().aggregate()
    assert (report.action, report.version, report.look_again_s) == ("waiting", 0, None)


def test_all_active_islands_close_at_once() -> None:
    toy = toy_run()
    for name in "abc":
        toy.send(name, 1)
    report = toy.aggregate()
    assert (report.action, report.version, report.reason, report.look_again_s) == ("merged", 1, "all", 0.0)
    assert toy.close(1).reason == "all"
    assert toy.aggregate().action == "waiting"


def test_quorum_and_grace() -> None:
    toy = toy_run()
    toy.send("a", 1)
    toy.clock.advance(30)
    toy.send("b", 2)
    report = toy.aggregate()
    assert (report.action, report.look_again_s) == ("waiting", GRACE_S)
    assert (report.arrived, report.waiting_for) == (("a", "b"), ("c",))
    toy.clock.advance(GRACE_S)
    assert toy.aggregate().reason == "grace"
    assert [entry.island for entry in toy.commit(1).merged] == ["a", "b"]


def test_deadline_fires_with_nobody_arriving_afterwards() -> None:
    """Whoever looks when he was told to makes the version; no event is needed (lessons 82, 88)."""
    toy = toy_run()
    toy.clock.advance(5)
    toy.send("a", 1)
    report = toy.aggregate()
    assert report.look_again_s == DEADLINE_S - 5
    toy.clock.advance(report.look_again_s)
    assert toy.aggregate().reason == "deadline"


def test_the_deadline_runs_from_the_last_commit() -> None:
    toy = toy_run()
    for name in "abc":
        toy.send(name, 1)
    toy.clock.advance(70)
    toy.aggregate()
    toy.send("a", 2, base_version=1)
    assert toy.aggregate().look_again_s == DEADLINE_S


def test_nobody_waits_for_a_late_island_and_its_work_is_merged_later_for_less() -> None:
    toy = toy_run(merge=Merge(weights="uniform", staleness="polynomial", staleness_a=0.5))
    toy.send("a", 1)
    toy.send("b", 2)
    toy.aggregate()
    toy.clock.advance(GRACE_S)
    assert toy.aggregate().version == 1
    toy.send("c", 3)  # From version 0, after the close of version 1.
    toy.send("a", 4, base_version=1)
    toy.send("b", 5, base_version=1)
    assert toy.aggregate().reason == "all"
    merged = {entry.island: entry for entry in toy.commit(2).merged}
    assert {name: entry.staleness for name, entry in merged.items()} == {"a": 0, "b": 0, "c": 1}
    factor = 2**-0.5
    assert merged["c"].weight == pytest.approx(factor / (2 + factor), rel=1e-12)
    assert merged["a"].weight == merged["b"].weight == pytest.approx(1 / (2 + factor), rel=1e-12)
    assert toy.commit(2).tally["c"].discounted == 1


def test_an_island_that_died_is_waited_for_no_longer_than_its_last_versions() -> None:
    toy = toy_run(islands=2, quorum=1, active_versions=2)
    toy.send("a", 0)
    toy.send("b", 0)
    assert toy.aggregate().reason == "all"
    for base in (1, 2):
        toy.send("a", base, base_version=base)
        assert toy.aggregate().waiting_for == ("b",)
        toy.clock.advance(GRACE_S)
        assert toy.aggregate().reason == "grace"
    toy.send("a", 3, base_version=3)
    assert toy.aggregate().reason == "all"  # b contributed to version 1 only.


def test_drain_takes_what_is_there() -> None:
    toy = toy_run()
    assert toy.aggregate(drain=True).action == "waiting"
    toy.send("c", 1)
    assert toy.aggregate().action == "waiting"
    assert toy.aggregate(drain=True).reason == "drain"


def test_merging_one_island_without_the_others_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    toy = toy_run(islands=2, quorum=1)
    toy.send("a", 1)
    toy.clock.advance(GRACE_S)
    toy.aggregate()
    assert "a is merged alone (grace), without b" in caplog.text


# ---- what


def test_contributions_are_listed_by_island_and_number_whatever_the_order_of_arrival() -> None:
    toys = [toy_run(), toy_run()]
    for toy, order in zip(toys, ("abacb", "bcaab"), strict=True):
        for name in order:
            toy.send(name, ord(name))
            toy.clock.advance(0.5)
        toy.aggregate()
    ones = [[(c.island, c.seq, c.weight) for c in toy.close(1).chosen] for toy in toys]
    assert ones[0] == ones[1]
    assert [one[:2] for one in ones[0]] == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1)]
    commits = [toy.commit(1) for toy in toys]
    assert commits[0].weights == commits[1].weights
    assert commits[0].outer == commits[1].outer
    assert commits[0].update == commits[1].update


def bad_receipts(toy: ToyRun) -> dict[str, bytes]:
    """Receipts that are wrong in one way each, by the beginning of the reason that must be on record."""
    other = ToyRun(seed=9)
    good = toy.send("c", 1)

    def changed(**changes: object) -> bytes:
        return encode(msgspec.structs.replace(good, **{"seq": 1, "island": "bad", **own, **changes}))

    part = good.parts[0]
    mine = msgspec.structs.replace(part, key=part.key.replace("islands/c/", "islands/bad/"))
    own: dict[str, object] = {"parts": (mine,)}
    huge = ObjectRef(key=mine.key.replace("/payloads/", "/elsewhere/"), digest=part.digest, size=1)
    return {
        "malformed: not a receipt record": b"{",
        "malformed: not a receipt record: Object contains unknown field": changed()[:-1] + b',"x":1}',
        "malformed: not a receipt record: JSON is malformed": b"\xff\xfe\x00",
        "malformed: not a receipt record: Expected `array` of length >= 1": changed(parts=()),
        "malformed: receipt record has format 2": changed(format=2),
        "malformed: receipt record belongs to another run": changed(run="0" * 32),
        "malformed: the receipt says that it is another one": changed(island="c"),
        "malformed: the receipt says that it is another one ": changed(seq=2),
        "malformed: the receipt says that it is another one  ": changed(fragment=1),
        "malformed: base version 1 is ahead of the head, 0": changed(base_version=1),
        f"malformed: {10 * TOKENS + 1} tokens in 10 steps": changed(tokens=10 * TOKENS + 1),
        "malformed: a payload is not the island's own": changed(parts=(part,)),
        "malformed: a payload is not the island's own ": changed(parts=(huge,)),
        "malformed: a payload's name is not allowed": changed(
            parts=(msgspec.structs.replace(mine, key=mine.key.replace("payloads/0000/", "payloads/0000/../x/")),)
        ),
        "parts: 2 payload objects": changed(parts=(mine, mine)),
        "malformed: receipt of 0 bytes": b"",
        f"malformed: receipt of {ISLAND_RECORD_BYTES_MAX + 1} bytes": b" " * (ISLAND_RECORD_BYTES_MAX + 1),
        "malformed: not a receipt record: ": b"[" * ISLAND_RECORD_BYTES_MAX,
        "malformed: not a receipt record: Expected": b"[]",
        "malformed: receipt record belongs to another run ": encode(
            msgspec.structs.replace(good, run="f" * 32, island="bad", parts=(mine,))
        ),
    } | {"": encode(other.send("a", 1))}


def test_whatever_is_wrong_with_a_receipt_is_on_record_and_harms_nobody() -> None:
    for reason in bad_receipts(toy_run()):
        toy = toy_run()
        data = bad_receipts(toy)[reason]
        toy.send_raw("bad", data)
        toy.send("a", 1)
        toy.send("b", 2)
        assert toy.aggregate().reason == "all", reason
        close = toy.close(1)
        [skipped] = close.skipped
        assert (skipped.island, skipped.seq) == ("bad", 1)
        assert skipped.reason.startswith(reason.rstrip() or "malformed: receipt record belongs to another run")
        assert len(skipped.reason) <= 200
        assert [entry.island for entry in close.chosen] == ["a", "b", "c"]
        assert close.watermarks["bad"] == Watermark(seq=1, version=0)
        assert toy.commit(1).tally["bad"].skipped == 1
        toy.audit()


def test_good_receipts_behind_bad_ones_are_found_and_bad_ones_alone_close_nothing() -> None:
    toy = toy_run(islands=1, quorum=1)
    for _ in range(CONTRIBUTIONS_PER_ISLAND_MAX + 3):
        toy.send_raw("a", b"{")
    toy.clock.advance(10 * DEADLINE_S)
    assert toy.aggregate(drain=True).action == "waiting"
    toy.send("a", 1)
    assert toy.aggregate().action == "merged"
    assert toy.close(1).watermarks["a"] == Watermark(seq=CONTRIBUTIONS_PER_ISLAND_MAX + 4, version=1)
    assert toy.audit()["a", CONTRIBUTIONS_PER_ISLAND_MAX + 4] == "merged"


def test_work_past_max_staleness_is_skipped_with_the_reason() -> None:
    toy = toy_run(islands=2, quorum=1, grace_s=0.0, max_staleness=2)
    for base in range(3):
        toy.send("a", base, base_version=base)
        assert toy.aggregate().version == base + 1
    toy.send("b", 7, base_version=0)
    toy.send("b", 8, base_version=1)
    toy.send("a", 9, base_version=3)
    toy.aggregate()
    close = toy.close(4)
    assert close.skipped == (Skipped(island="b", seq=1, reason="stale: 3 > 2"),)
    assert [(entry.island, entry.seq, entry.staleness) for entry in close.chosen] == [("a", 4, 0), ("b", 2, 2)]
    toy.audit()


def test_one_close_takes_a_bounded_number_and_leaves_the_rest_to_the_next() -> None:
    toy = toy_run(islands=1, quorum=1)
    for seed in range(CONTRIBUTIONS_PER_ISLAND_MAX + 2):
        toy.send("a", seed)
    assert len(toy.aggregate().merged) == CONTRIBUTIONS_PER_ISLAND_MAX
    assert len(toy.aggregate().merged) == 2
    assert set(toy.audit().values()) == {"merged"}


def test_names_that_no_island_may_have_are_ignored() -> None:
    toy = toy_run(islands=1, quorum=1)
    toy.store.put("islands/x..y/receipts/0000/0000000001.json", b"{}")
    toy.store.put("islands/" + "l" * 64 + "/receipts/0000/0000000001.json", b"{}")
    toy.send("a", 1)
    toy.aggregate()
    assert set(toy.close(1).watermarks) == {"a"}
    assert toy.close(1).skipped == ()


def test_figures_of_a_receipt_cannot_make_a_commit_unreadable() -> None:
    toy = toy_run(islands=1, quorum=1)
    for seed in range(3):
        toy.send("a", seed, steps=1 << 62, tokens=1 << 62)
    toy.aggregate()
    assert toy.commit(1).tokens == 1 << 62
    assert toy.commit(1).tally["a"].steps == 1 << 62


def test_an_island_that_claims_a_billion_tokens_weighs_no_more_than_one_full_interval() -> None:
    """With the bound set to what islands really do (64 tokens a step, 10 steps) the liar gains nothing."""
    claims = {"a": (640, 10), "b": (640, 10), "c": (10**9, 10**9)}

    def weights(rule: str, tokens_per_step_max: int) -> dict[str, float]:
        policy = Policy(islands=3, quorum=3, tokens_per_step_max=tokens_per_step_max)
        toy = ToyRun(Settings(sync=Sync(sync_every=10), merge=Merge(weights=rule), policy=policy))  # type: ignore[arg-type]
        for name, (tokens, steps) in claims.items():
            toy.join(name)
            toy.send(name, 1, tokens=tokens, steps=steps)
        toy.aggregate()
        close = toy.close(1)
        assert {one.island: (one.tokens, one.steps) for one in close.chosen} == claims, "records keep what was claimed"
        assert toy.commit(1).tokens == 10**9 + 1280
        assert audit(toy.store).ok
        return {one.island: one.weight for one in close.chosen}

    third = pytest.approx(1 / 3)
    assert weights("tokens", 64) == {"a": third, "b": third, "c": third}
    assert weights("tokens", 1 << 24)["c"] == pytest.approx(1.6777216e8 / (1.6777216e8 + 1280))  # 10 · 2²⁴ tokens
    assert weights("tokens2_per_step", 64)["c"] <= 1 / 3
    assert weights("uniform", 1 << 24)["c"] == third


def test_a_claim_beyond_the_limit_of_a_step_is_skipped_on_record() -> None:
    toy = toy_run(islands=2, quorum=1, grace_s=0.0, tokens_per_step_max=64)
    toy.send("a", 1)
    toy.send("b", 1, tokens=10**9, steps=10)
    toy.aggregate()
    assert toy.close(1).skipped == (Skipped(island="b", seq=1, reason="malformed: 1000000000 tokens in 10 steps"),)
    assert audit(toy.store).ok


def test_several_intervals_in_one_contribution_are_cut_not_skipped() -> None:
    """After an outage an island may send all it did meanwhile at once."""
    policy = Policy(islands=2, quorum=2, tokens_per_step_max=64)
    toy = ToyRun(Settings(sync=Sync(sync_every=10), policy=policy))
    toy.send("a", 1, tokens=640, steps=10)
    toy.send("b", 1, tokens=3 * 640, steps=30)
    toy.aggregate()
    assert toy.close(1).skipped == ()
    assert [entry.weight for entry in toy.commit(1).merged] == [0.5, 0.5]


@pytest.mark.parametrize("rule", ["tokens", "tokens2_per_step"])
def test_many_contributions_weigh_no_more_than_one_that_claims_all(rule: str) -> None:
    policy = Policy(islands=2, quorum=2, tokens_per_step_max=64)
    toy = ToyRun(Settings(sync=Sync(sync_every=10), merge=Merge(weights=rule), policy=policy))  # type: ignore[arg-type]
    toy.send("a", 1, tokens=640, steps=10)
    for seed in range(8):
        toy.send("b", seed, tokens=640, steps=10)
    toy.aggregate()
    weights = {one.island: one.weight for one in toy.close(1).chosen}
    assert 0.35 < weights["b"] < 0.5 + 1e-9  # tokens²/steps: the steps of what was cut are rounded up, eight times
    assert audit(toy.store).ok


def test_a_close_never_exceeds_what_a_record_may_hold() -> None:
    name = "x" * 59
    ref = ObjectRef(key="islands/" + "k" * 190 + "/" + "k" * 190 + "/" + "k" * 120, digest="0" * 32, size=1 << 62)
    big = decode(encode(toy_run().send("a", 1)), Receipt)
    receipt = msgspec.structs.replace(big, parts=(ref,), tokens=1 << 62, steps=1 << 62, seq=1 << 62)
    candidate = Candidate(receipt=receipt, digest="0" * 32, staleness=10, arrived_at=0.0)
    mails = [
        Mail(island=f"{name}{n:04d}", mark=Watermark(seq=0, version=n % 3), entries=(candidate,) * 2)
        for n in range(10_000)
    ]
    taken = _limited(mails)
    assert sum(len(mail.entries) for mail in taken) == CONTRIBUTIONS_PER_CLOSE_MAX
    assert all(mail.mark.version == 0 for mail in taken if len(mail.entries) > 1) is True
    served = [mail for mail in taken if mail.entries]
    assert {mail.mark.version for mail in served} == {0, 1}, "the longest unserved come first"
    chosen = [{**msgspec.to_builtins(c.receipt), "weight": 1e-300} for m in taken for c in m.entries]
    marks = {mail.island: Watermark(seq=1 << 62, version=9_999_999_999) for mail in mails}
    assert len(msgspec.json.encode(chosen)) + len(msgspec.json.encode(marks)) < RECORD_BYTES_MAX


def test_discount_is_recorded() -> None:
    toy = toy_run(islands=2, quorum=1, grace_s=0.0, merge=Merge(weights="uniform", discount=True))
    toy.send("a", 1)
    toy.aggregate()
    assert toy.close(1).discount == 1.0
    toy.send("b", 1, base_version=0)
    toy.aggregate()
    assert toy.close(2).discount == pytest.approx(2**-0.5)


# ---- when nothing but skipping is left to do

FULL = RECEIPTS_READ_MAX


def backlog(toy: ToyRun, island: str = "a", num: int = FULL) -> None:
    for _ in range(num):
        toy.send_raw(island, b"{")


def test_good_work_behind_a_full_backlog_of_bad_receipts_is_reached_at_the_deadline() -> None:
    toy = toy_run(islands=1, quorum=1)
    backlog(toy, num=FULL + 1)
    toy.send("a", 7)
    assert (toy.aggregate().action, toy.aggregate().look_again_s) == ("waiting", DEADLINE_S)
    toy.clock.advance(DEADLINE_S)
    before = toy.params()
    report = toy.aggregate()
    assert (report.action, report.version, report.reason, len(report.skipped)) == ("merged", 1, "backlog", FULL)
    assert toy.close(1).chosen == toy.commit(1).merged == ()
    assert toy.close(1).watermarks["a"] == Watermark(seq=FULL, version=0)
    assert (toy.commit(1).step_norm, toy.commit(1).tokens) == (0.0, 0)
    assert all((values == before[name]).all() for name, values in toy.params().items())
    assert toy.aggregate().reason == "all"
    assert [(entry.seq, entry.staleness) for entry in toy.commit(2).merged] == [(FULL + 2, 1)]
    assert toy.audit()["a", FULL + 2] == "merged"
    assert audit(toy.store).ok


def test_the_momentum_of_an_empty_version_is_the_one_before() -> None:
    toy = toy_run(islands=1, quorum=1)
    toy.send("a", 1)
    toy.aggregate()
    backlog(toy)
    toy.clock.advance(DEADLINE_S)
    assert toy.aggregate().reason == "backlog"
    assert toy.commit(2).outer.digest == toy.commit(1).outer.digest
    assert toy.commit(2).weights.digest == toy.commit(1).weights.digest
    assert audit(toy.store).ok


def test_a_backlog_below_the_limit_waits_for_a_close_that_merges() -> None:
    toy = toy_run(islands=1, quorum=1)
    backlog(toy, num=FULL - 1)
    toy.clock.advance(10 * DEADLINE_S)
    assert (toy.aggregate().action, toy.aggregate().look_again_s) == ("waiting", None)


def test_a_backlog_close_leaves_what_can_be_merged_to_the_next_and_gives_way_to_it() -> None:
    toy = toy_run(islands=3, quorum=2, min_contributions=2)
    backlog(toy, "a")
    toy.send_raw("c", b"{")
    toy.clock.advance(DEADLINE_S)
    toy.send("b", 1)
    assert toy.aggregate().reason == "backlog"  # One island's work is too little by the policy.
    assert {mark: toy.close(1).watermarks[mark].seq for mark in toy.close(1).watermarks} == {"a": FULL, "c": 1}
    toy.send("a", 2, base_version=1)
    assert toy.aggregate().reason == "all"
    assert [(entry.island, entry.staleness) for entry in toy.commit(2).merged] == [("a", 0), ("b", 1)]
    assert audit(toy.store).ok


def test_drain_skips_a_backlog_without_waiting() -> None:
    toy = toy_run(islands=1, quorum=1)
    backlog(toy, num=2 * FULL + 5)
    assert [toy.aggregate(drain=True).reason for _ in range(3)] == ["backlog", "backlog", ""]


def test_a_close_that_chooses_nothing_without_reason_is_refused() -> None:
    toy = toy_run(islands=1, quorum=1)
    toy.send("a", 1)
    toy.aggregate()
    fields = msgspec.to_builtins(toy.close(1))
    for change in ({"chosen": []}, {"chosen": [], "reason": "backlog"}):
        with pytest.raises(Corrupt, match="chooses nothing"):
            decode(msgspec.json.encode({**fields, **change}), Close)


# ---- what it costs


def test_an_idle_pass_costs_a_few_small_requests_whatever_the_history() -> None:
    toy = toy_run(islands=2, quorum=2)
    used = []
    for base in range(12):
        for name in "ab":
            toy.send(name, base, base_version=base)
        toy.aggregate()
        metered = MeteredStore(toy.store)
        hints = {0: base + 1}
        toy.aggregate(store=metered, hints=hints)
        used.append(metered.usage())
    # HEADs: the next commit, two receipts. GETs: the head, the next close, the last close.
    assert {(use.heads, use.gets, use.lists, use.puts) for use in used} == {(1 + 2, 3, 1, 0)}


def test_a_receipt_is_one_head_and_one_get(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = toy_run(islands=2, quorum=2)
    toy.send("a", 1)
    metered = MeteredStore(toy.store)
    toy.aggregate(store=metered)
    use = metered.usage()
    # HEADs: the next commit, a's receipt and the one after it, b's, two starts, whether b has left. GETs: the next
    # close, a's receipt.
    assert (use.heads, use.gets, use.puts) == (7, 2, 0)
    assert toy.store.head(keys.receipt("a", 0, 1)).size < 1000
