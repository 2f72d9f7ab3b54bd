"""`diloco-blob gc`: delete what no kept version of a run needs."""

import argparse
import sys

import msgspec
from msgspec import Struct

from diloco_blob.aggregate.collect import Amount, Swept, sweep, sweep_probes
from diloco_blob.aggregate.context import Context
from diloco_blob.aggregate.passes import fragments_of
from diloco_blob.core.clock import SystemClock
from diloco_blob.core.ids import SystemIds
from diloco_blob.protocol.heads import read_run
from diloco_blob.store import open_store

_EPILOG = """\
examples:
  diloco-blob gc s3://bucket/run --dry-run     what would be deleted?
  diloco-blob gc s3://bucket/run               delete it; a timer may do this once a day

How many versions of each fragment are kept is a setting of the run (collect.keep_versions). Whoever commits a version
deletes what that version made superfluous, so there is little to do here: what killed aggregators left, and the files
of merges that were overtaken. Records stay for ever: what was merged, and of whom, can always be verified. It may run
beside islands and aggregators, twice at once, and be killed anywhere. Needs the right to list, read and delete.
"""


class _Document(Struct):
    """What `--json` prints."""

    run: str
    dry_run: bool
    keep_versions: int
    fragments: list[Swept]
    probes: Amount


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    parser.add_argument("--fragment", type=int, metavar="N", help="only this fragment")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code.

    Raises:
        DilocoError: No such run or fragment, the store refused, or a record that is needed is damaged.
    """
    store = open_store(args.url)
    info = read_run(store)
    ctx = Context(store=store, run=info, clock=SystemClock(), ids=SystemIds())
    keep_versions = info.run.settings.collect.keep_versions
    document = _Document(store.url, args.dry_run, keep_versions, [], Amount())
    if keep_versions == 0 and not args.json:
        print("this run keeps everything (collect.keep_versions = 0): nothing is deleted")
    for fragment in fragments_of(info, args.fragment):
        for swept in sweep(ctx, fragment, dry_run=args.dry_run):
            document.fragments.append(swept)
            if not args.json:
                print(_line(swept, dry_run=args.dry_run), flush=True)
    if keep_versions:
        document.probes = sweep_probes(ctx, dry_run=args.dry_run)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    elif document.probes.objects:
        print(f"{_verb(dry_run=args.dry_run)} {_counted(document.probes)} of tests of the store")
    return 0


def _line(swept: Swept, *, dry_run: bool) -> str:
    kinds = [f"{kind}: {_counted(amount)}" for kind, amount in swept.deleted.items() if amount.objects]
    what = f"{_verb(dry_run=dry_run)} {', '.join(kinds)}" if kinds else "nothing to delete"
    return f"fragment {swept.fragment}: versions {swept.horizon} to {swept.version} are kept; {what}"


def _verb(*, dry_run: bool) -> str:
    return "would delete" if dry_run else "deleted"


def _counted(amount: Amount) -> str:
    return f"{amount.objects} object{'' if amount.objects == 1 else 's'} of {amount.bytes:,} bytes"
