"""Combines several operations of a store, such as reading complete files and opening them with checks."""

import contextlib
import posixpath
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..errors import CorruptError, ExistsError, TreeringError, UnsafeError
from .open_file import File
from .posix import retry_stale
from .read_errors import raise_read_error
from .store import Blob, Store

# A pointer of git-lfs: a few lines of text that stand for a large file until git-lfs has fetched it
MAX_POINTER_BYTES = 1024  # the specification allows no larger one
_POINTER_PREFIX = b"version https://git-lfs.github.com/spec/"
_MAX_NAMES = 10_000  # names in folders; further ones are not examined


def check_fetched(path: str, begin: bytes | bytearray) -> None:
    """Raises `CorruptError` if the first bytes of a file are those of a pointer of git-lfs."""
    if begin.startswith(_POINTER_PREFIX):
        raise CorruptError(f"{path}: found a git-lfs pointer instead of the file; run `git lfs pull` there")


def check_blob_fetched(blob: Blob) -> None:
    """Raises `CorruptError` if an open file is a pointer."""
    if blob.size <= MAX_POINTER_BYTES:
        check_fetched(blob.path, blob.read_up_to(len(_POINTER_PREFIX)))


def check_all_fetched(store: Store, path: str, *, levels: int = 5) -> None:
    """Raises `CorruptError` if a file is a pointer, or a folder contains one at most `levels` deep.

    Skips unreadable files.
    """
    for file in _files(store, path, levels):
        try:
            blob = store.open(file)
        except (OSError, TreeringError):
            continue
        try:
            check_blob_fetched(blob)
        except OSError:
            continue
        finally:
            blob.close()


def _files(store: Store, path: str, levels: int) -> Iterator[str]:
    """Yields the small files at a path and below it, down to `levels` folders and up to `_MAX_NAMES` names."""
    left = _MAX_NAMES
    stack = [(path, levels)]
    while stack:
        place, levels = stack.pop()
        try:
            if place != path and store.is_link(place):
                continue
            found = store.stat(place)
            if found is not None and found.is_file and 0 < found.nbytes <= MAX_POINTER_BYTES:
                yield place
            elif found is not None and found.is_folder and levels:
                names = store.list(place)[:left]
                left -= len(names)
                stack += [(posixpath.join(place, name), levels - 1) for name in sorted(names, reverse=True)]
        except (OSError, ValueError):
            continue


_MAX_FILE_BYTES = 2 << 30  # far more than any manifest has
_MAX_SPARSE_BYTES = 16 << 20  # a larger file with holes is refused: it may claim any size
_CREATE_ATTEMPTS = 50  # to create a file in a folder that other processes remove while it is empty
T = TypeVar("T")


def read_file(store: Store, path: str, *, expected: int = 0) -> bytes:
    """Reads a complete file of at most 2 GiB, and without holes if it has more than 16 MiB.

    expected: the number of bytes. With it, the file is read as it is now, and not from the listing of `Store.glance`.

    Raises `UnsafeError` for larger files, and `CorruptError` for unreadable files and pointers of git-lfs.
    """
    try:
        # Another host may also replace the file while it is open, so opening and reading are repeated together.
        return retry_stale(lambda: _read_file(store, path, expected))
    except OSError as error:
        raise_read_error(error, path)


def _read_file(store: Store, path: str, expected: int) -> bytes:
    blob = store.open(path, expected=expected)
    try:
        if blob.size > _MAX_FILE_BYTES or (blob.size > _MAX_SPARSE_BYTES and blob.has_holes):
            raise UnsafeError(f"{path}: {blob.size} bytes, too many to be read at once")
        data = blob.read_up_to(blob.size)
        check_fetched(path, data)
        return data
    finally:
        blob.close()


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
    options: dict[str, Any] = {} if into is None else {"into": into}  # only object stores have this option
    try:
        blob = store.open(path, expected=expected, **options)
        check_blob_fetched(blob)
    except OSError as error:
        raise_read_error(error, path)
    return blob
