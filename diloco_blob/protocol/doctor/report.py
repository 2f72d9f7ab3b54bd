"""What an examination of a store finds: one `Check` a question, each with a verdict and what to do about it."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from diloco_blob.core.errors import DilocoError

Verdict = Literal["ok", "warning", "broken"]
"""ok: as it should be. warning: a run can be trained, but read the hint. broken: it cannot, or not like this."""

_EXIT_CODES = {"unavailable": 4, "invalid-settings": 2}


class Check(Struct, frozen=True):
    """The answer to one question."""

    name: str
    """What was asked; stable, for programs."""
    verdict: Verdict
    what: str
    """What was found, in one line."""
    hint: str = ""
    """What to do about it, in one line; empty if nothing."""
    figures: dict[str, float] = {}
    """What was measured, units last in each name."""
    kind: str = ""
    """Of the error behind a broken one (`DilocoError.kind`), if there was one."""


def failed(name: str, error: DilocoError) -> Check:
    """A question that could not be answered."""
    return Check(name, "broken", error.message, error.hint, kind=error.kind)


def exit_code(checks: Sequence[Check]) -> int:
    """0 if nothing is broken; else what the first broken check's error would end a command with, or 1."""
    for check in checks:
        if check.verdict == "broken":
            return _EXIT_CODES.get(check.kind, 1)
    return 0
