"""Google Cloud Storage, through google-cloud-storage (docs/decisions/0004).

Every call is one attempt (`retry=None`), so that a create never takes its own object for a lost race. Credentials
come from where every Google tool takes them, and none are needed where `STORAGE_EMULATOR_HOST` names an emulator.
Conditional objects are small, so that they go up in a single request (`uploadType=multipart`): emulators honour
the precondition only there.
"""

import base64
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import google.auth
import google_crc32c
import requests
import urllib3
from google.api_core.exceptions import GoogleAPICallError, RequestRangeNotSatisfiable
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound, Unavailable
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.body import Body, body_file, body_size
from diloco_blob.store.dates import StoreDate
from diloco_blob.store.keys import check_key, check_list_prefix, split_bucket_url
from diloco_blob.store.parts import PARALLEL, PART_BYTES, PartReader

_ONCE: dict[str, Any] = {"retry": None, "timeout": (10, 60)}  # connecting; waiting for a single byte
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_ERRORS = (
    GoogleAuthError,
    DataCorruption,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    ConnectionError,
)


class GCSStore:
    """A bucket, and a prefix in it. Connects when it is first used; safe to use from many threads.

    Args:
        url: `gs://bucket` or `gs://bucket/prefix`.
        clock: Measures the time since the store last told its own.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self.url = url
        self.bucket, self._prefix = split_bucket_url(url)
        self._date = StoreDate(clock or SystemClock())
        self._parts = PartReader()
        self._lock = threading.Lock()
        self._answer = threading.local()  # .headers: of this thread's last answer
        self._made: Any = None
        self._pid = 0

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`. One request for each part; user metadata only comes with `head`."""
        with self._translated(key):
            try:
                first = self._download(key, start=0, end=PART_BYTES - 1)
            except RequestRangeNotSatisfiable:
                first = self._download(key)  # empty: it has no first byte
        headers = self._answer.headers
        _, _, whole = headers.get("Content-Range", "").partition("/")
        size = int(whole) if whole.isdigit() else len(first)
        what = f"{key} in {self.url}"
        data = self._parts.read_rest(what, first, size, lambda *part: self.get_range(key, *part))
        _check_crc32c(data, headers.get("X-Goog-Hash", ""), what)
        if "Last-Modified" not in headers:
            return data, self.head(key)
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        return data, ObjectInfo(key, size, headers.get("X-Goog-Generation", ""), modified)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        if length == 0:
            self.head(key)
            return b""
        with self._translated(key):
            try:
                return self._download(key, start=start, end=start + length - 1)
            except RequestRangeNotSatisfiable:
                return b""

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        blob = self._blob(key)
        with self._translated(key):
            blob.reload(**_ONCE)
        return self._info(blob)

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`."""
        blob = self._blob(key)
        if metadata:
            blob.metadata = dict(metadata)
        with self._translated(key, writing=True):
            blob.upload_from_file(
                body_file(data),
                size=body_size(data),
                content_type="application/octet-stream",
                if_generation_match=0 if if_absent else None,
                checksum="crc32c",
                **_ONCE,
            )
        return self._info(blob)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        check_list_prefix(prefix)
        offset = self._prefix + start_after if start_after else None  # includes the object of that name
        with self._translated():
            whole = self._prefix + prefix
            for blob in self._client().list_blobs(self.bucket, prefix=whole, start_offset=offset, **_ONCE):
                info = self._info(blob)
                if info.key > start_after and not info.key.endswith("/"):  # consoles make "folders" as objects
                    yield info

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        check_list_prefix(prefix)
        whole = self._prefix + prefix
        with self._translated():
            listing = self._client().list_blobs(self.bucket, prefix=whole, delimiter="/", **_ONCE)
            for _ in listing:
                pass  # the prefixes are known once the pages are read
        yield from sorted(found[len(whole) : -1] for found in listing.prefixes)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        try:
            with self._translated(key):
                self._blob(key).delete(**_ONCE)
        except NotFound:
            return

    def now(self) -> float:
        """See `ObjectStore.now`: the `Date` of the answers. Asks only if there was none yet."""
        return self._date.now_of(self)

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._parts.close()
        with self._lock:
            made, self._made = self._made, None
        if made is not None and self._pid == os.getpid():
            made.close()

    def _download(self, key: str, **span: int) -> bytes:
        # No checksum here: the SDK can only check a whole object, and `get` does that over all parts.
        data = self._blob(key).download_as_bytes(raw_download=True, checksum=None, **span, **_ONCE)
        announced = self._answer.headers.get("Content-Length", "")
        if announced.isdigit() and int(announced) != len(data):
            raise Unavailable(f"only {len(data)} of {announced} bytes of {key} in {self.url} arrived")
        return bytes(data)

    def _blob(self, key: str) -> Any:
        return self._client().bucket(self.bucket).blob(self._prefix + check_key(key))

    def _info(self, blob: Any) -> ObjectInfo:
        key = blob.name.removeprefix(self._prefix)
        return ObjectInfo(
            key, int(blob.size), str(blob.generation), blob.updated.timestamp(), dict(blob.metadata or {})
        )

    @contextmanager
    def _translated(self, key: str = "", *, writing: bool = False) -> Iterator[None]:
        try:
            yield
        except GoogleAPICallError as error:
            raise self._answered(error, key, writing=writing) from error
        except _ERRORS as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> DilocoError:
        """What it means that there was no answer."""
        reason = " ".join(str(error).split())
        if isinstance(error, DefaultCredentialsError):
            return Denied(
                f"no credentials for {self.url}",
                "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
            )
        if isinstance(error, RefreshError) and not error.retryable:
            return Denied(f"the credentials for {self.url} cannot be renewed: {reason}", "log in again")
        return Unavailable(f"{self.url} did not answer: {reason}")

    def _answered(self, error: GoogleAPICallError, key: str, *, writing: bool) -> DilocoError:
        """What an answer other than yes means."""
        status = int(error.code or 0)
        reason = " ".join(str(error).split())
        if status == 404 and (writing or not key or "bucket does not exist" in reason):
            return NotFound(f"there is no bucket {self.bucket!r}", "create it, or correct the URL")
        if status == 404:
            return NotFound(f"no object {key} in {self.url}")
        if status == 412:
            return Conflict(f"{key} exists already in {self.url}")
        if status in {401, 403}:
            return Denied(
                f"{self.url} refused {key or 'a listing'}: {reason}",
                "check the credentials and the bucket's IAM, which must allow to get and to list objects",
            )
        if status in {408, 409, 425, 429} or status >= 500:
            return Unavailable(f"{self.url} cannot answer now: {reason}")
        return InvalidSettings(f"{self.url} refused the request: {reason}")

    def _client(self) -> Any:
        with self._lock:
            if self._made is None or self._pid != os.getpid():  # connections must not be shared across a fork
                with self._translated():
                    self._made = self._make_client()
                self._pid = os.getpid()
            return self._made

    def _make_client(self) -> Any:
        # Without this the SDK asks for the bucket itself, from a thread of its own and with retries, to label traces.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        emulated = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
        anonymous: Any = AnonymousCredentials  # the SDK has no types
        authorized: Any = AuthorizedSession
        credentials = anonymous() if emulated else google.auth.default(scopes=_SCOPES)[0]
        session = authorized(credentials)
        for scheme in ("http://", "https://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=3 * PARALLEL))
        session.hooks["response"].append(self._observe)
        # A project is only asked for where buckets are made or listed.
        return storage.Client(project="none", credentials=credentials, _http=session)

    def _observe(self, response: requests.Response, **_: object) -> None:
        self._answer.headers = response.headers
        self._date.observe_header(response.headers.get("Date"))
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            # fake-gcs-server closes the connection unannounced after this answer: the next request on it would now and
            # then be reset. Nothing of its body is needed.
            response.raw.close()


def _check_crc32c(data: bytes, hashes: str, what: str) -> None:
    """Compare with `crc32c=4gcgLQ==,md5=…`, which a store may leave out."""
    for name, _, value in (item.strip().partition("=") for item in hashes.split(",")):
        if name == "crc32c" and base64.b64decode(value) != google_crc32c.value(data).to_bytes(4, "big"):
            raise Unavailable(f"the bytes of {what} were damaged on the way")
