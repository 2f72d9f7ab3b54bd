"""What `launch` is going to do, checked before any process starts: a mistake costs a second, not an evening."""

import datetime as dt
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from diloco_blob.cli.processes import Command
from diloco_blob.cli.urls import RUNS, absolute_url
from diloco_blob.core.clock import Clock
from diloco_blob.core.errors import InvalidSettings, NotFound
from diloco_blob.core.ids import Ids
from diloco_blob.core.settings import conflicts, load_settings
from diloco_blob.protocol.heads import read_run
from diloco_blob.store import ObjectStore
from diloco_blob.store.probe import probe


class Plan(Struct, frozen=True):
    """One `launch`, with every path absolute where a child will need it."""

    run: str
    """URL of the run."""
    workdir: Path
    """Logs and checkpoints."""
    script: Path
    arguments: tuple[str, ...]
    islands: int
    aggregators: int
    settings: str | None
    """Preset or absolute path of a TOML file."""
    export: Path | None
    max_restarts: int
    max_own_restarts: int | None = None
    """Of an island that no signal kills; None if nothing else is wanted of it than of others."""


def new_run(clock: Clock, ids: Ids) -> str:
    """A local folder for a run that nobody gave a URL; it sorts by time and is not there yet."""
    now = dt.datetime.fromtimestamp(clock.wall(), tz=dt.UTC)
    return str(RUNS / f"{now:%Y%m%d-%H%M%S}-{ids.fresh()[:4]}")


def check(plan: Plan, store: ObjectStore, ids: Ids) -> None:
    """Everything that can be known to be wrong before a process starts.

    Raises:
        InvalidSettings: No such script; settings that are wrong, ask for more islands than there will be, or are not
            those of the run; a store that cannot carry a run.
        Denied, NotFound, Unavailable: The store cannot be used.
    """
    if not plan.script.is_file():
        raise InvalidSettings(f"there is no script {plan.script}", "give the path of a Python file")
    if plan.run.startswith("memory:"):
        raise InvalidSettings("memory:// lives in one process, and islands are several", "use a folder or a bucket")
    settings = load_settings(plan.settings) if plan.settings else None
    probe(store, ids)
    try:
        run = read_run(store)
    except NotFound:  # The first island creates it.
        if settings:
            settings.resolved(plan.islands)
    else:
        found = conflicts(run.run.settings, settings) if settings else []
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise InvalidSettings(
                f"the run at {plan.run} has other settings: {'; '.join(found[:3])}{more}",
                "use another --run URL, or leave out --settings to go on with the run's own",
            )
    try:
        (plan.workdir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSettings(f"cannot write to {plan.workdir}: {error.strerror}", "give another --dir") from error


def island_names(plan: Plan) -> list[str]:
    """`island-0` and so on."""
    return [f"island-{number}" for number in range(plan.islands)]


def island_commands(plan: Plan, environ: Mapping[str, str]) -> list[Command]:
    """How each island is started.

    Args:
        plan: What to do.
        environ: Our own environment, which they inherit.
    """
    shared = {
        **{name: value for name, value in environ.items() if name != "DILOCO_SETTINGS"},
        "DILOCO_RUN": absolute_url(plan.run),
        "DILOCO_ISLANDS": str(plan.islands),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(_threads(plan.islands))),
        "PYTHONUNBUFFERED": "1",
    }
    if plan.settings:
        shared["DILOCO_SETTINGS"] = plan.settings
    return [
        Command(
            name=name,
            argv=(sys.executable, str(plan.script), *plan.arguments),
            env={
                **shared,
                "DILOCO_ISLAND": name,
                "DILOCO_CHECKPOINT_DIR": str(plan.workdir / "checkpoints" / name),
            },
            log=plan.workdir / "logs" / f"{name}.log",
        )
        for name in island_names(plan)
    ]


def aggregator_commands(plan: Plan, environ: Mapping[str, str]) -> list[Command]:
    """How each aggregator is started."""
    url = absolute_url(plan.run)
    return [
        Command(
            name=name,
            argv=(sys.executable, "-m", "diloco_blob.cli.main", "aggregate", url, "--watch", "--json"),
            env={**environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            log=plan.workdir / "logs" / f"{name}.log",
            endless=True,
        )
        for name in (f"aggregator-{number}" for number in range(plan.aggregators))
    ]


def _threads(islands: int) -> int:
    """Each island's share of the cores that we may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // islands)
