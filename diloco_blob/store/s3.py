"""Amazon S3 and what speaks its language: R2, MinIO, Ceph, SeaweedFS …, through boto3.

One attempt at everything: the SDK's retries are off, because a conditional PUT that it repeats after a lost
answer would be refused by its own object and look like a lost race. Credentials, region and endpoint come
from where every AWS tool takes them (`AWS_PROFILE`, `AWS_REGION`, `AWS_ENDPOINT_URL` …). Bodies carry a CRC32
that is computed here, as a header, because the SDK's own checksums come as a trailer that older servers
refuse or, worse, store. The payload stays signed: it is one more check that every server makes, at 1 GB/s.
"""

import base64
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

from diloco_blob.core.clock import Clock, SystemClock
from diloco_blob.core.errors import Unavailable
from diloco_blob.store.base import ObjectInfo
from diloco_blob.store.body import Body, body_bytes, body_file, body_size
from diloco_blob.store.dates import StoreDate
from diloco_blob.store.keys import check_key, check_list_prefix, split_bucket_url
from diloco_blob.store.parts import PARALLEL, PART_BYTES, PartReader
from diloco_blob.store.s3_errors import ERRORS, is_expired, translate

_CONNECT_TIMEOUT_S = 10  # also for a block of a body to go out
_READ_TIMEOUT_S = 60  # for a single byte to come in; so time-outs follow the size of a transfer by themselves

_TRANSFER = TransferConfig(
    multipart_threshold=PART_BYTES,
    multipart_chunksize=PART_BYTES,
    max_concurrency=PARALLEL,
    preferred_transfer_client="classic",  # the other one knows only Amazon's endpoints
)


class S3Store:
    """A bucket, and a prefix in it. Connects when it is first used; safe to use from many threads.

    Args:
        url: `s3://bucket` or `s3://bucket/prefix`.
        clock: Measures the time since the store last told its own.
        endpoint_url: The server, if it is not the one that the environment names.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, endpoint_url: str | None = None) -> None:
        self.url = url
        self.bucket, self._prefix = split_bucket_url(url)
        self._endpoint_url = endpoint_url
        self._date = StoreDate(clock or SystemClock())
        self._parts = PartReader()
        self._lock = threading.Lock()
        self._made: Any = None
        self._pid = 0

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore.get`. One request, and one for each further part of a large object."""
        where = self._where(key)
        with self._translated(key):
            try:
                answer = self._client().get_object(**where, Range=f"bytes=0-{PART_BYTES - 1}")
            except ClientError as error:
                if not _is_beyond_end(error):
                    raise
                answer = self._client().get_object(**where)  # empty: it has no first byte
            first = _read(answer)
        size = _whole_size(answer)
        info = self._info(key, answer, size)

        def read(start: int, length: int) -> bytes:
            return self._read_part(key, start, length, info.etag)

        return self._parts.read_rest(f"{key} in {self.url}", first, size, read), info

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self._read_part(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        with self._translated(key):
            answer = self._client().head_object(**self._where(key))
        return self._info(key, answer, answer["ContentLength"])

    def put(
        self, key: str, data: Body, *, if_absent: bool = False, metadata: Mapping[str, str] | None = None
    ) -> ObjectInfo:
        """See `ObjectStore.put`. `last_modified` is the answer's date, or what a HEAD says of a large object."""
        where = self._where(key)
        options: dict[str, Any] = {"Metadata": dict(metadata)} if metadata else {}
        if body_size(data) > PART_BYTES and not if_absent:
            with self._translated(key):
                self._client().upload_fileobj(
                    body_file(data), self.bucket, where["Key"], ExtraArgs=options, Config=_TRANSFER
                )
            return self.head(key)
        data = body_bytes(data)
        if if_absent:
            options["IfNoneMatch"] = "*"
        with self._translated(key):
            answer = self._client().put_object(
                **where,
                **options,
                Body=data,
                ChecksumCRC32=base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode(),
            )
        if not self._date.known:  # a server that sends no dates
            return self.head(key)
        return ObjectInfo(key, len(data), answer["ETag"], self._date.now(), dict(metadata or {}))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        after = {"StartAfter": self._prefix + start_after} if start_after else {}
        for page in self._pages(prefix, **after):
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(self._prefix)
                if key > start_after and not key.endswith("/"):  # consoles make "folders" as empty objects
                    yield ObjectInfo(key, entry["Size"], entry["ETag"], entry["LastModified"].timestamp())

    def list_dirs(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_dirs`."""
        for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"][len(self._prefix) + len(prefix) : -1]

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with self._translated(key):
            self._client().delete_object(**self._where(key))

    def now(self) -> float:
        """See `ObjectStore.now`: the `Date` of the answers. Asks only if there was none yet."""
        return self._date.now_of(self)

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._parts.close()
        self._forget_client()

    def _read_part(self, key: str, start: int, length: int, etag: str = "") -> bytes:
        where = self._where(key)
        if length == 0:
            self.head(key)
            return b""
        with self._translated(key):
            try:
                answer = self._client().get_object(**where, Range=f"bytes={start}-{start + length - 1}")
            except ClientError as error:
                if _is_beyond_end(error):
                    return b""
                raise
            data = _read(answer)
        if etag and answer["ETag"] != etag:
            raise Unavailable(f"{key} in {self.url} was replaced while it was read")
        if "ContentRange" not in answer:  # the server passed over the range and sent everything
            data = data[start : start + length]
        return data

    def _pages(self, prefix: str, **options: str) -> Iterator[Mapping[str, Any]]:
        check_list_prefix(prefix)
        with self._translated():
            paginator = self._client().get_paginator("list_objects_v2")
            yield from paginator.paginate(Bucket=self.bucket, Prefix=self._prefix + prefix, **options)

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._prefix + check_key(key)}

    def _info(self, key: str, answer: Mapping[str, Any], size: int) -> ObjectInfo:
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(key, size, answer["ETag"], modified, answer.get("Metadata", {}))

    @contextmanager
    def _translated(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except ERRORS as error:
            if is_expired(error):
                self._forget_client()
            raise translate(error, url=self.url, bucket=self.bucket, key=key) from error

    def _client(self) -> Any:
        with self._lock:
            if self._made is None or self._pid != os.getpid():  # connections must not be shared across a fork
                self._made = self._make_client()
                self._pid = os.getpid()
            return self._made

    def _forget_client(self) -> None:
        with self._lock:
            made, self._made = self._made, None
        if made is not None and self._pid == os.getpid():
            made.close()

    def _make_client(self) -> Any:
        session = boto3.Session()
        region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"

        def make(addressing: str) -> Any:
            config = Config(
                retries={"mode": "standard", "total_max_attempts": 1},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing},
                tcp_keepalive=True,
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                max_pool_connections=3 * PARALLEL,
                user_agent_extra="diloco-blob",
            )
            return session.client("s3", region_name=region, endpoint_url=self._endpoint_url, config=config)

        client = make("auto")
        if not _is_amazon(client.meta.endpoint_url):  # others have no DNS name for each bucket
            client.close()
            client = make("path")
        client.meta.events.register("after-call.s3", self._observe)
        return client

    def _observe(self, http_response: Any, **_: Any) -> None:
        self._date.observe_header(http_response.headers.get("Date"))


def _is_amazon(endpoint_url: str) -> bool:
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))


def _is_beyond_end(error: ClientError) -> bool:
    return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


def _read(answer: Mapping[str, Any]) -> bytes:
    """The body, whose length the SDK checks; its connection is given back even if it breaks."""
    with closing(answer["Body"]) as body:
        return bytes(body.read())


def _whole_size(answer: Mapping[str, Any]) -> int:
    """The size of the object of which `answer` may hold a part: `bytes 0-99/1234`."""
    _, _, size = answer.get("ContentRange", "").partition("/")
    return int(size) if size.isdigit() else int(answer["ContentLength"])
