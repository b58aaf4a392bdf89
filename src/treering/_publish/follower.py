"""`follow_weights`: yields the versions of a stream of published weights."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from .. import stores
from .._core import dtypes
from .._core.boxes import Box
from .._core.entries import ArrayEntry, step_number
from .._core.source import arrays_of
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
    the arrays stays in host memory, which on CPUs is that of the tree itself: do not donate the tree. Raises
    `MismatchError` if the versions do not fit `like`, and `UnsupportedError` for one of a later release.
    """
    after = None if version is None else step_number(version) - 1
    steps = follow(stream, after=after if after is None or after >= 0 else None, timeout=timeout, newest=True)
    return _weights(stores.absolute_run(stream), steps, like, options)


def _weights(root: str, steps: Iterator[Checkpoint], like: Any, options: "RestoreOptions") -> Iterator[Weights]:
    shown = _Shown(like, options)
    newest: int | None = None
    with contextlib.closing(steps):  # pyright: ignore[reportArgumentType] (it is a generator)
        for ckpt in steps:
            for one in _from_newest(root, ckpt, newest):
                try:
                    tree = shown.restored(one)
                except (CorruptError, NotFoundError) as error:
                    _log.warning("%s: version %s is left out: %s", root, one.step, error)
                    shown.forget()
                    continue
                newest = one.step
                yield Weights(one.step or 0, tree, one.metrics)
                del tree
                break


def _from_newest(root: str, newest: Checkpoint, shown: int | None) -> Iterator[Checkpoint]:
    """Yields a version, and then those before it, down to the one that is shown."""
    yield newest
    store = stores.get(root)
    found = run_layout.located_steps(store, root)
    assert newest.step is not None
    for step in sorted((step for step in found if (shown or -1) < step < newest.step), reverse=True):
        with contextlib.suppress(CorruptError, NotFoundError):
            yield open_step(store, found[step].path, step, found[step].format)


class _Shown:
    """The version that was yielded last: the bytes of its arrays, and its leaves."""

    def __init__(self, like: Any, options: "RestoreOptions"):
        self._like, self._options = like, options
        self._arrays: dict[str, np.ndarray] = {}
        self._identity = ""
        self._leaves = HeldLeaves()
        self._source: Reader | None = None  # With it, the versions that it is made from stay open.

    def forget(self) -> None:
        """Forgets the arrays, so that the next version is read completely."""
        self._arrays, self._identity, self._leaves, self._source = {}, "", HeldLeaves(), None

    def restored(self, ckpt: Checkpoint) -> Any:
        """Returns the tree of another version. Raises what `Checkpoint.restore` does; then nothing has changed."""
        source = ckpt._source
        if not isinstance(source, Reader):
            return ckpt.restore(self._like, **self._options)
        try:
            return self._restored(source)
        except CorruptError as error:
            if not self._arrays:
                raise
            _log.warning("%s is read completely, as the arrays in memory may have been changed: %s", ckpt.path, error)
            self.forget()
            return self._restored(source)

    def _restored(self, source: Reader) -> Any:
        paths = [entry.path for entry in arrays_of(source) if source.origin(entry.path) == entry.path]
        arrays = deltas.read_arrays(source, paths, self._arrays, self._identity)
        for array in arrays.values():
            array.flags.writeable = False
        same = {path for path, array in arrays.items() if self._arrays.get(path) is array}
        made: Any = _Made(source, arrays)
        tree = Checkpoint(made)._restore(self._like, None, **self._options, held=self._leaves.unless_changed(same))
        self._arrays, self._identity, self._source = arrays, source.identity, source
        return tree


class _Made:
    """A version whose arrays are in memory. Everything else is that of its `Reader`."""

    def __init__(self, reader: Reader, arrays: Mapping[str, np.ndarray]):
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
            stored = self._arrays[self._reader.origin(entry.path)]
            array = stored.view(dtypes.to_numpy(entry.dtype)).reshape(entry.shape)
            found.append(array[(*(slice(begin, end) for begin, end in box), ...)])
        return found
