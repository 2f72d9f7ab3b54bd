"""When each version of a run appeared, and its held-out loss: the global model's path, read from the bucket afterwards.

    ip netns exec HUB python versions.py URL

Nothing is evaluated while islands train, so no one's time is touched. With several fragments the model at a moment is
the newest version of each; it is looked at whenever all of them have made a further one. Times are the store's clock,
which S3 gives in whole seconds, rounded down; one second is added, so that no version counts before it was there.
Prints JSON: a list of [Unix time, version, bits per byte].
"""

import json
import sys

import torch
from training import Training

from diloco_blob import open_store
from diloco_blob.protocol.heads import newest_version, read_head, read_run
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.wire import read_tensors


def main() -> None:
    """Read every kept version and evaluate it."""
    store = open_store(sys.argv[1])
    info = read_run(store)
    num_fragments = len(info.run.fragments)
    training = Training(0)
    parameters = dict(training.model.named_parameters())
    newest = min(newest_version(store, p) for p in range(num_fragments))
    points: list[tuple[float, int, float]] = []
    for version in range(newest + 1):
        heads = [read_head(store, info, p, version) for p in range(num_fragments)]
        for head in heads:
            data, _ = store.get(head.weights.params.key)
            for name, array in read_tensors(data, fragment_layout(info.run.tensors, head.fragment)).items():
                with torch.no_grad():
                    parameters[name].copy_(torch.from_numpy(array))
        points.append((max(head.created_at for head in heads) + 1.0, version, training.bits_per_byte()))
    print(json.dumps(points))


if __name__ == "__main__":
    main()
