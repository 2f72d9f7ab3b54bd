"""`diloco-blob verify`: audit a run's bucket from end to end, and with `--replay` recompute what was merged."""

import argparse
import sys
from typing import Any

import msgspec

from diloco_blob.aggregate.replay import ReplayReport, replay
from diloco_blob.cli.replay import asks_what_if, open_run, print_what_if, run_what_if
from diloco_blob.cli.replay import configure as configure_replay
from diloco_blob.protocol.audit import PROMISES, AuditReport, Finding, audit
from diloco_blob.store import open_store
from diloco_blob.wire import printable

_EPILOG = """\
examples:
  diloco-blob verify s3://bucket/run
  diloco-blob verify demo/run --json
  diloco-blob verify demo/run --replay                        was it merged as its settings say?
  diloco-blob verify demo/run --replay --without island-2     how much does one island matter?
  diloco-blob verify demo/run --replay --merge trimmed_mean --into what-if/

Reads every record and every object that a version names, recomputes every digest and every version's weights from the
one before, and checks that each contribution was merged at most once. Prints one line for each promise that does not
hold, with the place; exit code 0 only if all hold. A run that is going on may be verified too. Changes nothing.

--replay recomputes every version that is still kept from its receipts and payloads, in temporary files (TMPDIR), and
compares decision, rejections, weights, outer state and update. It takes as long as merging it all again.

promises:
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    width = max(len(name) for name in PROMISES)
    parser.epilog = _EPILOG + "\n".join(f"  {name:<{width}}  {text}" for name, text in PROMISES.items())
    parser.add_argument("url", metavar="URL", help="the run: s3://, gs://, file:// or a folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    configure_replay(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code: 0 if every promise holds, 1 if one is broken.

    Raises:
        DilocoError: There is no run at the URL, or it cannot be read.
    """
    if asks_what_if(args):
        effect = run_what_if(open_run(args.url), args)
        if args.json:
            _print_json({"what_if": msgspec.to_builtins(effect)})
        else:
            print_what_if(effect)
        return 0
    report = audit(open_store(args.url))
    again = _replay(args.url, report) if args.replay else None
    ok = report.ok and (again is None or again.ok)
    findings = tuple(_encodable(finding) for finding in report.findings + (again.findings if again else ()))
    if args.json:
        replayed = {"replay": msgspec.to_builtins(again.counts)} if again else {}
        _print_json({"ok": ok, **msgspec.to_builtins(msgspec.structs.replace(report, findings=findings)), **replayed})
    else:
        _print(msgspec.structs.replace(report, findings=findings), again)
    return 0 if ok else 1


def _replay(url: str, report: AuditReport) -> ReplayReport | None:
    """A run whose layout is broken cannot be replayed: that was found before."""
    if any(finding.promise == "run" for finding in report.findings):
        return None
    return replay(open_run(url))


def _encodable(finding: Finding) -> Finding:
    """The same, with what is no text (a file's name may be any bytes) as an escape: JSON has no place for it."""
    where, what = (text.encode("utf-8", "backslashreplace").decode() for text in (finding.where, finding.what))
    return msgspec.structs.replace(finding, where=where, what=what)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _print(report: AuditReport, again: ReplayReport | None) -> None:
    for finding in report.findings:
        print(f"{finding.level}: {finding.promise}: {printable(finding.where)}: {printable(finding.what)}")
    counts = report.counts
    collected = f"the objects of {_counted(counts.collected, 'version')} are collected; " if counts.collected else ""
    print(
        f"{_counted(counts.fragments, 'fragment')}, {_counted(counts.commits, 'version')}, "
        f"{_counted(counts.islands, 'island')}; {_counted(counts.merged, 'contribution')} merged, "
        f"{counts.skipped} skipped, {counts.rejected} rejected, {counts.pending} pending; "
        f"{collected}{counts.bytes_read:,} bytes read in {_counted(counts.objects_read, 'object')}"
    )
    if again is not None:
        kept = f", {again.counts.collected} collected" if again.counts.collected else ""
        failed = f", {again.counts.failed} could not be" if again.counts.failed else ""
        print(f"{_counted(again.counts.recomputed, 'version')} recomputed{kept}{failed}")
    num_broken = sum(finding.level == "broken" for finding in report.findings)
    broken = f"{_counted(num_broken, 'finding')}: the run is NOT as promised"
    print("every promise holds" if report.ok else broken)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
