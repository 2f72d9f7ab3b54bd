"""diloco_blob: train one model on compute that shares nothing but a bucket.

The public names; `diloco_blob.aggregate` is the aggregator's. `Island` needs torch and is imported only when it is
asked for, so that the aggregator's half works without it.
"""

from typing import TYPE_CHECKING, Any

from diloco_blob.core.errors import (
    Conflict,
    Corrupt,
    Denied,
    DilocoError,
    Fenced,
    InvalidSettings,
    NotFound,
    Unavailable,
)
from diloco_blob.core.settings import PRESETS, Settings, load_settings, preset
from diloco_blob.store import open_store

if TYPE_CHECKING:
    from diloco_blob.island.binding import Island

__all__ = [
    "PRESETS",
    "Conflict",
    "Corrupt",
    "Denied",
    "DilocoError",
    "Fenced",
    "InvalidSettings",
    "Island",
    "NotFound",
    "Settings",
    "Unavailable",
    "load_settings",
    "open_store",
    "preset",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Island":
        try:
            from diloco_blob.island.binding import Island
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise InvalidSettings("an island needs torch", "pip install torch") from error
        return Island
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
