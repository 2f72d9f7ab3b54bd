"""The words of `results.md`: how it was measured, how to read it, and what it does not show."""

INTRO = """
# Islands on a thin link, beside DistributedDataParallel

Written by `make bench-link` (`benchmarks/link/bench.py`) from `results.json`, which has every figure with its date and
machine.

Two islands, each in a network namespace of its own behind a link with the rate (each way) and the delay (one way) of
the table, reach SeaweedFS and `diloco-blob aggregate --watch` in a third, and nothing else. DistributedDataParallel
(gloo, fp32 gradients, all defaults) has two ranks in the same two namespaces; what they send each other passes both
links and one delay. Both train the GPT of `workers/` with 3,276,800 parameters on Python's own text, 4 × 64 bytes a
step on each of the two, AdamW, one thread each. Islands: `sync_every` 50, outer lr 0.7, momentum 0.6, error feedback.
*Overlap* is `overlap = 1`, `adopt = "carry"`, four fragments.
"""

LIMITS = """
*DDP* is the link on which the exchange takes as long as the computation: 4 bytes per parameter, step and rank, for
two ranks; with more ranks it nears 8, while an island's traffic stays the same. *Islands* have 100 inner
steps for each exchange, and with overlap all that time to make it: below the figure they fall behind. The inner steps
are assumptions.

## How to read it

- *Waiting* of islands is the time inside `Island.step` up to the last step: snapshots, waiting, adopting. *By `status`*
  is `wait_s / (wait_s + train_s)` of `diloco-blob status --json`, in which `finish()` counts: the last contribution is
  sent and merged while nothing is left to train. In so short a run that is much, in a run of days nothing.
- *Waiting* of DDP is 1 − (a step under `no_sync`, both ranks computing) / (a step).
- DDP's loss after a step does not depend on the link, so it was trained once, on the fast link. Its seconds are those
  steps times the seconds of a step on the link in question. An island's seconds are measured: from the first inner step
  until the version was in the bucket, by the store's clock, which has whole seconds (one was added).
- *Reckoned*: the processor time of a step, measured before joining, takes the place of its seconds by the clock. DDP's
  exchange is taken at the link's full rate, 13.1 MB a step, as if it had no delay; it is measured to be slower.
  What islands waited is taken as it was. It is no measurement: the versions
  are those of the busy machine, and a quiet one would make others.
- Joining (13 MB of weights) is in neither; DDP sends the same weights when it starts.

## What it does not show

- Two cores had to do for two islands or ranks, the aggregator, the store and the link emulator, and other work ran on
  them too: seconds of compute differ from row to row. Part of what islands without overlap wait for is the aggregator,
  which looks once a second and needs a core that is busy training.
- Where the machine was so busy that 50 steps took longer than `policy.deadline_s`, versions hold one island's work:
  more rounds than steps / 50 in the table of what crossed the links tell it. That costs loss.
- Here 13 MB of gradients come with a tenth to a third of a second of computing. A GPU computes faster for the size of
  its model: 4,000 MB come with about a second. On the same link DDP would wait for a larger share there than here.
- Two islands, one seed, few rounds, a small model far from its best loss. DDP with gradients in 16 bits
  (`bf16_compress_hook`) would send half, with PowerSGD less; neither was tried, nor gradient accumulation.
- No loss of packets beyond full queues, no jitter, nobody else on the link. At 1000 Mbit/s and 50 ms one connection is
  held by its socket buffers, not by the link. Congestion control is the machine's default (bbr where this was made).
"""
