"""Real islands, each in a thread with its own torch model, around one bucket with a real aggregator."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from diloco_blob import Island, Settings, open_store
from diloco_blob.aggregate import aggregate
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import NotFound
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol.heads import find_head, read_run

Weights = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """A small network with an embedding, a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.hidden = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(x))))


def make_net() -> Net:
    torch.manual_seed(7)
    return Net()


def batch(island: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: a pure function of island and step."""
    generator = torch.Generator().manual_seed(1_000_003 * island + step)
    x = torch.randint(0, 16, (8, 4), generator=generator)
    return x, (3 * x + island) % 16


def inner_step(net: Net, optimizer: torch.optim.Optimizer, island: int, step: int) -> float:
    x, y = batch(island, step)
    loss = torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def adamw(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)


def weights_of(net: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@dataclass
class Trace:
    """What one island's weights were before and after each step boundary."""

    before: list[Weights] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)
    final: Weights = field(default_factory=dict)


def run_islands(url: str, settings: Settings, *, islands: int, steps: int) -> list[Trace]:
    """Train `islands` islands for `steps` inner steps each through the bucket at `url`.

    All start from the same weights; the order in which threads get their turn does not matter with `overlap = 0` and a
    quorum of all islands.
    """
    torch.set_num_threads(1)
    nets = [make_net() for _ in range(islands)]
    traces = [Trace() for _ in range(islands)]
    failures: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)
            stop.set()

    def island(number: int) -> None:
        net, trace = nets[number], traces[number]
        optimizer = adamw(net)
        with Island(url, model=net, optimizer=optimizer, name=f"island-{number}", settings=settings) as island:
            while island.steps < steps and not stop.is_set():
                loss = inner_step(net, optimizer, number, island.steps)
                trace.before.append(weights_of(net))
                island.step(tokens=32, loss=loss)
                trace.after.append(weights_of(net))
            island.finish()
        trace.final = weights_of(net)

    def aggregator() -> None:
        clock, ids = SystemClock(), SystemIds()
        store = open_store(url)
        run = None
        hints: dict[int, int] = {}
        while not stop.is_set():
            try:
                run = run or read_run(store)
            except NotFound:
                stop.wait(0.01)
                continue
            for report in aggregate(store, run=run, clock=clock, ids=ids, hints=hints):
                hints[report.fragment] = report.version
            stop.wait(0.01)

    threads = [threading.Thread(target=guarded, args=(lambda n=n: island(n),)) for n in range(islands)]
    beside = threading.Thread(target=guarded, args=(aggregator,))
    beside.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    beside.join()
    if failures:
        raise failures[0]
    return traces


def heads(url: str) -> list[tuple[int, str]]:
    """Version and weights digest of each fragment's head."""
    store = open_store(url)
    run = read_run(store)
    found = [find_head(store, run, p) for p in range(run.run.settings.sync.num_fragments)]
    return [(head.version, head.weights.digest) for head in found]
