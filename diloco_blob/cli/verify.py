"""`diloco-blob verify`: audit a run's bucket from end to end."""

import argparse
import sys

import msgspec

from diloco_blob.protocol.audit import PROMISES, AuditReport, audit
from diloco_blob.store import open_store

_EPILOG = """\
examples:
  diloco-blob verify s3://bucket/run
  diloco-blob verify demo/run --json

Reads every record and every object that a version names, recomputes every digest and every version's weights from the
one before, and checks that each contribution was merged at most once. Prints one line for each promise that does not
hold, with the place; exit code 0 only if all hold. A run that is going on may be verified too. Changes nothing.

promises:
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    width = max(len(name) for name in PROMISES)
    parser.epilog = _EPILOG + "\n".join(f"  {name:<{width}}  {text}" for name, text in PROMISES.items())
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code: 0 if every promise holds, 1 if one is broken.

    Raises:
        DilocoError: There is no run at the URL, or it cannot be read.
    """
    report = audit(open_store(args.url))
    if args.json:
        document = {"ok": report.ok, **msgspec.to_builtins(report)}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report: AuditReport) -> None:
    for finding in report.findings:
        print(f"{finding.level}: {finding.promise}: {finding.where}: {finding.what}")
    counts = report.counts
    print(
        f"{_counted(counts.fragments, 'fragment')}, {_counted(counts.commits, 'version')}, "
        f"{_counted(counts.islands, 'island')}; {_counted(counts.merged, 'contribution')} merged, "
        f"{counts.skipped} skipped, {counts.rejected} rejected, {counts.pending} pending; "
        f"{counts.bytes_read:,} bytes read in {_counted(counts.objects_read, 'object')}"
    )
    num_broken = sum(finding.level == "broken" for finding in report.findings)
    broken = f"{_counted(num_broken, 'finding')}: the run is NOT as promised"
    print("every promise holds" if report.ok else broken)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
