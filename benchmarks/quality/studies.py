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
    trials: int = 6
    """Of tuning, for every contender."""
    seeds: tuple[int, ...] = SEEDS
    """At which the best trial is run again."""
    follows: Optional["Study"] = None
    """Each search begins where this one's ended: five trials are that point, its neighbours, other outer settings."""


_LONG = named("dp", "diloco", "local-sgd", "streaming", "decoupled", "tau5-carry", "tau5-mix", "int4-int8", "topk-int8")
_SCALE = named("dp", "diloco", "local-sgd", "streaming", "decoupled", "int4-int8")
_LARGEST = named("dp", "diloco", "local-sgd", "int4-int8")

SHORT = Study("short", "600 steps, 4 islands", MAIN)
_OVERLAP = Study("overlap", "overlap and adoption, 600 steps", OVERLAP, trials=5, seeds=(1,))
_CODECS = Study("codecs", "codecs, 600 steps", CODECS, trials=5)
_LONGER = Study("long", "2400 steps, 4 islands", _LONG, steps=2400, trials=5, follows=SHORT)

STUDIES = (
    SHORT,
    _OVERLAP,
    _CODECS,
    _LONGER,
    Study("1200", "1200 steps, 4 islands", named("dp", "diloco", "local-sgd"), steps=1200, trials=5, follows=SHORT),
    Study("4800", "4800 steps, 4 islands", named("dp", "diloco", "local-sgd"), steps=4800, trials=5, follows=_LONGER),
    Study("islands8", "600 steps, 8 islands", _SCALE, islands=8, trials=3, follows=SHORT),
    Study("0.8M", "0.8 M parameters", _SCALE, size="0.8M", batch=4, trials=4, seeds=(1,), follows=SHORT),
    Study("3M", "3 M parameters", _LARGEST, size="3M", batch=4, trials=3, seeds=(1,), follows=SHORT),
)

QUICK = Study(
    "quick", "60 steps, 2 islands", named("dp", "diloco", "streaming"), islands=2, steps=60, trials=2, seeds=(1,)
)
"""`BENCH=quick`: minutes, to see that everything works; says nothing about methods."""
