"""Islands with `overlap = 0` through a bucket against an in-process loop of torch's own optimizers.

The reference trains the same replicas one after another with `torch.optim.AdamW` and steps the global weights with
`torch.optim.SGD(nesterov=True)`. After each exchange it takes over the bucket's weights, so that each exchange
is compared on its own: two trajectories that differ in a last bit would drift apart through training itself.

Bit for bit does not hold, for one reason: torch computes θ + (−lr)·d in one fused operation with one rounding; here
the step lr·d is a tensor of its own, since it is what is coded and sent, and is then subtracted: two roundings. The
reference takes the mean over replicas in float64, as the merge does; in fp32 its own rounding would be measured.
"""

import numpy as np
import pytest
import torch
from bucket_run import Trace, Weights, adamw, heads, inner_step, make_net, run_islands, weights_of

from diloco_blob import Settings
from diloco_blob.core.settings import Outer, Policy, Sync
from diloco_blob.protocol.layout import make_layout, offsets

ISLANDS, STEPS, SYNC_EVERY = 3, 40, 8


def classic(num_fragments: int) -> Settings:
    return Settings(
        sync=Sync(sync_every=SYNC_EVERY, num_fragments=num_fragments),
        outer=Outer(optimizer="nesterov", lr=0.7, momentum=0.9),
        policy=Policy(islands=ISLANDS, quorum=ISLANDS, grace_s=60.0, deadline_s=120.0),
    )


def ulps(found: torch.Tensor, expected: torch.Tensor, old: torch.Tensor) -> float:
    """Largest difference in units of the last place of the larger of old and new weight."""
    unit = np.spacing(np.maximum(np.abs(old.numpy()), np.abs(expected.numpy())))
    return float(np.max(np.abs(found.numpy().astype(np.float64) - expected.numpy().astype(np.float64)) / unit))


def replay_against_torch(traces: list[Trace], num_fragments: int) -> tuple[int, float]:
    """Run the reference beside the traces; returns the number of exchanges and the largest difference in ulps."""
    nets = [make_net() for _ in range(ISLANDS)]
    inner = [adamw(net) for net in nets]
    shapes = [(name, tuple(p.shape), "float32") for name, p in nets[0].named_parameters()]
    fragment_of = {spec.name: spec.fragment for spec in make_layout(shapes, num_fragments)}
    world = {name: torch.nn.Parameter(value) for name, value in weights_of(nets[0]).items()}
    outer = {p: torch.optim.SGD([world[n] for n in world if fragment_of[n] == p], lr=0.7, momentum=0.9, nesterov=True)
             for p in range(num_fragments)}  # fmt: skip
    starts = offsets(num_fragments, SYNC_EVERY)
    exchanges, worst = 0, 0.0
    for step in range(1, STEPS + 1):
        for number, net in enumerate(nets):
            inner_step(net, inner[number], number, step - 1)
            assert_same(weights_of(net), traces[number].before[step - 1], f"island {number} before boundary {step}")
        for p in range(num_fragments):
            if (step - starts[p]) % SYNC_EVERY:
                continue
            exchanges += 1
            names = [name for name in world if fragment_of[name] == p]
            old = {name: world[name].detach().clone() for name in names}
            for name in names:
                local = [dict(net.named_parameters())[name].detach() for net in nets]
                world[name].grad = torch.stack([old[name] - value for value in local]).double().mean(dim=0).float()
            outer[p].step()
            with torch.no_grad():
                for name in names:
                    new = traces[0].after[step - 1][name]
                    worst = max(worst, ulps(new, world[name].detach(), old[name]))
                    world[name].copy_(new)
                    for net in nets:
                        dict(net.named_parameters())[name].copy_(new)
    return exchanges, worst


def assert_same(found: Weights, expected: Weights, where: str) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{where}: {name}"


@pytest.mark.parametrize("num_fragments", [1, 4])
def test_each_exchange_agrees_with_torch_to_one_ulp(num_fragments):
    traces = run_islands(f"memory://torch-{num_fragments}", classic(num_fragments), islands=ISLANDS, steps=STEPS)
    exchanges, worst = replay_against_torch(traces, num_fragments)
    assert exchanges == num_fragments * STEPS // SYNC_EVERY
    assert 0.0 < worst <= 1.0
    for trace in traces[1:]:
        assert_same(trace.final, traces[0].final, "at the end every island holds the same weights")


@pytest.mark.parametrize("num_fragments", [1, 4])
def test_the_bucket_run_repeated_gives_the_same_bits(num_fragments):
    urls = [f"memory://repeat-{num_fragments}-{number}" for number in range(2)]
    first, second = (run_islands(url, classic(num_fragments), islands=ISLANDS, steps=STEPS) for url in urls)
    for number in range(ISLANDS):
        assert_same(first[number].final, second[number].final, f"island {number}")
    assert heads(urls[0]) == heads(urls[1])
