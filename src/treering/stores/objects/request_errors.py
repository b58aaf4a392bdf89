"""The errors of requests to a bucket, as a file system raises them, with what to do about them."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from ...errors import RequestError, TreeringError, UnsupportedError
from .clients import brief

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_EMPTY = ("InvalidRange", "Invalid range", " 416 ", "bytes 0--1/0")
_STATUS_PATTERN = re.compile(r"status code: (\d{3})")
_BUCKET_HINTS = {  # settings of a bucket that fail requests, and what to do
    "RetentionPolicyNotMet": "the bucket's retention policy keeps its objects for a while, and Treering must replace "
    "and delete objects; choose a bucket without a retention policy",
    "ObjectUnderActiveHold": "a hold is placed on this object, so it can be neither replaced nor deleted",
    "UserProjectMissing": "requests to this bucket are paid by the requester; pass a store object of obstore with the "
    "default header x-goog-user-project",
}
# Addresses of the machine's metadata service, which clients ask for credentials if they were given none.
_METADATA_URL = re.compile(
    r"https?://[^/\s]+(/computeMetadata/|/metadata/identity/|/latest/api/token|/latest/meta-data/)"
)
_DENIED = (" 403 ", " 401 ", "AccessDenied")
_EXPIRED = ("ExpiredToken", "RequestExpired", "TokenRefreshRequired", "AuthenticationFailed", "InvalidToken")

# The values of `_reason` of a `RequestError`.
UNANSWERED = "unanswered"  # in doubt: the server may have carried it out; obstore has repeated it already
BROKEN = "broken"  # in doubt too, and obstore has not repeated it
BUSY = "busy"  # the server wants fewer requests, and has not carried it out
EMPTY = "empty"  # a range of bytes was requested of an empty object


class ChangedError(FileExistsError):
    """A name has another object than expected."""


class ConflictError(ChangedError):
    """Another request for the same name is in progress. The same request may succeed in a moment."""


def missing(url: str, key: str) -> FileNotFoundError:
    """Returns the error of an object that does not exist."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{url}/{key}")


def failure(text: str, reason: str) -> RequestError:
    """Returns the error of a request that failed for one of the reasons above."""
    error = RequestError(text)
    error._reason = reason
    return error


def is_in_doubt(error: BaseException) -> bool:
    """Returns True for an error after which a request may have been carried out, or may still be."""
    return isinstance(error, RequestError) and error._reason in (UNANSWERED, BROKEN)


@contextlib.contextmanager
def translate_errors(url: str, key: str) -> Iterator[None]:
    """Wraps a request. Raises `FileNotFoundError`, `ChangedError`, and `RequestError` for all that went wrong."""
    import obstore.exceptions as exceptions

    path = f"{url}/{key}" if key else url
    try:
        yield
    except FileNotFoundError as error:
        if any(word in str(error) for word in _NO_BUCKET):
            raise RequestError(f"{url}: there is no such bucket; make it, or check its name") from None
        raise missing(url, key) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        # obstore reads every 409 as an existing object. All servers but Azure mean another request in progress.
        found, is_there = _STATUS_PATTERN.search(str(error)), "BlobAlreadyExists" in str(error)
        kind = ConflictError if found and found[1] == "409" and not is_there else ChangedError
        raise kind(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
    except (exceptions.NotSupportedError, NotImplementedError) as error:
        raise UnsupportedError(f"{path}: this kind of store cannot do that: {brief(error)}") from error
    except (exceptions.BaseError, OSError) as error:
        if isinstance(error, TreeringError) or getattr(error, "errno", None) is not None:
            raise
        text = str(error)  # The upload in parts raises an `OSError` without a number for every failure.
        # Names of objects in the text may contain " 403 ", so a status code is preferred to words.
        status = found[1] if (found := _STATUS_PATTERN.search(text)) else ""
        if (asked := _METADATA_URL.search(text)) and asked[1] not in f"/{key}":
            raise RequestError(
                f"{url}: no credentials were found in the environment, and the metadata service of this "
                f"machine gave none ({brief(error)}); set the provider's credentials, or pass a store of obstore"
            ) from error
        if any(word in text for word in _EMPTY):
            raise failure(path, EMPTY) from None
        if any(word in text for word in _NO_BUCKET):
            raise RequestError(f"{url}: there is no such bucket; make it, or check its name") from None
        if hint := next((hint for word, hint in _BUCKET_HINTS.items() if word in text), None):
            raise RequestError(f"{path}: {hint} ({brief(error)})") from error
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if denied or status in ("401", "403") or (not status and any(word in text for word in _DENIED)):
            raise RequestError(
                f"{path}: the store does not allow this ({brief(error)}); check that the credentials may list, "
                "get, put and delete there, and that this machine's clock is right"
            ) from error
        if any(word in text for word in _EXPIRED):
            raise RequestError(f"{path}: the credentials have expired; renew them ({brief(error)})") from error
        if status == "409":
            raise ConflictError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        if status == "429":
            raise failure(f"{path}: the store gets too many requests: {brief(error)}", BUSY) from error
        hint = "; without a reason, this is often an expired token" if status == "400" else ""
        reason = UNANSWERED if "max_retries" in text else BROKEN  # the word shows that obstore has repeated it
        raise failure(f"{path}: the store did not answer as it should: {brief(error)}{hint}", reason) from error
