"""A checkpoint without opening it: whether it is there, its identity, its metrics and size."""

import logging
import posixpath
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import CorruptError, UnsupportedError
from ...stores.read_errors import reading
from ...stores.store import Stat, Store
from ...stores.whole_files import read_file
from . import manifest, metrics, validity
from .schema import MANIFEST

_log = logging.getLogger("treering")


class Glance(NamedTuple):
    """The summary of a manifest and the metrics beside it."""

    metrics: dict[str, float]
    created_seconds: float
    nbytes: int
    late: frozenset[str]  # the metrics that were added after the save


def file(path: str) -> str:
    """The path of a checkpoint's manifest."""
    return posixpath.join(path, MANIFEST)


def look(store: Store, path: str) -> Stat | None:
    """The `stat` of the manifest; None where there is no checkpoint."""
    return store.stat(file(path))


def identity(store: Store, path: str) -> str:
    """The manifest's checksum, which tells a checkpoint from its successor. Raises `FileNotFoundError` without one."""
    return manifest.xxh3(read_file(store, file(path)))


def known_identity(store: Store, path: str) -> str | None:
    """Returns the `identity`, or None without a manifest that can be read."""
    try:
        return identity(store, path)
    except (CorruptError, FileNotFoundError):
        return None


def read(store: Store, path: str, *, partial: bool = False) -> Glance:
    """Reads the manifest, and looks for the files that it names; with `partial` some may be on other hosts' disks.

    Raises `CorruptError`, `UnsupportedError` for what a later release wrote, and `FileNotFoundError`.
    """
    data = read_file(store, file(path))
    summary = manifest.summarize(data, path)
    for listed in summary.files:
        with reading(path):
            found = store.stat(posixpath.join(path, listed.name))
        if partial and found is None:
            continue
        if found is None or found.nbytes != listed.size:
            raise CorruptError(f"{path}: {listed.name} is missing or cut short")
    added = _added(store, path, manifest.xxh3(data))
    numbers = {**validity.metrics(summary.metrics), **added}
    nbytes = len(data) + sum(listed.size for listed in summary.files)
    return Glance(numbers, summary.created_seconds(), nbytes, frozenset(added))


def add_metrics(store: Store, path: str, numbers: Mapping[str, float | str]) -> None:
    """Adds metrics, durably. Raises `FileNotFoundError` where there is no checkpoint."""
    data = read_file(store, file(path))
    manifest.check(data, path)
    manifest.check_envelope(data, path)
    metrics.write(store, path, manifest.xxh3(data), numbers)


def _added(store: Store, path: str, identity: str) -> dict[str, float]:
    """The metrics that were added to a checkpoint. A damaged file is logged, and does not count.

    Raises `UnsupportedError` for metrics that a later release added: without them the step cannot be judged.
    """
    found: dict[str, float] = {}
    for _, content in metrics.read(store, path, identity):
        if isinstance(content, dict):
            found.update(content)
        elif isinstance(content, UnsupportedError):
            raise content
        else:
            _log.warning("metrics that were recorded do not count: %s", content)
    return found
