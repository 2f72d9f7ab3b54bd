"""The marks: increments are disjoint, and each way to adopt keeps exactly the progress it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.core.settings import Codec, Sync
from diloco_blob.island.arrays import Arrays, copied
from diloco_blob.island.outbox import Outbox, _Parcel
from diloco_blob.island.trajectory import Trajectory
from diloco_blob.testing.port import ArrayPort
from diloco_blob.wire import ErrorFeedback

CARRY = Sync(sync_every=10, overlap=2, adopt="carry")
OVERWRITE = Sync(sync_every=10, overlap=2, adopt="overwrite")
MIX = Sync(sync_every=10, overlap=2, adopt="mix", mix_alpha=0.25)


def at(value: float) -> Arrays:
    return {"w": np.full(3, value, dtype=np.float32)}


def fresh(value: float = 0.0, version: int = 0) -> Trajectory:
    return Trajectory(fragment=0, version=version, mirror=at(value), mark=at(value))


def take(trajectory: Trajectory, local: Arrays, *, keep_end: bool = False):
    return trajectory.take(local, step_to=1, tokens_to=1, cursor="", keep_end=keep_end)


def test_the_pseudo_gradient_is_older_minus_newer():
    trajectory = fresh(5.0)
    contribution = take(trajectory, at(3.0))
    # Descending by it with learning rate 1 must lead from the mark to where the island is.
    assert np.array_equal(contribution.delta["w"], np.full(3, 2.0))


def test_consecutive_contributions_cover_disjoint_intervals():
    trajectory = fresh(0.0)
    trajectory.count(64, 0.5)
    first = take(trajectory, at(1.0))
    trajectory.count(64, 0.5)
    trajectory.count(64, 0.5)
    second = take(trajectory, at(4.0))
    assert (first.steps, first.tokens, second.steps, second.tokens) == (1, 64, 2, 128)
    assert np.array_equal(first.delta["w"] + second.delta["w"], np.full(3, -4.0))
    assert trajectory.steps == 0


def test_overwrite_takes_the_new_weights_and_forgets_unsent_progress():
    trajectory = fresh(0.0)
    trajectory.count(64, 0.5)
    result = trajectory.adopt(at(7.0), at(2.0), 1, 0, OVERWRITE)
    assert np.array_equal(result["w"], np.full(3, 2.0))
    assert trajectory.version == 1
    assert trajectory.steps == 0
    assert np.array_equal(take(trajectory, result).delta["w"], np.zeros(3))


def test_training_on_does_not_move_the_mark():
    trajectory, port = fresh(0.0), ArrayPort(0, {"w": (3,)})
    port.write(trajectory.adopt(at(7.0), at(2.0), 1, 0, OVERWRITE))
    port.weights["w"] += 1.0
    assert np.array_equal(trajectory.mark["w"], np.full(3, 2.0))


def test_mix_keeps_a_quarter_of_the_difference():
    trajectory = fresh(0.0)
    result = trajectory.adopt(at(8.0), at(4.0), 1, 0, MIX)
    assert np.array_equal(result["w"], np.full(3, 5.0))  # 0.25·8 + 0.75·4
    # The part that was kept counts as progress from the new version on.
    assert np.array_equal(take(trajectory, result).delta["w"], np.full(3, -1.0))


def test_carry_keeps_unsent_progress():
    trajectory = fresh(0.0)
    contribution = take(trajectory, at(1.0), keep_end=True)
    contribution.seq = 1
    # Version 1 contains contribution 1 and somebody else's, and lies at 3; the island has gone on from 1 to 1.5.
    result = trajectory.adopt(at(1.5), at(3.0), 1, 1, CARRY)
    assert np.array_equal(result["w"], np.full(3, 3.5))
    assert np.array_equal(take(trajectory, result).delta["w"], np.full(3, -0.5))


def test_carry_keeps_progress_that_is_sent_but_not_merged():
    trajectory = fresh(0.0)
    first = take(trajectory, at(1.0), keep_end=True)
    second = take(trajectory, at(3.0), keep_end=True)
    first.seq, second.seq = 1, 2
    # Only the first (1.0) is in version 1, which lies at 10: the second's 2.0 and the unsent 0.5 are kept on top.
    result = trajectory.adopt(at(3.5), at(10.0), 1, 1, CARRY)
    assert np.array_equal(result["w"], np.full(3, 12.5))
    # Version 2 contains the second too and lies at 11: only the unsent 0.5 is kept.
    result = trajectory.adopt(result, at(11.0), 2, 2, CARRY)
    assert np.array_equal(result["w"], np.full(3, 11.5))
    assert np.array_equal(take(trajectory, result).delta["w"], np.full(3, -0.5))


def test_carry_with_nothing_of_ones_own_merged_moves_by_what_the_version_moved():
    trajectory = fresh(2.0)
    first = take(trajectory, at(3.0), keep_end=True)
    first.seq = 1
    result = trajectory.adopt(at(3.25), at(7.0), 1, 0, CARRY)  # the others moved the world by 5
    assert np.array_equal(result["w"], np.full(3, 8.25))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_carry_never_loses_or_repeats_progress(data):
    """A random history of steps, sends, merges and adoptions, with learning rate 1 and this island alone.

    Then the global weights are exactly the sum of what was merged, and the island must be at that sum plus all of its
    progress that is not merged: its own undisturbed trajectory.
    """
    trajectory = fresh(0.0)
    local, own_path = at(0.0), 0.0  # own_path: where plain training would be
    sent, merged, version = [], 0, 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["train", "send", "merge", "adopt"]))
        if action == "train":
            move = float(data.draw(st.integers(-8, 8)))  # small integers: every sum is exact in fp32
            local = {"w": local["w"] + np.float32(move)}
            own_path += move
        elif action == "send":
            item = take(trajectory, {"w": local["w"].copy()}, keep_end=True)
            sent.append(item)
            item.seq = len(sent)
        elif action == "merge" and merged < len(sent):
            merged = data.draw(st.integers(merged + 1, len(sent)))
            version += 1
        elif action == "adopt":
            new = -sum((item.delta["w"] for item in sent[:merged]), np.zeros(3, dtype=np.float32))
            local = trajectory.adopt(local, {"w": new.astype(np.float32)}, version, merged, CARRY)
        assert np.array_equal(local["w"], np.full(3, own_path, dtype=np.float32))


@pytest.mark.parametrize("mode", [CARRY, OVERWRITE, MIX])
def test_what_is_history_is_forgotten(mode):
    trajectory = fresh(0.0)
    for seq in (1, 2, 3):
        take(trajectory, at(float(seq)), keep_end=True).seq = seq
    assert trajectory.unmerged(0, 10) == 3
    trajectory.adopt(at(3.0), at(1.0), 1, 2, mode)
    assert [item.seq for item in trajectory.in_flight] == [3]
    assert trajectory.unmerged(3, 10) == 0


@pytest.mark.parametrize("mode", [CARRY, OVERWRITE, MIX])
def test_nobody_waits_for_what_is_too_stale_to_be_merged(mode):
    """It will be skipped, but only by a version that somebody else's work makes: who waits for it may wait for ever."""
    trajectory = fresh(0.0)
    take(trajectory, at(1.0), keep_end=True).seq = 1
    trajectory.adopt(at(1.0), at(5.0), 3, 0, mode)
    take(trajectory, at(2.0), keep_end=True)
    assert [trajectory.unmerged(0, limit) for limit in (3, 2, 0)] == [2, 1, 1]


@pytest.mark.parametrize("mode", [CARRY, OVERWRITE, MIX])
def test_what_a_model_rounds_away_is_in_no_contribution(mode):
    """As a bfloat16 model does: it holds 3.0 where it was given 3.1, and then trains by 0.5."""
    trajectory = fresh(0.0)
    trajectory.count(64, 0.5)
    item = take(trajectory, at(1.0), keep_end=True)
    item.seq = 1
    intended = trajectory.adopt(at(1.0), at(3.1), 1, 1, mode)
    kept = float(intended["w"][0]) - 3.1  # what `mix` keeps counts as progress
    trajectory.rounded(intended, {"w": intended["w"] - np.float32(0.1)})
    local = {"w": intended["w"] - np.float32(0.1) + np.float32(0.5)}
    np.testing.assert_allclose(take(trajectory, local).delta["w"], -(kept + 0.5), atol=1e-6)
    # The next version takes the rounding back: the model is asked to hold it whole again.
    again = trajectory.adopt(copied(local), at(5.0), 2, 1, mode)
    expected = {"carry": 5.5, "overwrite": 5.0, "mix": 0.25 * float(local["w"][0]) + 0.75 * 5.0}[mode.adopt]
    np.testing.assert_allclose(again["w"], expected, atol=1e-6)


def test_carry_keeps_what_coding_still_owes_by_hand():
    # From 0 to 8, of which 5 were sent: 3 are owed. The version has the 5 as 4.5, so the island goes on from 7.5.
    trajectory = fresh(0.0)
    contribution = take(trajectory, at(8.0), keep_end=True)
    contribution.owed, contribution.seq = at(-3.0), 1  # pseudo-gradients point backwards
    local = trajectory.adopt(at(8.5), at(4.5), 1, 1, CARRY)
    assert local["w"].tolist() == [8.0] * 3  # 4.5 + 3 owed + 0.5 unsent
    assert trajectory.mirror["w"].tolist() == [4.5] * 3
    assert trajectory.mark["w"].tolist() == [7.5] * 3
    # Nothing new of its own is merged, but the version moves by 1: so does everything.
    assert trajectory.adopt(at(8.0), at(5.5), 2, 1, CARRY)["w"].tolist() == [9.0] * 3


@given(data=st.data())
@settings(max_examples=100)
def test_carry_with_a_coarse_codec_never_loses_or_repeats_progress(data):
    # Alone, lr 1: the version is 0 + all that was sent. Then local = version + owed + unsent = all progress ever made.
    trajectory, local, version, sent, owed = fresh(0.0), 0.0, 0, 0.0, 0.0
    flying = []
    total = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.integers(-8, 8))
        local, total = local + step, total + step
        contribution = take(trajectory, at(local), keep_end=True)
        progress = -float(contribution.delta["w"][0]) + owed
        part = float(np.round(progress * data.draw(st.sampled_from([0.0, 0.5, 1.0]))))
        owed, sent, version = progress - part, sent + part, version + 1
        contribution.seq, contribution.owed = version, at(-owed)
        flying.append((version, sent))
        if data.draw(st.booleans()):
            number, merged = data.draw(st.sampled_from(flying))
            flying = [item for item in flying if item[0] > number]
            local = float(trajectory.adopt(at(local), at(merged), number, number, CARRY)["w"][0])
            assert local == total


def test_whoever_sees_the_number_of_a_contribution_sees_what_is_owed_of_it(monkeypatch: pytest.MonkeyPatch):
    trajectory = fresh(0.0)
    item = take(trajectory, at(-1.0), keep_end=True)
    feedback = ErrorFeedback(Codec(name="topk", chunk=16, keep=1, error_feedback=True, decay=0.95))
    outbox = Outbox(None, None, None, None, next_seq={0: 1}, feedback={0: feedback})  # type: ignore[arg-type]
    coded = feedback.code("w", np.asarray(item.delta["w"]), 1)
    seen = []
    real = feedback.still_owed

    def still_owed(residuals):  # As the training thread might look while the other one multiplies.
        seen.append(item.seq)
        return real(residuals)

    monkeypatch.setattr(feedback, "still_owed", still_owed)
    outbox._sent(_Parcel(item, residuals={"w": coded.residual}), 1)
    assert seen == [None]
    assert item.seq == 1
    assert item.owed is not None
