"""Measures, and writes results.json and results.md beside this file."""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from speed import merging, ratios, training
from speed.model import ISLAND, LARGE, SMALL, Model

HERE = Path(__file__).parent
SIZES = ((1 << 20, 20), (16 << 20, 7), (256 << 20, 3))
"""Parameters, rounds."""
Row: TypeAlias = dict[str, float | str]
MERGES: tuple[tuple[Model, int], ...] = ((SMALL, 2), (SMALL, 8), (SMALL, 16), (LARGE, 8))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---:"] * len(list(head)), *rows)]


def machine() -> dict[str, object]:
    """What this ran on."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()]
    names = [name for name in models if any(maker in name for maker in ("AMD", "Intel", "ARM", "EPYC", "Xeon"))]
    return {
        "cpu": names[-1] if names else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def million(value: float | str) -> str:
    """A count for people."""
    return f"{float(value) / 1e6:.0f} M"


def ratio_table(rows: list[Row]) -> list[str]:
    """Part one."""
    names = ("encode", "decode", "accumulate", "outer_step")
    return table(
        ["parameters", "copy, ms", "encode", "decode", "accumulate", "outer step"],
        (
            [million(row["parameters"]), f"{1e3 * float(row['copy_s']):.1f}", *(f"{float(row[n]):.1f}" for n in names)]
            for row in rows
        ),
    )


def merge_table(rows: list[Row]) -> list[str]:
    """Part two."""

    def tensors(row: Row) -> float:
        return (float(row["peak_mib"]) - float(row["before_mib"])) * 2**20 / (4 * float(row["largest"]))

    names = ("seconds", "cpu_s", "fetched_s", "computed_s")
    return table(
        ["parameters", "largest tensor", "islands", "s", "CPU s", "fetched, s", "computed, s", "peak, MiB", "tensors"],
        (
            [
                million(row["parameters"]),
                million(row["largest"]),
                str(row["islands"]),
                *(f"{float(row[name]):.1f}" for name in names),
                f"{float(row['peak_mib']):.0f}",
                f"{tensors(row):.1f}",
            ]
            for row in rows
        ),
    )


def training_table(rows: list[Row]) -> list[str]:
    """Part three."""
    return table(
        ["adopt", "parameters", "copy", "snapshot", "adoption"],
        (
            [
                str(row["adopt"]),
                million(row["parameters"]),
                f"{float(row['copy_ms']):.0f}",
                f"{float(row['snapshot_ms']):.0f} ({float(row['snapshot_wall_ms']):.0f})",
                f"{float(row['adoption_ms']):.0f} ({float(row['adoption_wall_ms']):.0f})",
            ]
            for row in rows
        ),
    )


TEXT = """# Speed

`make bench-speed` on {cpu}, {cpus} CPUs, Python {python}, numpy {numpy}. Load average when it began: {load_before:.1f};
where it is more than 1, wall times say little.

Ratios: CPU time on one thread over that of copying the same fp32 values, the best of several rounds. int4 in blocks of
256, without zstd; accumulate: one island's tensor, with its share of the final rounding; outer step: Nesterov.

{ratios}

A merge: one pass of the aggregator on a local folder, int4 with error feedback both ways. Memory is the peak of the
process; *tensors*: what came on top of the imported program, in sizes of the largest tensor (fp32).

{merges}

What a round costs the training thread, ms of CPU time (wall time): the step that sends, and the one that adopts. int4
with error feedback both ways, torch on one thread.

{training}
"""
"""results.md."""


def report(found: dict[str, list[Row]], where: dict[str, object]) -> str:
    """results.md, filled in."""
    return TEXT.format(
        **where,
        ratios="\n".join(ratio_table(found["ratios"])),
        merges="\n".join(merge_table(found["merges"])),
        training="\n".join(training_table(found["training"])),
    )


def main() -> None:
    """Measure what is asked for; what is not keeps its figures of the last time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("ratios", "merges", "training"))
    parser.add_argument("--folder", help="where the merges' bucket is made; a temporary folder by default")
    args = parser.parse_args()
    results = HERE / "results.json"
    found = json.loads(results.read_text()) if results.exists() else {"ratios": [], "merges": [], "training": []}
    found["machine"] = machine()
    if args.only in {None, "ratios"}:
        found["ratios"] = [ratios.ratios(size, rounds)._asdict() for size, rounds in SIZES]
    if args.only in {None, "training"}:
        found["training"] = [training.lost(ISLAND, adopt, 2)._asdict() for adopt in training.ADOPTS]
    if args.only in {None, "merges"}:
        found["merges"] = []
        for model, islands in MERGES:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found["merges"].append(merging.measure(Path(folder) / "run", model, islands)._asdict())
    results.write_text(json.dumps(found, indent=2) + "\n")
    text = report(found, found["machine"])
    (HERE / "results.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
