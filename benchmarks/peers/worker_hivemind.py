"""A worker on hivemind: an averager of pseudo-gradients over its DHT, and an outer SGD on each worker.

    python worker_hivemind.py FOLDER INDEX ADDRESS

This is what OpenDiLoCo does with hivemind, without its old fork: if averaging fails within the time-out, the outer step
is taken with the worker's own pseudo-gradient. A worker that finds another one on joining loads its round, its weights
and its outer momentum, with hivemind's own state sharing.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import hivemind  # type: ignore[import-not-found] # in this system's own virtual environment
import torch
from task import Task

STEP_TIMEOUT_S = 30.0
MATCHMAKING_S, REQUEST_S = 2.0, 1.0
_PEERS_WAIT_S = 170.0


class Averager(hivemind.DecentralizedAverager):  # type: ignore[misc] # has no types
    """Averages pseudo-gradients, and gives the outer state to whoever joins."""

    state: tuple[dict[str, Any], Sequence[torch.Tensor]] = ({"rounds": 0}, ())

    def get_current_state(self) -> tuple[dict[str, Any], Sequence[torch.Tensor], Sequence[Any]]:
        """Called in the worker's process when another worker joins."""
        from hivemind.compression import CompressionInfo  # type: ignore[import-not-found]

        metadata, tensors = self.state
        return metadata, tensors, [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]


def initial_peers(folder: Path, index: int) -> list[str]:
    """Addresses of the other worker's DHT; none for worker 0, which is the first.

    Raises:
        TimeoutError: Worker 0 has not written any.
    """
    others = folder / "peers-0"
    deadline = monotonic() + _PEERS_WAIT_S
    while index and not others.exists():
        if monotonic() > deadline:
            raise TimeoutError(f"no {others} after {_PEERS_WAIT_S:g} s")
        sleep(0.05)
    return others.read_text().split() if index else []


class Outer:
    """The global weights, their outer optimizer, and how both get to a worker that joins."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.weights = [p.detach().clone().requires_grad_() for p in task.model.parameters()]
        self._optimizer = task.recipe.outer(self.weights)

    def state(self, rounds: int) -> tuple[dict[str, Any], Sequence[torch.Tensor]]:
        """What a worker needs to go on after so many rounds: weights, then momenta."""
        of_weights = [self._optimizer.state[p].get("momentum_buffer") for p in self.weights]
        momenta = [torch.zeros_like(p) if m is None else m for p, m in zip(self.weights, of_weights, strict=True)]
        return {"rounds": rounds}, [t.detach().clone() for t in (*self.weights, *momenta)]

    def load(self, state: tuple[dict[str, Any], Sequence[torch.Tensor]]) -> int:
        """Take another worker's state; gives its rounds."""
        rounds, half = int(state[0]["rounds"]), len(self.weights)
        with torch.no_grad():
            for p, weights, momentum in zip(self.weights, state[1][:half], state[1][half:], strict=True):
                p.copy_(weights)
                if rounds:
                    self._optimizer.state[p]["momentum_buffer"] = momentum.clone()
        self.adopt()
        return rounds

    @torch.no_grad()
    def adopt(self) -> None:
        """Begin a round from the global weights."""
        for p, new in zip(self._task.model.parameters(), self.weights, strict=True):
            p.copy_(new)

    def exchange(self, averager: Averager) -> str:
        """Average the pseudo-gradient, take the outer step with what came of it, and say how it went."""
        with averager.get_tensors() as tensors, torch.no_grad():
            for tensor, p, local in zip(tensors, self.weights, self._task.model.parameters(), strict=True):
                tensor.copy_(p - local)
        said = "averaged"
        try:
            if averager.step(timeout=STEP_TIMEOUT_S) is None:
                said = "no group"
        except Exception as error:  # noqa: BLE001 - whatever it is, a worker goes on with its own pseudo-gradient
            said = type(error).__name__
        with averager.get_tensors() as tensors:
            for tensor, p in zip(tensors, self.weights, strict=True):
                p.grad = tensor.clone()
        self._optimizer.step()
        self.adopt()
        return said


def main() -> None:
    """Train to the last round."""
    folder, index, address = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    task = Task(folder, index)
    task.ready()
    peers = initial_peers(folder, index)
    dht = hivemind.DHT(start=True, initial_peers=peers, host_maddrs=[f"/ip4/{address}/tcp/0"])
    if index == 0:
        partial = folder / "peers-0.part"
        partial.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        partial.rename(folder / "peers-0")  # whole, or not there
    outer = Outer(task)
    averager = Averager(
        [torch.zeros_like(p) for p in outer.weights],
        dht=dht,
        prefix="run",
        target_group_size=2,
        min_group_size=2,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=REQUEST_S,
        allow_state_sharing=True,
        start=True,
    )
    averager.state = outer.state(0)
    first = 0
    if index and (loaded := averager.load_state_from_peers(timeout=STEP_TIMEOUT_S)):
        first = outer.load(loaded)
        task.event("joined", rounds=first)
    for round_index in range(first, task.recipe.rounds):
        task.inner_steps(round_index)
        task.exchange(round_index + 1, lambda: outer.exchange(averager))
        averager.state = outer.state(round_index + 1)
    task.finished()
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
