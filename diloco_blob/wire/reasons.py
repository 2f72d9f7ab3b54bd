"""Why bytes were refused: a small, stable vocabulary.

A contribution that is refused is recorded as rejected, with its reason, for ever. So the reason is a word
from a closed list, it begins the message of every `Corrupt` that this package raises, and `reason_of` reads
it back. Text that comes from the refused bytes themselves (a tensor's name) is shortened and made printable, since
it ends up in a record, in logs and on terminals, where a line break or an escape sequence could say something else.
"""

from typing import Literal, get_args

from diloco_blob.core.errors import Corrupt

Reason = Literal["digest", "dtype", "format", "names", "non-finite", "shape", "size"]
"""digest: the bytes are not those that the record names.
dtype, shape: a tensor is not of the kind that the layout asks for.
format: not one zstd frame, not a safetensors file, or something that no encoder of ours writes.
names: a tensor is missing, or there is one too many.
non-finite: NaN or an infinity, in a tensor or in the scale of a block.
size: more or fewer bytes than the layout needs."""

REASONS: tuple[str, ...] = get_args(Reason)

_DETAIL_CHARS_MAX = 240
_NAME_CHARS_MAX = 120


def corrupt(reason: Reason, detail: str) -> Corrupt:
    """The error to raise for `reason`; `detail` says where and what, in a few words."""
    return Corrupt(f"{reason}: {_shortened(printable(detail), _DETAIL_CHARS_MAX)}")


def reason_of(error: Corrupt) -> str:
    """The reason that begins the message of a `Corrupt`, `"format"` if it was not raised by this package."""
    reason = error.message.partition(":")[0]
    return reason if reason in REASONS else "format"


def in_tensor(name: str, error: Corrupt) -> Corrupt:
    """The same error, naming the tensor in which it was met."""
    reason, _, detail = error.message.partition(": ")
    return Corrupt(f"{reason}: tensor {quoted(name)}: {detail}")


def quoted(name: str) -> str:
    """A tensor's name as messages show it."""
    return repr(_shortened(name, _NAME_CHARS_MAX))


def printable(text: str) -> str:
    """The text on one line, with anything that a terminal would not just show written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _shortened(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[: chars_max - 1]}…"
