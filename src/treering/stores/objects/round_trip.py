"""Tests a server before the first write to a bucket: it must return what was stored, completely and in ranges."""

import contextlib
import logging
from collections.abc import Iterator

from ...errors import RequestError, UnsupportedError
from ..temporary_names import clock_probe_sibling
from .bucket import Bucket
from .heartbeat import Heartbeat
from .request_errors import BROKEN, EMPTY, ChangedError

_log = logging.getLogger("treering")
# Compressible, because some servers compress. No two ranges are equal, so a wrong range shows.
_PROBE_DATA = b"".join(b"%07d\n" % n for n in range(512))
_OVERREAD_BYTES = 64  # bytes requested beyond the end, as when a file is opened


def check(bucket: Bucket, heartbeat: Heartbeat) -> None:
    """Tests a server once per process, with the heartbeat of a writer. Raises `UnsupportedError`.

    A server that does not get conditions is tested with an object of its own, which is also listed and deleted.
    """
    if bucket._is_verified:
        return
    if not bucket.conditional:
        check_neighbor(bucket, heartbeat.key)
        return
    with heartbeat.without_renewal() as data:
        bucket.check_conditions(heartbeat.key)
        _check_reads(bucket, heartbeat.key, data)
    bucket._is_verified = True


def check_neighbor(bucket: Bucket, key: str) -> None:
    """Tests a server once per process, with an object next to a key. Does not test conditions.

    A user who may not delete objects is not refused: that says nothing about the server.
    """
    if bucket._is_verified or bucket.is_read_verified:
        return
    probe = f"{clock_probe_sibling(key)}/probe"  # in its own folder, so that the listing is short
    bucket.put(probe, _PROBE_DATA, overwrite=True)
    try:
        _check_reads(bucket, probe, _PROBE_DATA)
        with _explained_errors(bucket, probe, "to list its folder"):
            listed, _ = bucket.list(probe.rpartition("/")[0])
        if not any(one.key == probe and one.nbytes == len(_PROBE_DATA) for one in listed):
            raise _refusal(bucket, probe, "to list its folder", "a list without it, or with another size")
    except BaseException:
        with contextlib.suppress(OSError):
            bucket.delete([probe])
        raise
    bucket.is_read_verified = True
    try:
        with _explained_errors(bucket, probe, "to delete it"):
            bucket.delete([probe])
    except RequestError as error:
        _log.warning("%s: %s stays, because it cannot be deleted: %s", bucket.url, probe, error)
        return
    if bucket.head(probe):
        raise _refusal(bucket, probe, "to delete it", "that it is still there")


def _check_reads(bucket: Bucket, key: str, data: bytes) -> None:
    size = len(data)
    version = None
    for begin, end in ((0, size + _OVERREAD_BYTES), (1, size - 1)):
        asked = f"for its bytes {begin} to {end - 1}, of {size}"
        with _explained_errors(bucket, key, asked):
            came, found = bucket._bytes(key, begin, end, version)
        if found.nbytes != size or bytes(came) != data[begin:end]:
            raise _refusal(bucket, key, asked, f"{len(came)} bytes of {found.nbytes}, which are not those")
        version = found.version


@contextlib.contextmanager
def _explained_errors(bucket: Bucket, key: str, asked: str) -> Iterator[None]:
    """Raises `UnsupportedError` for a wrong answer. Other errors say nothing about what the server can do."""
    try:
        yield
    except FileNotFoundError:
        raise _refusal(bucket, key, asked, "that there is no such object") from None
    except ChangedError:
        raise _refusal(bucket, key, asked, "that its version is another") from None
    except RequestError as error:
        if error._reason not in (BROKEN, EMPTY):
            raise
        raise _refusal(bucket, key, asked, f"an answer that does not fit ({error})") from error


def _refusal(bucket: Bucket, key: str, asked: str, answer: str) -> UnsupportedError:
    return UnsupportedError(
        f"{bucket.url}: expected a server that returns what is stored there; asked {asked}, about {key}, found "
        f"{answer}; nothing is saved where it could not be restored: make the server answer ranges as "
        "HTTP says (206, exactly those bytes, no content encoding), lists and deletes as S3 does, or save elsewhere"
    )
