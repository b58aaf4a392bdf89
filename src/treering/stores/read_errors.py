"""Turns errors of the system in reading into Treering's: one place for every format."""

import contextlib
import errno
from collections.abc import Iterator

from ..errors import CorruptError, NotFoundError, RequestError, TreeringError

# With these a system says that it cannot give back what was stored: a bad sector, a checksum of the file system's own
# that does not fit, memory that fails. All others (no permission, too many open files) say nothing about the bytes.
_DAMAGE = {
    getattr(errno, name)
    for name in ("EIO", "EFAULT", "EBADMSG", "EUCLEAN", "EREMOTEIO", "ENODATA")
    if hasattr(errno, name)
} | {133}  # EHWPOISON of Linux, which Python has no name for


# With these it says nothing about what is there: the next time the answer may be another.
_MOMENTARY = {
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EAGAIN", "EINTR", "EBUSY", "ENOLCK", "EDEADLK", "ETIMEDOUT"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN"),
        *("ECONNRESET", "ECONNREFUSED", "ECONNABORTED", "EPIPE"),
    )
    if hasattr(errno, name)
}


class UnreadableError(CorruptError):
    """The system cannot read what is there."""


class ReplacedError(NotFoundError):
    """The checkpoint was overwritten or deleted since it was opened."""


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Wraps code that reads a file or directory, or looks at it.

    Raises `CorruptError` for a file that cannot be read any more, and `NotFoundError` for one that another machine has
    removed (ESTALE). Other errors of the system get the path, if they have none.
    """
    try:
        yield
    except TreeringError:
        raise
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else path
        if error.errno in _DAMAGE:
            raise UnreadableError(
                f"{place}: cannot be read: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)}); "
                "restore an earlier step or a copy of this one, and look at the disk"
            ) from error
        if error.errno == errno.ESTALE:
            raise ReplacedError(
                f"{place}: another machine replaced or deleted it while it was open; open it again"
            ) from error
        if error.filename is None and error.errno is not None:
            error.filename = path
        raise


def is_momentary(error: BaseException) -> bool:
    """Whether an error says nothing about what is there."""
    return isinstance(error, RequestError) or (isinstance(error, OSError) and error.errno in _MOMENTARY)


def raise_if_momentary(error: BaseException) -> None:
    """Raises an error that says nothing about what is there: whatever is concluded from it would be made up."""
    if is_momentary(error):
        raise error


def refusal(error: TreeringError | OSError, path: str) -> str:
    """The text of an error, as the reason why something is of no format.

    Raises `CorruptError` for a file that cannot be read any more, for it may be of any format, and errors that say
    nothing about what is there, such as that it was replaced while it was looked at.
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
