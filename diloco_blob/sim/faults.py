"""What a network and a store do to requests: drawn by lot, with a probability for each operation and key prefix.

Everything here is within the store contract (`store/base.py`): answers may be late, lost or refused, requests may be
repeated or arrive after their sender gave up or died; but what is written is written, and reads are never stale.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from diloco_blob.sim.dice import Dice

Fate = Literal[
    "sound",
    "lost before",
    "lost after",
    "late",
    "repeated",
    "refused 409",
    "refused 412",
    "refused 429",
    "refused 500",
    "refused 503",
    "reset",
    "truncated",
    "slow",
    "outage",
]
"""What becomes of a request.

lost before: it never arrives, and times out. lost after: it has its effect, and the answer times out. late: it has its
effect long after its sender gave up. repeated: it has its effect twice, the second time later. refused 409: a create
that met another is told to try again. refused 412: a create that has had its effect is told that its object exists.
refused 429, 500, 503: no effect, and it is said. reset: the connection breaks, before or after the effect. truncated:
an answer that is cut short without a word. slow: it takes much longer than usual. outage: nothing answers for a while.
"""

ANY: tuple[Fate, ...] = ("lost before", "lost after", "refused 429", "refused 500", "refused 503", "reset", "slow")
FOR_PUTS: tuple[Fate, ...] = ("late", "repeated")
FOR_CREATES: tuple[Fate, ...] = ("refused 409", "refused 412")
FOR_BODIES: tuple[Fate, ...] = ("truncated",)

PREFIXES = ("", "run.json", "fragments/", "islands/", "closes/", "commits/", "receipts/", "payloads/", "generations/")


@dataclass(frozen=True)
class Rule:
    """A fate for some requests."""

    operation: str
    """Empty: all."""
    key: str
    """Part of the key; empty: all."""
    fate: Fate
    probability: float


@dataclass
class FaultPlan:
    """The faults of one schedule.

    Args:
        dice: Draws them.
        intensity: How probable they are on the whole; 0: none.
    """

    dice: Dice
    intensity: float
    counts: Counter[str] = field(default_factory=Counter)
    """How often each fate befell a request."""
    outage_until: float = 0.0
    """Until then nobody gets an answer."""
    outage_refuses: bool = False
    """Whether connections are refused or reset meanwhile, which is known at once; else there is silence."""

    def __post_init__(self) -> None:
        self.latency_s = self.dice.choice((0.005, 0.02, 0.08))
        self.bytes_per_s = self.dice.choice((2e3, 1e5, 1e8))
        self.timeout_s = self.dice.choice((2.0, 8.0))
        self.rules: list[Rule] = []
        if self.intensity <= 0.0:
            return
        for _ in range(self.dice.integer(1, 5)):
            fate = self.dice.choice(ANY + FOR_PUTS + FOR_CREATES + FOR_BODIES)
            operation = "put" if fate in FOR_PUTS + FOR_CREATES else self.dice.choice(("", "put", "get", "head"))
            key = self.dice.choice(PREFIXES)
            self.rules.append(Rule(operation, key, fate, self.intensity * self.dice.choice((0.02, 0.1, 0.4))))

    def calm(self) -> None:
        """No more faults."""
        self.rules = []
        self.outage_until = 0.0

    def begin_outage(self, until: float) -> None:
        """From now on nobody is answered, whatever is on its way."""
        self.outage_until, self.outage_refuses = until, self.dice.chance(0.5)

    def swallows(self, operation: str, now: float) -> bool:
        """Whether an answer that is under way is lost, because an outage began meanwhile."""
        lost = now < self.outage_until
        if lost:
            self.counts[f"outage began, {operation}"] += 1
        return lost

    def draw(self, operation: str, key: str, *, creates: bool, now: float) -> Fate:
        """What becomes of this request.

        Args:
            operation: Method of the store.
            key: Its key or prefix.
            creates: Whether it is a create-if-absent.
            now: The time.
        """
        fate: Fate = "sound"
        if now < self.outage_until:
            fate = "outage"
        else:
            for rule in self.rules:
                if (not rule.operation or operation.startswith(rule.operation)) and rule.key in key:
                    if not _possible(rule.fate, operation, creates=creates):
                        continue
                    if self.dice.chance(rule.probability):
                        fate = rule.fate
                        break
        if fate != "sound":
            self.counts[f"{fate}, {operation}"] += 1
        return fate

    def transfer_s(self, num_bytes: int, *, slow: bool) -> float:
        """How long a request or an answer of this size is under way."""
        seconds = self.dice.skewed(self.latency_s) + num_bytes / self.bytes_per_s
        return seconds * self.dice.uniform(10.0, 400.0) if slow else seconds


def _possible(fate: Fate, operation: str, *, creates: bool) -> bool:
    if fate in FOR_PUTS:
        return operation == "put"
    if fate in FOR_CREATES:
        return creates
    if fate in FOR_BODIES:
        return operation in {"get", "get_range"}
    return True
