"""Fragments: balanced, complete, the same for the same model, and offsets that spread their exchanges."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.limits import TENSOR_ELEMENTS_MAX, TENSORS_MAX
from diloco_blob.protocol.layout import (
    check_same_model,
    fragment_tensors,
    is_embedding,
    make_layout,
    num_elements,
    offsets,
)

Model = list[tuple[str, tuple[int, ...], str]]


def gpt(layers: int, width: int, vocabulary: int) -> Model:
    """The tensors of a small language model."""
    block = {
        "attn.qkv.weight": (3 * width, width), "attn.out.weight": (width, width), "mlp.up.weight": (4 * width, width),
        "mlp.down.weight": (width, 4 * width), "norm1.weight": (width,), "norm2.weight": (width,),
    }  # fmt: skip
    model: Model = [("wte.weight", (vocabulary, width), "bfloat16")]
    model += [(f"layers.{n}.{name}", shape, "bfloat16") for n in range(layers) for name, shape in block.items()]
    return [*model, ("lm_head.weight", (vocabulary, width), "bfloat16"), ("norm.weight", (width,), "float32")]


def loads(model: Model, num_fragments: int) -> list[int]:
    layout = make_layout(model, num_fragments)
    return [num_elements(fragment_tensors(layout, number)) for number in range(num_fragments)]


def of_sizes(sizes: list[int]) -> Model:
    return [(f"t{number}", (size,), "float32") for number, size in enumerate(sizes)]


def lower_bound(sizes: list[int], num_fragments: int) -> float:
    """No partition has a smaller largest part: the mean; the largest; two of the m+1 largest share one."""
    ordered = sorted(sizes, reverse=True)
    pair = ordered[num_fragments - 1] + ordered[num_fragments] if len(ordered) > num_fragments else 0
    return max(sum(sizes) / num_fragments, ordered[0], pair)


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", [gpt(4, 64, 512), gpt(12, 96, 96), gpt(24, 128, 32)])
def test_language_models_are_balanced_to_four_thirds(model: Model, num_fragments: int) -> None:
    sizes = [math.prod(shape) for _, shape, _ in model]
    found = loads(model, num_fragments)
    assert sum(found) == sum(sizes)
    assert max(found) <= 4 / 3 * lower_bound(sizes, num_fragments)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_no_partition_is_better_by_more_than_a_third(sizes: list[int], num_fragments: int) -> None:
    if num_fragments > len(sizes):
        return
    best = min(
        max(sum(size for size, place in zip(sizes, places, strict=True) if place == p) for p in range(num_fragments))
        for places in itertools.product(range(num_fragments), repeat=len(sizes))
    )
    assert max(loads(of_sizes(sizes), num_fragments)) <= (4 / 3 - 1 / (3 * num_fragments)) * best + 1e-9


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 9), st.randoms())
def test_every_tensor_has_one_fragment_no_fragment_is_empty_and_order_is_the_models(
    sizes: list[int], num_fragments: int, random: object
) -> None:
    model = of_sizes(sizes)
    if num_fragments > len(model):
        with pytest.raises(InvalidSettings, match="has only"):
            make_layout(model, num_fragments)
        return
    layout = make_layout(model, num_fragments)
    assert [(spec.name, spec.shape, spec.dtype) for spec in layout] == model
    parts = [fragment_tensors(layout, number) for number in range(num_fragments)]
    assert all(parts)
    assert sorted(spec.name for part in parts for spec in part) == sorted(name for name, _, _ in model)
    shuffled = list(model)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {spec.name: spec.fragment for spec in make_layout(shuffled, num_fragments)} == {
        spec.name: spec.fragment for spec in layout
    }


def test_scalars_count_one_element() -> None:
    assert num_elements(make_layout([("s", (), "float32"), ("v", (3,), "float32"), ("e", (0, 5), "float32")], 1)) == 4


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("wte.weight", True), ("model.embed_tokens.weight", True), ("transformer.wpe.weight", True),
        ("lm_head.weight", True), ("shared.weight", True), ("layers.0.attn.weight", False), ("norm.weight", False),
    ],
)  # fmt: skip
def test_embeddings_are_known_by_their_names(name: str, embedding: bool) -> None:
    assert is_embedding(name) is embedding
    assert make_layout([(name, (2,), "float32")], 1)[0].embedding is embedding


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ([], "no trainable parameters"),
        ([("a", (1,), "float32"), ("a", (2,), "float32")], "the same name"),
        ([("a", (TENSOR_ELEMENTS_MAX + 1,), "float32")], "more than"),
        ([("a", (TENSOR_ELEMENTS_MAX, 2), "float32")], "more than"),
        ([(f"t{n}", (1,), "float32") for n in range(TENSORS_MAX + 1)], "more than"),
    ],
)
def test_models_that_cannot_be_exchanged_are_refused(model: Model, word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        make_layout(model, 1)


def test_another_model_is_refused_by_the_first_tensor_that_differs() -> None:
    ours = make_layout(of_sizes([3, 4]), 1)
    check_same_model(ours, ours)
    check_same_model(ours, [msgspec.structs.replace(spec, fragment=7, dtype="bfloat16") for spec in ours])
    with pytest.raises(InvalidSettings, match=r"it has no tensor t1"):
        check_same_model(ours, ours[:1])
    with pytest.raises(InvalidSettings, match=r"t1 is \[5\] there, \[4\] here"):
        check_same_model(ours, make_layout(of_sizes([3, 5]), 1))
    with pytest.raises(InvalidSettings, match=r"it also has t1"):
        check_same_model(ours[:1], ours)


@given(st.integers(1, 64), st.integers(1, 1000))
def test_offsets_spread_the_exchanges_evenly_over_the_round(num_fragments: int, sync_every: int) -> None:
    found = offsets(num_fragments, sync_every)
    assert found[0] == 0
    assert all(0 <= offset < sync_every for offset in found)
    gaps = [b - a for a, b in itertools.pairwise((*found, sync_every))]
    assert max(gaps) - min(gaps) <= 1
