"""Which keys and URLs are allowed, checked before any backend sees them.

Keys come from other people's records as well as from our own code, so a bad one is `Corrupt`, not a
programmer's error: a receipt that names `../../etc/passwd` harms nobody. The alphabet is the one that every
store keeps and lists alike.
"""

import re

from diloco_blob.core.errors import Corrupt, InvalidSettings

KEY_CHARS_MAX = 512
"""Characters of a key, without the run's own prefix."""

_SEGMENT = r"[a-z0-9_=-][a-z0-9._=-]{0,199}"  # no leading dot: a folder's listing skips such names
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_LIST_PREFIX = re.compile(rf"(?:{_SEGMENT}/)*(?:{_SEGMENT})?")
_BUCKET_URL = re.compile(r"(?P<scheme>s3|gs)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(?P<prefix>.*))?")
_URL_PREFIX = re.compile(r"[\w.=+@~-]+(?:/[\w.=+@~-]+)*", re.ASCII)


def check_key(key: str) -> str:
    """Return `key` if it may name an object.

    Raises:
        Corrupt: It is empty or too long, has other characters than `a-z 0-9 . _ = - /`, or a segment that is
            empty or starts with a dot.
    """
    if len(key) > KEY_CHARS_MAX or not _KEY.fullmatch(key):
        raise Corrupt(f"{key[:80]!r} may not name an object", "whoever wrote this name is not a sound diloco_blob")
    return key


def check_list_prefix(prefix: str) -> str:
    """Return `prefix` if keys may start with it: the beginning of a key, or nothing.

    Raises:
        Corrupt: No allowed key starts with it.
    """
    if len(prefix) > KEY_CHARS_MAX or not _LIST_PREFIX.fullmatch(prefix):
        raise Corrupt(f"no object's name may start with {prefix[:80]!r}")
    return prefix


def split_bucket_url(url: str) -> tuple[str, str]:
    """Split `s3://bucket/a/b/` or `gs://…` into bucket and prefix `a/b/`: empty, or ending in a slash.

    Raises:
        InvalidSettings: There is no bucket, or the prefix has empty, `.` or `..` segments or unusual
            characters.
    """
    match = _BUCKET_URL.fullmatch(url)
    if match is None:
        raise InvalidSettings(f"{url!r} does not name a bucket", "write it as s3://bucket/run or gs://bucket/run")
    prefix = (match["prefix"] or "").rstrip("/")
    if not prefix:
        return match["bucket"], ""
    if not _URL_PREFIX.fullmatch(prefix) or any(part in {".", ".."} for part in prefix.split("/")):
        raise InvalidSettings(
            f"the path in {url!r} is not allowed", "use letters, digits and '._=+@~-' between single slashes"
        )
    return match["bucket"], f"{prefix}/"
