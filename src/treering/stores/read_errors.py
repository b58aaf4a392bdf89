"""Turns the system's errors in reading into Treering's errors, in one place for every format."""

import contextlib
import errno
from collections.abc import Iterator
from typing import NoReturn

from ..errors import CorruptError, NotFoundError, RequestError, TreeringError

# These mean that the system cannot return the stored bytes: a bad sector, a wrong checksum of the file system, failing
# memory. All others (no permission, too many open files) say nothing about the bytes.
_DAMAGE_ERRNOS = {
    getattr(errno, name)
    for name in ("EIO", "EFAULT", "EBADMSG", "EUCLEAN", "EREMOTEIO", "ENODATA")
    if hasattr(errno, name)
} | {133}  # EHWPOISON of Linux, which Python has no name for


# These say nothing about the files: the next attempt may succeed.
_MOMENTARY_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "EINTR", "EBUSY", "ENOLCK", "EDEADLK", "ETIMEDOUT"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EPIPE"),
    )
    if hasattr(errno, name)
}

READ_ATTEMPTS = 5  # to read a checkpoint that other jobs overwrite or replace meanwhile


class UnreadableError(CorruptError):
    """The system cannot read an existing file."""


class ReplacedError(NotFoundError):
    """The checkpoint was overwritten or deleted after it was opened."""


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Wraps code that reads or examines a file or directory.

    Raises `CorruptError` for a file that the system cannot read any more, and `NotFoundError` for one that another
    machine removed (ESTALE). Other errors of the system get the path if they have none.
    """
    try:
        yield
    except OSError as error:
        raise_read_error(error, path)


def raise_read_error(error: OSError, path: str) -> NoReturn:
    """Raises what `reading` raises for an error of its block."""
    try:
        if not isinstance(error, TreeringError):
            place = error.filename if isinstance(error.filename, str) else path
            if error.errno in _DAMAGE_ERRNOS:
                code = errno.errorcode.get(error.errno or 0, error.errno)
                raise UnreadableError(
                    f"{place}: cannot be read: {error.strerror} ({code}); "
                    "restore an earlier step or a copy of this one, and check the disk"
                ) from error
            if error.errno == errno.ESTALE:
                raise ReplacedError(
                    f"{place}: another machine replaced or deleted it while it was open; open it again"
                ) from error
            if error.filename is None and error.errno is not None:
                error.filename = path
        raise error
    finally:
        del error  # The error's traceback has this frame: each would keep the other, and the callers' frames, alive.


def is_momentary(error: BaseException) -> bool:
    """Returns True if an error says nothing about the files, such as too many open files."""
    return isinstance(error, RequestError) or (isinstance(error, OSError) and error.errno in _MOMENTARY_ERRNOS)


def raise_if_momentary(error: BaseException) -> None:
    """Raises an error that says nothing about the files, because any conclusion from it would be wrong."""
    try:
        if is_momentary(error):
            raise error
    finally:
        del error  # as in `raise_read_error`


def refusal(error: TreeringError | OSError, path: str) -> str:
    """Returns the text of an error, as the reason why a path has no known format.

    Raises `CorruptError` for a file that cannot be read any more, because it could have any format. Raises errors that
    say nothing about the files, for example if a file was replaced meanwhile.
    """
    raise_if_momentary(error)
    if isinstance(error, UnreadableError | ReplacedError):
        raise error
    try:
        with reading(path):
            raise error
    except UnreadableError:
        raise
    except (TreeringError, OSError) as found:
        return str(found)


def is_full(error: OSError) -> bool:
    """Returns True if a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
