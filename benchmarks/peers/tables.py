"""The bench's results as a page: `results.md` is made of `results.json` and nothing else.

A figure over several seeds is the median; one that is missing is a dash.
"""

from statistics import fmean, median
from typing import Any

PARAMETERS = 131_072
"""Of the model; a test holds it to `task.py`."""
CLASSES = ("PUT", "GET", "HEAD", "LIST", "DELETE")
_NUM_WORKERS = 2

_WHO = ("worker 0", "worker 1", "global")
_BYTES = ("up", "down", "up, whole run", "down, whole run", "aggregator up", "aggregator down")
_AFTER = ("worker 0 stood still", "worker 1 came back at round")

_NOTHING_FAILS = """\
## Nothing fails

Held-out loss in nats per byte at equal tokens, of what each worker ends with and of the global model that the system
keeps. Bytes per parameter and round of a worker's link: in a median round, and over the whole run, joining included;
and of our aggregator's link over the whole run. Who closes a round in gradientmail is a worker, and so in its columns;
Flower's server has what its workers have, the other way round.
"""

_KILLED = """\
## Worker 1 is killed in the middle of round 4

It joins again, with nothing on its disk, when worker 0 has completed round 6, or when worker 0 has
completed none for so long as the table says (*stood still*; the bench's limit, so it shows no more than that nothing
moved until then). The run is over at round 8. *Rounds* are those in which a worker trained, the one it
died in not counted. *Came back at round*: what the system itself told it; a dash where it trains first and is told at
its first exchange (torchft), or with each message (flwr), or never (flwr-serverless).
"""

_NOT_SHOWN = """\
## What this does not show

- A model of 131,072 parameters on one machine: fixed costs (headers, polling, imports) weigh more than in earnest, and
  a link is never the limit. Bytes per parameter of everything that grows with the model carry over; seconds do not.
- Seconds depend on the machine's load while it ran (the last column of the first table); only several times as many
  mean anything. They run from the moment at which all workers had loaded everything to the last one's end; Flower
  starts a process for each round, and so pays for loading torch in each.
- Outer momentum is Nesterov's 0.9 and the outer learning rate 0.7 wherever there is a choice. Flower's FedAvgM has
  plain momentum; flwr-serverless has no outer optimizer. Their losses say something of that, not of their transport.
- Differences of less than 0.02 nats between systems that do not compute the same thing are within what another seed
  does.
- It compares systems, not methods. Outer momentum of 0.9 starts slowly: after eight rounds two workers that never
  exchanged anything (`alone`) have the lower loss. The systems that do DiLoCo in fp32 end at the same weights but for
  rounding, and that is what the losses show.
- Eight rounds are few for a codec that sends one value in 64: what error feedback still owes at the end is lost.
- In the faults, how long a survivor waits is each system's time-out as it is set here: hivemind 30 s (its averager's
  step), torchft 10 s and 30 s (its example's), gradientmail 120 s (its lease's default), ours 20 s (`deadline_s`).
- The kill is a process's death: connections are reset at once. A machine that vanishes silently is noticed later.
- One fault, at one moment, of one worker of two. With two workers every quorum is all or one.
"""


def line(run: dict[str, Any]) -> str:
    """A run in one line, while the bench is going on."""
    head = f"{run['system']} seed {run['seed']}{' with a worker killed' if run['fault'] else ''}:"
    if "failed" in run:
        return f"{head} failed, {run['failed']}"
    losses = [w["loss"] for w in run["workers"]] + [run["global_loss"]]
    return f"{head} {run['seconds']} s, losses {' '.join(map(_loss, losses))} {run['cut_off']}".rstrip()


def text(results: dict[str, Any]) -> str:
    """The whole page."""
    parts = [_head(results), _quality(results), _requests(results), _faults(results), _NOT_SHOWN]
    return "\n".join(part for part in parts if part)


def final_loss(run: dict[str, Any]) -> float | None:
    """Held-out loss of what a run ends with: of its global model, or the mean over the workers' models."""
    if run.get("global_loss") is not None:
        return float(run["global_loss"])
    losses = [float(w["loss"]) for w in run.get("workers", []) if w["loss"] is not None]
    return fmean(losses) if len(losses) == _NUM_WORKERS else None


def round_bytes(run: dict[str, Any], direction: int) -> float | None:
    """Bytes per parameter that a worker's link carried in a median round, mean over the workers.

    Args:
        run: A run.
        direction: 0 for down, 1 for up.
    """
    of_workers = [[r[direction] for r in w["round_bytes"]] for w in run.get("workers", [])]
    if "link" not in run or not all(of_workers):
        return None
    return fmean(median(numbers) for numbers in of_workers) / PARAMETERS


def run_bytes(run: dict[str, Any], name: str, direction: str, rounds: int) -> float | None:
    """Bytes per parameter and round through somebody's link over the whole run, joining and ending included."""
    link = run.get("link", {}).get(name)
    return link[direction] / PARAMETERS / rounds if link else None


def _head(results: dict[str, Any]) -> str:
    machine, recipe = results.get("machine", {}), results.get("recipe", {})
    steps = f"{recipe.get('rounds')} rounds of {recipe.get('sync_every')} steps"
    batch = f"batch {recipe.get('batch')} × {recipe.get('context')}, AdamW {recipe.get('lr')}"
    outer = f"outer SGD {recipe.get('outer_lr')} / {recipe.get('outer_momentum')}"
    releases = "; ".join(sorted({_release(of) for of in results.get("versions", {}).values()}))
    lines = [
        "# Peers in one run",
        "",
        "Written by `make bench-peers` (`benchmarks/peers/compare.py`) from `results.json`; do not edit.",
        "",
        f"{machine.get('date')}, {machine.get('cores')} cores ({machine.get('cpu')}), Linux {machine.get('kernel')}.",
        f"Two workers, a byte-level GPT of {PARAMETERS:,} parameters on Python's own text, the same initial weights,",
        f"batches and steps for all: {steps}, {batch}, {outer}.",
        "Each worker has a network namespace of its own; bytes are its device's counters in /proc/net/dev, so headers",
        "of IP and TCP, polling and coordination are in them. Requests are counted by a proxy before SeaweedFS.",
        "",
        f"Releases: {releases}.",
    ]
    lines += [f"Skipped: {name}, {reason}." for name, reason in sorted(results.get("skipped", {}).items())]
    return "\n".join(lines) + "\n"


def _release(of: dict[str, str]) -> str:
    """The releases of one environment, the system's own first."""
    base = ("python", "torch", "boto3")
    own = [f"{name} {value}" for name, value in of.items() if name not in (*base, "numpy")]
    return f"{', '.join(own)} with {', '.join(f'{name} {of[name]}' for name in base if name in of)}"


def _quality(results: dict[str, Any]) -> str:
    rounds = results.get("recipe", {}).get("rounds", 1)
    rows = [
        _row(
            "system", "what is merged, and how", "seeds", *_WHO, "minus in-process DiLoCo", *_BYTES, "seconds", "load"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    references = {run["seed"]: final_loss(run) for run in _runs(results, "diloco", fault=False)}
    for name in _names(results):
        runs = [run for run in _runs(results, name, fault=False) if final_loss(run) is not None]
        if not runs:
            continue
        gaps = [_minus(final_loss(run), references.get(run["seed"])) for run in runs]
        workers = [f"worker-{i}" for i in range(_NUM_WORKERS)]
        cells = [
            *(_loss(_median([run["workers"][i]["loss"] for run in runs])) for i in range(_NUM_WORKERS)),
            _loss(_median([run["global_loss"] for run in runs])),
            _signed(_median(gaps)),
            *(_bytes(_median([round_bytes(run, direction) for run in runs])) for direction in (1, 0)),
            *(
                _bytes(_median([run_bytes(run, worker, direction, rounds) for run in runs for worker in workers]))
                for direction in ("up", "down")
            ),
            *(
                _bytes(_median([run_bytes(run, "aggregator", direction, rounds) for run in runs]))
                for direction in ("up", "down")
            ),
            f"{median(run['seconds'] for run in runs):.0f}",
            _whole(_median([run.get("load") for run in runs])),
        ]
        rows.append(_row(name, results["rules"][name], str(len(runs)), *cells))
    intro = _NOTHING_FAILS
    return "\n".join([intro, *rows]) + "\n"


def _requests(results: dict[str, Any]) -> str:
    rounds = results.get("recipe", {}).get("rounds", 1)
    rows = [
        f"| system | who | {' | '.join(CLASSES)} | of them 304 | 404 | 412 | seconds |",
        f"|---|---|{'---|' * (len(CLASSES) + 4)}",
    ]
    for name in _names(results):
        runs = [run for run in _runs(results, name, fault=False) if "requests" in run]
        for who in sorted({who for run in runs for who in run["requests"]}):
            kinds = (*CLASSES, "304", "404", "412")
            cells = [f"{median(r['requests'].get(who, {}).get(k, 0) for r in runs) / rounds:.1f}" for k in kinds]
            rows.append(f"| {name} | {who} | {' | '.join(cells)} | {median(run['seconds'] for run in runs):.0f} |")
    intro = (
        "## Requests to the bucket\n\nPer round, over the whole run. Whoever polls asks more the longer a round is.\n"
    )
    return "\n".join([intro, *rows]) + "\n" if len(rows) > 2 else ""


def _faults(results: dict[str, Any]) -> str:
    rows = [
        _row("system", *_WHO, "minus its run without", "rounds of worker 0 / 1", "away s", *_AFTER, "seconds", "end"),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in _names(results):
        for run in _runs(results, name, fault=True):
            if "failed" in run:
                rows.append(f"| {name} | - | - | - | - | - | - | - | - | - | {run['failed']} |")
                continue
            without = next((r for r in _runs(results, name, fault=False) if r["seed"] == run["seed"]), {})
            joined = run["workers"][1]["joined"]
            cells = [
                *(_loss(w["loss"]) for w in run["workers"]),
                _loss(run["global_loss"]),
                _signed(_minus(final_loss(run), final_loss(without))),
                " / ".join(str(w["rounds_trained"]) for w in run["workers"]),
                f"{run['back_s'] - run['killed_s']:.0f}" if run["back_s"] else "-",
                f"{run['stall_limit_s']:.0f} s, until then" if run["stalled"] else "no",
                str(joined[-1]) if run["back_s"] and joined else "-",
                f"{run['seconds']:.0f}",
                run["cut_off"] or "all done",
            ]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    intro = _KILLED
    return "\n".join([intro, *rows]) + "\n" if len(rows) > 2 else ""


def _names(results: dict[str, Any]) -> list[str]:
    """Systems in the order in which the bench has them."""
    order = list(results.get("rules", {}))
    names = {run["system"] for run in results["runs"]}
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _runs(results: dict[str, Any], name: str, *, fault: bool) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if run["system"] == name and run["fault"] == fault]


def _median(numbers: list[float | None]) -> float | None:
    there = [number for number in numbers if number is not None]
    return median(there) if there else None


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _signed(number: float | None) -> str:
    return "-" if number is None else f"{number:+.4f}"


def _bytes(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
