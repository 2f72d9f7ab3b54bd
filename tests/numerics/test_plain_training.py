"""An island alone, uncompressed, outer learning rate 1, no momentum, is plain training to one rounding an exchange."""

import numpy as np
import torch
from bucket_run import adamw, inner_step, make_net, run_islands, weights_of

from diloco_blob import Settings
from diloco_blob.core.settings import Merge, Outer, Policy, Sync

STEPS, SYNC_EVERY = 50, 10

ALONE = Settings(
    sync=Sync(sync_every=SYNC_EVERY),
    merge=Merge(staleness="constant"),
    outer=Outer(optimizer="sgd", lr=1.0, momentum=0.0),
    policy=Policy(islands=1, quorum=1, grace_s=0.0, deadline_s=60.0),
)


def test_each_exchange_gives_back_the_islands_own_weights():
    (trace,) = run_islands("memory://alone-each", ALONE, islands=1, steps=STEPS)
    exchanged = 0
    mark = weights_of(make_net())
    for step, (before, after) in enumerate(zip(trace.before, trace.after, strict=True), start=1):
        if step % SYNC_EVERY:
            assert all(torch.equal(before[name], after[name]) for name in before)
            continue
        exchanged += 1
        for name in before:
            old, own, new = mark[name].numpy(), before[name].numpy(), after[name].numpy()
            # new = old − (old − own): the inner difference is rounded once, the outer one once; each error is at most
            # half a unit in the last place of the larger of old and new.
            bound = np.spacing(np.maximum(np.abs(old), np.abs(own)))
            assert np.all(np.abs(new.astype(np.float64) - own.astype(np.float64)) <= bound), name
        mark = after
    assert exchanged == STEPS // SYNC_EVERY


def test_fifty_steps_with_five_exchanges_are_plain_training():
    (trace,) = run_islands("memory://alone-fifty", ALONE, islands=1, steps=STEPS)
    net = make_net()
    optimizer = adamw(net)
    for step in range(STEPS):
        inner_step(net, optimizer, 0, step)
    plain = weights_of(net)
    for name, expected in plain.items():
        error = (trace.final[name] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: {error:.2e}"
