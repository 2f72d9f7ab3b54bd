"""Train a small byte-level GPT as one island of a run: the reference program, to be copied and changed.

Three islands on this machine, with an aggregator beside them (what `make demo` does):

    diloco-blob launch --islands 3 --run demo/run --settings workers/demo.toml workers/train.py

One island on a machine of its own; the bucket is all that it shares with the others:

    DILOCO_RUN=s3://bucket/run DILOCO_ISLAND=us-east-1a python workers/train.py
    python workers/train.py --run gs://bucket/run --island europe-west4 --data texts/ --optimizer adamw

The same command resumes after a stop or a crash. All that has to do with islands is in `train`.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from time import monotonic  # noqa: TID251 - a program of its own, for which no clock is simulated

import torch
from data import held_out_batches, load, train_batch
from gpt import GPT, GPTConfig
from muon import MuonAdamW
from torch import Tensor
from torch.optim import AdamW, Optimizer

from diloco_blob import DilocoError, InvalidSettings, Island

TELL_S = 10.0
"""An island says how far it is no more often than this."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `diloco-blob launch` names the run and the island through the environment."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT as one island of a run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--run", default=os.environ.get("DILOCO_RUN"), help="bucket or folder of the run ($DILOCO_RUN)")
    add("--island", default=os.environ.get("DILOCO_ISLAND"), help="this island's name ($DILOCO_ISLAND)")
    add("--settings", help="preset or .toml file, for whoever creates the run ($DILOCO_SETTINGS)")
    add("--data", nargs="+", default=[], metavar="PATH", help="text files, folders; none: Python's own text")
    add("--data-bytes-max", type=int, default=20_000_000, help="read no more text than this")
    add("--steps", type=int, default=600, help="inner steps of this island in all")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--context", type=int, default=128, help="bytes a sequence")
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--width", type=int, default=128, help="channels of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--optimizer", choices=("muon", "adamw"), default="muon", help="inner optimizer")
    add("--lr", type=float, default=6e-3, help="peak learning rate of AdamW")
    add("--muon-lr", type=float, default=0.02, help="peak learning rate of Muon")
    add("--weight-decay", type=float, default=0.1, help="decoupled weight decay")
    add("--warmup", type=float, default=0.05, help="share of the tokens in which the learning rate rises")
    add("--eval-every", type=int, default=0, help="evaluate each so many steps; 0: only first and last")
    add("--eval-batches", type=int, default=16, help="held-out batches of an evaluation")
    add("--seed", type=int, default=0, help="of the initial weights and the order of the data")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="where to compute")
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[GPTConfig, Tensor, Tensor]:
    """Check what was asked for and read the text: the shape of the model, training and held-out text.

    Raises:
        InvalidSettings: Something is missing, impossible, or too little text.
    """
    if not (args.run and args.island):
        raise InvalidSettings("no run or no island name", "give --run and --island, or $DILOCO_RUN and $DILOCO_ISLAND")
    if min(args.steps, args.batch, args.eval_batches) < 1 or not 0 <= args.warmup < 1:
        raise InvalidSettings("--steps, --batch and --eval-batches must be at least 1, --warmup in [0, 1)")
    try:
        config = GPTConfig(args.context, args.layers, args.width, args.heads)
        text, held_out = load(args.data, args.data_bytes_max)
    except OSError as error:
        raise InvalidSettings(f"cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSettings(str(error)) from error
    if min(len(text), len(held_out)) <= args.context:
        raise InvalidSettings(f"too little text: {len(text)} bytes to train on, {len(held_out)} held out", "see --data")
    return config, text, held_out


def pick_device(name: str) -> torch.device:
    """Turn `auto` into the best device there is; on a CPU, leave the other islands their share of cores.

    Raises:
        InvalidSettings: There is no such device.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
    if not there[name]:
        raise InvalidSettings(f"--device {name}: torch finds no such device here", "leave it out, or give --device cpu")
    if name == "cpu":
        islands = os.environ.get("DILOCO_ISLANDS", "")
        share = (os.cpu_count() or 1) // (int(islands) if islands.isdigit() and int(islands) else 1)
        torch.set_num_threads(max(1, share))
    return torch.device(name)


def make_optimizer(model: GPT, args: argparse.Namespace) -> Optimizer:
    """AdamW for everything, or Muon for the matrices inside the blocks and AdamW for the rest."""
    decay = args.weight_decay
    if args.optimizer == "adamw":
        return AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=decay)
    rest = (*model.embed.parameters(), *model.lm_head.parameters())
    return MuonAdamW(model.blocks.parameters(), rest, lr=args.lr, muon_lr=args.muon_lr, weight_decay=decay)


def lr_factor(done: float, warmup: float) -> float:
    """Rise linearly, then follow a cosine down to a tenth; `done` is the share of all tokens seen."""
    if done < warmup:
        return done / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / (1 - warmup))))


def batch_loss(model: GPT, batch: Tensor, device: torch.device) -> Tensor:
    """Loss of a batch in nats per byte; in bfloat16 where the hardware gains by it."""
    with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
        return model.loss(batch.to(device))


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[Tensor], device: torch.device) -> float:
    """Mean loss in nats per byte."""
    losses = [float(batch_loss(model, batch, device)) for batch in batches]
    return sum(losses) / len(losses)


def train(args: argparse.Namespace) -> None:
    """Join the run, train, and leave when this island has done its steps."""
    config, text, held_out = prepare(args)
    device = pick_device(args.device)
    held_out_set = list(held_out_batches(held_out, args.eval_batches, batch=16, context=args.context))
    model = GPT(config, args.seed).to(device)
    optimizer = make_optimizer(model, args)
    peaks = [group["lr"] for group in optimizer.param_groups]
    tokens_a_step = args.batch * args.context
    joining = Island(
        args.run,
        model=model,
        optimizer=optimizer,
        name=args.island,
        settings=args.settings,
        model_config=asdict(config),
    )
    with joining as island:
        print(f"{args.island}: joined {args.run} at version {island.version}, step {island.steps}", flush=True)

        def report(sample: str = "") -> float:
            loss = evaluate(model, held_out_set, device)
            island.record_eval(loss=loss, bits_per_byte=loss / math.log(2), sample=sample)
            return loss / math.log(2)

        if island.steps == 0:
            report()
        if island.steps >= args.steps:
            print(f"already at step {island.steps} of {args.steps} (--steps {island.steps + args.steps} goes on)")
        told = monotonic()
        k = int(island.cursor or 0)  # the next batch of this island's stream
        while island.steps < args.steps:
            done = (island.tokens + tokens_a_step) / (args.steps * tokens_a_step)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor(done, args.warmup)
            batch = train_batch(text, f"{args.seed}/{args.island}", k, batch=args.batch, context=args.context)
            loss = batch_loss(model, batch, device)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            k += 1
            island.step(tokens=tokens_a_step, loss=loss.detach(), cursor=str(k))
            if monotonic() - told >= TELL_S:
                told = monotonic()
                at = f"step {island.steps} of {args.steps}, loss {float(loss.detach()):.3f}, version {island.version}"
                print(f"{args.island}: {at}", flush=True)
            if args.eval_every and island.steps % args.eval_every == 0 and island.steps < args.steps:
                report()

        island.finish()  # from here on the model is the newest global one
        bits = report(printable(model.generate(b"\n", 300, seed=args.seed)))
        print(f"{args.island}: {island.steps} steps, {island.tokens} bytes, {bits:.3f} bits per held-out byte")


def printable(text: bytes) -> str:
    """Text for a terminal: whatever is not printable becomes a question mark in a diamond."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.decode(errors="replace"))


def main() -> int:
    """Run `train`; turn what can go wrong into one line and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `launch` stops islands as Ctrl-C does
    args = arguments()
    try:
        train(args)
    except KeyboardInterrupt:
        print("train.py: stopped; the same command resumes", file=sys.stderr)
        return 130
    except DilocoError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
