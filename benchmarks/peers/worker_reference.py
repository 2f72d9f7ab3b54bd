"""What the systems are compared with: both workers in one process, and torch's SGD as the outer optimizer.

    python worker_reference.py FOLDER diloco|alone

diloco: the algorithm of arXiv 2311.08105 with a uniform mean, no network and no rounding but float32's. alone: the same
two workers, never exchanging anything. Deterministic: a system that exchanges float32 and waits for both workers should
end within rounding of `diloco`.
"""

import sys

import torch
from task import Task

NUM_WORKERS = 2


def main() -> None:
    """Train both workers to the end."""
    folder, exchange = sys.argv[1], sys.argv[2] == "diloco"
    tasks = [Task(folder, index) for index in range(NUM_WORKERS)]
    globals_ = [p.detach().clone().requires_grad_() for p in tasks[0].model.parameters()]
    outer = tasks[0].recipe.outer(globals_)

    def merge() -> None:
        for i, p in enumerate(globals_):
            local = torch.stack([list(task.model.parameters())[i].detach() for task in tasks])
            p.grad = (p.detach() - local).mean(0)
        outer.step()
        with torch.no_grad():
            for task in tasks:
                for mine, new in zip(task.model.parameters(), globals_, strict=True):
                    mine.copy_(new)

    tasks[1].announce()
    tasks[0].ready()
    for round_index in range(tasks[0].recipe.rounds):
        for task in tasks:
            task.inner_steps(round_index)
        if exchange:
            merge()
        for task in tasks:
            task.synced(round_index + 1, 0.0)
    for task in tasks:
        task.finished()


if __name__ == "__main__":
    main()
