"""Defines every error that Treering raises on purpose.

    TreeringError
    ├── NotFoundError      (also FileNotFoundError)   there is no checkpoint at this path
    ├── ExistsError        (also FileExistsError)     something else is already at this path
    ├── MismatchError      (also ValueError)          checkpoint and template differ, or an argument does not fit
    ├── CorruptError                                  bytes on the disk are not what was saved
    │   └── UnsafeError                               a file built to do harm
    ├── UnsupportedError   (also TypeError)           a leaf, dtype, format or version this release cannot handle
    ├── RequestError       (also OSError)             a store refused a request, or did not answer as it should
    ├── SaveError          (also OSError)             a save failed; the cause is its ``__cause__``
    └── PeerError          (also ConnectionError)     another process of the job has ended or did not make the call

A message says where, what was expected, what was found, and what to do. If the system can no longer read a file (a bad
sector, a checksum of the file system), that is a `CorruptError`. Other errors of the file system while reading
(permission denied, too many open files) are Python's own, with the path.
"""

from typing import ClassVar, NamedTuple

from ._printable import safe, safe_lines


class TreeringError(Exception):
    """The base of every error raised on purpose. `entry` is the heading of docs/troubleshooting.md about its kind."""

    entry: ClassVar[str] = "troubleshooting"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.add_note(f"More about it: docs/troubleshooting.md#{self.entry} in the documentation of Treering")

    def __str__(self) -> str:
        """Returns the message. Names from files in it cannot control a terminal."""
        return safe_lines(Exception.__str__(self))


class NotFoundError(TreeringError, FileNotFoundError):
    """No checkpoint, step or leaf has that name."""

    entry = "notfounderror"

    __str__ = TreeringError.__str__


class ExistsError(TreeringError, FileExistsError):
    """A save would replace something that exists. Nothing was written."""

    entry = "existserror"

    __str__ = TreeringError.__str__


class Difference(NamedTuple):
    """One leaf in which a checkpoint and a template differ, and a hint that would allow or fix it."""

    path: str
    expected: str
    found: str
    hint: str

    def __str__(self) -> str:
        return f"{safe(self.path) or '(root)'}: expected {self.expected}, found {self.found}; {self.hint}"


class MismatchError(TreeringError, ValueError):
    """A checkpoint and a template, or an argument, do not fit together.

    If a template does not fit, the message gives the likely cause, and groups leaves that differ in the same way.
    `differences` lists each leaf by itself.
    """

    entry = "mismatcherror"

    differences: tuple[Difference, ...] = ()


class CorruptError(TreeringError):
    """The bytes on disk are not those that were saved, or cannot be read. Nothing was returned."""

    entry = "corrupterror"


class UnsafeError(CorruptError):
    """A file whose claims could only be meant to do harm (sizes beyond the file, names outside its folder)."""

    entry = "unsafeerror"


class UnsupportedError(TreeringError, TypeError):
    """A leaf, dtype, format or format version that this release cannot save or read."""

    entry = "unsupportederror"


class SaveError(TreeringError, OSError):
    """A save failed. An earlier checkpoint at the path is untouched and nothing is left behind."""

    entry = "saveerror"

    __str__ = TreeringError.__str__


class RequestError(TreeringError, OSError):
    """A store refused a request, or did not answer it as it should. So it is unknown if the object exists."""

    entry = "requesterror"
    _reason: str = ""  # how the store's own code classifies the error; see `stores.objects.bucket`

    __str__ = TreeringError.__str__


class PeerError(TreeringError, ConnectionError):
    """Another process of the job has ended, or did not make the collective call that this process made."""

    entry = "peererror"

    __str__ = TreeringError.__str__
