"""The studies: which contenders meet, at which size, number of islands and length; the queue takes them in order."""

from typing import Optional

from msgspec import Struct

from quality.contenders import CODECS, MAIN, OVERLAP, Contender, named

SEEDS = (1, 2, 3)


class Study(Struct, frozen=True):
    """Contenders at equal tokens."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    size: str = "0.1M"
    islands: int = 4
    steps: int = 600
    batch: int = 8
    """Sequences of one island's step."""
    trials: int = 5
    """Of tuning, for every contender."""
    seeds: tuple[int, ...] = SEEDS
    """At which the best trial is run again."""
    factors: tuple[float, ...] = (2.0, 0.5)
    """Along which the search climbs first, of learning rates."""
    follows: Optional["Study"] = None
    """Each search begins where this one's ended: five trials are that point, its neighbours, other outer settings."""


_LONG = named("dp", "diloco", "local-sgd", "streaming", "decoupled", "dp-muon", "muloco", "int4-int8", "sparse-160")
_LENGTHS = named("dp", "diloco", "local-sgd", "dp-muon", "muloco")
_SCALE = named("dp", "diloco", "local-sgd", "streaming", "decoupled", "dp-muon", "muloco", "int4-int8")
_LARGEST = named("dp", "diloco", "dp-muon", "muloco", "int4-int8")

SHORT = Study("short", "600 steps, 4 islands", MAIN)


def _following(
    name: str, title: str, contenders: tuple[Contender, ...], *, size: str = "0.1M", islands: int = 4, steps: int = 600
) -> Study:
    """Two trials a contender, its learning rate of `short` and half of it (longer and larger wants less), one seed."""
    batch = 8 if size == "0.1M" else 4
    return Study(name, title, contenders, size, islands, steps, batch, 2, (1,), (0.5,), SHORT)


STUDIES = (
    SHORT,
    Study("overlap", "overlap and adoption, 600 steps", OVERLAP, trials=4, seeds=(1, 2)),
    Study("codecs", "codecs, 600 steps", (*named("muloco"), *CODECS), trials=4),
    _following("long", "2400 steps, 4 islands", _LONG, steps=2400),
    _following("1200", "1200 steps, 4 islands", _LENGTHS, steps=1200),
    _following("islands8", "600 steps, 8 islands", _SCALE, islands=8),
    _following("0.8M", "0.8 M parameters", _SCALE, size="0.8M"),
    _following("4800", "4800 steps, 4 islands", _LENGTHS, steps=4800),
    _following("3M", "3 M parameters", _LARGEST, size="3M"),
)

QUICK = Study(
    "quick", "60 steps, 2 islands", named("dp", "diloco", "streaming"), islands=2, steps=60, trials=2, seeds=(1,)
)
"""`BENCH=quick`: minutes, to see that everything works; says nothing about methods."""
