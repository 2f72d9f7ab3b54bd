"""Errors, few, by what the caller can do about them.

Every error has a stable `kind` (for programs), one line of text (for people) and a `hint` that says what to do next.
The command line turns any `DilocoError` into that one line and an exit code; nothing else reaches a user as a
traceback. Exit codes: 0 done, 1 a promise is broken or the run failed, 2 the words or settings are wrong, 3 taken over
by another process, 4 the store does not answer.
"""


class DilocoError(Exception):
    """Base of every error that the library raises on purpose.

    Args:
        message: What happened, in one line.
        hint: What the reader can do about it, in one line; may be empty.
    """

    kind = "error"
    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidSettings(DilocoError):  # noqa: N818 - named for what it is, as users meet it
    """The words, settings or model are wrong; nothing was changed. Correct them and start again."""

    kind = "invalid-settings"
    exit_code = 2


class NotFound(DilocoError):  # noqa: N818
    """The object (or the bucket, or the run) does not exist."""

    kind = "not-found"


class Conflict(DilocoError):  # noqa: N818
    """Another writer created this object first. Read it and go on from there."""

    kind = "conflict"


class Fenced(DilocoError):  # noqa: N818
    """A newer process has taken over this island. Stop; nothing that was receipted is lost."""

    kind = "fenced"
    exit_code = 3


class Unavailable(DilocoError):  # noqa: N818
    """The store did not answer, or not in time; the outcome may be unknown. Trying again later may succeed."""

    kind = "unavailable"
    exit_code = 4


class Denied(DilocoError):  # noqa: N818
    """The store refused the credentials or the permission, or its disk is full. Trying again will not help."""

    kind = "denied"


class Corrupt(DilocoError):  # noqa: N818
    """Bytes are not what they claim to be: digest, format, shape, or a value that is not finite."""

    kind = "corrupt"
