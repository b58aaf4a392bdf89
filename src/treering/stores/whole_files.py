"""Several operations of a store in one: reading whole files, opening them with a look at what they are."""

import contextlib
import posixpath
from collections.abc import Iterator
from typing import Any

from ..errors import ExistsError, UnsafeError
from . import git_lfs
from .posix import looked_up_again
from .read_errors import reading
from .store import Blob, Store

_MAX_FILE_BYTES = 2 << 30
_MAX_SPARSE_BYTES = 16 << 20  # bytes; larger files are not read if they have holes


def read_file(store: Store, path: str, *, expected: int = 0) -> bytes:
    """Reads a whole file of text, of at most 2 GiB, which no manifest comes near, and without holes if it is large.

    With the number of bytes that are `expected` it is read as it is now, whatever `Store.glance` has shown. Raises
    `CorruptError` for a file that cannot be read any more, and for pointers of git-lfs.
    """
    with reading(path):
        return looked_up_again(lambda: _read_file(store, path, expected))  # it may also be replaced while it is open


def _read_file(store: Store, path: str, expected: int) -> bytes:
    with opened(store, path, expected=expected) as blob:
        if blob.size > _MAX_FILE_BYTES or (blob.size > _MAX_SPARSE_BYTES and blob.has_holes):
            raise UnsafeError(f"{path}: {blob.size} bytes, which cannot be meant to be read at once")
        data = blob.read_up_to(blob.size)
        git_lfs.check(path, data)
        return data


def make_empty(store: Store, path: str) -> None:
    """Makes an empty file, durable once its folder is settled. Raises `FileExistsError` when there is one."""
    sink = store.create(path)
    try:
        sink.finish(0)
    finally:
        sink.close()


def is_file(store: Store, path: str) -> bool:
    """Whether there is a file at a path."""
    there = store.stat(path)
    return there is not None and there.is_file


def check_free(store: Store, path: str, *, overwrite: bool, folder: bool) -> None:
    """Raises `ExistsError` when writing a file or folder to a path would touch something it must not."""
    found = store.stat(path)
    if found is not None:
        what = "directory" if found.is_folder else "file"
        if found.is_folder != folder:
            raise ExistsError(f"{path}: expected a free path, found a {what}; choose another path or remove it")
        if not overwrite:
            raise ExistsError(f"{path}: expected a free path, found a {what}; pass overwrite=True to replace it")


def is_folder(store: Store, path: str, *, links: bool = False) -> bool:
    """Whether there is a folder at a path; one that a link leads to counts with `links`."""
    there = store.stat(path)
    return there is not None and there.is_folder and (links or not store.is_link(path))


def files_in(store: Store, path: str) -> Iterator[str]:
    """The files below a folder, by their paths within it. Links count as files, wherever they lead."""
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
    """Opens a file to be read at any time. Raises `CorruptError` for a pointer of git-lfs in its place."""
    with reading(path):
        options: dict[str, Any] = {} if into is None else {"into": into}  # which only stores of objects need to know
        blob = store.open(path, expected=expected, **options)
        git_lfs.check_open(blob)
    return blob
