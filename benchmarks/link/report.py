"""`results.md` from `results.json`: how long each waits on each link, and the wall time to the same loss.

    python benchmarks/link/report.py [results.json]

The loss that is compared is the lowest round figure (a multiple of 0.05 bits per byte) that every training came to, of
those with the most steps: a case may be shorter where only its waiting is wanted.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from report_text import INTRO, LIMITS

Case = dict[str, Any]
Cases = dict[str, Case]

PARAMETERS = 3_276_800
_CODEC_BYTES = {"int4": (0.43, 0.95), "topk": (0.021, 0.021)}
"""Bytes per parameter up and down in a long run, by `benchmarks/payload_bytes.py`."""
_REAL = ((1e9, 1.0), (10e9, 5.0))
"""Parameters, and assumed seconds of an inner step."""
_REAL_SYNC_EVERY = 100


def waiting_share(case: Case) -> float:
    """Of islands: share of the time up to the last step that was in `Island.step`. Of DDP: what is not compute."""
    if case["kind"] == "ddp":
        return 1 - compute_s(case) / step_s(case)
    exchange = sum(island["exchange_s"] for island in case["islands"])
    return float(exchange / (exchange + sum(island["compute_s"] for island in case["islands"])))


def step_s(case: Case) -> float:
    """Seconds of a step, everything included."""
    if case["kind"] == "ddp":
        return mean(float(rank["step_s"]) for rank in case["ranks"])
    seconds = [float(island["compute_s"] + island["exchange_s"]) for island in case["islands"]]
    return mean(seconds) / int(case["steps"])


def compute_s(case: Case) -> float:
    """Seconds of a step without the exchange; of islands beside the threads that code and send."""
    if case["kind"] == "ddp":
        return mean(float(rank["bare_step_s"]) for rank in case["ranks"])
    return mean(float(island["compute_s"]) for island in case["islands"]) / int(case["steps"])


def reached_s(case: Case, target: float) -> float:
    """Seconds from the first inner step until a version with at most this loss was in the bucket; inf if never."""
    begun = min(float(island["first_step_at"]) for island in case["islands"])
    times = [float(at) for at, _, bits in case["versions"] if bits <= target]
    return min(times, default=math.inf) - begun


def common_target(curve: Case, islands: Iterable[Case]) -> float:
    """The lowest multiple of 0.05 that every training came to."""
    lowest = [min(bits for _, bits in curve["ranks"][0]["curve"])]
    lowest += [min(bits for _, _, bits in case["versions"]) for case in islands]
    return math.ceil(float(max(lowest)) * 20) / 20


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def of_kind(cases: Cases, kind: str) -> list[Case]:
    """Cases by link."""
    found = [case for case in cases.values() if case["kind"] == kind]
    return sorted(
        found, key=lambda case: (case["rate_mbit"], case["delay_ms"], case.get("mode", ""), case.get("codec", ""))
    )


def of_full_length(cases: Cases) -> list[Case]:
    """The trainings of islands that took the most steps."""
    islands = of_kind(cases, "islands")
    most = max((case["steps"] for case in islands), default=0)
    return [case for case in islands if case["steps"] == most]


def link_name(case: Case) -> str:
    """For people."""
    return f"{case['rate_mbit']:g} Mbit/s, {case['delay_ms']:g} ms"


def label(case: Case) -> str:
    """Which settings of the islands."""
    codec = {"int4": "int4 up, int8 down", "topk": "topk both ways"}[case["codec"]]
    return f"{'overlap' if case['mode'] == 'overlap' else 'no overlap'}, {codec}"


def waiting(cases: Cases) -> Iterator[list[str]]:
    """Rows: one for each link and way of training."""
    for case in [*of_kind(cases, "ddp"), *of_kind(cases, "islands")]:
        is_ddp = case["kind"] == "ddp"
        whole = "" if is_ddp else f"{share_of_status(case):.1%}"
        yield [
            link_name(case),
            "DDP" if is_ddp else label(case),
            f"{compute_s(case):.2f}",
            f"{step_s(case):.2f}",
            f"**{waiting_share(case):.1%}**",
            whole,
        ]


def share_of_status(case: Case) -> float:
    """Share of waiting that `diloco-blob status --json` shows at the end, the last merge included."""
    totals = case["totals"]
    return float(totals["wait_s"] / (totals["wait_s"] + totals["train_s"]))


def same_loss(cases: Cases, target: float, ddp_steps: int) -> Iterator[list[str]]:
    """Rows: seconds to the target on each link, DDP's and the islands', and how many times less."""
    ddp = {link_name(case): ddp_steps * step_s(case) for case in of_kind(cases, "ddp")}
    for case in of_full_length(cases):
        theirs, ours = ddp.get(link_name(case)), reached_s(case, target)
        if theirs is None:
            continue
        versions = next((version for _, version, bits in case["versions"] if bits <= target), 0)
        yield [link_name(case), label(case), f"{theirs:.0f}", f"{ours:.0f}", str(versions), f"{theirs / ours:.1f}"]


def quiet_compute_s(cases: Cases) -> float | None:
    """The least processor time of a bare step that any island measured: what it takes when nobody else computes."""
    runs = [run for case in of_kind(cases, "islands") for run in case["islands"]]
    times = [float(run["bare_step_cpu_s"]) for run in runs if "bare_step_cpu_s" in run]
    return min(times, default=None)


def reckoned(cases: Cases, target: float, ddp_steps: int, quiet: float) -> Iterator[list[str]]:
    """Rows: the same with `quiet_compute_s` for each step, and DDP's exchange at the link's full rate."""
    for case in of_full_length(cases):
        theirs = ddp_steps * (quiet + PARAMETERS * 32e-6 / case["rate_mbit"])
        reached = reached_s(case, target)
        num_steps = min(case["steps"], reached / step_s(case))
        ours = reached - num_steps * (compute_s(case) - quiet)
        yield [link_name(case), label(case), f"{theirs:.0f}", f"{ours:.0f}", f"{theirs / ours:.1f}"]


def needed() -> Iterator[list[str]]:
    """Rows: the link that a real model needs, by arithmetic."""
    for parameters, seconds in _REAL:
        bits = 8e-6 * parameters
        row = [f"{parameters / 1e9:g} billion", f"{seconds:g} s", f"{bits * 4 / seconds:,.0f} each way"]
        for up, down in _CODEC_BYTES.values():
            round_s = _REAL_SYNC_EVERY * seconds
            row.append(f"{bits * up / round_s:.3g} up, {bits * down / round_s:.3g} down")
        yield row


def traffic(cases: Cases) -> Iterator[list[str]]:
    """Rows: what an island sent and received on the wire, and what became of it."""
    for case in of_kind(cases, "islands"):
        counts = [case["link_bytes"][f"island-{i}"] for i in range(len(case["islands"]))]
        up, down = (mean(count[way] for count in counts) / 1e6 for way in ("sent", "received"))
        totals = case["totals"]
        yield [
            link_name(case),
            label(case),
            str(case["steps"]),
            f"{up:.1f}",
            f"{down:.1f}",
            f"{totals['rounds']:.1f}",
            f"{totals['discounted']}",
            f"{mean(island['join_s'] for island in case['islands']):.1f}",
            f"{mean(island['finish_s'] for island in case['islands']):.1f}",
        ]


def lines(cases: Cases) -> Iterator[str]:
    """The page."""
    yield from (INTRO.strip(), "", "## What the links really do", "")
    probes = (
        [link_name(c), f"{c['mtu']}", f"{c['round_trip_ms']:.1f}", f"{c['up_mbit']:.1f}", f"{c['down_mbit']:.1f}"]
        for c in of_kind(cases, "probe")
    )
    yield from table(["link", "packet, bytes", "round trip, ms", "one TCP connection up, Mbit/s", "down"], probes)
    yield from ("", "## Share of time waiting", "")
    head = ["link", "training", "compute, s/step", "step, s", "waiting", "waiting by `status`, last merge included"]
    yield from table(head, waiting(cases))
    curve = next(iter(of_kind(cases, "ddp-curve")), None)
    islands = of_full_length(cases)
    if curve and islands:
        target = common_target(curve, islands)
        points = curve["ranks"][0]["curve"]
        ddp_steps = next(step for step, bits in points if bits <= target)
        yield from ("", f"## Wall time to {target:.2f} bits per held-out byte", "")
        yield f"DDP comes to it after {ddp_steps} of {points[-1][0]} steps (at the end: {points[-1][1]:.2f})."
        yield ""
        head = ["link", "islands", "DDP, s", "islands, s", "version", "times less"]
        yield from table(head, same_loss(cases, target, ddp_steps))
        if quiet := quiet_compute_s(cases):
            yield from (
                "",
                f"## The same, reckoned for a machine that has nothing else to do ({quiet:.2f} s a step)",
                "",
            )
            head = ["link", "islands", "DDP at least, s", "islands, s", "times less"]
            yield from table(head, reckoned(cases, target, ddp_steps, quiet))
    yield from ("", "## What crossed the links", "")
    head = ["link", "islands", "steps", "MB up", "MB down", "rounds", "discounted", "joining, s", "finish, s"]
    yield from table(head, traffic(cases))
    yield from ("", "## What link a real model needs: arithmetic, not measured", "")
    head = [
        "parameters",
        "inner step",
        "DDP, two ranks, Mbit/s",
        "int4 up, int8 down, Mbit/s",
        "topk both ways, Mbit/s",
    ]
    yield from table(head, needed())
    yield from ("", LIMITS.strip())


def write_report(results: Path) -> str:
    """Write `results.md` beside a `results.json`; returns its path."""
    path = results.with_suffix(".md")
    path.write_text("\n".join(lines(json.loads(results.read_text()))) + "\n")
    return str(path)


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results.json")))
