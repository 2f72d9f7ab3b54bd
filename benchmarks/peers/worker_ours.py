"""A worker on diloco_blob: an island, through `Island` alone.

    python worker_ours.py FOLDER INDEX URL SETTINGS.toml

It keeps no local checkpoint: an island that is killed has lost its disk, too.
"""

import sys
from time import monotonic

from task import Task

from diloco_blob import Island


def main() -> None:
    """Train to the last round."""
    folder, index, url, settings = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    task = Task(folder, index)
    task.ready()
    every, rounds = task.recipe.sync_every, task.recipe.rounds
    name = f"island-{index}"
    with Island(url, model=task.model, optimizer=task.optimizer, name=name, settings=settings) as island:
        task.event("joined", rounds=island.version, steps=island.steps)
        while island.version < rounds and island.steps < rounds * every:
            step = island.steps % every
            loss = task.inner_step(island.version, step)
            start = monotonic()
            island.step(tokens=task.recipe.tokens, loss=loss)
            if step == every - 1:
                task.synced(island.version, monotonic() - start)
        island.finish()
        task.finished()


if __name__ == "__main__":
    main()
