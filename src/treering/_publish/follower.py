"""`follow_weights`: yields the versions of a stream of published weights."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from .. import stores
from .._core.boxes import Box
from .._core.entries import ArrayEntry, step_number
from .._core.source import Source, arrays_of, complete_arrays, origins
from .._core.tracebacks import hide_internal_frames
from .._restore import options as _options
from .._restore.checkpoint import Checkpoint
from .._restore.restore import HeldLeaves
from .._run import run_layout
from .._run.follow import follow
from .._run.step_fallback import open_step
from ..errors import CorruptError, NotFoundError
from ..formats.treering import deltas
from ..formats.treering.read import Reader

if TYPE_CHECKING:
    from .._restore.options import RestoreOptions

_log = logging.getLogger("treering")


class Weights(NamedTuple):
    """A version of published weights: its number, the restored tree, and the metrics that came with it."""

    version: int
    tree: Any
    metrics: Mapping[str, float]


@hide_internal_frames
def follow_weights(
    stream: str | os.PathLike[str],
    like: Any = None,
    *,
    version: int | None = None,
    timeout: float | None = None,
    **options: "Unpack[RestoreOptions]",
) -> Iterator[Weights]:
    """Yields the newest version of a stream that a `Publisher` writes, then each time the newest one that has come.

    >>> for weights in tr.follow_weights("gs://bucket/policy", like=abstract_params):
    ...     rollouts = generate(weights.tree, weights.version)

    A version is yielded once all of it is read and every array has the checksum that was published. Only arrays that
    have changed are read and placed on devices; the others are the same objects as in the tree before. If a version is
    damaged, or one that it was made from is gone, that is logged, and the newest version that can be read is next.

    like: what the tree is shaped like, as for `treering.restore`.
    version: the first version to yield, or a later one; by default any.
    timeout: ends after so many seconds without a new version; None waits forever.
    options: those of `treering.restore`, for every version.

    Versions in between are logged and left out. Ends after the last version of a stream that is finished. The stream
    need not exist yet, and may be written again from the start: then the next version is read completely. One copy of
    the arrays stays in host memory, which on CPUs is that of the tree itself: do not donate the tree. While a version
    is read, the arrays that it changes are there twice, because the tree before stays as it is. Raises
    `MismatchError` if the versions do not fit `like`, and `UnsupportedError` for one of a later release.
    """
    _options.check(options, "tr.follow_weights()", ("stream", "like", "version", "timeout"))
    versions = read_versions(stores.absolute_run(stream), version, timeout)
    return _restored(versions, like, options)


def _restored(versions: "Iterator[ReadVersion]", like: Any, options: "RestoreOptions") -> Iterator[Weights]:
    leaves = HeldLeaves()
    for ckpt, same in versions:
        tree = ckpt._restore(like, None, **options, held=leaves.unless_changed(same))
        yield Weights(ckpt.step or 0, tree, ckpt.metrics)
        del tree


class ReadVersion(NamedTuple):
    """A version whose arrays are in memory and have the checksums that were published.

    same: the paths of the arrays that are the same as in the version before.
    """

    ckpt: Checkpoint
    same: frozenset[str]


def read_versions(root: str, first: int | None, timeout: float | None) -> Iterator[ReadVersion]:
    """Returns the newest version of a stream that can be read, and then each time the newest one that has come.

    Logs versions that are damaged or gone. For `first` and `timeout` see `follow_weights`.
    """
    after = -1 if first is None else step_number(first) - 1
    # Wrong arguments raise now, not with the first version.
    steps = follow(root, after=after if after >= 0 else None, timeout=timeout, newest=True)
    return _read(root, steps, after)


def _read(root: str, steps: Iterator[Checkpoint], after: int) -> Iterator[ReadVersion]:
    held = _Held()
    for newest in steps:
        for ckpt in _from_newest(root, newest, after):
            try:
                found = held.read(ckpt)
            except (CorruptError, NotFoundError) as error:
                _log.warning("%s: version %s is left out: %s", root, ckpt.step, error)
                continue
            after = ckpt.step or 0
            yield found
            break


def _from_newest(root: str, newest: Checkpoint, after: int) -> Iterator[Checkpoint]:
    """Yields a version, and then those between it and the one that was yielded last, the newest first."""
    yield newest
    store = stores.get(root)
    found = run_layout.located_steps(store, root)
    for step in sorted(found, reverse=True):
        if newest.step is not None and after < step < newest.step:
            try:
                ckpt = open_step(store, found[step].path, step, found[step].format)
            except (CorruptError, NotFoundError) as error:
                _log.warning("%s: version %s is left out: %s", root, step, error)
                continue
            yield ckpt


class _Held:
    """The bytes of the arrays of the version that was read last."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._source: Reader | None = None  # With it, the versions that it is made from stay open.

    def read(self, ckpt: Checkpoint) -> ReadVersion:
        """Reads another version. Raises `CorruptError` if it is damaged; then nothing has changed."""
        source = ckpt._source
        if not isinstance(source, Reader):
            wanted = [*complete_arrays(source)]
            found = zip(wanted, source.read(wanted), strict=True)
            made: Any = _Made(source, {entry.path: array for (entry, _), array in found})
            return ReadVersion(Checkpoint(made), frozenset())
        paths = [entry.path for entry in arrays_of(source) if source.origin(entry.path) == entry.path]
        try:
            arrays = deltas.read_arrays(source, paths, self._arrays, self._source.identity if self._source else "")
        except CorruptError as error:
            if not self._arrays:
                raise
            _log.warning("%s is read completely, as the arrays in memory may have been changed: %s", ckpt.path, error)
            arrays = deltas.read_arrays(source, paths)
        for array in arrays.values():
            array.flags.writeable = False
        same = frozenset(path for path, array in arrays.items() if self._arrays.get(path) is array)
        self._arrays, self._source = arrays, source
        made = _Made(source, arrays)
        return ReadVersion(Checkpoint(made), same)


class _Made:
    """A version whose arrays are in memory. Everything else is that of its reader."""

    def __init__(self, reader: Source, arrays: Mapping[str, np.ndarray]):
        self._reader, self._arrays = reader, arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_reader"], name)

    def can_mmap(self, requested: bool | None) -> bool:
        """Returns True: `read` returns views."""
        return True

    def read(
        self, wanted: Sequence[tuple[ArrayEntry, Box]], *, verify: bool = True, mmap: bool | None = None
    ) -> list[np.ndarray]:
        """Returns the boxes of arrays, which are not to be changed."""
        found: list[np.ndarray] = []
        for entry, box in wanted:
            (path,) = origins(self._reader, [entry.path])
            found.append(deltas.piece_of(self._arrays[path], entry, box))
        return found
