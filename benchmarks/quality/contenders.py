"""What is compared. To add a contender, add a line.

Settings are by dotted name, and only what differs from the library's defaults. `sync.sync_every` is 25 unless a line
says otherwise, because the runs are short: 24 rounds in 600 steps. Learning rates, and of outer optimizers also the
momentum, are found by `tuning`, with as many trials for each contender.
"""

from msgspec import Struct

from quality.inner import Inner
from quality.training import Flat

Outer = tuple[float, float]
"""Outer learning rate and momentum."""

EQUAL: Flat = {"merge.weights": "uniform", "merge.staleness": "constant", "sync.sync_every": 25}
AVERAGED: Flat = EQUAL | {"outer.optimizer": "sgd"}
CARRY_5: Flat = {"sync.overlap": 5, "sync.adopt": "carry"}
INT4_INT8: Flat = {"up.name": "int4", "up.error_feedback": True, "down.name": "int8", "down.error_feedback": True}
STREAMING: Flat = {
    "sync.num_fragments": 5,
    "sync.overlap": 1,
    "sync.adopt": "mix",
    "up.name": "fp4",
    "down.name": "bf16",
}
DECOUPLED: Flat = {
    "sync.num_fragments": 12,
    "sync.overlap": 2,
    "merge.rule": "rda",
    "merge.weights": "tokens2_per_step",
    "up.name": "bf16",
    "down.name": "bf16",
    "policy.quorum": 1,
    "policy.grace_s": 1.0,
}

NESTEROV: tuple[Outer, ...] = ((0.7, 0.6), (1.0, 0.0), (0.7, 0.9))
"""The first is where the search starts; the others are tried at the best inner learning rate."""
PLAIN: tuple[Outer, ...] = ((1.0, 0.0),)
"""The mean itself: nothing to tune but the inner learning rate."""


class Contender(Struct, frozen=True):
    """A method; its learning rates are not part of it."""

    name: str
    title: str
    settings: Flat | None
    """None: data parallel."""
    outers: tuple[Outer, ...] = NESTEROV
    inner: Inner = "adamw"
    lr: float = 24e-3
    """Where the search begins."""


def _diloco(name: str, title: str, settings: Flat, outers: tuple[Outer, ...] = NESTEROV) -> Contender:
    return Contender(name, title, EQUAL | settings, outers)


def _muon(name: str, title: str, settings: Flat, outers: tuple[Outer, ...] = NESTEROV) -> Contender:
    """With the inner optimizer of `workers/train.py`: its seeds agree to 1 %, AdamW's here to 5 to 20 %."""
    return Contender(name, title, EQUAL | settings, outers, "muon", 12e-3)


MAIN = (
    Contender("dp", "data parallel", None, ()),
    _diloco("diloco", "DiLoCo", {}),
    Contender("local-sgd", "Local SGD, AdamW inside", AVERAGED, PLAIN),
    _diloco("streaming", "Streaming DiLoCo", STREAMING),
    _diloco("decoupled", "Decoupled DiLoCo", DECOUPLED),
    Contender("fedavg", "FedAvg, SGD inside, H = 100", AVERAGED | {"sync.sync_every": 100}, PLAIN, "sgd", 0.8),
    Contender("local-sgd-plain", "Local SGD, SGD inside", AVERAGED, PLAIN, "sgd", 0.8),
    Contender("fedavg-adamw", "FedAvg, AdamW inside, H = 100", AVERAGED | {"sync.sync_every": 100}, PLAIN),
    _muon("muloco", "DiLoCo, Muon inside", {}),
    Contender("dp-muon", "data parallel, Muon", None, (), "muon", 12e-3),
)

OVERLAP = (
    *(
        _muon(f"tau{tau}-{adopt}", f"τ = {tau}, {adopt}", {"sync.overlap": tau, "sync.adopt": adopt})
        for tau in (5, 1)
        for adopt in ("mix", "overwrite", "carry")
    ),
    *(
        _muon(
            f"tau5-{adopt}-p5",
            f"τ = 5, {adopt}, 5 fragments",
            {"sync.overlap": 5, "sync.adopt": adopt, "sync.num_fragments": 5},
        )
        for adopt in ("mix", "overwrite", "carry")
    ),
)


def _codec(name: str, **settings: float | str | bool) -> Flat:
    """Both ways, with error feedback."""
    both = {"name": name, "error_feedback": True, **settings}
    return {f"{way}.{field}": value for way in ("up", "down") for field, value in both.items()}


CODECS = (
    _muon("every-5", "uncompressed, H = 5", {"sync.sync_every": 5}),
    _muon("int4-int8", "int4 up, int8 down, feedback", INT4_INT8),
    _muon("int4-int4", "int4 both ways, feedback", _codec("int4")),
    _muon("int4-plain", "int4 up, int8 down, no feedback", {"up.name": "int4", "down.name": "int8"}),
    _muon("bf16", "bf16 both ways", {"up.name": "bf16", "down.name": "bf16"}),
    _muon("int8", "int8 both ways, feedback", _codec("int8")),
    _muon("topk-int8", "topk up, int8 down", _codec("int8") | {"up.name": "topk", "up.decay": 0.95}),
    _muon("topk", "topk both ways", _codec("topk", decay=0.95)),
    *(
        _muon(
            f"sparse-{keep}",
            f"topk {keep} of 4096 both ways, carry, sparse_mean",
            _codec("topk", keep=keep)
            | {"sync.adopt": "carry", "merge.rule": "sparse_mean"}
            | {"outer.optimizer": "sgd"},
            ((0.7, 0.0), (1.0, 0.0), (0.5, 0.0)),
        )
        for keep in (64, 160)
    ),
    *(
        _muon(
            f"turns-{every}",
            f"int2, one value of 6 in turn, both ways, carry, H = {every}",
            _codec("int2", cycle=6, whole_every=600 // every) | {"sync.adopt": "carry", "sync.sync_every": every},
            ((0.7, 0.6), (1.4, 0.0), (0.7, 0.9)),
        )
        for every in (25, 10, 5)
    ),
    _muon("dct-topk", "dct_topk both ways", _codec("dct_topk", decay=0.95)),
    _muon("int2", "int2 both ways", _codec("int2")),
    _muon("sign", "sign both ways", _codec("sign")),
    _muon("fp4", "fp4 both ways", _codec("fp4")),
    _muon("int4-int8-carry5", "int4 up, int8 down, feedback, τ = 5, carry", INT4_INT8 | CARRY_5),
)

ALL = {contender.name: contender for contender in (*MAIN, *OVERLAP, *CODECS)}


def named(*names: str) -> tuple[Contender, ...]:
    """These contenders."""
    return tuple(ALL[name] for name in names)
