"""Many seeds, one after the other or on many cores; always in order, so that the first failure is the lowest seed."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

from diloco_blob.sim.protocol import Outcome, simulate

_CHUNK = 8
"""Seeds that a worker is given at a time."""


def outcomes(first: int, count: int, jobs: int = 1) -> Iterator[Outcome]:
    """What becomes of the seeds `first` to `first + count − 1`, in order.

    Args:
        first: The first seed.
        count: How many.
        jobs: Processes to share them among.
    """
    seeds = iter(range(first, first + count))
    if jobs <= 1:
        yield from map(simulate, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        # In portions: whoever stops at the first failure leaves little behind that is still to be played.
        while portion := list(islice(seeds, 8 * jobs * _CHUNK)):
            yield from pool.map(simulate, portion, chunksize=_CHUNK)


def trace(seed: int) -> list[str]:
    """The events of one seed, a line each: virtual seconds, who, what. The same for ever, byte for byte."""
    lines: list[str] = []
    simulate(seed, lambda seconds, who, what: lines.append(f"{seconds:10.3f}  {who:<16} {what}"))
    return lines
