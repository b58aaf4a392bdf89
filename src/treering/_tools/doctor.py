"""Tests the features and the speed of a place for runs, and gives advice."""

import contextlib
import os
import posixpath
import time
from collections.abc import Iterator

import numpy as np

from .. import stores
from .._run.open import restore
from .._save.save import save
from ..errors import CorruptError, NotFoundError
from ..formats.treering import removal
from ..stores import probe
from ..stores.probe import BYTES_PER_SECOND, Finding, disk_findings, drop_page_cache, median_seconds
from ..stores.store import Store


def examine(path: str | os.PathLike[str], *, size: int = 256 << 20) -> list[Finding]:
    """Tests a directory or the prefix of a bucket with `size` bytes, and leaves nothing behind.

    Raises `NotFoundError` if the directory does not exist, and `OSError` if nothing can be written.
    """
    place = stores.absolute(path)
    store = stores.get(place)
    there = store.stat(place) if store.has_folders else None
    if store.has_folders and not (there and there.is_folder):
        raise NotFoundError(f"{place}: expected a directory, found {'a file' if there else 'nothing'}")
    folder = posixpath.join(place, f"treering-doctor-{os.urandom(4).hex()}")
    store.make_folders(folder, [])
    try:
        findings = [
            Finding("a tier here survives", probe.survives(store, folder)),
            *disk_findings(store, folder),
            *_probe_any_store(store, folder),
            *_probe_rates(store, folder, size),
        ]
    finally:
        _remove(store, folder)
    return findings


def _remove(store: Store, folder: str) -> None:
    removal.collect_garbage(store, posixpath.join(folder, "checkpoint"), remove_empty=True)
    for name in store.list(folder):
        with contextlib.suppress(FileNotFoundError):
            store.delete(posixpath.join(folder, name))
    store.remove_folder(folder)


def _probe_any_store(store: Store, folder: str) -> Iterator[Finding]:
    name = posixpath.join(folder, "small")

    def put(overwrite: bool) -> None:
        with store.new_file(name, overwrite=overwrite) as file:
            file.write(b"x")

    put(False)
    try:
        put(False)
    except FileExistsError:
        yield Finding("one writer wins", True)
    else:
        yield Finding(
            "one writer wins",
            False,
            "",
            "two jobs that create the same file both succeed: never let two jobs write one run",
        )
    if not store.has_folders:
        yield Finding("small write", median_seconds(lambda: put(True)), "seconds")
        yield Finding("look at a file", median_seconds(lambda: store.stat(name)), "seconds")
        yield Finding("list", median_seconds(lambda: store.list(folder)), "seconds")


def _probe_rates(store: Store, folder: str, size: int) -> Iterator[Finding]:
    path = posixpath.join(folder, "checkpoint")
    array = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8)
    report = save(path, {"x": array}, processes="this")
    yield Finding("save", size / max(report.seconds, 1e-9), BYTES_PER_SECOND)
    drop_page_cache(store, path)
    begun = time.perf_counter()
    found = restore(path, mmap=False)
    seconds = time.perf_counter() - begun
    if not np.array_equal(found["x"], array):
        raise CorruptError(f"{path}: expected the bytes that were written, found others; do not use this place")
    yield Finding("restore", size / max(seconds, 1e-9), BYTES_PER_SECOND)
    removal.delete(store, path)
