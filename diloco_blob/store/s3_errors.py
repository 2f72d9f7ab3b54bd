"""What boto3 raises, told by what the caller can do about it."""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from diloco_blob.core.errors import Conflict, Denied, DilocoError, InvalidSettings, NotFound, Unavailable

ERRORS = (BotoCoreError, ClientError, ResponseParserError, HTTPError)
"""Everything that a call of boto3 raises on purpose, and what gets past it while a body is read."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_NO_LOGIN = (NoCredentialsError, PartialCredentialsError, NoAuthTokenError, TokenRetrievalError, SSOError)
_BROKEN = (
    NoConnectionError,
    HTTPClientError,  # sending or waiting failed
    ResponseStreamingError,  # the body broke off
    IncompleteReadError,  # the body was shorter than announced
    MetadataRetrievalError,  # the instance's metadata service did not answer
    ResponseParserError,  # a proxy's page instead of XML
    HTTPError,
)
_DENIED_HINT = (
    "check the credentials and the bucket's policy; without the right to list it, an absent object is answered so, too"
)
_LOGIN_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give this machine a role"


def is_expired(error: Exception) -> bool:
    """Whether fresh credentials may help."""
    return isinstance(error, ClientError) and _code(error) in _EXPIRED


def translate(error: Exception, *, url: str, bucket: str, key: str) -> DilocoError:
    """The error of ours that says the same. `key` names the object that was asked for, if one was."""
    if isinstance(error, ClientError):
        return _answered(error, url, bucket, key)
    reason = " ".join(str(error).split())
    if isinstance(error, _NO_LOGIN):
        return Denied(f"no credentials for {url}: {reason}", _LOGIN_HINT)
    if isinstance(error, _BROKEN):
        return Unavailable(f"{url} did not answer: {reason}", "is the endpoint (AWS_ENDPOINT_URL) right?")
    return InvalidSettings(f"cannot use {url}: {reason}")


def _answered(error: ClientError, url: str, bucket: str, key: str) -> DilocoError:
    code = _code(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{code}: {error.response.get('Error', {}).get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return NotFound(f"there is no bucket {bucket!r}", "create it, or correct the URL; and is the endpoint right?")
    if code in _EXPIRED:
        return Unavailable(f"the credentials for {url} have expired", "renew them; they are read again at each try")
    if code == "RequestTimeTooSkewed":
        return Unavailable(f"{url} finds this machine's clock wrong", "set it, and let NTP keep it right")
    if code in {"RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "InternalError"}:
        return Unavailable(f"a transfer to or from {url} broke ({said})")
    if status == 412:
        return Conflict(f"{key} exists already in {url}")
    if status == 404:
        return NotFound(f"no object {key} in {url}")
    if status in {401, 403}:
        return Denied(f"{url} refused {key or 'a listing'} ({said})", _DENIED_HINT)
    if status == 501:
        return InvalidSettings(f"the store of {url} cannot do what the protocol needs ({said})")
    # 409 (ConditionalRequestConflict, OperationAborted) is a race that nobody has won yet, not a lost one.
    if status in {408, 409, 425, 429} or status >= 500 or code in {"SlowDown", "Throttling"}:
        return Unavailable(f"{url} cannot answer now ({status} {said})")
    return InvalidSettings(f"{url} refused the request ({status} {said})", "check bucket, region and endpoint")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
