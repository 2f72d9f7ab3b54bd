"""What every system gets: the same model, initial weights, batches, inner optimizer and steps, to the bit.

A worker program of any system imports this module in that system's own virtual environment, so nothing here needs more
than torch and numpy. Model and batches are those of `workers/`; the text lies in the run's folder, since another Python
has another standard library.

Worker i, in round r (from 0), at step s of the round, takes batch r·H + s of its own stream, whether it was killed
before or not. A worker writes what happens as JSON lines to `worker-<i>.events` in the folder, and its last weights to
`worker-<i>.npz`.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workers"))
from data import held_out_batches, load, train_batch  # noqa: E402 - found through the line above
from gpt import GPT, GPTConfig  # noqa: E402

LAYERS, WIDTH, HEADS = 2, 64, 4
EVAL_BATCHES, EVAL_BATCH = 32, 16
TEXT_BYTES_MAX = 20_000_000
GO = "PEERS_GO"
"""Environment variable: the file that a worker waits for; `go` by default."""
_GO_POLL_S = 0.02


@dataclass(frozen=True)
class Recipe:
    """What is trained and for how long; the same for every system."""

    seed: int = 0
    sync_every: int = 50
    """H: inner steps of a round."""
    rounds: int = 8
    batch: int = 8
    """Sequences a step."""
    context: int = 64
    """Bytes a sequence."""
    lr: float = 1e-3
    """Of AdamW, with torch's other defaults; constant."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    @property
    def tokens(self) -> int:
        """Of one inner step."""
        return self.batch * self.context

    def model(self) -> GPT:
        """The model with its initial weights."""
        return GPT(GPTConfig(self.context, LAYERS, WIDTH, HEADS), self.seed)

    def outer(self, parameters: Iterable[torch.Tensor]) -> torch.optim.SGD:
        """The outer optimizer of DiLoCo (arXiv 2311.08105)."""
        return torch.optim.SGD(parameters, lr=self.outer_lr, momentum=self.outer_momentum, nesterov=True)


class Task:
    """One worker's side of a run.

    Args:
        folder: Of the run: `recipe.json`, `text.npz`, and what the workers write.
        index: Which worker this is, from 0.
    """

    def __init__(self, folder: str | Path, index: int) -> None:
        self.folder, self.index = Path(folder), index
        self.recipe = Recipe(**json.loads((self.folder / "recipe.json").read_text()))
        torch.set_num_threads(1)
        with np.load(self.folder / "text.npz") as text:
            self._train = torch.from_numpy(text["train"])
        self.model = self.recipe.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.recipe.lr)
        self._loss = float("nan")

    def ready(self) -> int:
        """Say what this worker starts from, and wait until it may go: until then it has joined nothing.

        Returns:
            Rounds that are over without it: 0 but for a worker that replaces a dead one.
        """
        self.announce()
        go = self.folder / os.environ.get(GO, "go")
        while not go.exists():
            sleep(_GO_POLL_S)
        return int(go.read_text())

    def announce(self) -> None:
        """Say what this worker starts from."""
        batch = self.batch(0, 0)
        self.event("ready", initial=digest(weights(self.model)), first_batch=digest({"batch": batch.numpy()}))

    def batch(self, round_index: int, step: int) -> torch.Tensor:
        """Bytes of a step, (batch, context + 1)."""
        k = round_index * self.recipe.sync_every + step
        stream = f"{self.recipe.seed}/worker-{self.index}"
        return train_batch(self._train, stream, k, batch=self.recipe.batch, context=self.recipe.context)

    def inner_step(self, round_index: int, step: int) -> float:
        """Forward, backward, and one step of the inner optimizer; gives the loss in nats."""
        self.optimizer.zero_grad()
        loss = self.model.loss(self.batch(round_index, step))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._loss = float(loss.detach())
        if step == self.recipe.sync_every // 2:
            self.event("half", round=round_index)
        return self._loss

    def inner_steps(self, round_index: int) -> None:
        """All inner steps of a round."""
        for step in range(self.recipe.sync_every):
            self.inner_step(round_index, step)

    def synced(self, rounds: int, sync_s: float, **more: Any) -> None:
        """Write down that an exchange is over.

        Args:
            rounds: Rounds that are complete with it.
            sync_s: Seconds that the worker waited for it.
            more: Whatever else the system says.
        """
        self.event("round", rounds=rounds, sync_s=round(sync_s, 4), loss=self._loss, **more)

    def exchange(self, rounds: int, act: Callable[[], Any]) -> None:
        """Do an exchange and write down how long it took; what `act` returns is noted as `said`."""
        start = monotonic()
        said = act()
        self.synced(rounds, monotonic() - start, **({} if said is None else {"said": said}))

    def finished(self, model: torch.nn.Module | None = None) -> None:
        """Save the weights that this worker ends with: its model's, or `model`'s."""
        np.savez(self.folder / f"worker-{self.index}.npz", **weights(model or self.model))
        self.event("finished")

    def event(self, name: str, **more: Any) -> None:
        """Append a line to this worker's events, with the time and what its link carried so far."""
        down, up = link_bytes()
        line = json.dumps({"event": name, "at": time(), "down": down, "up": up, **more})
        with (self.folder / f"worker-{self.index}.events").open("a") as file:
            file.write(line + "\n")


def link_bytes(table: str | None = None, device: str = "eth0") -> tuple[int, int]:
    """Bytes that a network device received and sent, headers included; zeros if there is no such device.

    Args:
        table: The text of a /proc/net/dev; by default this process's own.
        device: Which one.
    """
    for line in (Path("/proc/self/net/dev").read_text() if table is None else table).splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            fields = counts.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def weights(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters by name, as numpy arrays of their own."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def digest(arrays: Mapping[str, Any]) -> str:
    """A fingerprint of arrays, to show that two processes hold the same."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


class Evaluator:
    """Mean held-out loss in nats per byte, of whatever weights a worker has left behind."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        recipe = Recipe(**json.loads((folder / "recipe.json").read_text()))
        with np.load(folder / "text.npz") as text:
            held_out = torch.from_numpy(text["held_out"])
        self._model = recipe.model()
        self._batches = list(held_out_batches(held_out, EVAL_BATCHES, batch=EVAL_BATCH, context=recipe.context))

    @torch.no_grad()
    def loss(self, arrays: Mapping[str, Any]) -> float:
        """Loss of the model with these parameters.

        Raises:
            ValueError: They are not this model's.
        """
        parameters = dict(self._model.named_parameters())
        if set(parameters) != set(arrays):
            raise ValueError(f"not this model's parameters: {sorted(set(parameters) ^ set(arrays))}")
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(arrays[name]))
        losses = [float(self._model.loss(batch)) for batch in self._batches]
        return sum(losses) / len(losses)


def write_task(folder: Path, recipe: Recipe) -> None:
    """Lay down what workers read: the recipe and the text (this Python's documentation and library source)."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe.__dict__))
    train, held_out = load([], TEXT_BYTES_MAX)
    np.savez(folder / "text.npz", train=train.numpy(), held_out=held_out.numpy())
