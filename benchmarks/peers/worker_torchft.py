"""A worker on torchft: its `DiLoCo` around the inner optimizer, one replica group of one process, gloo.

    python worker_torchft.py FOLDER INDEX ADDRESS LIGHTHOUSE

Settings are those of torchft's own DiLoCo example (`train_diloco.py`), with `init_sync` off, since every worker begins
with the same weights. A worker that joins late trains a round from whatever it has and is healed at its first exchange.
"""

import logging
import sys
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from task import Task
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, but not in its __all__
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found] # in this system's own environment
from torchft.checkpointing.http_transport import HTTPTransport  # type: ignore[import-not-found]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

ATTEMPTS_MAX = 24
"""Rounds, those that were not committed included."""


def main() -> None:
    """Train to the last round."""
    folder, index, address, lighthouse = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    logging.basicConfig(level=logging.INFO)
    task = Task(folder, index)
    outer = task.recipe.outer(task.model.parameters())

    def load_state_dict(state: dict[str, Any]) -> None:
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["inner_optim"])
        outer.load_state_dict(state["outer_optim"])

    def state_dict() -> dict[str, Any]:
        return {
            "model": task.model.state_dict(),
            "inner_optim": task.optimizer.state_dict(),
            "outer_optim": outer.state_dict(),
        }

    task.ready()
    store: Any = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        use_async_quorum=False,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"worker_{index}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0),
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname=address,
        lighthouse_addr=lighthouse,
        init_sync=False,
    )
    stepped_at = [0.0]

    def note_time(*_: Any) -> None:
        stepped_at[0] = monotonic()

    task.optimizer.register_step_post_hook(note_time)  # runs before the hook of DiLoCo, which does the exchange
    options = {"sync_every": task.recipe.sync_every, "backup_device": torch.device("cpu")}
    with DiLoCo(manager, [task.model], task.optimizer, outer, **options):
        attempts = 0
        while manager.current_step() < task.recipe.rounds and attempts < ATTEMPTS_MAX:
            task.inner_steps(manager.current_step())
            attempts += 1
            sync_s = monotonic() - stepped_at[0]
            task.synced(manager.current_step(), sync_s, participants=manager.num_participants())
    task.finished()
    manager.shutdown()


if __name__ == "__main__":
    main()
