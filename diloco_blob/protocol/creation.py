"""Creating a run: version 0 first, then `run.json`, which makes the run exist.

Several islands may try at once. Each publishes its own version 0 under names that its digests make its own, or the same
names with the same bytes; the one whose `run.json` is created has created the run, and all the others adopt
it. A run is never cleared or overwritten from here.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from diloco_blob.core.errors import Conflict
from diloco_blob.core.ids import Ids
from diloco_blob.core.settings import Settings
from diloco_blob.protocol import keys
from diloco_blob.protocol.heads import RunInfo, read_run
from diloco_blob.protocol.layout import fragment_tensors
from diloco_blob.protocol.records import FORMAT, ObjectRef, Run, TensorSpec, Weights, encode
from diloco_blob.store.base import ObjectStore
from diloco_blob.store.probe import probe
from diloco_blob.wire import digest, weights_digest, write_tensors


def create_run(
    store: ObjectStore,
    settings: Settings,
    tensors: Sequence[TensorSpec],
    arrays: Mapping[str, np.ndarray],
    *,
    ids: Ids,
    created_by: str,
    model: Mapping[str, Any] | None = None,
    at: Callable[[str], None] = lambda _: None,
) -> RunInfo:
    """Create the run at the store's URL, or find that another has just created it.

    Args:
        store: Where; it is probed for create-if-absent first.
        settings: Its settings, resolved.
        tensors: The model's layout.
        arrays: Initial weights, fp32, by tensor name.
        ids: Source of write ids.
        created_by: The island's name, for people.
        model: Free-form configuration, for export.
        at: Told of each step (those of `island.steps` that begin with `create`); for tests.

    Returns:
        The run as it stands in the store, whoever created it.

    Raises:
        InvalidSettings: The store ignores create-if-absent.
        Corrupt: A weight is not finite.
    """
    at("create.begin")
    probe(store, ids)
    fragments = []
    for p in range(settings.sync.num_fragments):
        fragments.append(
            write_params(store, p, 0, {spec.name: arrays[spec.name] for spec in fragment_tensors(tensors, p)})
        )
        at("create.params.after_put")
    run = Run(
        format=FORMAT,
        write_id=ids.fresh(),
        created_by=created_by,
        settings=settings,
        tensors=tuple(tensors),
        fragments=tuple(fragments),
        model=dict(model or {}),
    )
    at("create.run.before_put")
    with contextlib.suppress(Conflict):  # another island was first: its version 0 is the run's, ours names nothing
        store.put(keys.RUN, encode(run), if_absent=True)
        at("create.run.after_put")
    return read_run(store)


def write_params(store: ObjectStore, fragment: int, version: int, arrays: Mapping[str, np.ndarray]) -> Weights:
    """Write a fragment's weights under the name that their digest gives them.

    Args:
        store: Where.
        fragment: Which fragment.
        version: Of which version.
        arrays: fp32 weights in the layout's order.
    """
    data = write_tensors(arrays)
    name = digest(data)
    key = keys.params(fragment, version, name)
    store.put(key, data)
    return Weights(params=ObjectRef(key=key, digest=name, size=len(data)), digest=weights_digest(arrays))
