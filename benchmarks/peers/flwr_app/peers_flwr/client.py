"""The worker's half: one round of inner steps for each message of the server.

Flower starts a process for each round. What an inner optimizer must remember is kept in `context.state`, which the
SuperNode holds between rounds, as Flower's documentation of stateful clients does it.
"""

import sys
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # type: ignore[import-not-found]
from flwr.clientapp import ClientApp  # type: ignore[import-not-found]

app = ClientApp()

_KEPT = ("step", "exp_avg", "exp_avg_sq")


@app.train()  # type: ignore[untyped-decorator] # has no types
def train(message: Message, context: Context) -> Message:
    """One round: take the global weights, do the inner steps, send the local weights."""
    sys.path.insert(0, str(context.run_config["bench"]))
    from task import Task, digest, weights

    task = Task(str(context.run_config["folder"]), int(context.node_config["partition-id"]))
    task.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rounds = int(message.content["config"]["server-round"])
    batch = digest({"batch": task.batch(0, 0).numpy()})
    task.event("ready", initial=digest(weights(task.model)), first_batch=batch, rounds=rounds - 1)
    if "inner" in context.state:
        load(task.optimizer, context.state["inner"].to_torch_state_dict())
    task.inner_steps(rounds - 1)
    context.state["inner"] = ArrayRecord(kept(task.optimizer))
    task.synced(rounds, 0.0)
    content = {
        "arrays": ArrayRecord(task.model.state_dict()),
        "metrics": MetricRecord({"num-examples": task.recipe.batch * task.recipe.sync_every}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def kept(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of AdamW as named tensors."""
    of_parameters = optimizer.state_dict()["state"]
    return {f"{i}.{name}": state[name] for i, state in of_parameters.items() for name in _KEPT}


def load(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put `kept` back."""
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        i, _, name = key.partition(".")
        state.setdefault(int(i), {})[name] = tensor
    optimizer.load_state_dict({**whole, "state": state})
