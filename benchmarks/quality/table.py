"""The results as Markdown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from quality.studies import Study
from quality.summary import Summary, data_parallel, summaries
from quality.training import CURVE_BYTES, FINAL_BYTES, Result
from quality.tuning import TUNING_SEED

HEADER = f"""# Quality: held-out bits per byte at equal tokens

Written by `make bench-quality` from `results.jsonl`; `contenders.py` says what is compared, `studies.py` where.
Each contender gets as many trials of its learning rates as every other one of its study, at seed {TUNING_SEED}; the
best is run again at fresh seeds: *bits* is their median, with lowest and highest. Where the seeds are not run yet, it
is the best trial so far, marked with its number of trials. Held-out text: {FINAL_BYTES:,} bytes, the same for all
(curves in `results.jsonl`: {CURVE_BYTES:,}). *up* and *down* are payload bytes per parameter that an island sends and
fetches in `sync_every` steps, headers and all, with what is left over at the end; for data parallel, per step,
computed for a ring all-reduce in fp32 (2 (M − 1) / M values each way). *moved* is both over the whole run. *records* is
everything else that an island moves over the whole run, such as receipts and commits. Learning rates rise over the
first 5 % of the steps and fall along a cosine to a tenth. Weights of the newest version are evaluated, not an island's.

"""

FOOTER = """## What the figures do not show

- Anything about large models. These have 0.1 to 3 M parameters and see a few million bytes; what a setting costs at
  this size and length need not be what it costs at another. Who leads depends on the length: see the gap to data
  parallel against steps.
- Time. At equal tokens, islands that wait for links and islands that do not look alike; see `benchmarks/link`.
- Islands that differ. All have the same speed, none fails, everybody is in every round, and all draw from the same
  text. Staleness is always 0.
- Other inner optimizers than those named, weight decay, schedules, batch sizes: they are the same for all.
- Differences smaller than the range over seeds. Learning rates were searched on a coarse grid, at one seed.
"""


def write_table(path: Path, studies: Sequence[Study], results: Mapping[str, Result], machine: str) -> None:
    """Write all studies of which something is known."""
    parts = [HEADER]
    for study in studies:
        rows = summaries(study, results)
        if rows:
            parts.append(section(study, rows, data_parallel(study, results)))
    cpu_hours = sum(result.cpu_seconds for result in results.values()) / 3600
    parts.append(f"{len(results)} runs, {cpu_hours:.1f} hours of processor time: {machine}, one thread each.\n\n")
    parts.append(FOOTER)
    path.write_text("".join(parts))


def section(study: Study, rows: Sequence[Summary], reference: float | None) -> str:
    """One study's table."""
    what = f"`{study.name}`: {study.size} parameters, {study.islands} islands"
    lines = [
        f"## {study.title[0].upper()}{study.title[1:]}",
        "",
        f"{what}, {study.steps} steps of {study.batch} sequences, {study.trials} trials, {len(study.seeds)} seeds.",
        "",
        "| contender | bits | nats | gap | lr | outer lr, momentum | up | down | moved | records, kB | s of CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(study, row, reference) for row in rows),
        "",
        "",
    ]
    return "\n".join(lines)


def _row(study: Study, row: Summary, reference: float | None) -> str:
    lr, outer = row.point
    if row.tuned:
        spread = f" ({row.bits[0]:.3f} … {row.bits[-1]:.3f})" if len(row.bits) > 1 else ""
    else:
        spread = f" (trial; {row.trials} of {study.trials})"
    cells = (
        row.contender.title,
        f"{row.median:.3f}{spread}",
        f"{row.median * math.log(2):.3f}",
        "" if reference is None else f"{row.median - reference:+.3f}",
        f"{lr:g}",
        "" if outer is None else f"{outer[0]:g}, {outer[1]:g}",
        f"{row.up:.3g}",
        f"{row.down:.3g}",
        f"{row.moved:.3g}",
        f"{row.records / 1000:.0f}",
        f"{row.cpu_seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"
