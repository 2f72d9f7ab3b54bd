"""Settings of a run: what they are called, what they may be, where they are read.

Written by hand as TOML, kept in `run.json` as JSON, immutable once the run exists. Unknown keys are refused,
there are no aliases, and every field says what it does. Defaults of `sync`, `outer` and the codecs
are DiLoCo's (arXiv 2311.08105); those of `merge` and `policy` are ours, for islands that come, go and differ in speed.
`preset(name)` gives each published method whole.
"""

import difflib
import math
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.limits import FRAGMENTS_MAX

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]

PRESETS = ("diloco", "local-sgd", "fedavg", "streaming-diloco", "decoupled-diloco", "sparseloco")


class Sync(Struct, frozen=True, forbid_unknown_fields=True):
    """When an island sends, and how it takes a new version."""

    sync_every: Positive = 500
    """Inner steps between two contributions to one fragment (H)."""
    num_fragments: Annotated[int, Meta(ge=1, le=FRAGMENTS_MAX)] = 1
    """Parts of the model that are exchanged separately (P); balanced by size."""
    overlap: NonNegative = 0
    """0: wait after sending until the new version is there. τ ≥ 1: never wait; take a version at the first
    step boundary, at least τ steps after the last send of its fragment, at which it has arrived. `overwrite`
    and `mix` take none later than half of `sync_every` after it, but right after the next send."""
    adopt: Literal["overwrite", "mix", "carry"] = "overwrite"
    """How a new version is taken. overwrite: local ← new. mix: local ← α·local + (1−α)·new. carry: keep all
    progress that `new` does not contain."""
    mix_alpha: Fraction = 0.5
    """α of `mix`; Streaming DiLoCo (arXiv 2501.18512) uses 0.5."""
    max_in_flight: Positive = 2
    """Contributions to one fragment that may be unsent before further progress is gathered in the next one; bounds
    the host memory."""
    pause_after: Positive = 10
    """Rounds (deadlines) without a new version after which an island pauses, loudly."""
    owe_unmerged: bool = False
    """Add a contribution that was skipped or rejected to what is owed, so that it goes out again with the next one;
    needs `up.error_feedback`."""
    match_speed: bool = False
    """DyLU (arXiv 2401.09135): an island slower than the fastest of the last version makes fewer inner steps between
    two contributions, `sync_every` times the ratio of their steps per second: all send at about the same time."""


class Codec(Struct, frozen=True, forbid_unknown_fields=True):
    """How tensors become bytes in one direction."""

    name: Literal["fp32", "bf16", "int8", "int4", "int2", "sign", "fp4", "topk", "dct_topk"] = "fp32"
    """fp32, bf16: every value by itself. int8, int4, int2, sign (1 bit), fp4 (E3M0): few bits a value and one scale a
    block. topk: of each chunk the largest values. dct_topk: of each square the largest coefficients of its cosine
    transform. The last five need `error_feedback` to train well."""
    block: Annotated[int, Meta(ge=8, le=65536)] = 256
    """Values that share a scale (int8, int4, int2, sign, fp4)."""
    chunk: Annotated[int, Meta(ge=16, le=65536)] = 4096
    """Values of which the `keep` largest are sent. topk: consecutive ones; dct_topk: a square of √chunk × √chunk."""
    keep: Annotated[int, Meta(ge=1)] = 64
    """Values that are sent of each chunk (topk, dct_topk); at most half of them."""
    value_bits: Literal[1, 2, 4, 8] = 2
    """Bits of a kept value, its sign included (topk, dct_topk)."""
    error_feedback: bool = False
    """Add what coding lost to the next tensor that is coded."""
    decay: Fraction = 1.0
    """β of the error feedback: the residual is multiplied by it each time."""
    cycle: Annotated[int, Meta(ge=1, le=1024)] = 1
    """In each version only one value of every so many is coded, the same ones for all islands; the others wait in the
    residual for their turn, so it needs `error_feedback`. Use it both ways alike."""
    whole_every: NonNegative = 0
    """Every so many versions nothing waits for its turn: all values are coded (with `cycle`; 0: never). The version
    that is to be exported should be one of them."""

    def __post_init__(self) -> None:
        if self.cycle > 1 and not self.error_feedback:
            raise ValueError(
                f"cycle ({self.cycle}) needs error_feedback = true: what waits for its turn has to be kept"
            )
        if self.whole_every and self.cycle == 1:
            raise ValueError(f"whole_every ({self.whole_every}) needs cycle above 1: all values are coded anyway")
        if 2 * self.keep > self.chunk:
            raise ValueError(f"keep ({self.keep}) must be at most half of chunk ({self.chunk})")
        if self.name == "dct_topk" and math.isqrt(self.chunk) ** 2 != self.chunk:
            raise ValueError(f"chunk ({self.chunk}) must be a square with name = 'dct_topk', such as 1024 or 4096")


class Merge(Struct, frozen=True, forbid_unknown_fields=True):
    """How contributions become one pseudo-gradient. Those of one island are summed first (docs/decisions/0001)."""

    rule: Literal["mean", "rda", "trimmed_mean", "sparse_mean"] = "mean"
    """mean: weighted mean. rda: radial-directional averaging per tensor, embeddings by mean (arXiv 2604.21428,
    App. D.2). trimmed_mean: coordinate by coordinate, the mean without the largest and the smallest values (arXiv
    1803.01498); weights are not used. sparse_mean: coordinate by coordinate, the weighted mean over those islands that
    sent a value other than 0 (as arXiv 2508.15706 merges sparse contributions)."""
    trim: Annotated[float, Meta(ge=0.0, lt=0.5)] = 0.125
    """Share of the islands of a round whose values trimmed_mean leaves out at each end, rounded up: at least one at
    each end where there are three islands or more."""
    clip: Literal["none", "median"] = "none"
    """median: an island whose pseudo-gradient (the whole fragment) has a larger L2 norm than the median of the round's
    islands is scaled down to it. Recorded in the commit."""
    weights: Literal["tokens", "tokens2_per_step", "uniform"] = "tokens"
    """Weight of an island before staleness, c being sums over its contributions: c_tokens, c_tokens²/c_steps, or 1."""
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    """Factor for staleness s. constant: 1. polynomial: (1+s)^−a. hinge: 1 if s ≤ b, else 1/(a·(s−b)+1). An island's
    is the mean over its contributions, weighted by tokens."""
    staleness_a: Annotated[float, Meta(ge=0.0)] = 0.5
    """a of polynomial and hinge."""
    staleness_b: Annotated[float, Meta(ge=0.0)] = 1.0
    """b of hinge."""
    discount: bool = False
    """Also multiply the whole step by Σ(weight·factor)/Σ weight, so that a round of only stale work moves
    less. Recorded."""


class Outer(Struct, frozen=True, forbid_unknown_fields=True):
    """The outer optimizer: how the merged pseudo-gradient changes the global weights."""

    optimizer: Literal["sgd", "nesterov", "delayed_nesterov", "rho_adaptive"] = "nesterov"
    """sgd and nesterov keep buf ← μ·buf + Δ; sgd steps lr·buf, nesterov lr·(Δ + μ·buf). delayed_nesterov: momentum is
    renewed and applied only at every `delay`-th version (arXiv 2401.09135). rho_adaptive: no momentum; lr·Δ is
    lengthened, at most twofold, where consecutive pseudo-gradients of a tensor agree."""
    lr: Annotated[float, Meta(gt=0.0)] = 0.7
    """Outer learning rate."""
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """μ; of rho_adaptive the most that agreement counts."""
    delay: Positive = 4
    """Versions over which delayed_nesterov gathers pseudo-gradients for its momentum (N)."""


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """When a round is closed. All times by the store's clock."""

    islands: NonNegative = 0
    """Islands that are expected; 0 if nobody knows. Used to choose `quorum` when that is 0, and to refuse settings that
    ask for more islands than there are."""
    quorum: NonNegative = 0
    """Islands that must have contributed before grace starts. 0: the majority of `islands`; 1 if nobody knows them."""
    grace_s: Seconds = 10.0
    """How long a round stays open after the quorum is there, and at least after the first `min_contributions` arrivals,
    also past the deadline."""
    deadline_s: Annotated[float, Meta(gt=0.0)] = 600.0
    """How long after the last version a round is closed with whatever arrived; but not within `grace_s` of the first
    `min_contributions` arrivals: a round that nobody could reach in time is not closed by its first arrival alone.
    Choose it above `sync_every` × step time + upload of the slowest island that is to be merged fresh, by half as much
    again (docs/settings.md, "Choosing deadline_s")."""
    min_contributions: Positive = 1
    """Islands that must have contributed for the deadline to close a round."""
    active_versions: Positive = 3
    """An island is active, and waited for, if it contributed to one of this many last versions."""
    max_staleness: NonNegative = 10
    """A contribution staler than this is skipped, with the reason on record."""
    takeover_s: Seconds = 60.0
    """After this long without a commit, any aggregator merges what another one closed."""
    tokens_per_step_max: Positive = 1 << 24
    """Tokens that one inner step may claim; a receipt that claims more is skipped. In a version an island weighs at
    most as `sync_every` steps of this many tokens, whatever it claims."""

    @property
    def quorum_or_majority(self) -> int:
        """`quorum`, or where that is 0 the majority of `islands`, at least 1."""
        return self.quorum or self.islands // 2 + 1


class Collect(Struct, frozen=True, forbid_unknown_fields=True):
    """What garbage collection keeps. Records (closes, commits, receipts, generations, departures) are always kept."""

    keep_versions: NonNegative = 8
    """Newest versions of each fragment whose weights, outer state, update and contributions stay in the bucket; 0: all
    of them. Every commit makes what is older collectable."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a run."""

    sync: Sync = Sync()
    up: Codec = Codec()
    down: Codec = Codec()
    merge: Merge = Merge()
    outer: Outer = Outer()
    policy: Policy = Policy()
    collect: Collect = Collect()

    def __post_init__(self) -> None:
        for name, value in _flat(self):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} ({value}) must be a finite number")  # JSON, so run.json, has no other
        if self.sync.overlap >= self.sync.sync_every:
            raise ValueError(
                f"sync.overlap ({self.sync.overlap}) must be smaller than sync.sync_every ({self.sync.sync_every})"
            )
        if 0 < self.policy.islands < self.policy.quorum:
            raise ValueError(
                f"policy.quorum ({self.policy.quorum}) cannot exceed policy.islands ({self.policy.islands})"
            )
        if 0 < self.policy.islands < self.policy.min_contributions:
            raise ValueError(
                f"policy.min_contributions ({self.policy.min_contributions}) cannot exceed "
                f"policy.islands ({self.policy.islands})"
            )
        if self.policy.grace_s > self.policy.deadline_s:
            raise ValueError(
                f"policy.grace_s ({self.policy.grace_s}) cannot exceed policy.deadline_s ({self.policy.deadline_s})"
            )
        if self.sync.owe_unmerged and not (self.up.error_feedback and self.up.decay > 0.0):
            raise ValueError(
                "sync.owe_unmerged needs up.error_feedback = true and up.decay above 0: what is owed has to be kept"
            )
        if self.sync.overlap == 0 and self.sync.adopt == "mix":
            raise ValueError("sync.adopt = 'mix' needs sync.overlap ≥ 1: without overlap there is nothing to mix")

    def resolved(self, islands: int = 0) -> "Settings":
        """These settings as `run.json` keeps them: `policy.islands` and `policy.quorum` filled in where they are 0.

        Args:
            islands: How many are expected, where the settings do not say so themselves; 0 if nobody knows.

        Raises:
            InvalidSettings: They ask for more islands than there are.
        """
        known = self.policy.islands or islands
        policy = msgspec.structs.replace(self.policy, islands=known)
        policy = msgspec.structs.replace(policy, quorum=policy.quorum_or_majority)
        try:
            return msgspec.structs.replace(self, policy=policy)
        except ValueError as error:
            raise InvalidSettings(
                f"with {known} islands, {error}", "start more, or set policy.islands to the number of all of them"
            ) from error


def preset(name: str) -> Settings:
    """The settings of a published method, by its name (see `PRESETS`).

    Raises:
        InvalidSettings: There is no preset of this name.
    """
    if name not in PRESETS:
        raise InvalidSettings(f"no preset {name!r}", f"choose one of {', '.join(PRESETS)}, or give a .toml file")
    file = resources.files("diloco_blob.core").joinpath("presets", f"{name}.toml")
    return parse_settings(file.read_text(), source=f"preset {name}")


def load_settings(source: str | Path | None) -> Settings:
    """Read settings from a TOML file or a preset's name; None gives the defaults.

    Raises:
        InvalidSettings: No such file or preset, not TOML, an unknown key, or a value that is not allowed.
    """
    if source is None:
        return Settings()
    path = Path(source)
    if path.suffix != ".toml":
        return preset(str(source))
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidSettings(f"cannot read settings {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(f"settings {source} are not UTF-8 text") from error
    return parse_settings(text, source=str(source))


def parse_settings(text: str, *, source: str) -> Settings:
    """Parse TOML into `Settings`; `source` names it in errors.

    Raises:
        InvalidSettings: Not TOML, an unknown key, or a value that is not allowed.
    """
    try:
        return msgspec.toml.decode(text, type=Settings)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"{source}: {_what_is_wrong(error)}", "docs/settings.md lists every setting") from error
    except msgspec.DecodeError as error:
        raise InvalidSettings(f"{source} is not valid TOML: {error}") from error


def _what_is_wrong(error: msgspec.ValidationError) -> str:
    """What msgspec found, with the setting's dotted name first; for an unknown one, what was perhaps meant."""
    what, _, where = str(error).partition(" - at `$.")
    path = where.removesuffix("`")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL)
    if unknown is None:
        return f"{path}: {what}" if path else what
    name = unknown[1]
    known = [one for one, _ in _flat(Settings())]
    here = [one.removeprefix(f"{path}.") for one in known if one.startswith(f"{path}.")] or Settings.__struct_fields__
    meant = [one for one in known if one.rpartition(".")[2] == name]
    if not meant:
        meant = [f"{path}.{one}".lstrip(".") for one in difflib.get_close_matches(name, here, n=1)]
    perhaps = f" (did you mean {' or '.join(meant)}?)" if meant else ""
    return f"unknown setting {path}{'.' if path else ''}{name}{perhaps}"


def conflicts(run: Settings, given: Settings) -> list[str]:
    """How `given` contradicts an existing run's settings; what `given` leaves open (0) contradicts nothing.

    The number of islands is never a conflict: islands come and go.
    """
    policy = msgspec.structs.replace(
        given.policy, islands=run.policy.islands, quorum=given.policy.quorum or run.policy.quorum
    )
    return differences(run, msgspec.structs.replace(given, policy=policy))


def differences(old: Settings, new: Settings) -> list[str]:
    """The settings that differ, each as `path: old → new`; empty if none."""
    flat_old, flat_new = dict(_flat(old)), dict(_flat(new))
    return [f"{key}: {flat_old[key]} → {flat_new[key]}" for key in flat_old if flat_old[key] != flat_new[key]]


def _flat(settings: Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, Struct):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
