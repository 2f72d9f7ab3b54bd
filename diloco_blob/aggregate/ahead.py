"""Decoding ahead: while one tensor is merged, threads decode the next ones, and their results come in order.

Decoding is most of a merge, and zstd and numpy let other threads run meanwhile. What is computed does not depend on
it. The threads touch no store. What may be decoded ahead is bounded in bytes, so that memory stays bounded by the
largest tensor.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Self, TypeVar

_T = TypeVar("_T")

AHEAD_BYTES_MAX = 256 << 20
"""Of decoded tensors that wait; one may always wait, however large."""

THREADS_MAX = 4

VALUES_MIN = 1 << 20
"""A fragment with fewer values is not worth a thread."""


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Ahead:
    """Threads for one merge, if it is large enough for any.

    Args:
        values: Of the fragment.
        largest: Values of its largest tensor.
    """

    def __init__(self, values: int, largest: int) -> None:
        threads = min(THREADS_MAX, num_cpus())
        self.depth = max(1, min(threads, AHEAD_BYTES_MAX // max(1, 4 * largest)))
        """Tasks that may be under way at once."""
        self._pool = ThreadPoolExecutor(self.depth, "diloco-ahead") if values >= VALUES_MIN and threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def results(self, tasks: Iterable[Callable[[], _T]], depth: int | None = None) -> Iterator[_T]:
        """What the tasks return, in their order. Some may be begun before they are asked for.

        Args:
            tasks: Independent of each other within any `depth` of them.
            depth: Of these, how many may be under way at once.
        """
        if self._pool is None:
            for task in tasks:
                yield task()
            return
        rest = iter(tasks)
        waiting = deque(self._pool.submit(task) for task in islice(rest, min(self.depth, depth or self.depth)))
        while waiting:
            yield self._next(self._pool, waiting, rest)  # Not bound to a name: a tensor must not outlive its use.

    def _next(self, pool: ThreadPoolExecutor, waiting: deque[Future[_T]], rest: Iterator[Callable[[], _T]]) -> _T:
        result = waiting.popleft().result()
        waiting.extend(pool.submit(task) for task in islice(rest, 1))
        return result
