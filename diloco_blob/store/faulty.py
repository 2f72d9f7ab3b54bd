"""Faults on purpose, by a script: the same calls fail in the same way every time.

    store = FaultyStore(inner, [Fault("put", "lose_answer", key=r"commits/", times=2)])

Put `RetryingStore` around it, as it is around a backend. The faults are those that stores and networks really
show: a request that never arrives, an answer that is lost after the effect, an SDK that repeats a create and
reports its own object as another's, a body that is cut short, slowness.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from diloco_blob.core.errors import Conflict, DilocoError, Unavailable
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.body import Body

_T = TypeVar("_T")

Operation = Literal["get", "get_range", "head", "put", "list", "list_dirs", "delete", "now", "any"]

Effect = Literal["refuse", "lose_answer", "conflict_after", "truncate", "delay"]


class Fault(Struct, frozen=True):
    """What goes wrong with which calls."""

    operation: Operation
    """The method that fails; `any` for all of them."""
    effect: Effect
    """refuse: raise `error`, nothing happens. lose_answer: it happens, then raise `error`. conflict_after: it happens,
    then raise `Conflict`, as an SDK does that repeats a create by itself. truncate: return only the first half of the
    bytes. delay: call `hook` first, then go on."""
    key: str = ""
    """A regular expression that is searched for in the key or prefix."""
    skip: int = 0
    """How many matching calls go well first."""
    times: int = 1
    """How many matching calls fail after these."""
    error: Callable[[], DilocoError] = lambda: Unavailable("a fault on purpose")
    """Makes what is raised by refuse and lose_answer."""
    hook: Callable[[], None] = lambda: None
    """What delay calls: let a virtual clock advance, wait for another thread, change the store."""


class FaultyStore:
    """Does what `inner` does, except where a fault says otherwise.

    Safe to use from many threads. Each call counts for every fault that it matches, and suffers from the
    first whose turn it is.

    Args:
        inner: The sound store.
        faults: The script; more can be given later with `add`.
    """

    def __init__(self, inner: ObjectStore, faults: Sequence[Fault] = ()) -> None:
        self.url = inner.url
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._matched: list[int] = []
        self.add(*faults)

    def add(self, *faults: Fault) -> None:
        """Add faults to the end of the script; their calls are counted from now on."""
        with self._lock:
            self._faults += faults
            self._matched += [0] * len(faults)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        effect, (data, info) = self._call("get", key, lambda: self._inner.get(key))
        return (_half(data), info) if effect == "truncate" else (data, info)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        effect, data = self._call("get_range", key, lambda: self._inner.get_range(key, start, length))
        return _half(data) if effect == "truncate" else data

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._call("head", key, lambda: self._inner.head(key))[1]

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`."""

        def put() -> ObjectInfo:
            return self._inner.put(key, data, if_absent=if_absent, metadata=metadata)

        return self._call("put", key, put)[1]

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        yield from self._call("list", prefix, lambda: [*self._inner.list(prefix, start_after=start_after)])[1]

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        yield from self._call("list_dirs", prefix, lambda: [*self._inner.list_dirs(prefix)])[1]

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._call("delete", key, lambda: self._inner.delete(key))

    def now(self) -> float:
        """See `ObjectStore.now`."""
        return self._call("now", "", self._inner.now)[1]

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._inner.close()

    def _call(self, operation: Operation, key: str, action: Callable[[], _T]) -> tuple[Effect | None, _T]:
        fault = self._next_fault(operation, key)
        if fault is None:
            return None, action()
        if fault.effect == "refuse":
            raise fault.error()
        if fault.effect == "delay":
            fault.hook()
        result = action()
        if fault.effect == "lose_answer":
            raise fault.error()
        if fault.effect == "conflict_after":
            raise Conflict(f"{key} exists already in {self.url}")
        return fault.effect, result

    def _next_fault(self, operation: Operation, key: str) -> Fault | None:
        chosen = None
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.operation not in {operation, "any"} or not re.search(fault.key, key):
                    continue
                turn = self._matched[number] - fault.skip
                self._matched[number] += 1
                if chosen is None and 0 <= turn < fault.times:
                    chosen = fault
        return chosen


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]
