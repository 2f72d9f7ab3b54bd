"""How a run's figures look to people: tables for `status`, for the live view and for the summary of `launch`.

Text that others wrote (names, samples, messages) never becomes markup or control characters.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diloco_blob.cli.run_status import IslandView, RunStatus

PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
_FRAGMENTS_SHOWN = 8
_STYLES = {
    "training": "green",
    "waiting": "cyan",
    "finishing": "cyan",
    "done": "bold green",
    "paused": "yellow",
    "restarting": "yellow",
    "silent": "yellow",
    "failed": "bold red",
    "fenced": "bold red",
}


def make_console(file: TextIO | None = None) -> Console:
    """A console for `file`, stdout by default; colours and width as the terminal and NO_COLOR have it."""
    file = file or sys.stdout
    width = None if file.isatty() else PLAIN_WIDTH
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def human_bytes(count: float) -> str:
    """`1234567` as `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def human_count(count: float) -> str:
    """`1234567` as `1.2 M`."""
    for unit in ("", " k", " M", " B"):
        if count < 1000 or unit == " B":
            break
        count /= 1000
    return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"


def human_seconds(seconds: float) -> str:
    """`75` as `1 min 15 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def versions(status: RunStatus) -> str:
    """The fragments' versions, as one number if they agree."""
    found = {fragment.version for fragment in status.fragments}
    return f"version {min(found)}" if len(found) == 1 else f"versions {min(found)} to {max(found)}"


def num_islands(count: int) -> str:
    """`3 islands`, `1 island`."""
    return f"{count} island{'' if count == 1 else 's'}"


def islands_table(
    status: RunStatus,
    restarts: Mapping[str, int] | None = None,
    states: Mapping[str, str] | None = None,
    pids: Mapping[str, int | None] | None = None,
) -> Table:
    """What each island is doing; with the restarts, states and processes that `launch` knows of, if given."""
    table = _table("island", "state", right=("step", "tokens/s", "loss", "version", "behind", "staleness"))
    if restarts is not None:
        table.add_column("restarts", justify="right")
    if pids:
        table.add_column("process", justify="right", no_wrap=True)
    known = {island.name: island for island in status.islands}
    names = [*known, *(name for name in states or {} if name not in known)]
    for name in sorted(names):
        island = known.get(name)
        state = (states or {}).get(name) or (island.state if island else "starting")
        cells: list[str | Text] = [plain(name), plain(state, style=_STYLES.get(state, ""))]
        cells += _progress_cells(island)
        if restarts is not None:
            cells.append(str(restarts.get(name, 0)))
        if pids:
            cells.append(str(pids.get(name) or "-"))
        table.add_row(*cells)
    return table


def contributions_table(status: RunStatus) -> Table:
    """What became of each island's work, and what it cost."""
    figures = ("steps", "tokens", "merged", "accepted", "late", "skipped", "rejected", "up", "down")
    table = _table("island", right=figures, gap=1)
    for island in (*status.islands, None):
        source = island or status.totals
        if island is None:
            table.add_section()
        table.add_row(
            plain(island.name) if island else "all",
            str(source.steps),
            human_count(source.tokens),
            human_count(source.tokens_merged),
            str(source.accepted),
            str(source.discounted),
            str(source.skipped),
            str(source.rejected),
            human_bytes(source.bytes_up),
            human_bytes(source.bytes_down),
        )
    return table


def fragments_table(status: RunStatus) -> Table:
    """The newest version of each fragment; of many, the first ones."""
    table = _table("fragment", right=("version", "tokens merged", "parameters", "step norm", "committed"))
    for fragment in status.fragments[:_FRAGMENTS_SHOWN]:
        table.add_row(
            str(fragment.fragment),
            str(fragment.version),
            human_count(fragment.tokens),
            human_count(fragment.parameters),
            "-" if fragment.step_norm is None else f"{fragment.step_norm:.3g}",
            f"{human_seconds(max(0.0, status.now - fragment.committed_at))} ago",
        )
    if len(status.fragments) > _FRAGMENTS_SHOWN:
        table.caption = f"and {len(status.fragments) - _FRAGMENTS_SHOWN} more fragments"
    return table


def outcome_lines(status: RunStatus) -> list[str]:
    """Held-out figures before and after, and the bytes of a round."""
    lines, evals, totals = [], status.eval, status.totals
    if evals.last:
        before, last = evals.before or evals.last, evals.last
        line = f"held-out bits per byte   {before.bits_per_byte:.3f} at version {before.version}"
        if (before.version, before.step) != (last.version, last.step):  # each island may have made the first one
            line += f", {last.bits_per_byte:.3f} at version {last.version} ({last.island}, step {last.step})"
        lines.append(line)
    if totals.bytes_per_param_up is not None and totals.bytes_per_param_down is not None:
        lines.append(
            f"bytes per parameter      {totals.bytes_per_param_up:.2f} up, {totals.bytes_per_param_down:.2f} down, "
            "per island and round"
        )
    if totals.wait_s + totals.train_s > 0.0:
        waited = 100.0 * totals.wait_s / (totals.wait_s + totals.train_s)
        lines.append(f"waiting                  {waited:.0f}% of the islands' time")
    return lines


def status_view(status: RunStatus) -> RenderableType:
    """All of a run's figures, as `status` prints them."""
    totals = status.totals
    head = Text.assemble(
        ("run ", "dim"),
        plain(status.run, style="bold"),
        f"  {versions(status)}, {human_count(totals.parameters)} parameters, {num_islands(len(status.islands))}",
    )
    return Group(head, *_blocks(fragments_table(status), islands_table(status), *summary_blocks(status)))


def summary_blocks(status: RunStatus) -> list[RenderableType]:
    """What a run came to: contributions, outcome, a sample of text."""
    blocks: list[RenderableType] = [contributions_table(status)]
    lines = outcome_lines(status)
    if lines:
        blocks.append(Text("\n".join(lines)))
    last = status.eval.last
    if last and last.sample.strip():
        sample = _Indented(plain(last.sample.strip("\n"), keep_newlines=True, style="italic"))
        blocks.append(
            Group(Text(f"what the model writes ({last.island}, version {last.version})", style="dim"), sample)
        )
    return blocks


def summary_view(status: RunStatus) -> RenderableType:
    """What a run came to, as `launch` prints it at its end."""
    return Group(*_blocks(*summary_blocks(status)))


def plain(text: str, *, keep_newlines: bool = False, style: str = "") -> Text:
    """Text of others without control characters: it cannot steer the terminal."""
    kept = "\n" if keep_newlines else ""
    return Text("".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text), style=style)


class _Indented:
    """Text four columns to the right, without blanks at the ends of its lines."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._text.wrap(console, max(1, options.max_width - 4)):
            line.rstrip()
            yield Text.assemble("    ", line) if line else Text("")


def _blocks(*parts: RenderableType) -> Iterable[RenderableType]:
    for part in parts:
        yield Text("")
        yield part


def _table(*left: str, right: tuple[str, ...], gap: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _progress_cells(island: IslandView | None) -> list[str]:
    if island is None or island.generation == 0:
        return ["-"] * 6
    return [
        str(island.steps),
        human_count(island.tokens_per_s),
        "-" if island.loss is None else f"{island.loss:.3f}",
        str(island.version),
        str(island.versions_behind),
        str(island.staleness),
    ]
