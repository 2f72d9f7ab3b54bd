"""A worker on flwr-serverless: an `AsyncFederatedNode` on an S3 folder, with Flower's FedAvg.

    python worker_flwr_serverless.py FOLDER INDEX BUCKET

There is no server, no common round and no global model: a worker writes its weights and averages them with whatever
the other has written last. Nothing tells a new process what the run has done, so one that comes back is told how many
rounds are over, begins with the initial weights, and takes part for the rest.
"""

import sys
from typing import Any

import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays  # type: ignore[import-not-found]
from flwr.server.strategy import FedAvg  # type: ignore[import-not-found]
from flwr_serverless import AsyncFederatedNode, S3Folder  # type: ignore[import-not-found]
from task import Task


def main() -> None:
    """Train to the last round."""
    folder, index, bucket = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    task = Task(folder, index)
    shared = S3Folder(f"s3://{bucket}/run")
    node = AsyncFederatedNode(shared_folder=shared, strategy=FedAvg(), node_id=f"worker-{index}")
    first = task.ready()
    num_examples = task.recipe.batch * task.recipe.sync_every
    for round_index in range(first, task.recipe.rounds):
        task.inner_steps(round_index)

        def exchange(epoch: int = round_index) -> Any:
            mine = ndarrays_to_parameters([p.detach().numpy() for p in task.model.parameters()])
            merged, metrics = node.update_parameters(mine, num_examples=num_examples, metrics={}, epoch=epoch)
            with torch.no_grad():
                for p, new in zip(task.model.parameters(), parameters_to_ndarrays(merged), strict=True):
                    p.copy_(torch.from_numpy(new.copy()))
            return metrics.get("num_nodes", 1)

        task.exchange(round_index + 1, exchange)
    task.finished()


if __name__ == "__main__":
    main()
