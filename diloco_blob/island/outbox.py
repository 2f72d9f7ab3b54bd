"""Sending: contributions become payload objects, then receipts, in the order in which they were taken.

Payloads first, receipt last: a receipt makes a contribution exist, so it never names an object that does not. The
receipt's name is the island's next number for the fragment, and creating it is the fence: if another process of the
same island holds that name, the older generation stops and the newer takes the next number. A contribution is encoded
once; sending may be tried as often as the store needs; what coding lost is kept only when the receipt exists.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Conflict, Corrupt, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.island.arrays import Arrays
from diloco_blob.island.fates import sent_before
from diloco_blob.island.membership import Membership
from diloco_blob.island.steps import ignore
from diloco_blob.island.trajectory import Contribution
from diloco_blob.protocol import keys
from diloco_blob.protocol.layout import fragment_layout
from diloco_blob.protocol.reading import read_limited
from diloco_blob.protocol.records import FORMAT, ObjectRef, Receipt, decode, encode
from diloco_blob.store.base import ObjectStore
from diloco_blob.wire import ErrorFeedback, Parts, codec_for, digest, pack_payload

log = logging.getLogger(__name__)

_RETRY_S = (1.0, 30.0)
"""Wait between tries of a send that the store's retry layer gave up on: from, at most."""


@dataclass
class _Parcel:
    contribution: Contribution
    sent: bool = False
    """Its receipt exists already (found when resuming): only the residual is brought up to date."""
    payload: bytes | None = None
    receipt: Receipt | None = None
    """As it is being sent: tried again, it must be the same bytes, or a receipt whose answer was lost would look like
    another process's."""
    residuals: Arrays = field(default_factory=dict)


@dataclass
class _Debt:
    """A contribution that became history without being merged: what it sent is owed again."""

    fragment: int
    seq: int


@dataclass
class _Note:
    """Something to do once everything queued before it is sent: write the local checkpoint."""

    action: Callable[["Outbox"], None]


@dataclass
class Outbox:
    """The queue of contributions of one island. `pump` is called by one thread; the rest from any."""

    store: ObjectStore
    membership: Membership
    clock: Clock
    ids: Ids
    next_seq: dict[int, int]
    """The number of the next contribution to each fragment."""
    feedback: dict[int, ErrorFeedback]
    """What coding still owes, by fragment."""
    at: Callable[[str], None] = ignore
    """Told of each step (`steps.STEPS`)."""
    on_sent: Callable[[Contribution], None] = ignore
    num_sent: int = 0
    """Contributions whose receipts exist, of this process."""
    failure: Unavailable | None = None
    """Why the next piece of work could not be done when it was last tried; None if it was, or was not tried yet."""
    _queue: deque[_Parcel | _Debt | _Note] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _tries: int = 0
    _retry_at: float = 0.0

    def submit(
        self,
        contributions: Sequence[Contribution],
        *,
        before: Callable[["Outbox"], None] | None = None,
        sent: frozenset[int] = frozenset(),
    ) -> None:
        """Queue contributions.

        Args:
            contributions: In the order in which they are to be sent.
            before: Called once all that was queued earlier is sent, before these are.
            sent: Fragments whose receipt exists already.
        """
        with self._lock:
            if before is not None:
                self._queue.append(_Note(before))
            self._queue.extend(_Parcel(item, sent=item.fragment in sent) for item in contributions)

    def owe(self, fragment: int, numbers: Iterable[int]) -> None:
        """Queue contributions that were sent in vain: whatever is queued later takes along what they held."""
        with self._lock:
            self._queue.extend(_Debt(fragment, seq) for seq in numbers)

    def unsent(self, fragment: int) -> int:
        """Contributions to a fragment whose receipt does not exist yet."""
        with self._lock:
            return sum(isinstance(item, _Parcel) and item.contribution.fragment == fragment for item in self._queue)

    def notes(self) -> int:
        """Things to be done that still wait for earlier contributions, or for the store: a checkpoint, a departure."""
        with self._lock:
            return sum(isinstance(item, _Note) for item in self._queue)

    def empty(self) -> bool:
        """Whether everything that was submitted is done."""
        with self._lock:
            return not self._queue

    def pump(self) -> float | None:
        """Do the next piece of work.

        Returns:
            Seconds until there is something to do again; None if the queue is empty.

        Raises:
            Fenced: A newer process has taken over this island.
            Denied: The store refuses to be written to.
        """
        with self._lock:
            item = self._queue[0] if self._queue else None
        if item is None:
            return None
        early = self._retry_at - self.clock.monotonic()
        if early > 0:
            return early
        try:
            if isinstance(item, _Note):
                self.membership.check_fence()  # a fenced process must not replace the newer one's checkpoint
                item.action(self)
            elif isinstance(item, _Debt):
                self._owe(item)
            else:
                self._send(item)
        except Unavailable as error:
            low, high = _RETRY_S
            delay = min(high, low * 2.0 ** min(self._tries, 10))
            self._tries += 1
            self.failure = error
            self._retry_at = self.clock.monotonic() + delay
            log.warning("island %s: not sent yet, trying again in %.0f s: %s", self.membership.name, delay, error)
            return delay
        self._tries, self._retry_at, self.failure = 0, 0.0, None
        with self._lock:
            self._queue.popleft()
            self.num_sent += isinstance(item, _Parcel)
            more = bool(self._queue)
        return 0.0 if more else None

    def residuals(self) -> dict[int, Arrays]:
        """What coding still owes, by fragment; for the checkpoint."""
        return {p: feedback.export() for p, feedback in self.feedback.items()}

    def _owe(self, debt: _Debt) -> None:
        run, name = self.membership.run, self.membership.name
        sent = sent_before(self.store, run, name, debt.fragment, debt.seq, run.run.settings.up)
        if sent is not None:
            self.feedback[debt.fragment].owe(sent)
            log.info("island %s: contribution %d to fragment %d is owed again", name, debt.seq, debt.fragment)

    def _send(self, parcel: _Parcel) -> None:
        item = parcel.contribution
        if parcel.payload is None:
            parcel.payload = self._encode(parcel)
        if parcel.sent:
            self._sent(parcel, self.next_seq[item.fragment])
            return
        self.membership.check_fence()
        if parcel.receipt is None:
            parcel.receipt = self._receipt(item, parcel.payload, self.next_seq[item.fragment])
        while not self._put(parcel.receipt, parcel.payload):
            parcel.receipt = self._receipt(item, parcel.payload, parcel.receipt.seq + 1)
        self.at("send.receipt.after_put")
        self._sent(parcel, parcel.receipt.seq)

    def _sent(self, parcel: _Parcel, seq: int) -> None:
        item = parcel.contribution
        if item.end is not None:
            item.owed = self.feedback[item.fragment].still_owed(parcel.residuals)
        item.delta = {}
        item.seq = seq  # Last: from here on the training thread may settle it, and needs what is owed.
        self.next_seq[item.fragment] = seq + 1
        self.feedback[item.fragment].keep(parcel.residuals)
        self.on_sent(item)

    def _encode(self, parcel: _Parcel) -> bytes:
        """The payload of a contribution; what coding it loses waits in the parcel until its receipt exists."""
        item = parcel.contribution
        feedback, version = self.feedback[item.fragment], item.base_version + 1

        def coded() -> Iterator[tuple[str, Parts]]:
            for name, array in item.delta.items():
                result = feedback.code(name, array, version)
                parcel.residuals[name] = result.residual
                yield name, result.parts

        layout = fragment_layout(self.membership.run.run.tensors, item.fragment)
        return pack_payload(coded(), layout, codec_for(self.membership.run.run.settings.up, version))

    def _receipt(self, item: Contribution, payload: bytes, seq: int) -> Receipt:
        """The record of a contribution under a number, which is that of its payload too: both are history together."""
        name = digest(payload)
        key = keys.payload(self.membership.name, item.fragment, seq, 0, name)
        return Receipt(
            format=FORMAT,
            run=self.membership.run.digest,
            write_id=self.ids.fresh(),
            island=self.membership.name,
            generation=self.membership.generation,
            fragment=item.fragment,
            seq=seq,
            base_version=item.base_version,
            steps=item.steps,
            tokens=item.tokens,
            step_to=item.step_to,
            tokens_to=item.tokens_to,
            cursor=item.cursor,
            parts=(ObjectRef(key=key, digest=name, size=len(payload)),),
            train_s=item.train_s,
        )

    def _put(self, receipt: Receipt, payload: bytes) -> bool:
        """Put the payload, then create the receipt; False if an older generation has its number.

        May be called again after a failure with the same receipt: then it has the same bytes, by which it is known as
        ours where only the answer was lost.
        """
        (part,) = receipt.parts
        self.at("send.payload.before_put")
        self.store.put(part.key, payload)
        self.at("send.payload.after_put")
        key = keys.receipt(receipt.island, receipt.fragment, receipt.seq)
        self.at("send.receipt.before_put")
        try:
            self.store.put(key, encode(receipt), if_absent=True)
        except Conflict:
            try:
                other = self._yield_to_newer(key)
            except Corrupt as error:  # No receipt of anybody: it will be skipped, and has the number.
                log.warning("island %s: %s is not one of its receipts: %s", receipt.island, key, error)
                return False
            # Or the very bytes that we resumed to send: an earlier process's receipt arrived late.
            return other.parts[0].digest == part.digest and other.step_to == receipt.step_to
        return True

    def _yield_to_newer(self, key: str) -> Receipt:
        """The receipt that has our number; whoever is not newer than its writer stops."""
        data, _ = read_limited(self.store, key)
        other = decode(data, Receipt, run=self.membership.run.digest)
        if other.generation >= self.membership.generation:
            raise self.membership.fenced(other.generation)
        return other
