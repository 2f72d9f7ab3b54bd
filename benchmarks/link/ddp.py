"""One rank of torch's DistributedDataParallel on the same model, data and link: gloo, gradients in fp32, all defaults.

    ip netns exec ISLAND python ddp.py ADDRESS-OF-RANK-0 RANK --ranks 2 [--curve STEPS]

Without `--curve`: the median seconds of a step that exchanges nothing (`no_sync`, both ranks computing), and the mean
of as many synchronised steps as fit 15 s, at least 3. With it: a whole training, and the held-out loss after every
tenth step; that depends on the step alone, not on the link, so one such run serves for all links. Prints JSON.
"""

import argparse
import json
import os
import statistics
from time import perf_counter

import torch
import torch.distributed as dist
from network import DEVICE
from torch.nn.parallel import DistributedDataParallel
from training import Training

_EVAL_EVERY = 10
_MEASURE_S = 15.0


class Loss(torch.nn.Module):
    """The model's loss as a forward pass: what DistributedDataParallel wraps."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model = training.model

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch in nats."""
        return self.model.loss(batch)


def step(training: Training, parallel: DistributedDataParallel, number: int) -> float:
    """One synchronised step; returns its seconds."""
    start = perf_counter()
    parallel(training.batch(number)).backward()
    training.update(number)
    return perf_counter() - start


def measured(training: Training, parallel: DistributedDataParallel) -> dict[str, object]:
    """Seconds of a step with and without the exchange."""
    with parallel.no_sync():
        bare = [step(training, parallel, number) for number in range(6)][1:]
    first = [step(training, parallel, number) for number in range(2)]
    slowest = torch.tensor(first[1])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = [step(training, parallel, number) for number in range(max(3, min(60, int(_MEASURE_S / float(slowest)))))]
    return {"bare_step_s": statistics.median(bare), "step_s": statistics.mean(times), "steps": len(times)}


def curve(training: Training, parallel: DistributedDataParallel, num_steps: int) -> dict[str, object]:
    """Held-out bits per byte by number of steps done."""
    points = [(0, training.bits_per_byte())]
    for number in range(num_steps):
        step(training, parallel, number)
        if (number + 1) % _EVAL_EVERY == 0:
            points.append((number + 1, training.bits_per_byte()))  # on every rank: so nobody runs ahead
    return {"curve": points}


def main() -> None:
    """Join the group, measure or train, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("rank", type=int)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--curve", type=int, default=0)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    training = Training(args.rank)
    dist.init_process_group("gloo", init_method=f"tcp://{args.address}:7100", rank=args.rank, world_size=args.ranks)
    begun = perf_counter()
    parallel = DistributedDataParallel(Loss(training))  # sends rank 0's weights to all
    join_s = perf_counter() - begun
    said = curve(training, parallel, args.curve) if args.curve else measured(training, parallel)
    dist.destroy_process_group()
    print(json.dumps({"join_s": join_s, **said}))


if __name__ == "__main__":
    main()
