"""Combines several operations of a store, such as reading complete files and opening them with checks."""

import contextlib
import posixpath
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import ExistsError, UnsafeError
from . import git_lfs
from .open_file import File
from .posix import retry_stale
from .read_errors import reading
from .store import Blob, Store

_MAX_FILE_BYTES = 2 << 30  # far more than any manifest has
_MAX_SPARSE_BYTES = 16 << 20  # a larger file with holes is refused: it may claim any size
_CREATE_ATTEMPTS = 50  # to create a file in a folder that other processes remove while it is empty
T = TypeVar("T")


def read_file(store: Store, path: str, *, expected: int = 0) -> bytes:
    """Reads a complete file of at most 2 GiB, and without holes if it has more than 16 MiB.

    expected: the number of bytes. With it, the file is read as it is now, and not from the listing of `Store.glance`.

    Raises `UnsafeError` for larger files, and `CorruptError` for unreadable files and pointers of git-lfs.
    """
    with reading(path):
        # Another host may also replace the file while it is open, so opening and reading are repeated together.
        return retry_stale(lambda: _read_file(store, path, expected))


def _read_file(store: Store, path: str, expected: int) -> bytes:
    with opened(store, path, expected=expected) as blob:
        if blob.size > _MAX_FILE_BYTES or (blob.size > _MAX_SPARSE_BYTES and blob.has_holes):
            raise UnsafeError(f"{path}: {blob.size} bytes, too many to be read at once")
        data = blob.read_up_to(blob.size)
        git_lfs.check(path, data)
        return data


def make_empty(store: Store, path: str) -> None:
    """Creates an empty file, which is durable once its folder is settled. Raises `FileExistsError`."""
    sink = store.create(path)
    try:
        sink.finish(0)
    finally:
        sink.close()


def create_in_folder(make_folder: Callable[[], object], create: Callable[[], T]) -> T:
    """Makes a folder and calls `create`, which creates a file there.

    Begins again if another process has removed the folder, which it had made, while the folder was empty.
    """
    for _ in range(_CREATE_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            make_folder()
            return create()
    make_folder()
    return create()


def is_in_use(store: Store, path: str) -> bool:
    """Returns True if a file has a living writer, or if that cannot be known. False if it does not exist."""
    with contextlib.suppress(FileNotFoundError), store.unused(path) as remove:
        return remove is None
    return False


def remove_unused(store: Store, path: str, check: Callable[[], bool] = lambda: True) -> None:
    """Removes a file, or what a killed writer left under a temporary name, unless a living writer has it.

    `check` runs when no writer can begin to use it any more. If it returns False, the file stays.
    """
    with contextlib.suppress(FileNotFoundError), store.unused(path) as remove:
        if remove and check():
            remove()


def is_file(store: Store, path: str) -> bool:
    """Returns True if a path is a file."""
    there = store.stat(path)
    return there is not None and there.is_file


def check_free(store: Store, path: str, *, overwrite: bool, folder: bool) -> None:
    """Raises `ExistsError` if a file or folder must not be written to a path because of what exists there."""
    found = store.stat(path)
    if found is not None:
        what = "directory" if found.is_folder else "file"
        if found.is_folder != folder:
            raise ExistsError(f"{path}: expected a free path, found a {what}; choose another path or remove it")
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a {what}; pass overwrite=True to replace it")


def is_folder(store: Store, path: str, *, links: bool = False) -> bool:
    """Returns True if a path is a folder. A link to a folder is one only with `links`."""
    there = store.stat(path)
    return there is not None and there.is_folder and (links or not store.is_link(path))


def files_in(store: Store, path: str) -> Iterator[str]:
    """Yields the files below a folder, as paths within it. Links count as files and are not followed."""
    for name in store.list(path):
        inner = posixpath.join(path, name)
        if is_folder(store, inner):
            yield from (f"{name}/{file}" for file in files_in(store, inner))
        else:
            yield name


@contextlib.contextmanager
def opened(store: Store, path: str, *, expected: int = 0) -> Iterator[Blob]:
    """Opens a file for reading within a `with` block."""
    blob = store.open(path, expected=expected)
    try:
        yield blob
    finally:
        blob.close()


def open_fetched(store: Store, path: str, expected: int = 0, into: memoryview | None = None) -> Blob:
    """Opens a file for reading. Raises `CorruptError` for a pointer of git-lfs.

    Reading raises `ReplacedError` once a program has written into the file in place.
    """
    blob = open_with_checksums(store, path, expected, into)
    if isinstance(blob, File):
        blob.watch()
    return blob


def open_with_checksums(store: Store, path: str, expected: int = 0, into: memoryview | None = None) -> Blob:
    """Does the same for a caller that compares checksums, which show more than the time of the last write."""
    with reading(path):
        options: dict[str, Any] = {} if into is None else {"into": into}  # only object stores have this option
        blob = store.open(path, expected=expected, **options)
        git_lfs.check_open(blob)
    return blob
