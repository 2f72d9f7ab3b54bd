"""Merging: the numbers against independent references, bad payloads, and bytes that never differ."""

import math
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
import torch
import zstandard

from diloco_blob.aggregate.payloads import payload_bytes_max
from diloco_blob.core.errors import Corrupt
from diloco_blob.core.settings import Codec, Merge, Outer, Policy, Settings, Sync
from diloco_blob.protocol import keys
from diloco_blob.protocol.audit import audit
from diloco_blob.protocol.records import ObjectRef, Skipped, encode
from diloco_blob.testing.toy import SHAPES, ToyRun, random_tensors
from diloco_blob.wire import FloatArray, codec_for, decode_payload, digest, read_tensors, weights_digest, write_tensors

POLICY = Policy(islands=3, quorum=1, grace_s=0.0)
PLAIN = Outer(optimizer="sgd", lr=1.0, momentum=0.0)
CODECS = [
    Codec(),
    Codec(name="bf16", error_feedback=True, decay=0.95),
    Codec(name="int8", block=16),
    Codec(name="int4", block=8, error_feedback=True),
    Codec(name="int2", block=8, error_feedback=True, cycle=2, whole_every=3),
]


def toy_run(**settings: msgspec.Struct) -> ToyRun:
    return ToyRun(Settings(policy=POLICY, **settings))  # type: ignore[arg-type]


def the_same(left: dict[str, FloatArray], right: dict[str, FloatArray]) -> None:
    assert list(left) == list(right)
    for name, values in left.items():
        np.testing.assert_array_equal(values, right[name], strict=True)


def rounds_of(num: int) -> list[list[tuple[str, int, int, int]]]:
    """Three islands' contributions in each round: island, seed, tokens, steps."""
    return [
        [(name, 100 * number + index, 640 * (1 + index), 10 * (1 + number)) for index, name in enumerate("abc")]
        for number in range(num)
    ]


# ---- against references


@pytest.mark.parametrize(
    "outer",
    [Outer(), Outer(optimizer="sgd", lr=0.5, momentum=0.9), Outer(optimizer="sgd", lr=1.0, momentum=0.0)],
)
@pytest.mark.parametrize("weights", ["tokens", "tokens2_per_step", "uniform"])
def test_three_islands_for_three_rounds_are_torch_sgd_of_their_weighted_mean(outer: Outer, weights: str) -> None:
    toy = toy_run(outer=outer, merge=Merge(weights=weights))  # type: ignore[arg-type]
    model = {name: torch.nn.Parameter(torch.tensor(values)) for name, values in toy.initial.items()}
    reference = torch.optim.SGD(
        model.values(), lr=outer.lr, momentum=outer.momentum, nesterov=outer.optimizer == "nesterov"
    )
    for version, contributions in enumerate(rounds_of(3)):
        for island, seed, tokens, steps in contributions:
            toy.send(island, seed, base_version=version, tokens=tokens, steps=steps)
        assert toy.aggregate().version == version + 1
        base = {
            "tokens": [c[2] for c in contributions],
            "tokens2_per_step": [c[2] ** 2 / c[3] for c in contributions],
            "uniform": [1, 1, 1],
        }[weights]
        for name, parameter in model.items():
            deltas = [random_tensors(seed)[name].astype(np.float64) for _, seed, _, _ in contributions]
            mean = sum(w * delta for w, delta in zip(base, deltas, strict=True)) / sum(base)
            parameter.grad = torch.tensor(mean, dtype=torch.float32)
        reference.step()
        for name, values in toy.params().items():
            # A few units in the last place of the largest values on the way, which are below 8.
            np.testing.assert_allclose(values, model[name].detach().numpy(), rtol=0, atol=4 * 2.0**-21)


def test_an_island_alone_uncompressed_is_taken_over_to_one_rounding() -> None:
    toy = toy_run(outer=PLAIN)
    deltas = random_tensors(5)
    toy.send("a", deltas)
    toy.aggregate()
    the_same(toy.params(), {name: toy.initial[name] - deltas[name] for name in SHAPES})


@pytest.mark.parametrize("merge", [Merge(weights=w, staleness=s) for w in ("tokens", "tokens2_per_step", "uniform")
                                   for s in ("constant", "polynomial", "hinge")])  # fmt: skip
def test_identical_contributions_merge_to_that_contribution(merge: Merge) -> None:
    toy = toy_run(outer=PLAIN, merge=merge)
    deltas = random_tensors(5)
    zero = {name: np.zeros_like(values) for name, values in deltas.items()}
    for base in range(2):
        toy.send("z", zero, base_version=base)
        toy.aggregate()
    for island, base_version, tokens in (("a", 0, 640), ("b", 1, 77), ("c", 2, 12345), ("d", 2, 1)):
        toy.send(island, deltas, base_version=base_version, tokens=tokens)
    toy.aggregate()
    assert [entry.staleness for entry in toy.commit(3).merged] == [2, 1, 0, 0]
    the_same(toy.params(), {name: toy.initial[name] - deltas[name] for name in SHAPES})


def test_rda_keeps_the_norm_of_orthogonal_contributions_but_not_of_embeddings() -> None:
    toy = toy_run(outer=PLAIN, merge=Merge(rule="rda", weights="uniform"))
    first = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for name in ("layer.weight", "embed.weight"):
        first[name][0, 0], second[name][0, 1] = 3.0, 4.0
    toy.send("a", first)
    toy.send("b", second)
    toy.aggregate()
    step = {name: toy.initial[name] - values for name, values in toy.params().items()}
    assert np.linalg.norm(step["layer.weight"]) == pytest.approx(3.5, rel=1e-6)
    assert np.linalg.norm(step["embed.weight"]) == pytest.approx(2.5, rel=1e-6)


def test_discount_scales_the_whole_step() -> None:
    toy = toy_run(outer=PLAIN, merge=Merge(weights="uniform", discount=True))
    zero = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    toy.send("a", zero)
    toy.aggregate()
    deltas = random_tensors(5)
    toy.send("b", deltas, base_version=0)
    toy.aggregate()
    factor = np.float32(2**-0.5)
    the_same(toy.params(), {name: np.asarray(toy.initial[name] - deltas[name] * factor) for name in SHAPES})


def norm_of(deltas: dict[str, FloatArray], times: float = 1.0) -> float:
    return times * math.sqrt(sum(float(np.sum(np.square(v, dtype=np.float64))) for v in deltas.values()))


def scaled(deltas: dict[str, FloatArray], factor: float) -> dict[str, FloatArray]:
    return {name: np.asarray(values * np.float32(factor)) for name, values in deltas.items()}


def test_clipping_bounds_an_island_by_the_median_norm_and_is_on_record() -> None:
    toy = toy_run(outer=PLAIN, merge=Merge(weights="uniform", clip="median"))
    deltas = {
        name: scaled(random_tensors(seed), size)
        for seed, (name, size) in enumerate(zip("abc", (1, 2, 64), strict=True))
    }
    for name, values in deltas.items():
        toy.join(name)
        toy.send(name, values)
    toy.aggregate()
    norms = {name: norm_of(values) for name, values in deltas.items()}
    median = sorted(norms.values())[1]
    factors = {name: min(1.0, median / norm) for name, norm in norms.items()}
    clips = {entry.island: entry.clip for entry in toy.commit(1).merged}
    assert clips == pytest.approx(factors, rel=1e-12)
    assert sorted(clip == 1.0 for clip in clips.values()) == [False, True, True]
    for name, values in toy.params().items():
        mean = sum(factors[island] * deltas[island][name].astype(np.float64) for island in "abc") / 3
        np.testing.assert_allclose(values, toy.initial[name] - mean, rtol=0, atol=1e-6)
    assert audit(toy.store).ok


def test_increments_of_one_island_are_clipped_by_the_norm_of_their_sum() -> None:
    """Two that cancel are no progress; two that add up are twice as much, and both entries name the factor."""
    toy = toy_run(outer=PLAIN, merge=Merge(weights="uniform", clip="median"))
    deltas = random_tensors(1)
    for name, sizes in (("a", (1, -1)), ("b", (1, 1)), ("c", (1,)), ("d", (1,))):
        toy.join(name)
        for size in sizes:
            toy.send(name, scaled(deltas, size))
    toy.aggregate()
    assert [(entry.island, entry.seq, entry.clip) for entry in toy.commit(1).merged] == [
        ("a", 1, 1.0), ("a", 2, 1.0), ("b", 1, 0.5), ("b", 2, 0.5), ("c", 1, 1.0), ("d", 1, 1.0),
    ]  # fmt: skip
    the_same(toy.params(), {name: np.asarray(toy.initial[name] - v * np.float32(0.75)) for name, v in deltas.items()})
    assert audit(toy.store).ok


def test_what_is_rejected_takes_no_part_in_the_median() -> None:
    toy, without = (toy_run(outer=PLAIN, merge=Merge(weights="uniform", clip="median")) for _ in range(2))
    for one in (toy, without):
        one.send("a", 1)
        one.send("c", scaled(random_tensors(2), 5.0))
    toy.send("b", b"junk")
    for one in (toy, without):
        one.aggregate()
    assert toy.commit(1).merged == without.commit(1).merged
    assert toy.commit(1).merged[1].clip < 0.5
    the_same(toy.params(), without.params())


def test_without_clipping_every_factor_is_one_and_another_is_a_broken_promise() -> None:
    toy = toy_run()
    toy.join("a")
    toy.join("b")
    toy.send("a", 1)
    toy.send("b", scaled(random_tensors(2), 50.0))
    toy.aggregate()
    commit = toy.commit(1)
    assert [entry.clip for entry in commit.merged] == [1.0, 1.0]
    merged = (commit.merged[0], msgspec.structs.replace(commit.merged[1], clip=0.5))
    toy.store.put(keys.commit(0, 1), encode(msgspec.structs.replace(commit, merged=merged)))
    assert [finding.promise for finding in audit(toy.store).findings] == ["weights"]


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_the_trimmed_mean_of_a_round_has_equal_weights_on_record(num: int) -> None:
    toy = toy_run(outer=PLAIN, merge=Merge(rule="trimmed_mean", trim=0.2))
    deltas = [random_tensors(seed) for seed in range(num)]
    for island, (name, values) in enumerate(zip("abcde"[:num], deltas, strict=True)):
        toy.join(name)
        toy.send(name, values, tokens=1 + 1000 * island)
    toy.aggregate()
    assert {entry.weight for entry in toy.commit(1).merged} == {1 / num}
    cut = 1 if num >= 3 else 0
    for name, values in toy.params().items():
        kept = np.sort(np.stack([one[name] for one in deltas]).astype(np.float64), axis=0)[cut : num - cut]
        np.testing.assert_allclose(values, toy.initial[name] - kept.mean(axis=0), rtol=0, atol=1e-6)
    assert audit(toy.store).ok


# ---- the files of a version


@pytest.mark.parametrize("down", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("up", CODECS, ids=lambda codec: codec.name)
def test_what_islands_decode_is_what_was_subtracted_to_the_bit(up: Codec, down: Codec) -> None:
    toy = toy_run(up=up, down=down)
    for version, contributions in enumerate(rounds_of(3)):
        for island, seed, tokens, steps in contributions:
            toy.send(island, seed, base_version=version, tokens=tokens, steps=steps)
        toy.aggregate()
        commit = toy.commit(version + 1)
        update = toy.store.get(commit.update.key)[0]
        sent = dict(decode_payload([update], toy.layout(), codec_for(down, version + 1)))
        mirror = {name: np.asarray(values - sent[name]) for name, values in toy.params(version).items()}
        assert weights_digest(mirror) == commit.weights.digest
        the_same(mirror, toy.params())
        norm = math.sqrt(sum(float(np.sum(np.square(values, dtype=np.float64))) for values in sent.values()))
        assert commit.step_norm == pytest.approx(norm, rel=1e-12)


def test_what_the_downlink_lost_is_owed_and_paid() -> None:
    """However coarse the downlink, the weights are an uncompressed run's, minus what is still owed."""
    exact, coarse = toy_run(), toy_run(down=Codec(name="int4", block=32, error_feedback=True))
    for version, contributions in enumerate(rounds_of(6)):
        for toy in (exact, coarse):
            for island, seed, tokens, steps in contributions:
                toy.send(island, seed, base_version=version, tokens=tokens, steps=steps)
            toy.aggregate()
    outer = read_tensors(
        coarse.store.get(coarse.commit(6).outer.key)[0],
        [(f"{kind}.{name}", shape) for name, shape in coarse.layout() for kind in ("momentum", "residual")],
    )
    for name, values in coarse.params().items():
        np.testing.assert_allclose(values - outer[f"residual.{name}"], exact.params()[name], rtol=1e-5, atol=1e-5)
        assert not np.allclose(values, exact.params()[name], rtol=1e-5, atol=1e-5) or values.size == 1


@pytest.mark.parametrize(
    ("outer", "down", "kinds"),
    [
        (Outer(), Codec(), ["momentum"]),
        (Outer(), Codec(name="int8", error_feedback=True), ["momentum", "residual"]),
        (PLAIN, Codec(name="int8", error_feedback=True), ["residual"]),
        (PLAIN, Codec(), []),
    ],
)
def test_outer_state_holds_what_is_remembered_and_no_more(outer: Outer, down: Codec, kinds: list[str]) -> None:
    toy = toy_run(outer=outer, down=down)
    for base in range(2):
        toy.send("a", base, base_version=base)
        toy.aggregate()
        layout = [(f"{kind}.{name}", shape) for name, shape in toy.layout() for kind in kinds]
        found = read_tensors(toy.store.get(toy.commit(base + 1).outer.key)[0], layout)
        assert list(found) == [name for name, _ in layout]


def test_fragments_advance_by_themselves() -> None:
    toy = ToyRun(Settings(policy=POLICY, sync=Sync(num_fragments=2)))
    toy.send("a", 1, fragment=1)
    assert [toy.aggregate(fragment=number).version for number in (0, 1)] == [0, 1]
    toy.audit(1)
    names = [name for name, _ in toy.layout(1)]
    assert list(toy.params(fragment=1)) == names != list(SHAPES)


# ---- bad contributions


def payload_of(toy: ToyRun, shapes: dict[str, tuple[int, ...]], fill: float = 0.5) -> bytes:
    """A well-formed payload that holds these tensors."""
    arrays = {name: np.full(shape, fill, np.float32) for name, shape in shapes.items()}
    if np.isfinite(fill):
        raw = write_tensors(arrays)
    else:
        raw = write_tensors({name: np.full(shape, 12345.5, np.float32) for name, shape in shapes.items()})
        raw = raw.replace(np.float32(12345.5).tobytes(), np.float32(fill).tobytes())
    return zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(raw)


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(bytes(size))


BAD: dict[str, Callable[[ToyRun], bytes]] = {  # by the beginning of the reason on record
    "format": lambda _: b"not a payload",
    "size: the stream ends": lambda _: b"",
    "format:": lambda _: zstandard.compress(write_tensors(random_tensors(1))),
    "non-finite: tensor 'embed.weight'": lambda toy: payload_of(toy, dict(SHAPES), math.nan),
    "non-finite: tensor 'embed.weight':": lambda toy: payload_of(toy, dict(SHAPES), -math.inf),
    "huge: tensor 'embed.weight'": lambda toy: payload_of(toy, dict(SHAPES), 1e30),
    "shape": lambda toy: payload_of(toy, {**SHAPES, "layer.bias": (5,)}),
    "names": lambda toy: payload_of(toy, {**SHAPES, "one.more": (1,)}),
    "names: ": lambda toy: payload_of(toy, {name: shape for name, shape in SHAPES.items() if name != "scale"}),
    "size: zstd frame declares": lambda _: bomb(1 << 26),
    "size: a payload of": lambda _: np.random.default_rng(0).bytes(1 << 16),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_payload_is_rejected_on_record_and_the_others_are_as_without_it(reason: str) -> None:
    toy, without = toy_run(), toy_run()
    for one in (toy, without):
        one.send("a", 1)
        one.send("c", 3, tokens=77)
    toy.send("b", BAD[reason](toy), tokens=10_000)
    report = toy.aggregate()
    without.aggregate()
    commit = toy.commit(1)
    [rejected] = commit.rejected
    assert (rejected.island, rejected.seq) == ("b", 1)
    assert rejected.reason.startswith(reason.rstrip(" :"))
    assert report.rejected == (rejected,)
    assert [entry.island for entry in commit.merged] == ["a", "c"]
    assert sum(entry.weight for entry in commit.merged) == pytest.approx(1.0, rel=1e-12)
    assert [e.weight for e in commit.merged] == pytest.approx([e.weight for e in without.commit(1).merged], rel=1e-12)
    the_same(toy.params(), without.params())
    assert commit.tally["b"].rejected == 1
    assert toy.audit()["b", 1] == "rejected"


def test_bytes_that_are_not_those_of_the_receipt_are_rejected() -> None:
    toy = toy_run()
    toy.send("a", 1)
    receipt = toy.send("b", 2)
    other = toy.payload(random_tensors(3))
    toy.store.put(receipt.parts[0].key, other)
    toy.send("c", 3, upload=False)
    short = toy.send("d", 4).parts[0]
    toy.store.put(short.key, toy.store.get(short.key)[0][:-1])
    toy.aggregate()
    reasons = {entry.island: entry.reason for entry in toy.commit(1).rejected}
    assert reasons["b"].startswith("digest: " if len(other) == receipt.parts[0].size else "size: ")
    assert reasons["c"] == "payload missing"
    assert reasons["d"] == f"size: the payload has {short.size - 1} bytes, the receipt says {short.size}"


def test_a_flipped_bit_is_found_by_the_digest() -> None:
    toy = toy_run()
    toy.send("a", 1)
    key = toy.send("b", 2).parts[0].key
    data = bytearray(toy.store.get(key)[0])
    data[len(data) // 2] ^= 1
    toy.store.put(key, bytes(data))
    toy.aggregate()
    [rejected] = toy.commit(1).rejected
    assert rejected.reason.partition(":")[0] in {"digest", "format", "size"}


def test_if_all_are_rejected_a_version_is_made_that_changes_nothing() -> None:
    toy = toy_run(down=Codec(name="int4", block=8, error_feedback=True))
    toy.send("a", 1)
    toy.aggregate()
    toy.send("a", b"junk", base_version=1)
    toy.send("b", b"junk", base_version=1)
    assert toy.aggregate().version == 2
    before, after = toy.commit(1), toy.commit(2)
    assert after.merged == ()
    assert [entry.island for entry in after.rejected] == ["a", "b"]
    assert (after.weights.digest, after.outer.digest) == (before.weights.digest, before.outer.digest)
    assert (after.step_norm, after.tokens) == (0.0, before.tokens)
    toy.send("a", 3, base_version=2)
    assert toy.aggregate().version == 3
    toy.audit()


def test_if_all_are_rejected_at_first_the_outer_state_is_zero_and_goes_on() -> None:
    toy, clean = toy_run(), toy_run()
    toy.send("a", b"junk")
    toy.aggregate()
    toy.send("a", 7, base_version=1)
    clean.send("a", 7)
    toy.aggregate()
    clean.aggregate()
    the_same(toy.params(), clean.params())
    assert toy.commit(2).outer.digest == clean.commit(1).outer.digest


def test_a_contribution_that_counts_nothing_is_not_a_division_by_zero() -> None:
    toy = toy_run(merge=Merge(staleness="polynomial", staleness_a=5000.0))
    toy.send("a", 1)
    toy.aggregate()
    toy.send("b", 2, base_version=0)  # Its weight underflows to 0,
    toy.send("c", b"junk", base_version=1)  # and the only other one is rejected.
    toy.aggregate()
    assert [(entry.island, entry.weight) for entry in toy.commit(2).merged] == [("b", 1.0)]


def test_more_than_one_part_is_rejected_if_somebody_chose_it() -> None:
    """Our closes never choose such a contribution; a later version of the program might."""
    from diloco_blob.aggregate.context import Context
    from diloco_blob.aggregate.payloads import Payloads, Spool
    from diloco_blob.core.ids import SeededIds

    toy = toy_run()
    toy.send("a", 1)
    toy.aggregate()
    [chosen] = toy.close(1).chosen
    double = msgspec.structs.replace(chosen, parts=chosen.parts * 2)
    context = Context(store=toy.store, run=toy.run, clock=toy.clock, ids=SeededIds(0))
    with Spool() as spool:
        found = Payloads(context, 0, spool).fetch(double)
    assert found == Skipped(island="a", seq=1, reason="parts: 2 payload objects, this program merges 1")


@pytest.mark.parametrize("codec", [*CODECS, Codec(name="int8", block=8), Codec(name="int4", block=65536)])
def test_no_honest_payload_is_larger_than_the_bound(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    for shapes in ({"w": (257, 33)}, {"w": (1,)}, {f"tensor.number.{n}": (3,) for n in range(50)}):
        layout = list(shapes.items())
        noise = {n: rng.integers(-(2**30), 2**30, s).astype(np.int32).view(np.float32) for n, s in layout}
        toy = ToyRun(Settings(policy=POLICY, up=codec), shapes=shapes)
        data = toy.payload({name: np.nan_to_num(values) for name, values in noise.items()})
        assert len(data) <= payload_bytes_max(layout, codec_for(codec, 1)) <= len(data) * 2 + 20_000


# ---- damage to the run itself


@pytest.mark.parametrize("what", ["params", "outer"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_head_is_refused_clearly_and_nothing_is_committed(what: str, damage: str) -> None:
    toy = toy_run()
    toy.send("a", 1)
    toy.aggregate()
    commit = toy.commit(1)
    ref: ObjectRef = commit.weights.params if what == "params" else commit.outer
    data = toy.store.get(ref.key)[0]
    toy.store.delete(ref.key)
    if damage != "gone":
        toy.store.put(ref.key, data[:-1] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    toy.send("a", 2, base_version=1)
    with pytest.raises(Corrupt, match="version 1"):
        toy.aggregate()
    assert toy.head().version == 1
    toy.store.put(ref.key, data)  # Restored: the next pass goes on (after the takeover time).
    toy.clock.advance(POLICY.takeover_s)
    assert toy.aggregate().version == 2
    toy.audit()


def test_a_step_that_is_not_finite_is_not_committed() -> None:
    toy = toy_run(outer=Outer(optimizer="sgd", lr=1e38, momentum=0.0))
    toy.send("a", {name: np.full(shape, 1e8, np.float32) for name, shape in SHAPES.items()})
    with pytest.raises(Corrupt, match="non-finite"):
        toy.aggregate()
    assert toy.head().version == 0


# ---- determinism


def test_the_bytes_do_not_depend_on_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(reads: int, memory: int) -> Iterable[str]:
        monkeypatch.setattr("diloco_blob.aggregate.payloads.READ_BYTES", reads)
        monkeypatch.setattr("diloco_blob.aggregate.payloads._CHUNK_BYTES", reads)
        monkeypatch.setattr("diloco_blob.aggregate.payloads.MEMORY_BYTES_MAX", memory)
        monkeypatch.setattr("diloco_blob.aggregate.files.MEMORY_BYTES_MAX", memory)
        toy = toy_run(down=Codec(name="int8", error_feedback=True), merge=Merge(clip="median"))
        for version, contributions in enumerate(rounds_of(2)):
            for island, seed, tokens, steps in contributions:
                toy.send(island, seed, base_version=version, tokens=tokens, steps=steps)
            toy.aggregate()
        commit = toy.commit(2)
        return commit.weights.params.digest, commit.outer.digest, commit.update.digest

    assert files(16 << 20, 64 << 20) == files(7, 1) == files(100, 300)


def test_a_commit_names_its_files_by_their_digests() -> None:
    toy = toy_run()
    toy.send("a", 1)
    toy.aggregate()
    commit = toy.commit(1)
    for ref in (commit.weights.params, commit.outer, commit.update):
        data = toy.store.get(ref.key)[0]
        assert (digest(data), len(data)) == (ref.digest, ref.size)
        assert ref.digest in ref.key
