"""Processes that kill themselves: an island or an aggregator without torch, and a nursery that starts them quickly.

python tests/integration/crash_worker.py island URL --name island-0 --checkpoints FOLDER --steps 5
python tests/integration/crash_worker.py aggregator URL --kill-at commit.before_put --marker FILE
python tests/integration/crash_worker.py nursery

With `--kill-at STEP --nth N --marker FILE` the process sends itself SIGKILL when it reaches STEP for the N-th time,
until the marker holds one byte for each of `--kills`; so the same command, typed again, goes on.

The nursery has imported everything and forks a process for each command line that it is given: a process of its own
with its own end, without the half second that Python takes to start. It answers one line of JSON to each line of JSON.
"""

import argparse
import functools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from diloco_blob.aggregate import watch
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import DilocoError
from diloco_blob.core.ids import SystemIds
from diloco_blob.core.settings import Codec, Collect, Outer, Policy, Settings, Sync
from diloco_blob.island.core import start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.island.pumps import ThreadedDriver
from diloco_blob.store import open_store
from diloco_blob.testing.port import ArrayPort

ISLANDS = 2


def settings(num_fragments: int) -> Settings:
    """Everything that a restart must bring back: residuals on both ways, momentum, objects that are collected."""
    return Settings(
        sync=Sync(sync_every=2, num_fragments=num_fragments),
        up=Codec(name="int4", block=8, error_feedback=True),
        down=Codec(name="int8", block=8, error_feedback=True),
        outer=Outer(lr=0.7, momentum=0.5),
        # All islands in every round, however long it takes: then nothing depends on time.
        policy=Policy(islands=ISLANDS, quorum=ISLANDS, grace_s=100.0, deadline_s=100.0, takeover_s=0.25),
        collect=Collect(keep_versions=2),
    )


def killer(args: argparse.Namespace) -> Callable[[str], None]:
    """What kills this process at the step that the command line names."""
    reached: Counter[str] = Counter()

    def at(step: str) -> None:
        reached[step] += 1  # a step is announced by one thread
        if step != args.kill_at or reached[step] != args.nth:
            return
        marker = Path(args.marker)
        if not marker.exists() or marker.stat().st_size < args.kills:
            with marker.open("ab") as file:
                file.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)

    return at


def island(args: argparse.Namespace) -> None:
    """Train to the end; started again, go on."""
    clock, ids = SystemClock(), SystemIds()
    store = open_store(args.url, clock=clock, ids=ids)
    number = int(args.name.rsplit("-", 1)[-1])
    port = ArrayPort(1000 + number, initial=ArrayPort(0).weights)  # the same version 0, whoever creates the run
    options = IslandOptions(
        name=args.name,
        settings=settings(args.fragments),
        checkpoint_dir=Path(args.checkpoints),
        pid=os.getpid(),
    )
    core = start(store, port, options, clock=clock, ids=ids, driver=ThreadedDriver(), at=killer(args))
    core.block(core.begin())
    while core.steps < args.steps:
        loss = port.train()
        core.block(core.after_step(64, loss=loss, cursor=str(core.steps + 1)))
    core.block(core.finish())
    core.end("done")
    store.close()


def aggregator(args: argparse.Namespace) -> None:
    """Merge until SIGTERM."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    clock, ids = SystemClock(), SystemIds()
    watch(
        open_store(args.url, clock=clock, ids=ids),
        clock=clock,
        ids=ids,
        stop=lambda: bool(stopped),
        on_report=lambda report: print(report, flush=True),
        poll_s=0.1 if "://" in args.url else 0.03,
        wait_for_run=True,
        at=killer(args),
    )


def main(words: list[str]) -> int:
    """One island or aggregator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("island", "aggregator"))
    parser.add_argument("url")
    parser.add_argument("--name")
    parser.add_argument("--checkpoints")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--kill-at")
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--marker")
    args = parser.parse_args(words)
    try:
        (island if args.kind == "island" else aggregator)(args)
    except DilocoError as error:
        print(f"crash_worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


# ---- the nursery


def nursery() -> None:
    """Obey until the other side is gone, then kill what is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    alive: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "words" in order:
            answer: object = _fork(**order)
            alive.add(int(str(answer)))
        else:
            answer = _wait(alive, order["timeout_s"])
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def warm_up() -> None:
    """Do once what each client of S3 would do anew: import the SDK, and parse two megabytes of JSON."""
    import boto3
    from botocore.loaders import JSONFileLoader, Loader

    import diloco_blob.store.s3  # noqa: F401

    files = JSONFileLoader()
    files.load_file = functools.cache(files.load_file)
    Loader.FILE_LOADER_CLASS = staticmethod(lambda: files)
    boto3.client("s3", region_name="us-east-1", aws_access_key_id="-", aws_secret_access_key="-").close()


def _fork(words: list[str], env: dict[str, str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.environ.update(env)
        code = main(words)
    except BaseException:  # noqa: BLE001 - whatever it is, it must not run on as a second nursery
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)  # without the nursery's own clean-up


def _wait(alive: set[int], timeout_s: float) -> tuple[int, int] | None:
    """Process id and exit code (−N after signal N) of one that has ended; None if none does in time."""
    while True:
        # waitpid(-1) sees our children only; the signal is blocked, so none is lost between looking and waiting.
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            alive.discard(pid)
            return pid, os.waitstatus_to_exitcode(status)
        if signal.sigtimedwait({signal.SIGCHLD}, timeout_s) is None:
            return None


if __name__ == "__main__":
    if sys.argv[1:] == ["nursery"]:
        warm_up()
        nursery()
    else:
        sys.exit(main(sys.argv[1:]))
