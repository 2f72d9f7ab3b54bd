"""The JSON records that make things exist, and how they are read.

Each is written once, with create-if-absent. Each carries the format version, the digest of `run.json` and a fresh write
id, by which its writer recognises it after a lost answer. Reading is strict: an unknown field, a wrong type or
another run is `Corrupt`. Figures are bounded where they are read, since anyone may have written them.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from diloco_blob.core.errors import Corrupt
from diloco_blob.core.limits import CURSOR_CHARS_MAX, PARTS_MAX, RECORD_BYTES_MAX, TENSORS_MAX
from diloco_blob.core.settings import Settings
from diloco_blob.wire import digest, printable

FORMAT = 1

COUNT_MAX = 1 << 62
"""The largest figure that a record may hold."""

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
PositiveCount = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
# `\Z`, not `$`, which also matches before a final line break.
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Version = Annotated[int, Meta(ge=0, le=9_999_999_999)]
Key = Annotated[str, Meta(pattern=r"^[a-z0-9._=-]+(/[a-z0-9._=-]+)*\Z", max_length=512)]


class ObjectRef(Struct, frozen=True, forbid_unknown_fields=True):
    """An object named together with what it must contain."""

    key: Key
    digest: Digest
    size: Count


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of the model."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    """Type in the model, for export and for people; exchanged weights are fp32."""
    fragment: Count
    embedding: bool = False
    """Merged by plain mean under RDA."""


class Weights(Struct, frozen=True, forbid_unknown_fields=True):
    """The weights of a fragment at some version."""

    params: ObjectRef
    digest: Digest
    """Of the tensors themselves (`wire.weights_digest`), so that a mirror is checked without serialising it."""


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """`run.json`: settings, layout, and the commit of version 0 of every fragment."""

    format: int
    write_id: str
    created_by: str
    settings: Settings
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=TENSORS_MAX)]
    fragments: tuple[Weights, ...]
    model: dict[str, Any] = {}
    """Free-form configuration of the model, for export."""


class Generation(Struct, frozen=True, forbid_unknown_fields=True):
    """One start of an island."""

    format: int
    run: Digest
    write_id: str
    island: str
    generation: PositiveCount
    host: str
    pid: int


class Receipt(Struct, frozen=True, forbid_unknown_fields=True):
    """One contribution: an island's progress on one fragment over an interval of its inner steps."""

    format: int
    run: Digest
    write_id: str
    island: str
    generation: PositiveCount
    fragment: Count
    seq: PositiveCount
    base_version: Version
    """The version this contribution started from."""
    steps: PositiveCount
    """Inner steps in it."""
    tokens: PositiveCount
    """Tokens in it."""
    step_to: PositiveCount
    """The island's inner step count at its end."""
    tokens_to: PositiveCount
    """The island's token count at its end."""
    cursor: Annotated[str, Meta(max_length=CURSOR_CHARS_MAX)]
    """Where the island's data stream was at its end."""
    parts: Annotated[tuple[ObjectRef, ...], Meta(min_length=1, max_length=PARTS_MAX)]
    train_s: float = 0.0
    """Seconds of training in it, by the island's clock; for people."""


class Departure(Struct, frozen=True, forbid_unknown_fields=True):
    """An island has left after contribution `seq` (0: before its first). Its next contribution is its return."""

    format: int
    run: Digest
    write_id: str
    island: str
    generation: PositiveCount
    fragment: Count
    seq: Count


class Chosen(Struct, frozen=True, forbid_unknown_fields=True):
    """A contribution that a close takes."""

    island: str
    seq: PositiveCount
    generation: PositiveCount
    base_version: Version
    staleness: Count
    weight: Annotated[float, Meta(ge=0.0, le=1.0)]
    """Of its island; weights sum to 1 over islands, whose contributions are summed (docs/decisions/0001)."""
    steps: PositiveCount
    tokens: PositiveCount
    receipt: Digest
    parts: tuple[ObjectRef, ...]
    train_s: float = 0.0
    """Seconds of training in it, by the island's clock."""


class Skipped(Struct, frozen=True, forbid_unknown_fields=True):
    """A contribution that is not merged, and why: skipped when closing, or rejected while merging."""

    island: str
    seq: PositiveCount
    reason: str


class Watermark(Struct, frozen=True, forbid_unknown_fields=True):
    """Up to which contribution an island's progress is history."""

    seq: Count
    version: Version
    """The version to which it last contributed."""


class Close(Struct, frozen=True, forbid_unknown_fields=True):
    """Fixes which contributions, with which weights, make `version`."""

    format: int
    run: Digest
    write_id: str
    fragment: Count
    version: PositiveCount
    parent: Digest
    """Of the commit record of `version` − 1 (of `run.json` for version 1)."""
    reason: str
    """Why now: all | grace | deadline | drain | backlog."""
    chosen: tuple[Chosen, ...]
    """Empty only if the reason is backlog."""
    skipped: tuple[Skipped, ...]
    watermarks: dict[str, Watermark]
    """Of every island that ever contributed, after this close."""
    left: tuple[str, ...]
    """Islands that had said so when they left, and have not contributed since."""
    discount: Annotated[float, Meta(ge=0.0, le=1.0)]
    """Factor on the whole step; 1 unless `merge.discount` is set."""
    opened_at: float
    closed_at: float

    def __post_init__(self) -> None:
        if not self.chosen and not (self.reason == "backlog" and self.skipped):
            raise ValueError("a close that chooses nothing is there to skip a backlog, and this one is not")


class Tally(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of an island's contributions to a fragment, from version 1 on."""

    accepted: Count = 0
    """Merged, the discounted ones included."""
    discounted: Count = 0
    """Merged with staleness ≥ 1."""
    skipped: Count = 0
    rejected: Count = 0
    steps: Count = 0
    """Inner steps merged."""
    tokens: Count = 0
    """Tokens merged."""

    @property
    def consumed(self) -> int:
        """Contributions that are history. Sequence numbers have no gaps, so this is also the island's watermark."""
        return self.accepted + self.skipped + self.rejected


class Merged(Struct, frozen=True, forbid_unknown_fields=True):
    """A contribution that is in a version, with the weight that its island really had."""

    island: str
    seq: PositiveCount
    staleness: Count
    weight: Annotated[float, Meta(ge=0.0, le=1.0)]
    tokens: PositiveCount
    clip: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Factor by which its island's pseudo-gradient was clipped (`merge.clip`); one per island."""
    steps: Count = 0
    """Inner steps in it; 0 where the close did not say."""
    train_s: float = 0.0
    """Seconds of training in it, by the island's clock: what `sync.match_speed` goes by."""


class Commit(Struct, frozen=True, forbid_unknown_fields=True):
    """Makes `version` exist. The commits of a fragment form a hash chain through `parent`."""

    format: int
    run: Digest
    write_id: str
    fragment: Count
    version: PositiveCount
    parent: Digest
    close: Digest
    """Of the close record of this version."""
    weights: Weights
    outer: ObjectRef
    update: ObjectRef
    merged: tuple[Merged, ...]
    rejected: tuple[Skipped, ...]
    tally: dict[str, Tally]
    tokens: Count
    """Tokens merged into this fragment from version 1 on."""
    step_norm: float
    """L2 norm of what was subtracted from the weights."""
    merge_s: float
    """Seconds that the merge took, by the aggregator's clock; for people."""


class Eval(Struct, frozen=True, forbid_unknown_fields=True):
    """A held-out evaluation that an island reports."""

    step: Count
    version: Version
    loss: float
    bits_per_byte: float
    sample: str = ""


class IslandStatus(Struct, frozen=True, forbid_unknown_fields=True):
    """`status.json` of an island: for people; nobody decides from it."""

    format: int
    run: Digest
    island: str
    generation: Count
    state: str
    """starting | training | waiting | paused | finishing | done | stopped | fenced | failed"""
    steps: Count
    tokens: Count
    version: Version
    """Lowest adopted version over the fragments."""
    versions_behind: Count
    loss: float | None
    tokens_per_s: float
    staleness: Count
    """Of the island's last merged contribution."""
    requests: Count
    requests_by_class: dict[str, Count]
    bytes_up: Count
    bytes_down: Count
    wait_s: float
    train_s: float
    written_at: float
    first_eval: Eval | None = None
    last_eval: Eval | None = None
    message: str = ""


Record = TypeVar("Record", bound=Struct)


def encode(record: Struct) -> bytes:
    """A record's bytes: compact JSON, fields in declared order, deterministic."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[Record], *, run: str | None = None) -> Record:
    """Read a record, strictly.

    Args:
        data: Its bytes.
        kind: The struct it must be.
        run: Digest of `run.json` that it must carry; None for `run.json` itself.

    Raises:
        Corrupt: Too big, not this kind of record, another format, or of another run.
    """
    name = kind.__name__.lower()
    if len(data) > RECORD_BYTES_MAX:
        raise Corrupt(f"{name} record of {len(data)} bytes exceeds the limit of {RECORD_BYTES_MAX}")
    try:
        record = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"not a {name} record: {printable(str(error))}") from error
    found = getattr(record, "format", FORMAT)
    if found != FORMAT:
        raise Corrupt(f"{name} record has format {found}, this program reads {FORMAT}", "update diloco-blob")
    if run is not None and getattr(record, "run", run) != run:
        raise Corrupt(f"{name} record belongs to another run")
    return record


def record_digest(data: bytes) -> str:
    """What other records call a record by: the digest of its exact bytes."""
    return digest(data)
