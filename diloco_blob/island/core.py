"""The island itself, on arrays: what happens at each step boundary, in which order, and what it waits for.

At a step boundary: count; snapshot what is due and hand it to the outbox, unless too much is unsent; without
overlap wait for the version that follows, within limits; take what has arrived; pause if nobody has answered for
long. What cannot be snapshot stays in the progress since the mark: it goes out with the next contribution. The order
is written once, as a generator that yields whenever it cannot go on, so that a training loop can block on it and a
simulation can interleave it with everything else.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import SupportsFloat

import msgspec

from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import Corrupt, InvalidSettings, Unavailable
from diloco_blob.core.ids import Ids
from diloco_blob.core.limits import CURSOR_CHARS_MAX
from diloco_blob.island.arrays import Arrays, first_not_finite
from diloco_blob.island.checks import check_cursor, checked_tokens
from diloco_blob.island.inbox import Inbox
from diloco_blob.island.joining import IslandOptions, Joined, join_run, put
from diloco_blob.island.outbox import Outbox
from diloco_blob.island.pace import Pace
from diloco_blob.island.patience import Patience
from diloco_blob.island.port import ModelPort
from diloco_blob.island.pumps import Driver
from diloco_blob.island.reporter import Evals, Reporter, earlier_status
from diloco_blob.island.saving import Moment, Saver
from diloco_blob.island.steps import ignore
from diloco_blob.island.trajectory import Contribution, Trajectory
from diloco_blob.protocol.layout import fragment_tensors
from diloco_blob.protocol.records import FORMAT, Eval, IslandStatus
from diloco_blob.store import RetryingStore
from diloco_blob.wire import ErrorFeedback

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Longest sleep while waiting, so that limits are looked at."""


@dataclass
class IslandCore:
    """One island: see the module's docstring. Made by `start`."""

    store: RetryingStore
    port: ModelPort
    options: IslandOptions
    clock: Clock
    ids: Ids
    driver: Driver
    joined: Joined
    at: Callable[[str], None] = ignore
    state: str = "starting"
    message: str = ""
    loss: SupportsFloat | None = None
    """Of the last step; a tensor is read only when somebody wants to see it."""
    wait_s: float = 0.0
    train_s: float = 0.0
    staleness: int = 0
    evals: Evals = field(default_factory=Evals)

    def __post_init__(self) -> None:
        joined, settings = self.joined, self.joined.run.run.settings
        self.run = joined.run
        self.membership = joined.membership
        self.sync = settings.sync
        self._max_staleness = settings.policy.max_staleness
        self.trajectories: list[Trajectory] = joined.trajectories
        self.steps, self.tokens, self.cursor = joined.steps, joined.tokens, joined.cursor
        self.pace = Pace(self.sync)
        self._names = [
            [spec.name for spec in fragment_tensors(self.run.run.tensors, p)] for p in range(self.sync.num_fragments)
        ]
        self._sent_at_step = joined.sent_at or [self.steps - self.sync.overlap] * self.sync.num_fragments
        self._watermarks = [0] * self.sync.num_fragments
        self._finished = False
        now = self.clock.monotonic()
        self._boundary = self._started = now
        self._tokens_before = self.tokens
        self._waiting_since: float | None = None
        feedback = {
            p: ErrorFeedback(settings.up, {name: joined.residuals[name] for name in names if name in joined.residuals})
            for p, names in enumerate(self._names)
        }
        self.outbox = Outbox(
            store=self.store,
            membership=self.membership,
            clock=self.clock,
            ids=self.ids,
            next_seq=dict(joined.next_seq),
            feedback=feedback,
            at=self.at,
            on_sent=self._on_sent,
        )
        self.patience = Patience(self.store, self.outbox, self.clock, self.sync, settings.policy)
        self.inbox = Inbox(
            store=self.store,
            run=self.run,
            island=self.membership.name,
            clock=self.clock,
            ids=self.ids,
            at=self.at,
        )
        for trajectory in self.trajectories:
            self.inbox.start(trajectory.fragment, trajectory.version, trajectory.mirror)
        self.saver = Saver(self.options.checkpoint_dir, self.clock, waits=self.sync.overlap == 0, at=self.at)
        self._before = earlier_status(self.store, self.membership.name, self.run.digest)
        if self._before is not None:
            self.evals = Evals(self._before.first_eval, self._before.last_eval)
        self.reporter = Reporter(store=self.store, clock=self.clock, status=self.status)

    @property
    def version(self) -> int:
        """Lowest adopted version over the fragments."""
        return min(trajectory.version for trajectory in self.trajectories)

    def begin(self) -> Iterator[str]:
        """Start the pumps and do the exchange that the checkpoint says was due, if any."""
        self.driver.start([self.outbox.pump, self.inbox.pump, self.reporter.pump])
        self.state = "training"
        if self.joined.due:
            yield from self._exchange(self.joined.due, sent=self.joined.sent)
        self._boundary = self.clock.monotonic()

    def after_step(self, tokens: int, *, loss: SupportsFloat | None = None, cursor: str = "") -> Iterator[str]:
        """Everything between two inner steps; yields the reason each time it has to wait.

        Args:
            tokens: In the step just done.
            loss: For people.
            cursor: Where the data stream is after this step; found again after a restart.

        Raises:
            InvalidSettings: A figure that cannot be put on record.
        """
        if self._finished:
            raise InvalidSettings("this island has finished", "call step() before finish()")
        tokens = checked_tokens(tokens, self.run.run.settings.policy.tokens_per_step_max)
        check_cursor(cursor)
        now = self.clock.monotonic()
        seconds = now - self._boundary
        self.train_s += seconds
        self.steps += 1
        self.tokens += tokens
        self.cursor = cursor
        if loss is not None:
            self.loss = loss
        for trajectory in self.trajectories:
            trajectory.count(tokens, seconds)
        due = self.pace.due(self.steps)
        self.driver.check()
        yield from self._exchange(due)
        self._boundary = self.clock.monotonic()

    def finish(self) -> Iterator[str]:
        """Send what is left, wait until it is history, and take the newest version everywhere.

        Gives up waiting, with a warning, when no aggregator has answered within a deadline and a take-over.

        Raises:
            Unavailable: The store has taken nothing for `pause_after` deadlines and a round, at least 10 minutes.
        """
        if self._finished:
            return
        self.state = "finishing"
        rest = [trajectory.fragment for trajectory in self.trajectories if trajectory.steps > 0]
        yield from self._until_sent(lambda: self._with_room(rest) == rest)
        self._send(rest)
        self.outbox.submit((), before=lambda outbox: self.membership.depart(outbox.next_seq, self.ids))
        self.driver.wake()
        yield from self._until_sent(self.outbox.empty)
        limit = self.clock.monotonic() + self.patience.round_s
        merged = yield from self._until(self._all_history, "the last contributions are being merged", limit=limit)
        if not merged:
            log.warning(
                "island %s: nothing has merged its last contributions yet; they count as soon as an aggregator runs",
                self.membership.name,
            )
        for trajectory in self.trajectories:
            self._take_whole(trajectory)
        self._finished = True
        self.state = "done"

    def end(self, state: str, message: str = "") -> None:
        """Stop the pumps and say how it ended; whoever was stopped on purpose is not waited for.

        A store that does not answer is told nothing: nobody should have to wait for it after Ctrl-C.
        """
        silent = False
        try:
            self.driver.stop()
            silent = self.store.outage is not None and state in {"stopped", "failed"}
            if state == "stopped" and not silent:
                with contextlib.suppress(Unavailable):
                    self.membership.depart(self.outbox.next_seq, self.ids)
        finally:
            self.state, self.message = state, message
            if state != "fenced" and not silent:  # when fenced, the status is the newer process's
                self.reporter.write()

    def record_eval(self, loss: float, bits_per_byte: float, sample: str = "") -> None:
        """Remember a held-out evaluation for people; one that is not finite is not remembered."""
        if not (math.isfinite(loss) and math.isfinite(bits_per_byte)):
            log.warning("island %s: an evaluation of %s is not recorded", self.membership.name, loss)
            return
        self.evals.record(
            Eval(
                step=self.steps,
                version=self.version,
                loss=loss,
                bits_per_byte=bits_per_byte,
                sample=sample[:CURSOR_CHARS_MAX],
            )
        )

    def status(self) -> IslandStatus:
        """The island's figures as of now."""
        usage, before = self.store.meter.usage(), self._before
        since, now = self._waiting_since, self.clock.monotonic()
        wait_s = self.wait_s + (now - since if since is not None else 0.0)
        elapsed = self.clock.monotonic() - self._started
        newest = [self.inbox.version(p) for p in range(self.sync.num_fragments)]
        return IslandStatus(
            format=FORMAT,
            run=self.run.digest,
            island=self.membership.name,
            generation=self.membership.generation,
            state=self.state,
            steps=self.steps,
            tokens=self.tokens,
            version=self.version,
            versions_behind=max(0, min(newest) - self.version),
            loss=None if self.loss is None else float(self.loss),
            tokens_per_s=(self.tokens - self._tokens_before) / elapsed if elapsed > 0 else 0.0,
            staleness=self.staleness,
            requests=usage.requests + (before.requests if before else 0),
            requests_by_class={
                name: getattr(usage, name) + (before.requests_by_class.get(name, 0) if before else 0)
                for name in ("gets", "heads", "puts", "lists", "deletes")
            },
            bytes_up=usage.bytes_up + (before.bytes_up if before else 0),
            bytes_down=usage.bytes_down + (before.bytes_down if before else 0),
            wait_s=wait_s + (before.wait_s if before else 0.0),
            train_s=self.train_s + (before.train_s if before else 0.0),
            written_at=self.store.now(),
            first_eval=self.evals.first,
            last_eval=self.evals.last,
            message=self.message,
        )

    # ---- the exchange -------------------------------------------------------------------------------------------

    def _exchange(self, due: Sequence[int], sent: frozenset[int] = frozenset()) -> Iterator[str]:
        limit = self.clock.monotonic() + self.patience.round_s
        if self.sync.overlap == 0:
            yield from self._until(
                lambda: len(self._with_room(due)) == len(due), "earlier contributions are not sent yet", limit=limit
            )
        taken = self._with_room(due)
        bases = {p: self.trajectories[p].version for p in taken}
        self._send(taken, sent)
        if self.sync.overlap == 0 and taken:
            yield from self._until(self.outbox.empty, "contributions are being sent", limit=limit)
            yield from self._until(
                lambda: all(self.inbox.version(p) > base for p, base in bases.items()),
                "the next version is being made",
                limit=limit,
            )
        self._adopt_arrived(taken)
        if self.patience.over() and self._waits_to_be_merged() and not self._arrived():
            yield from self._pause()
            self._adopt_arrived(taken)

    def _pause(self) -> Iterator[str]:
        """Train no further until a version is here or, if the store was what was missing, until it takes something."""
        cause = self.patience.cause()
        self.message = f"paused: {cause.text}"
        log.error("island %s %s", self.membership.name, self.message)
        yield from self._until(lambda: self._arrived() or cause.gone(), "nobody answers", state="paused")
        self.message = ""
        news = "a new version is there" if self._arrived() else "the store answers again"
        log.warning("island %s goes on: %s", self.membership.name, news)
        self.patience.renew()

    def _with_room(self, due: Sequence[int]) -> list[int]:
        """The fragments of which another contribution may be held; what is due of others stays where it is."""
        return [p for p in due if self.outbox.unsent(p) < self.sync.max_in_flight]

    def _send(self, due: Sequence[int], sent: frozenset[int] = frozenset()) -> None:
        """Snapshot these fragments and hand them to the outbox."""
        if not due:
            return
        # One checkpoint at a time: each holds a whole model until all that was taken before it is sent.
        keep = self.outbox.notes() == 0 and self.saver.due()
        local = {p: self.port.read(self._names[p]) for p in (range(self.sync.num_fragments) if keep else due)}
        self._check_finite(local)
        write = self.saver.capture(self._moment(due), self.port, self.trajectories, local) if keep else None
        contributions = [
            self.trajectories[p].take(
                local[p],
                step_to=self.steps,
                tokens_to=self.tokens,
                cursor=self.cursor,
                keep_end=self.sync.adopt == "carry",
            )
            for p in due
        ]
        for item in contributions:
            self._sent_at_step[item.fragment] = self.steps
            self.pace.took(item.fragment, self.steps, item.steps, item.train_s)
        self.patience.taken()
        self.outbox.submit(contributions, before=write, sent=sent)
        self.driver.wake()

    def _moment(self, due: Sequence[int]) -> Moment:
        return Moment(
            run=self.run.digest,
            island=self.membership.name,
            steps=self.steps,
            tokens=self.tokens,
            cursor=self.cursor,
            due=tuple(due),
            sent_at=tuple(self._sent_at_step),
        )

    def _check_finite(self, local: Mapping[int, Arrays]) -> None:
        """Before anything is kept or sent: a checkpoint of NaNs would bring them back at every restart."""
        for arrays in local.values():
            name = first_not_finite(arrays)
            if name is not None:
                raise Corrupt(
                    f"island {self.membership.name}, step {self.steps}: {name} has a value that is NaN or infinite",
                    "nothing of it was sent or kept; the same command goes on from the last exchange, but look at "
                    "the learning rate and the data",
                )

    def _may_adopt(self, fragment: int, taken: Sequence[int]) -> bool:
        """Whether a version may be taken at this boundary without throwing away much that was not sent.

        `overwrite` and `mix` give up (part of) the progress since the mark. Where it was `taken` just now there is
        none. With overlap they also take a version later, from `overlap` steps to half an interval after sending:
        whatever comes later waits for the next send, so that a slow island keeps its work however fast the others make
        versions, and what there was no room for is not thrown away.
        `carry` loses nothing at any time.
        """
        since = self.steps - self._sent_at_step[fragment]
        if self.sync.overlap == 0:
            return fragment in taken
        if self.sync.adopt == "carry":
            return since >= self.sync.overlap
        window = max(self.sync.overlap, self.pace.interval(fragment) // 2)
        return fragment in taken or self.sync.overlap <= since <= window

    def _adopt_arrived(self, taken: Sequence[int]) -> None:
        for p, trajectory in enumerate(self.trajectories):
            arrival = self.inbox.take(p) if self._may_adopt(p, taken) else None
            if arrival is None:
                continue
            self.at("adopt.before_write")
            local = {} if self.sync.adopt == "overwrite" else self.port.read(self._names[p])
            adopted = trajectory.adopt(local, arrival.weights, arrival.version, arrival.watermark, self.sync)
            put(self.port, trajectory, adopted)
            self.at("adopt.after_write")
            self.outbox.owe(p, arrival.unmerged)
            self.pace.learned(p, arrival.fastest)
            self._noted(p, arrival.watermark, arrival.staleness)

    def _take_whole(self, trajectory: Trajectory) -> None:
        """Take the newest version as it is, however versions are adopted while training goes on."""
        arrival = self.inbox.take(trajectory.fragment)
        if arrival is None:
            self.port.write(trajectory.mirror)
            return
        self.at("adopt.before_write")
        overwrite = msgspec.structs.replace(self.sync, adopt="overwrite")
        self.port.write(trajectory.adopt({}, arrival.weights, arrival.version, arrival.watermark, overwrite))
        self.at("adopt.after_write")
        self._noted(trajectory.fragment, arrival.watermark, arrival.staleness)

    def _noted(self, fragment: int, watermark: int, staleness: int | None) -> None:
        self._watermarks[fragment] = watermark
        if staleness is not None:
            self.staleness = staleness
        self.patience.adopted(waits=self._waits_to_be_merged())

    def _on_sent(self, contribution: Contribution) -> None:
        self.inbox.expect(contribution.fragment)
        self.driver.wake()

    # ---- waiting ------------------------------------------------------------------------------------------------

    def _until(
        self, done: Callable[[], bool], reason: str, *, limit: float | None = None, state: str = "waiting"
    ) -> Generator[str, None, bool]:
        """Yield until `done`, or past `limit` by this machine's clock; its value says whether it is done."""
        if done():
            return True
        before, self.state = self.state, state
        started = self._waiting_since = self.clock.monotonic()
        try:
            while not done():
                if limit is not None and self.clock.monotonic() >= limit:
                    return False
                yield reason
        finally:
            self._waiting_since = None
            self.wait_s += self.clock.monotonic() - started
            self.state = before
        return True

    def block(self, waiting: Iterator[str]) -> None:
        """Run a generator of this class to its end, sleeping whenever it has to wait."""
        for _ in waiting:
            self.driver.wait(_TICK_S)

    def _until_sent(self, done: Callable[[], bool]) -> Iterator[str]:
        """Wait for the outbox, as long as it gets on."""
        while not done():
            sent, wait_s = self.outbox.num_sent, self.patience.finish_s
            moved = yield from self._until(
                partial(self._gets_on, done, sent),
                "the last contributions are being sent",
                limit=self.clock.monotonic() + wait_s,
            )
            if not moved:
                unsent = max(t.steps + sum(i.steps for i in t.in_flight if i.seq is None) for t in self.trajectories)
                raise Unavailable(
                    f"{self.store.url} has taken nothing for {wait_s:.0f} s; the last {unsent} steps of island "
                    f"{self.membership.name} are not in it",
                    "when it is back, the same command trains on from what was sent, or from the local checkpoint",
                )

    def _gets_on(self, done: Callable[[], bool], sent: int) -> bool:
        return done() or self.outbox.num_sent > sent

    def _arrived(self) -> bool:
        """Whether a version is here that was not taken yet."""
        return any(self.inbox.arrival(t.fragment) for t in self.trajectories)

    def _all_history(self) -> bool:
        for trajectory in self.trajectories:
            arrival = self.inbox.arrival(trajectory.fragment)
            watermark = arrival.watermark if arrival else self._watermarks[trajectory.fragment]
            if trajectory.unmerged(watermark, self._max_staleness):
                return False
        return True

    def _waits_to_be_merged(self) -> bool:
        """Whether something was taken that is not history as of what was adopted, and not too stale to be merged."""
        return any(t.unmerged(self._watermarks[t.fragment], self._max_staleness) for t in self.trajectories)


def start(
    store: RetryingStore,
    port: ModelPort,
    options: IslandOptions,
    *,
    clock: Clock,
    ids: Ids,
    driver: Driver,
    at: Callable[[str], None] = ignore,
) -> IslandCore:
    """Join the run and stand ready for the first step; `begin` is to be run next. Raises as `join_run` does."""
    joined = join_run(store, port, options, ids=ids, at=at)
    return IslandCore(
        store=store, port=port, options=options, clock=clock, ids=ids, driver=driver, joined=joined, at=at
    )
