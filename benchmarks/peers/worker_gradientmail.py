"""A worker on gradientmail: a `Session` on the torch model as it is, in the role `both` (train, and close rounds).

    python worker_gradientmail.py FOLDER INDEX BUCKET ENDPOINT

The algorithm is what gradientmail's documentation calls standard DiLoCo, so that all do the same; leases and polls have
their defaults. A worker that joins late gets weights and round from the bucket.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import gradientmail as gm  # type: ignore[import-not-found] # in this system's own virtual environment
import numpy as np
from gradientmail.algorithms.diloco import WeightedMean  # type: ignore[import-not-found]
from gradientmail.events import FragmentAligned, Joined, log_events  # type: ignore[import-not-found]
from gradientmail.mailbox.s3 import S3Mailbox  # type: ignore[import-not-found]
from task import Task, weights


def main() -> None:
    """Train to the last round."""
    folder, index, bucket, endpoint = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    logging.basicConfig(level=logging.INFO)
    task = Task(folder, index)
    recipe = task.recipe
    progress = {"rounds": 0, "stepped_at": 0.0}

    def listen(event: Any) -> None:
        if isinstance(event, Joined):
            progress["rounds"] = event.round + 1
            task.event("joined", rounds=event.round + 1)
        elif isinstance(event, FragmentAligned) and event.round + 1 > progress["rounds"]:
            progress["rounds"] = event.round + 1
            task.synced(event.round + 1, monotonic() - progress["stepped_at"])

    mailbox = S3Mailbox(bucket, "run", endpoint_url=endpoint)
    algorithm = gm.DiLoCo(
        sync_every=recipe.sync_every,
        fragments=1,
        in_flight=1,
        overlap_steps=0,
        follow=0,
        merge=WeightedMean(),
        quorum_size=2,
        outer_lr=recipe.outer_lr,
        outer_momentum=recipe.outer_momentum,
    )
    session = gm.Session(
        task.model, algorithm=algorithm, mailbox=mailbox, node_id=f"node-{index}", callbacks=(log_events, listen)
    )
    task.ready()
    session.join()

    def steps(first: int) -> Iterator[tuple[int, int]]:
        for round_index in range(first, recipe.rounds):
            for step in range(recipe.sync_every):
                yield round_index, step

    def step(at: tuple[int, int]) -> int:
        task.inner_step(*at)
        progress["stepped_at"] = monotonic()
        return recipe.tokens

    session.run(step, steps(int(progress["rounds"])))
    newest = recipe.model()
    gm.align(newest, mailbox=mailbox)
    with (folder / f"global-{index}.part").open("wb") as file:
        np.savez(file, **weights(newest))
    (folder / f"global-{index}.part").rename(folder / "global.npz")
    task.finished()


if __name__ == "__main__":
    main()
