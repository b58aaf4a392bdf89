"""Copies objects within the server, so that bytes that it has already need not be uploaded again."""

import logging
from typing import Any

from ...errors import UnsupportedError
from ..store import FinishedFile
from .bucket import Bucket, ObjectMeta, Version

_log = logging.getLogger("treering")


def copy_version(bucket: Bucket, file: FinishedFile, key: str) -> Version | None:
    """Copies an object of a known size and version to another key of the bucket. Returns the version of the copy.

    Returns None if the bytes must be uploaded: the object is gone or was replaced, or the server refuses. Then the key
    has no copy, unless an answer of the server was lost. Once the server has refused, this process copies nothing more
    in the bucket.

    obstore cannot make a copy conditional. So the ETags are compared: if the copy has that of the object, the bytes are
    equal. Otherwise the object must still have its version once it is copied.
    """
    version: Any = file.version
    source, tag = ObjectMeta(file.path[len(bucket.url) + 1 :], file.nbytes, 0.0, version), version[0]
    if not bucket.can_copy or tag is None or tag.startswith("W/"):  # Weak ETags may be equal for other bytes.
        return None
    try:
        bucket.copy(source.key, key)
        made = bucket.head(key)
        if made and made.nbytes == source.nbytes and (made.version[0] == tag or _is_unchanged(bucket, source)):
            return made.version
        bucket.delete([key])  # Wrong bytes must not stay, and an object can only be created at a free key.
        problem = "it was replaced, or the copy has another size"
    except FileNotFoundError:
        problem = "it is gone"
    except (OSError, UnsupportedError) as error:
        if bucket.can_copy:
            bucket.can_copy = False
            _log.warning("%s: unchanged arrays are uploaded from now on, because copies failed: %s", bucket.url, error)
        return None
    _log.info("%s/%s: uploaded again, not copied from %s: %s", bucket.url, key, source.key, problem)
    return None


def _is_unchanged(bucket: Bucket, expected: ObjectMeta) -> bool:
    found = bucket.head(expected.key)
    return found is not None and found.is_same(expected)
