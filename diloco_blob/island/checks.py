"""What a training loop may say about a step: checked where it is said, since a receipt with a bad figure is skipped."""

import operator

from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.limits import CURSOR_CHARS_MAX


def checked_tokens(tokens: int, tokens_max: int) -> int:
    """The tokens of a step, as a whole number that the aggregator will accept.

    Args:
        tokens: What the training loop says.
        tokens_max: `policy.tokens_per_step_max` of the run.

    Raises:
        InvalidSettings: It is not one.
    """
    try:
        count = operator.index(tokens)
    except TypeError:
        count = 0
    if not 1 <= count <= tokens_max:
        raise InvalidSettings(
            f"an inner step of {tokens!r} tokens",
            f"give step() a whole number from 1 to {tokens_max} (policy.tokens_per_step_max of this run)",
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
