"""Names and identifiers: which are allowed, and where fresh ones come from."""

import random
import re
from typing import Protocol

from diloco_blob.core.errors import InvalidSettings

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Ids(Protocol):
    """Where randomness comes from: fresh write ids, and jitter for waiting."""

    def fresh(self) -> str:
        """32 hexadecimal characters that nobody else has."""

    def uniform(self, low: float, high: float) -> float:
        """A number drawn evenly from [low, high]; for jitter."""


class SystemIds:
    """Randomness from the operating system."""

    def __init__(self) -> None:
        self._random: random.Random = random.SystemRandom()

    def fresh(self) -> str:
        """See `Ids.fresh`."""
        return f"{self._random.getrandbits(128):032x}"

    def uniform(self, low: float, high: float) -> float:
        """See `Ids.uniform`."""
        return self._random.uniform(low, high)


class SeededIds(SystemIds):
    """Randomness from one seed: for tests and simulation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - the point is to be repeatable


def check_island_name(name: str) -> str:
    """Return `name` if it may name an island, which it also does in object keys.

    Raises:
        InvalidSettings: It is empty, longer than 63 characters, or has other characters than `a-z 0-9 . _ -`.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidSettings(
            f"island name {name!r} is not allowed",
            "use 1 to 63 characters of a-z, 0-9, '.', '_', '-', starting with a letter or digit",
        )
    return name
