"""Faults that a programmer might make: each is put into the production code, and the simulation must find it.

A mistake is a function that patches; its docstring says what is wrong. Some of them were in the code once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from diloco_blob.aggregate import closing, collect, gather, merging, step
from diloco_blob.core.errors import Conflict
from diloco_blob.island import catchup, core, membership, outbox
from diloco_blob.island.arrays import total
from diloco_blob.protocol import keys, policy
from diloco_blob.protocol.records import ObjectRef, Watermark, encode
from diloco_blob.sim.network import Connection
from diloco_blob.store.body import Body, body_bytes
from diloco_blob.store.memory import MemoryStore
from diloco_blob.store.retrying import RetryingStore

Patch = pytest.MonkeyPatch
MISTAKES: dict[str, tuple[Callable[[Patch], None], set[str]]] = {}
"""By name: what patches, and the promises of which one is then broken first."""


def mistake(*promises: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MISTAKES[function.__name__] = (function, set(promises))
        return function

    return register


@mistake("once")
def no_watermarks(patch: Patch) -> None:
    """Receipts are read from the first on, whatever is history."""
    patch.setattr(gather, "watermark_of", lambda *_: Watermark(0, 0))
    patch.setattr(gather, "read_mail", _from_the_first(gather.read_mail))


def _from_the_first(read_mail: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ctx, head, island, _: read_mail(ctx, head, island, Watermark(0, 0))


@mistake("dangling")
def commit_before_its_files(patch: Patch) -> None:
    """The commit names files that are written afterwards."""
    files: list[Callable[[], object]] = []
    real_write, real_put = merging.write_files, merging._put_commit

    class Later:
        def __init__(self, store: Any) -> None:
            self._store = store

        def put(self, key: str, data: Body) -> None:
            whole = body_bytes(data)
            files.append(lambda: self._store.put(key, whole))

    def write(ctx: Any, *args: Any) -> Any:
        files.clear()
        return real_write(replace(ctx, store=Later(ctx.store)), *args)

    def put(*args: Any) -> Any:
        late = list(files)
        outcome = real_put(*args)
        for action in late:
            action()
        return outcome

    patch.setattr(merging, "write_files", write)
    patch.setattr(merging, "_put_commit", put)


@mistake("chain", "once", "fence", "numbering", "liveness")
def refusals_are_believed_to_be_ours(patch: Patch) -> None:
    """A refused create counts as a lost answer, without reading back whose object it is."""
    patch.setattr(RetryingStore, "_settle", lambda self, key, *_: self.meter.head(key))


@mistake("fence")
def a_refusal_is_never_ours(patch: Patch) -> None:
    """A create whose answer was lost, tried again, is taken for another's."""

    def settle(self: Any, key: str, data: bytes, error: Any) -> Any:
        raise error

    patch.setattr(RetryingStore, "_settle", settle)


@mistake("records")
def collected_names_become_free(patch: Patch) -> None:
    """Collection deletes receipts too, so that a process that slept can create them again."""
    real = collect._pushed_over

    def pushed_over(ctx: Any, fragment: int, oldest: int) -> Iterator[str]:
        yield from real(ctx, fragment, oldest)
        for chosen in collect._read_close(ctx, fragment, oldest).chosen:
            yield keys.receipt(chosen.island, fragment, chosen.seq)

    patch.setattr(collect, "_pushed_over", pushed_over)
    patch.setattr(collect, "_delete", lambda ctx, key: ctx.store.delete(key))


@mistake("clock", "liveness")
def the_machines_clock_is_trusted(patch: Patch) -> None:
    """Deadlines are measured with the clock of whoever looks."""
    patch.setattr(Connection, "now", lambda self: self._process.wall())


@mistake("fence", "steps")
def nobody_is_fenced(patch: Patch) -> None:
    """An island that was replaced goes on sending."""
    patch.setattr(membership.Membership, "check_fence", lambda _: None)
    patch.setattr(membership.Membership, "fenced", lambda *_: AssertionError("not raised"))

    def yield_to_newer(self: Any, key: str) -> Any:
        return outbox.decode(self.store.get(key)[0], outbox.Receipt)

    patch.setattr(outbox.Outbox, "_yield_to_newer", yield_to_newer)


@mistake("dangling")
def receipt_before_its_payload(patch: Patch) -> None:
    """The receipt exists before what it names."""

    def put(self: Any, receipt: Any, payload: bytes) -> bool:
        key = keys.receipt(receipt.island, receipt.fragment, receipt.seq)
        try:
            self.store.put(key, encode(receipt), if_absent=True)
        except Conflict:
            return False
        self.store.put(receipt.parts[0].key, payload)
        return True

    patch.setattr(outbox.Outbox, "_put", put)


@mistake("fence")
def a_receipt_is_written_anew_when_tried_again(patch: Patch) -> None:
    """With another write id, so that the one whose answer was lost looks like another process's. Was in the code."""
    real = outbox.Outbox._send

    def send(self: Any, parcel: Any) -> None:
        parcel.receipt = None
        real(self, parcel)

    patch.setattr(outbox.Outbox, "_send", send)


@mistake("collected", "aggregator", "audit")
def collection_goes_one_version_too_far(patch: Patch) -> None:
    """The horizon is one version too high."""
    real = collect.horizon
    patch.setattr(collect, "horizon", lambda head, keep: min(head + 1, real(head, keep) + 1))


@mistake("collected")
def payloads_are_collected_before_they_are_history(patch: Patch) -> None:
    """A payload goes if its number is just above the watermark."""
    real = collect.is_past
    patch.setattr(collect, "is_past", lambda key, island, fragment, mark: real(key, island, fragment, mark + 1))


@mistake("write-once", "chain")
def commits_are_written_over(patch: Patch) -> None:
    """Whoever comes last has made the version."""

    def put(ctx: Any, head: Any, commit: Any) -> Any:
        ctx.store.put(keys.commit(commit.fragment, commit.version), encode(commit))
        return merging.Outcome(commit=commit, ours=True)

    patch.setattr(merging, "_put_commit", put)


@mistake("write-once", "chain")
def the_store_ignores_the_precondition(patch: Patch) -> None:
    """Create-if-absent overwrites, as some gateways have it (and nobody probed)."""
    real = MemoryStore.put

    def put(self: Any, key: str, data: bytes, *, if_absent: bool = False, metadata: Any = None) -> Any:
        return real(self, key, data, metadata=metadata)

    patch.setattr(MemoryStore, "put", put)
    patch.setattr("diloco_blob.protocol.creation.probe", lambda *_: [])


@mistake("once", "rejected")
def a_merge_leaves_something_out(patch: Patch) -> None:
    """The last contribution of a close is forgotten."""
    real = merging.compute

    def compute(ctx: Any, head: Any, chosen: Any, *args: Any, **words: Any) -> Any:
        return real(ctx, head, chosen[:-1] or chosen, *args, **words)

    patch.setattr(merging, "compute", compute)


@mistake("watermarks", "once")
def a_watermark_goes_one_too_far(patch: Patch) -> None:
    """It passes a receipt that the close neither chose nor skipped."""
    real = closing._moved
    patch.setattr(
        closing, "_moved", lambda mail, version: Watermark(real(mail, version).seq + 1, real(mail, version).version)
    )


@mistake("weights")
def a_version_is_taken_and_not_written_into_the_model(patch: Patch) -> None:
    """The bookkeeping goes on, and the model stays where it was."""
    patch.setattr(core, "put", lambda *_: None)


@mistake("arithmetic")
def an_increment_is_summed_twice(patch: Patch) -> None:
    """The records say once; and replay, which runs the same code, agrees."""
    real = step.Share.next_tensor
    patch.setattr(
        step.Share,
        "next_tensor",
        lambda self: real(self) * np.float32(2) if len(self.increments) > 1 else real(self),
    )


@mistake("arithmetic")
def momentum_is_never_read_back(patch: Patch) -> None:
    """Every version begins with an empty buffer."""

    def read_outer(self: Any) -> Iterator[Any]:
        for _ in self._specs:
            yield {}

    patch.setattr(step.Stepper, "_read_outer", read_outer)


@mistake("steps")
def a_step_is_left_out(patch: Patch) -> None:
    """Every contribution says that it has one step fewer than it has."""
    real = outbox.Outbox._receipt

    def receipt(self: Any, *args: Any) -> Any:
        made = real(self, *args)
        return msgspec.structs.replace(made, steps=max(1, made.steps - 1))

    patch.setattr(outbox.Outbox, "_receipt", receipt)


@mistake("liveness")
def deadlines_never_fire(patch: Patch) -> None:
    """A round is closed when all are there, and only then."""
    real = policy.decide

    def decide(view: Any, rules: Any, *, drain: bool = False) -> Any:
        found = real(view, rules, drain=drain)
        return policy.Decision(reason=None) if found.reason in {"deadline", "grace"} else found

    patch.setattr(closing, "decide", decide)


@mistake("weights")
def updates_are_added_and_not_checked(patch: Patch) -> None:
    """An island applies what it should subtract with the wrong sign, and does not compare digests."""
    patch.setattr(catchup, "difference", total)

    class Believing:
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

    patch.setattr(catchup, "weights_digest", lambda _: Believing())


@mistake("skipped", "rejected", "aggregator", "audit", "liveness")
def answers_that_end_early_are_believed(patch: Patch) -> None:
    """Half a record is taken for a bad one. Was in the code."""
    patch.setattr(RetryingStore, "_check_length", lambda *_: None)


@mistake("rejected", "collected", "dangling", "skipped")
def a_payload_keeps_the_number_that_it_was_first_given(patch: Patch) -> None:
    """Its receipt takes the next number, and collection goes by the payload's. Was in the code."""
    real = outbox.Outbox._put

    def put(self: Any, receipt: Any, payload: bytes) -> bool:
        first = self.next_seq[receipt.fragment]
        (part,) = receipt.parts
        key = keys.payload(receipt.island, receipt.fragment, first, 0, part.digest)
        if receipt.seq != first:
            moved = msgspec.structs.replace(receipt, parts=(ObjectRef(key=key, digest=part.digest, size=part.size),))
            try:
                self.store.put(
                    keys.receipt(receipt.island, receipt.fragment, receipt.seq), encode(moved), if_absent=True
                )
            except Conflict:
                return False
            return True
        return real(self, receipt, payload)

    patch.setattr(outbox.Outbox, "_put", put)
