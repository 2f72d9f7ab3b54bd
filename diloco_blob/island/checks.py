"""What a training loop may say about a step: checked where it is said, since a receipt with a bad figure is skipped."""

import operator

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.limits import CURSOR_CHARS_MAX, TOKENS_PER_STEP_MAX


def checked_tokens(tokens: int) -> int:
    """The tokens of a step, as a whole number that the aggregator will accept.

    Raises:
        InvalidSettings: It is not one.
    """
    try:
        count = operator.index(tokens)
    except TypeError:
        count = 0
    if not 1 <= count <= TOKENS_PER_STEP_MAX:
        raise InvalidSettings(
            f"an inner step of {tokens!r} tokens", f"give step() a whole number from 1 to {TOKENS_PER_STEP_MAX}"
        )
    return count


def check_cursor(cursor: str) -> None:
    """Raise InvalidSettings unless this can be kept in a receipt: text, not too long, that UTF-8 can hold."""
    try:
        fits = len(cursor) <= CURSOR_CHARS_MAX and len(cursor.encode()) >= 0
    except (TypeError, AttributeError, UnicodeEncodeError):
        fits = False
    if not fits:
        raise InvalidSettings(
            f"the cursor {str(cursor)[:40]!r} cannot be kept",
            f"give step() text of at most {CURSOR_CHARS_MAX} characters",
        )
