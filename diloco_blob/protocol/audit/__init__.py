"""Auditing a bucket from end to end: does what lies there keep every promise of the protocol?

Nothing is believed: each digest is computed again, each version's weights from the version before, each tally from the
records. Memory holds three tensors and some numbers per island and fragment, whatever the length of the history. A run
that is going on may be audited: a LIST comes first and the walk along the commits after it, so what appears meanwhile
is only ever ahead of the list. Records are audited from version 1 on; objects only of the versions that are kept, and
what is missing is judged by the newest version at that moment, as it may have been collected meanwhile.
"""

from diloco_blob.core.errors import Corrupt
from diloco_blob.protocol.audit.chain import audit_fragment
from diloco_blob.protocol.audit.kept import Collected, Kept
from diloco_blob.protocol.audit.listing import audit_departures, audit_generations, list_bucket
from diloco_blob.protocol.audit.report import PROMISES, AuditCounts, AuditReport, Finding, Ledger
from diloco_blob.protocol.heads import RunInfo, read_run
from diloco_blob.protocol.layout import fragment_tensors
from diloco_blob.store.base import ObjectStore

__all__ = ["PROMISES", "AuditCounts", "AuditReport", "Collected", "Finding", "Kept", "Ledger", "audit"]


def audit(store: ObjectStore) -> AuditReport:
    """Audit a run.

    Args:
        store: The run's store; only read from.

    Returns:
        Every finding, in a fixed order, and what was looked at. `report.ok` only if no promise is broken.

    Raises:
        NotFound: There is no run at this URL.
        Unavailable: The store did not answer.
    """
    ledger = Ledger()
    try:
        run = read_run(store)
    except Corrupt as error:
        ledger.broken("run", "run.json", error.message)
        return ledger.report()
    ledger.count(objects_read=1, fragments=len(run.run.fragments))
    if not _layout_is_sound(run, ledger):
        return ledger.report()
    kept = [Kept(store, run, fragment) for fragment in range(len(run.run.fragments))]
    listing = list_bucket(store, kept, ledger)
    audit_generations(store, run, listing, ledger)
    audit_departures(store, run, listing, ledger)
    for fragment, listed in enumerate(listing.fragments):
        head = audit_fragment(store, run, fragment, listing, kept[fragment], ledger)
        ledger.count(orphans=listed.num_orphans(head))
    return ledger.report()


def _layout_is_sound(run: RunInfo, ledger: Ledger) -> bool:
    settings, tensors = run.run.settings, run.run.tensors
    names = [spec.name for spec in tensors]
    faults = []
    if len(run.run.fragments) != settings.sync.num_fragments:
        faults.append(f"{len(run.run.fragments)} fragments, but sync.num_fragments is {settings.sync.num_fragments}")
    if len(set(names)) != len(names):
        faults.append("a tensor is named twice")
    if any(spec.fragment >= len(run.run.fragments) for spec in tensors):
        faults.append("a tensor belongs to a fragment that does not exist")
    elif not all(fragment_tensors(tensors, p) for p in range(len(run.run.fragments))):
        faults.append("a fragment has no tensors")
    for fault in faults:
        ledger.broken("run", "run.json", fault)
    return not faults
