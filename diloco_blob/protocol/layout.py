"""Which tensors are exchanged together: balanced tensor fragmentation (arXiv 2604.21428).

Greedy number partitioning: tensors by descending size, each into the fragment that is smallest so far. Ties
break on names and fragment numbers, so the same model always gives the same layout.
"""

import math
from collections.abc import Iterable, Sequence

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.limits import TENSOR_ELEMENTS_MAX, TENSORS_MAX
from diloco_blob.protocol.records import TensorSpec
from diloco_blob.wire import Layout

EMBEDDING_MARKERS = ("embed", "wte", "wpe", "lm_head", "shared.weight")
"""A tensor whose name contains one of these is an embedding (RDA merges it by plain mean)."""


def make_layout(tensors: Iterable[tuple[str, tuple[int, ...], str]], num_fragments: int) -> tuple[TensorSpec, ...]:
    """Assign tensors to fragments.

    Args:
        tensors: Name, shape and dtype name of each, in the model's order.
        num_fragments: P; at most the number of tensors.

    Returns:
        One spec per tensor, in the model's order.

    Raises:
        InvalidSettings: No tensors, too many or too big ones, a name twice, or more fragments than tensors.
    """
    items = list(tensors)
    names = [name for name, _, _ in items]
    if not items:
        raise InvalidSettings("the model has no trainable parameters")
    if len(items) > TENSORS_MAX:
        raise InvalidSettings(f"the model has {len(items)} tensors, more than {TENSORS_MAX}")
    if len(set(names)) != len(names):
        raise InvalidSettings("two tensors of the model have the same name")
    if num_fragments > len(items):
        raise InvalidSettings(
            f"sync.num_fragments is {num_fragments}, but the model has only {len(items)} tensors",
            "use fewer fragments",
        )
    sizes = {name: math.prod(shape) for name, shape, _ in items}
    for name, size in sizes.items():
        if size > TENSOR_ELEMENTS_MAX:
            raise InvalidSettings(f"tensor {name} has {size} elements, more than {TENSOR_ELEMENTS_MAX}")
    loads = [0] * num_fragments
    counts = [0] * num_fragments
    place: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (-sizes[name], name)):
        # The number of tensors comes second so that empty tensors still spread and no fragment stays empty.
        fragment = min(range(num_fragments), key=lambda p: (loads[p], counts[p], p))
        place[name] = fragment
        loads[fragment] += sizes[name]
        counts[fragment] += 1
    return tuple(
        TensorSpec(name=name, shape=shape, dtype=dtype, fragment=place[name], embedding=is_embedding(name))
        for name, shape, dtype in items
    )


def is_embedding(name: str) -> bool:
    """Whether a tensor's name says that it is an embedding."""
    return any(marker in name for marker in EMBEDDING_MARKERS)


def fragment_tensors(tensors: Sequence[TensorSpec], fragment: int) -> tuple[TensorSpec, ...]:
    """The tensors of one fragment, in the model's order: the order in every file."""
    return tuple(spec for spec in tensors if spec.fragment == fragment)


def fragment_layout(tensors: Sequence[TensorSpec], fragment: int) -> Layout:
    """What the files of one fragment hold: names and shapes of its tensors, in the order in every file."""
    return [(spec.name, spec.shape) for spec in fragment_tensors(tensors, fragment)]


def num_elements(tensors: Iterable[TensorSpec]) -> int:
    """Parameters in all."""
    return sum(math.prod(spec.shape) for spec in tensors)


def check_same_model(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    """Raise unless a run's tensors are this model's.

    Args:
        ours: Layout of the model in this process.
        theirs: Layout in `run.json`.

    Raises:
        InvalidSettings: Names the first tensor that differs.
    """
    hint = "give the run's own model, or another run URL for this one"
    run = {spec.name: spec for spec in theirs}
    for spec in ours:
        other = run.pop(spec.name, None)
        if other is None:
            raise InvalidSettings(f"this run trains another model: it has no tensor {spec.name}", hint)
        if other.shape != spec.shape:
            raise InvalidSettings(
                f"this run trains another model: {spec.name} is {list(other.shape)} there, {list(spec.shape)} here",
                hint,
            )
    if run:
        raise InvalidSettings(f"this run trains another model: it also has {next(iter(run))}", hint)


def offsets(num_fragments: int, sync_every: int) -> tuple[int, ...]:
    """Inner-step offset of each fragment, spread evenly: fragment p is due when (step − offset) mod sync_every = 0.

    With one fragment the offset is 0, so that contributions end at multiples of `sync_every`.
    """
    return tuple(fragment * sync_every // num_fragments for fragment in range(num_fragments))
