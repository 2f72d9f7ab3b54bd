"""Object stores: what the protocol asks of one (`ObjectStore`), the backends, and what wraps them.

`open_store(url)` is how everybody gets one. A backend and its SDK are imported only when a URL asks for it.
"""

import re

from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import InvalidSettings
from diloco_blob.core.ids import Ids, SystemIds
from diloco_blob.store.base import ObjectInfo, ObjectStore
from diloco_blob.store.metered import MeteredStore, Usage
from diloco_blob.store.retrying import RetryingStore

__all__ = [
    "MeteredStore",
    "ObjectInfo",
    "ObjectStore",
    "RetryingStore",
    "Usage",
    "open_backend",
    "open_store",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def open_store(
    url: str, *, clock: Clock | None = None, ids: Ids | None = None, budget_s: float = 90.0
) -> RetryingStore:
    """Open the store that a run's URL names, with retries and a meter. Sends no request yet.

    `.meter.usage()` of the result tells what was asked of the backend so far.

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///folder`, a path, or `memory://name` (shared
            by all who open the same name in this process).
        clock: Where time comes from; the machine's own by default.
        ids: Where randomness comes from; the operating system by default.
        budget_s: How long an outage is ridden out before an operation raises `Unavailable`.

    Raises:
        InvalidSettings: The URL is not one of these, or the extra that its scheme needs is not installed.
    """
    clock = clock or SystemClock()
    ids = ids or SystemIds()
    return RetryingStore(open_backend(url, clock=clock, ids=ids), clock, ids, budget_s)


def open_backend(url: str, *, clock: Clock, ids: Ids) -> ObjectStore:
    """Open the bare backend, which makes one attempt at everything. For tests and for wrapping differently.

    Raises:
        InvalidSettings: See `open_store`.
    """
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    if not url.strip():
        raise InvalidSettings("no URL given", "name a bucket or a folder: s3://bucket/run, gs://bucket/run, ./run")
    if scheme == "s3":
        return _open_s3(url, clock)
    if scheme == "gs":
        return _open_gcs(url, clock)
    if scheme == "memory":
        from diloco_blob.store.memory import MemoryStore

        return MemoryStore(url, clock=clock)
    if scheme in {"", "file"}:
        from diloco_blob.store.local import LocalStore

        return LocalStore(url, clock=clock, ids=ids)
    raise InvalidSettings(
        f"{url!r}: there is no store for {scheme}:", "use s3://, gs://, file:///, a path, or memory://"
    )


def _open_s3(url: str, clock: Clock) -> ObjectStore:
    try:
        from diloco_blob.store.s3 import S3Store
    except ModuleNotFoundError as error:
        raise _missing_sdk("boto3", error) from error
    return S3Store(url, clock=clock)


def _open_gcs(url: str, clock: Clock) -> ObjectStore:
    try:
        from diloco_blob.store.gcs import GCSStore
    except ModuleNotFoundError as error:
        raise _missing_sdk("google-cloud-storage", error) from error
    return GCSStore(url, clock=clock)


def _missing_sdk(package: str, error: ModuleNotFoundError) -> InvalidSettings:
    return InvalidSettings(f"this kind of URL needs {error.name}, which is not installed", f"pip install {package}")
