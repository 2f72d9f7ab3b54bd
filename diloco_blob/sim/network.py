"""A process's connection to the store: every request takes time, and may meet a fault."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from diloco_blob.core.errors import Conflict, DilocoError, Unavailable
from diloco_blob.sim.faults import Fate, FaultPlan
from diloco_blob.sim.world import Process
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.body import Body, body_bytes

_T = TypeVar("_T")

LATE_S = (0.5, 30.0)
"""How long after it was sent a late request has its effect."""


class Connection:
    """An `ObjectStore` for one process: makes one attempt at everything, as a backend does.

    Requests are on their way on their own: a process that is killed or stalls meanwhile does not take them back.

    Args:
        process: Whose.
        bucket: Where requests have their effect, at once and whole.
        plan: What befalls them.
    """

    def __init__(self, process: Process, bucket: ObjectStore, plan: FaultPlan) -> None:
        self.url = bucket.url
        self._process = process
        self._bucket = bucket
        self._plan = plan
        self._thread = threading.get_ident()

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`."""
        return self._call("get", key, lambda: self._bucket.get(key), cut=lambda found: (_half(found[0]), found[1]))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._call("get_range", key, lambda: self._bucket.get_range(key, start, length), cut=_half)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        return self._call("head", key, lambda: self._bucket.head(key))

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`. A request may have its effect when a file of its sender is closed long since."""
        body = body_bytes(data)

        def effect() -> ObjectInfo:
            return self._bucket.put(key, body, if_absent=if_absent, metadata=metadata)

        return self._call("put", key, effect, num_bytes=len(body), creates=if_absent)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        yield from self._call("list", prefix, lambda: [*self._bucket.list(prefix, start_after=start_after)])

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        yield from self._call("list_dirs", prefix, lambda: [*self._bucket.list_dirs(prefix)])

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._call("delete", key, lambda: self._bucket.delete(key))

    def now(self) -> float:
        """See `ObjectStore.now`: the store's clock, whatever the process's own says."""
        self._process.check_alive()
        return self._bucket.now()

    def close(self) -> None:
        """See `ObjectStore.close`."""

    def _call(
        self,
        operation: str,
        key: str,
        effect: Callable[[], _T],
        *,
        num_bytes: int = 0,
        creates: bool = False,
        cut: Callable[[Any], Any] | None = None,
    ) -> _T:
        if threading.get_ident() != self._thread:
            return effect()  # The probe races creates in threads of its own: no part of the world.
        self._process.check_alive()
        world, task = self._process.world, self._process.world.current
        if task is None:
            raise AssertionError("only a task of a process makes requests")
        fate = self._plan.draw(operation, key, creates=creates, now=world.now)
        if fate != "sound" and world.traced:
            world.trace(self._process.name, f"  ({fate}: {operation} {key})")
        request = _Request(self._plan, fate, self._plan.transfer_s(num_bytes, slow=fate == "slow"))
        self._send(request, effect, cut, f"{operation} {key}", task.ticket())
        found = world.suspend()
        self._process.check_alive()
        if isinstance(found, DilocoError):
            raise found
        return cast(_T, found)

    def _send(
        self,
        request: "_Request",
        effect: Callable[[], object],
        cut: Callable[[Any], Any] | None,
        what: str,
        wake: Callable[..., None],
    ) -> None:
        """Let the request go its way; `wake` is given whatever its sender hears first."""
        world, plan = self._process.world, self._plan

        def land() -> None:
            if request.fate == "late":
                world.trace(self._process.name, f"  (late, takes effect now: {what})")
            result: object
            try:
                result = effect()
            except DilocoError as error:
                result = error
            answer = request.answer(result, cut)
            if answer is not _SILENCE:
                world.after(plan.transfer_s(0, slow=False), lambda: arrive(answer))

        def again() -> None:
            world.trace(self._process.name, f"  (repeated, takes effect again: {what})")
            with contextlib.suppress(DilocoError):
                effect()

        def arrive(answer: object) -> None:
            if plan.swallows(what.partition(" ")[0], world.now):
                world.trace(self._process.name, f"  (outage: no answer to {what})")
                if plan.outage_refuses:
                    wake(Unavailable(f"reset: {what}"))
            else:
                wake(answer)

        if request.arrives_s is not None:
            world.after(request.arrives_s, land)
        if request.again_s is not None:
            world.after(request.again_s, again)
        if request.says_s is not None:
            world.after(request.says_s, lambda: wake(Unavailable(f"{request.fate}: {what}")))
        patience_s = max(plan.timeout_s, request.patience_s)
        world.after(patience_s, lambda: wake(Unavailable(f"timed out: {what}")))


class _Request:
    """When a request has its effect, and what its sender hears, by its fate."""

    def __init__(self, plan: FaultPlan, fate: Fate, transfer_s: float) -> None:
        dice = plan.dice
        self.arrives_s: float | None = transfer_s
        """None: never."""
        self.again_s: float | None = None
        """When it has its effect a second time."""
        self.says_s: float | None = None
        """When the sender hears of a failure; None: not before it gives up."""
        self.patience_s = transfer_s * 3.0
        """A large upload has more time."""
        self.fate = fate
        if fate in {"lost before", "outage"}:
            self.arrives_s = None
            if fate == "outage" and plan.outage_refuses:
                self.says_s = transfer_s
        elif fate in {"refused 409", "refused 429", "refused 500", "refused 503"}:
            self.arrives_s, self.says_s = None, transfer_s
        elif fate == "reset":
            self.says_s = transfer_s * dice.uniform(0.5, 2.0)
            if dice.chance(0.5):
                self.arrives_s = None
        elif fate == "late":
            self.arrives_s = transfer_s + dice.uniform(*LATE_S)
            self.patience_s = 0.0
        elif fate == "repeated":
            self.again_s = transfer_s + dice.uniform(*LATE_S)

    def answer(self, result: object, cut: Callable[[Any], Any] | None) -> object:
        """What the sender hears of `result`."""
        if self.fate in {"lost after", "late", "reset"}:
            return _SILENCE
        if isinstance(result, DilocoError):
            return result
        if self.fate == "refused 412":
            return Conflict("the object exists already")
        return cut(result) if self.fate == "truncated" and cut is not None else result


_SILENCE = object()
"""No answer."""


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]
