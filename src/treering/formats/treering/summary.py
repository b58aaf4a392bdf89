"""Quick facts about a checkpoint that is not opened: if it exists, its identity, its metrics and its size."""

import functools
import logging
import posixpath
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import msgspec

from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError, NotFoundError, SaveError, UnsupportedError
from ...stores.file_io import read_file
from ...stores.read_errors import reading
from ...stores.store import Stat, Store
from . import manifest, metrics, validity
from .manifest_fields import Published
from .schema import MANIFEST, OWN_FILES

_log = logging.getLogger("treering")

# Called with the directory of a checkpoint that got metrics, so that retention can apply its policy.
listeners: list[Callable[[str], None]] = []


class StepSummary(NamedTuple):
    """The summary of a manifest, and of the metrics files next to it."""

    metrics: dict[str, float]
    created_seconds: float  # since the epoch
    nbytes: int  # of the manifest and the array files
    linked: dict[Hashable, int]  # see `keep.Saved`
    late: frozenset[str]  # the names of the metrics that were added after the save
    base: str | None = None  # the name of its base, a folder next to it
    published: Published | None = None


def manifest_path(path: str) -> str:
    """Returns the path of the manifest of a checkpoint."""
    return posixpath.join(path, MANIFEST)


def is_own_file(name: str) -> bool:
    """Returns True for the name of a file within a checkpoint, or of one that an interrupted save has left."""
    return bool(OWN_FILES.fullmatch(name))


def stat_manifest(store: Store, path: str) -> Stat | None:
    """Returns the `stat` of the manifest, or None without a checkpoint."""
    return store.stat(manifest_path(path))


class _Step(msgspec.Struct):
    step: int | None = None


preload_decoders(_Step)


def is_step(store: Store, path: str, number: int) -> bool | None:
    """Returns True if a checkpoint was saved as the step with a number; None if its manifest cannot be read."""
    there = stat_manifest(store, path)
    step = _saved_step(store, path, there.version) if there else None
    return None if step is None else step == number


@functools.lru_cache(maxsize=64)  # A program that follows a run asks for the same manifest again and again.
def _saved_step(store: Store, path: str, version: Hashable) -> int | None:
    """Returns the step in a manifest, -1 without one, or None if it cannot be read."""
    try:
        step = msgspec.json.decode(read_file(store, manifest_path(path)), type=_Step).step
    except (CorruptError, OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return -1 if step is None else step


def identity(store: Store, path: str) -> str:
    """Returns the checksum of the manifest, which identifies the checkpoint. Raises `FileNotFoundError` without one.

    A checkpoint that replaces it at the same path has another identity.
    """
    return manifest.xxh3(read_file(store, manifest_path(path)))


def identity_or_none(store: Store, path: str) -> str | None:
    """Returns the `identity`, or None if the manifest is missing or cannot be read."""
    try:
        return identity(store, path)
    except (CorruptError, FileNotFoundError):
        return None


def read(store: Store, path: str, *, allow_missing_files: bool = False) -> StepSummary:
    """Reads the manifest, and checks the sizes of the files that it names.

    allow_missing_files: allows missing and cut files, because other hosts may have them on their disks.

    Raises `CorruptError` for a damaged checkpoint, `UnsupportedError` for one that a later release wrote, and
    `FileNotFoundError` without a manifest.
    """
    data = read_file(store, manifest_path(path))
    summary = manifest.summarize(data, path)
    linked: dict[Hashable, int] = {}
    for listed in () if allow_missing_files else summary.files:
        with reading(path):
            found = store.stat(posixpath.join(path, listed.name))
        if found is None or found.nbytes != listed.size:
            raise CorruptError(f"{path}: {listed.name} is missing or cut short")
        if store.sharing == "links":
            linked[found.version] = listed.size
    added = _added(store, path, manifest.xxh3(data))
    numbers = {**validity.metrics(summary.metrics), **added}
    nbytes = len(data) + sum(listed.size for listed in summary.files)
    base = summary.base.name if summary.base else None
    return StepSummary(
        numbers, summary.created_seconds(), nbytes, linked, frozenset(added), base, Published.of(summary.published)
    )


def read_emptied(store: Store, path: str) -> StepSummary | None:
    """Returns the summary of a checkpoint whose manifest is all that is left of it; None for any other.

    A save writes the array files before the manifest, and a deletion removes the manifest first. So such a manifest
    arrived after the deletion of its step, as a delayed duplicate of the commit, or another program removed the arrays.
    """
    if store.list(path) != [MANIFEST]:
        return None
    try:
        data = read_file(store, manifest_path(path))
        summary = manifest.summarize(data, path)
    except (CorruptError, UnsupportedError, FileNotFoundError):
        return None
    if not summary.files:  # Nothing is missing: a checkpoint without arrays has no array files.
        return None
    return StepSummary(validity.metrics(summary.metrics), summary.created_seconds(), len(data), {}, frozenset())


def add_metrics(
    store: Store,
    path: str,
    step: int | None,
    numbers: Mapping[str, float | str],
    *,
    of: str | None = None,
    notify: bool = True,
) -> bool:
    """Adds metrics durably to a checkpoint, and with `notify` calls the `listeners`.

    of: the identity of the checkpoint that the metrics were measured on. Metrics never become those of another one,
    because the name of their file has the identity. Returns False if the checkpoint is gone or replaced.

    Raises `NotFoundError` without a checkpoint, unless `of` is given, and `SaveError` if writing fails.
    """
    try:
        data = read_file(store, manifest_path(path))
        manifest.check(data, path)
        manifest.check_envelope(data, path)
        found = manifest.xxh3(data)
        if of in (None, found):
            metrics.write(store, path, found, numbers)
        is_there = of is None or identity_or_none(store, path) == of
    except FileNotFoundError:
        if of is None:
            raise NotFoundError(f"{path}: expected step {step}, but it was deleted meanwhile") from None
        is_there = False
    except OSError as error:
        raise SaveError(f"{path}: the metrics cannot be added: {error}") from error
    if is_there and notify:
        for listener in listeners:
            listener(posixpath.dirname(path))
    return is_there


def _added(store: Store, path: str, identity: str) -> dict[str, float]:
    """Returns the metrics that were added to a checkpoint. Logs damaged files and ignores them.

    Raises `UnsupportedError` for metrics that a later release added: without them the steps cannot be compared.
    """
    found: dict[str, float] = {}
    for _, content in metrics.read(store, path, identity):
        if isinstance(content, dict):
            found.update(content)
        elif isinstance(content, UnsupportedError):
            raise content
        else:
            _log.warning("recorded metrics are ignored: %s", content)
    return found
