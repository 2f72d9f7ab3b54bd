"""`diloco-blob verify --replay`: what was merged, recomputed; and what would have been, by another rule."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.replay import WhatIfReport, changed_merge, what_if
from diloco_blob.cli.urls import absolute_url, folder_of
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import Denied, InvalidSettings
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol.heads import read_run
from diloco_blob.store import ObjectStore, open_store
from diloco_blob.wire import printable

CHANGES = ("without", "staleness", "merge", "clip")
"""The options that ask what would have been."""

_FIGURES: dict[str, dict[str, tuple[str, ...]]] = {
    "staleness": {"constant": (), "polynomial": ("staleness_a",), "hinge": ("staleness_a", "staleness_b")},
    "rule": {"mean": (), "rda": (), "trimmed_mean": ("trim",)},
    "clip": {"none": (), "median": ()},
}
"""By setting the rules that it may be, and the settings that their figures stand for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a replay to those of `verify`."""
    parser.add_argument(
        "--replay", action="store_true", help="also recompute every version that can be, from receipts and payloads"
    )
    group = parser.add_argument_group(
        "what if",
        "With --replay: instead of verifying, recompute the run along a changed rule, from the oldest version that\n"
        "can be, each version on top of the recomputed one. Contributions stay as they were made: they started from\n"
        "the versions that really were.",
    )
    group.add_argument("--without", metavar="ISLAND", action="append", help="leave an island out; may be repeated")
    group.add_argument("--staleness", metavar="RULE", help="constant, polynomial[:a] or hinge[:a[:b]]")
    group.add_argument("--merge", metavar="RULE", help="mean, rda or trimmed_mean[:trim]")
    group.add_argument("--clip", metavar="RULE", help="none or median")
    group.add_argument(
        "--into",
        metavar="FOLDER",
        help="keep the recomputed run here, for export; its version 0 is what it starts from",
    )


def asks_what_if(args: argparse.Namespace) -> bool:
    """Whether anything is to be changed.

    Raises:
        InvalidSettings: Words that do not go together.
    """
    given = [name for name in (*CHANGES, "into") if getattr(args, name) is not None]
    for name in given:
        if "" in (getattr(args, name), *(getattr(args, name) if name == "without" else ())):
            raise InvalidSettings(f"--{name} is empty", "is a shell variable not set? give a word, or leave it out")
    if given and not args.replay:
        raise InvalidSettings(f"--{given[0]} is for a replay", "add --replay")
    if given == ["into"]:
        raise InvalidSettings("--into keeps what a changed rule gives", f"say what to change: --{', --'.join(CHANGES)}")
    return bool(given)


def open_run(url: str) -> Context:
    """The run that is replayed.

    Raises:
        DilocoError: There is no run at the URL, or it cannot be read.
    """
    store = open_store(url)
    return Context(store=store, run=read_run(store), clock=SystemClock(), ids=SystemIds())


def run_what_if(ctx: Context, args: argparse.Namespace) -> WhatIfReport:
    """Recompute along the changed rule.

    Raises:
        DilocoError: No such island or rule, nothing left to recompute, or a folder that is not empty.
    """
    changes = {
        **({} if args.staleness is None else _rule("staleness", "staleness", args.staleness)),
        **({} if args.merge is None else _rule("merge", "rule", args.merge)),
        **({} if args.clip is None else _rule("clip", "clip", args.clip)),
    }
    merge = changed_merge(ctx.run.run.settings.merge, changes)
    with _scratch(args.into, args.url) as into:
        return what_if(ctx, into, merge=merge, without=args.without or ())


def print_what_if(report: WhatIfReport) -> None:
    """One line for each version, and the totals."""
    for effect in report.effects:
        left_out = f", {effect.num_left_out} left out" if effect.num_left_out else ""
        print(
            f"fragment {effect.fragment} version {effect.version}: {effect.num_merged} merged{left_out}; "
            f"step {effect.step_norm:.6g} -> {effect.what_if_step_norm:.6g}; weights differ by {effect.difference:.6g}"
            f"{_share(effect.difference, effect.distance)}, since version {report.bases[effect.fragment]}"
        )
    print(
        f"in all: {len(report.effects)} version{'' if len(report.effects) == 1 else 's'} recomputed; "
        f"the newest weights differ by {report.difference:.6g}{_share(report.difference, report.distance)}"
    )


def _share(difference: float, distance: float) -> str:
    share = f", {100.0 * difference / distance:.3g} %" if distance > 0.0 else ""
    return f"{share} of the {distance:.6g} that they moved"


def _rule(option: str, field: str, text: str) -> dict[str, Any]:
    """The settings that `NAME[:figure...]` stands for."""
    rules = _FIGURES[field]
    name, *figures = text.split(":")
    text = printable(text)  # from here on only shown
    if name not in rules:
        raise InvalidSettings(f"--{option} {text}: there is no rule {name!r}", f"there are {', '.join(rules)}")
    names = rules[name]
    if len(figures) > len(names):
        raise InvalidSettings(f"--{option} {text}: at most {len(names)} figures for {name}", "see verify --help")
    try:
        return {field: name, **{key: float(figure) for key, figure in zip(names, figures, strict=False)}}
    except ValueError:
        raise InvalidSettings(f"--{option} {text}: a figure is not a number", "write it as 0.5") from None


@contextmanager
def _scratch(into: str | None, url: str) -> Iterator[ObjectStore]:
    """A folder for the recomputed run, which goes away afterwards unless it was asked for."""
    if into is None:
        with tempfile.TemporaryDirectory(prefix="diloco-what-if-") as folder:
            yield open_store(folder)
        return
    shown = printable(into)
    if "://" in into or into.startswith("file:"):
        raise InvalidSettings(f"--into {shown} is a URL, and not a folder", "give the path of a folder on this machine")
    path, run = Path(into), folder_of(absolute_url(url))
    if run is not None and path.resolve().is_relative_to(run.resolve()):
        raise InvalidSettings(f"{shown} is in the run's own folder", "nothing may be written there: choose another one")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InvalidSettings(f"{shown} is there and not an empty folder", "choose another one")
    except OSError as error:
        raise Denied(f"cannot read {shown}: {error.strerror or error}") from error
    yield open_store(str(path.absolute()))
