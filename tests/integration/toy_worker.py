"""A training script without torch for tests of `launch`: a real island on a toy model, and ways to misbehave.

diloco-blob launch --islands 2 tests/integration/toy_worker.py --steps 20
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from diloco_blob.core.clock import SystemClock
from diloco_blob.core.errors import DilocoError
from diloco_blob.core.ids import SystemIds
from diloco_blob.core.settings import load_settings
from diloco_blob.island.core import start
from diloco_blob.island.joining import IslandOptions
from diloco_blob.island.pumps import ThreadedDriver
from diloco_blob.store import open_store
from diloco_blob.testing.port import ArrayPort


def train(args: argparse.Namespace) -> None:
    name = os.environ["DILOCO_ISLAND"]
    clock, ids = SystemClock(), SystemIds()
    store = open_store(os.environ["DILOCO_RUN"], clock=clock, ids=ids)
    settings = os.environ.get("DILOCO_SETTINGS")
    options = IslandOptions(
        name=name,
        settings=load_settings(settings) if settings else None,
        islands=int(os.environ["DILOCO_ISLANDS"]),
        checkpoint_dir=Path(os.environ["DILOCO_CHECKPOINT_DIR"]),
        pid=os.getpid(),
    )
    core = start(
        store,
        ArrayPort(int(name.rsplit("-", 1)[-1])),
        options,
        clock=clock,
        ids=ids,
        driver=ThreadedDriver(),
    )
    state = "failed"
    try:
        core.block(core.begin())
        if core.steps == 0:
            core.record_eval(4.0, 8.0)
        while core.steps < args.steps:
            time.sleep(args.step_s)
            core.block(core.after_step(64, loss=1.0 / (1 + core.steps), cursor=str(core.steps + 1)))
            print(f"{name} pid {os.getpid()} step {core.steps}")
            misbehave(args, name, core.steps)
        core.block(core.finish())
        core.record_eval(2.0, 2.5, sample="a sample [bold]of[/bold] text \x1b[31m")
        state = "done"
    except KeyboardInterrupt:
        state = "stopped"
        raise
    finally:
        core.end(state)
        store.close()


def misbehave(args: argparse.Namespace, name: str, step: int) -> None:
    """Die once at the given steps, by SIGKILL of ourselves."""
    if args.kill_every and step % args.kill_every == 0:
        time.sleep(2.5)  # long enough for others to see how far it was
    elif args.kill_at is None or name != "island-0" or step != args.kill_at:
        return
    marker = Path(os.environ["DILOCO_CHECKPOINT_DIR"]) / f"died-at-{step}"
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--kill-every", type=int, default=0)
    parser.add_argument("--fail", help="the island that leaves at once with 1")
    parser.add_argument("--exit", type=int, help="leave at once with this code")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, and leave a grandchild behind")
    parser.add_argument("--last-words", default="these are the last words")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if args.fail == os.environ["DILOCO_ISLAND"]:
        args.exit = 1
    if args.exit is not None:
        print(f"an earlier line\n{args.last_words}", file=sys.stderr)
        return args.exit
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(600)
        print("stubborn", flush=True)
        time.sleep(600)
    try:
        train(args)
    except KeyboardInterrupt:
        return 130
    except DilocoError as error:
        print(f"toy_worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
