"""How fast a store is and what its clock says, and what that means for a run."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from diloco_blob.core.clock import Clock
from diloco_blob.protocol.doctor.probes import Area, Probes
from diloco_blob.protocol.doctor.report import Check
from diloco_blob.store import ObjectInfo

_T = TypeVar("_T")

SLOW_REQUEST_S = 1.0
SLOW_BYTES_PER_S = 1e6
LONG_EXCHANGE_S = 60.0
SKEW_MAX_S = 5.0
"""Beyond it logs of two machines cannot be read side by side. The protocol asks the store's clock alone."""
DATES_APART_MAX_S = 30.0
"""How far the dates of objects may be from those of answers: `store/probe.py` refuses more."""

UP_BYTES_PER_PARAMETER = 0.43
DOWN_BYTES_PER_PARAMETER = 0.95
"""The default codecs, int4 up and int8 down, as `benchmarks/payload_bytes.py` measures them."""
EXCHANGE_REQUESTS = 6
"""Of an island in one exchange (docs/protocol.md): a HEAD and 2 PUTs for a contribution, 3 GETs for a version."""

_TINY_S = 1e-6


@dataclass(frozen=True)
class Stamp:
    """When an object was written: by this machine before and after, and by the store."""

    before: float
    after: float
    dated: float


@dataclass(frozen=True)
class Skew:
    """How far the store's clock is ahead of this machine's, in seconds."""

    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Speed:
    """What was measured."""

    put_s: float
    get_s: float
    up_bytes_per_s: float = math.nan
    down_bytes_per_s: float = math.nan


def measure_latency(probes: Probes, area: Area, clock: Clock, samples: int) -> tuple[Check, list[Stamp], Speed]:
    """Time small requests, one after the other.

    Raises:
        Unavailable, Denied: It could not be measured.
    """
    times: dict[str, list[float]] = {"put": [], "get": [], "list": []}
    brackets: dict[str, tuple[float, float]] = {}

    def timed(name: str, action: Callable[[], _T]) -> _T:
        started = clock.monotonic()
        result = action()
        times[name].append(clock.monotonic() - started)
        return result

    for _ in range(samples):
        key, body = probes.key(area), probes.body()
        before = clock.wall()
        timed("put", partial(probes.put, key, body))
        brackets[key] = (before, clock.wall())
        timed("get", partial(probes.store.get, key))
        timed("list", partial(_listed, probes, key))
    dates = {info.key: info.last_modified for info in probes.store.list(probes.folder(area))}
    stamps = [Stamp(*bracket, dates[key]) for key, bracket in brackets.items() if key in dates]
    figures: dict[str, float] = {}
    parts = []
    for name, taken in times.items():
        median, high = quantile(taken, 0.5), quantile(taken, 0.95)
        figures |= {f"{name}_median_s": median, f"{name}_p95_s": high}
        parts.append(f"{name} {_milliseconds(median)} (95%: {_milliseconds(high)})")
    slow = max(figures[f"{name}_median_s"] for name in times) > SLOW_REQUEST_S
    check = Check(
        "latency",
        "warning" if slow else "ok",
        f"median of {samples} small requests: {', '.join(parts)}",
        "each exchange waits for several of these: use a bucket nearby, or a larger sync.sync_every" if slow else "",
        figures,
    )
    return check, stamps, Speed(figures["put_median_s"], figures["get_median_s"])


def clock_check(probes: Probes, area: Area, stamps: Sequence[Stamp]) -> Check:
    """Compare three clocks: this machine's, the one that dates objects, and the one of the answers.

    Raises:
        Unavailable, Denied: It could not be measured.
    """
    key = probes.key(area)
    probes.put(key, probes.body())
    apart_s = probes.store.now() - probes.store.head(key).last_modified
    figures = {"dates_apart_s": apart_s}
    if abs(apart_s) > DATES_APART_MAX_S:
        what = f"the store dates an object {abs(apart_s):.0f} s away from its own answers"
        return Check("clock", "broken", what, "who is late is decided by these dates: set the server's clock", figures)
    skew = estimate_skew(stamps)
    if skew is None:
        return Check("clock", "warning", "the store does not list what was written, so its clock is not known")
    figures |= {"store_ahead_s": skew.ahead_s, "uncertainty_s": skew.uncertainty_s}
    side = "ahead of" if skew.ahead_s >= 0 else "behind"
    what = f"the store's is {abs(skew.ahead_s):.2f} s (± {skew.uncertainty_s:.2f} s) {side} this machine's"
    if abs(skew.ahead_s) - skew.uncertainty_s <= SKEW_MAX_S:
        return Check("clock", "ok", what, figures=figures)
    hint = "let NTP set this machine's: times in its logs are off, and S3 refuses requests 15 minutes away from its own"
    return Check("clock", "warning", what, hint, figures)


def measure_throughput(
    probes: Probes, area: Area, clock: Clock, size: int, latency: Speed
) -> tuple[list[Check], Speed]:
    """Send one object of `size` bytes that cannot be compressed, and fetch it.

    Raises:
        Unavailable, Denied: It could not be measured.
    """
    data = hashlib.shake_128(probes.ids.fresh().encode()).digest(size)
    key = probes.key(area)
    started = clock.monotonic()
    probes.put(key, data)
    sent = clock.monotonic()
    fetched, _ = probes.store.get(key)
    ended = clock.monotonic()
    speed = Speed(latency.put_s, latency.get_s, size / max(sent - started, _TINY_S), size / max(ended - sent, _TINY_S))
    if fetched != data:
        hint = "something on the way changes bytes: a proxy, or the store itself"
        return [Check("upload", "broken", f"{size} bytes came back as others", hint)], speed
    checks = []
    for name, rate in (("upload", speed.up_bytes_per_s), ("download", speed.down_bytes_per_s)):
        slow = rate < SLOW_BYTES_PER_S
        what = f"{rate / 1e6:.1f} MB/s, one object of {size / 1e6:.1f} MB"
        hint = "exchange less often (sync.sync_every), or fewer bytes (codecs of the presets, docs/numerics.md)"
        checks.append(
            Check(name, "warning" if slow else "ok", what, hint if slow else "", {f"{name}_bytes_per_s": rate})
        )
    return checks, speed


def exchange_check(speed: Speed, parameters: int) -> Check:
    """What one exchange of a model would take an island here, with the default codecs."""
    up_s = UP_BYTES_PER_PARAMETER * parameters / speed.up_bytes_per_s
    down_s = DOWN_BYTES_PER_PARAMETER * parameters / speed.down_bytes_per_s
    waiting_s = EXCHANGE_REQUESTS * max(speed.put_s, speed.get_s)
    total_s = up_s + down_s + waiting_s
    figures = {"parameters": float(parameters), "up_s": up_s, "down_s": down_s, "requests_s": waiting_s}
    what = (
        f"{parameters / 1e6:g} M parameters, int4 up and int8 down: {_seconds(up_s)} up, {_seconds(down_s)} down, "
        f"{_seconds(waiting_s)} of small requests"
    )
    if total_s <= LONG_EXCHANGE_S:
        return Check("exchange", "ok", what, figures=figures)
    hint = f"let sync.sync_every steps take several times {_seconds(total_s)}, and policy.deadline_s more than that"
    return Check("exchange", "warning", what, hint, figures)


def estimate_skew(stamps: Sequence[Stamp]) -> Skew | None:
    """What all stamps together say; None of none.

    An object that was written between `before` and `after` and is dated d was written in [d, d + resolution) by the
    store's clock. Dates that are all whole seconds have a resolution of one.
    """
    if not stamps:
        return None
    resolution_s = 1.0 if all(stamp.dated == math.floor(stamp.dated) for stamp in stamps) else 0.02
    low = max(stamp.dated - stamp.after for stamp in stamps)
    high = min(stamp.dated + resolution_s - stamp.before for stamp in stamps)
    # If a clock was set meanwhile no skew agrees with all, and what lies between the bounds is as uncertain.
    return Skew((low + high) / 2, abs(high - low) / 2)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that is not exceeded by at least `share` of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _listed(probes: Probes, prefix: str) -> list[ObjectInfo]:
    return [*probes.store.list(prefix)]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
