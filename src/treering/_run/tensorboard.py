"""Metrics from TensorBoard's event files, read without TensorFlow."""

import os
import posixpath
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from .._core.leaf_paths import absolute
from .._threads.forks import free_in_children
from ..errors import CorruptError, UnsupportedError


class TensorBoardScalars:
    """The scalars in a directory of event files, named ``{run}/{tag}``: the directory below it, and the tag.

    As TensorBoard does, it follows links, and forgets the scalars of a run from the step at which a job restarted it
    (``purge_step``). TensorBoard's own accumulators also keep other data than scalars, and stop reading a file once
    there is a newer one.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            self._root = absolute(directory)
        except UnsupportedError:
            raise UnsupportedError(
                f"tensorboard={os.fspath(directory)!r}: expected a folder of a file system, found a URL; event files "
                "are read only from disks: sync them to one, or pass metrics to save(metrics=) or treering.record"
            ) from None
        self._lock = free_in_children(threading.Lock())
        self._loaders: dict[str, Any] = {}
        # By run and step, also of steps that are not saved yet: a step may be saved after its events came.
        self._scalars: dict[str, dict[int, dict[str, float]]] = {}
        try:
            from tensorboard.backend.event_processing import event_file_loader
        except ImportError:
            raise UnsupportedError(
                "tensorboard=…: expected the package tensorboard; install treering[tensorboard]"
            ) from None
        self._loader_module = event_file_loader

    def read(self, steps: Iterable[int]) -> dict[int, dict[str, float]]:
        """Returns the scalars of some steps, after reading new events. Of several with one tag, takes the last.

        Raises `CorruptError` for a file that cannot be read: missing metrics must not decide which steps are deleted.
        """
        with self._lock:
            for directory, names in self._folders(self._root):
                run = os.path.relpath(directory, self._root)
                for name in names:  # Names begin with the time of the file.
                    if "tfevents" in name:
                        path = posixpath.join(directory, name)
                        try:
                            self._read_file(path, "" if run == "." else f"{run}/")
                        except Exception as error:  # The libraries document no error classes.
                            if os.path.exists(path):  # Otherwise it was removed meanwhile.
                                raise CorruptError(f"{path}: expected TensorBoard's events: {error}") from error
            found: dict[int, dict[str, float]] = {}
            for step in steps:
                for by_step in self._scalars.values():
                    if step in by_step:
                        found.setdefault(step, {}).update(by_step[step])
            return found

    def _folders(self, directory: str, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[str]]]:
        """Yields a directory and those below it, with the names in them. A link back to one above is not followed."""
        if (real := os.path.realpath(directory)) in above:
            return
        try:
            names = sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):  # It is not there yet, or was removed meanwhile.
            return
        except OSError as error:
            raise CorruptError(f"{directory}: expected TensorBoard's events: {error}") from error
        yield directory, names
        for name in names:
            if os.path.isdir(path := posixpath.join(directory, name)):
                yield from self._folders(path, above | {real})

    def _read_file(self, path: str, prefix: str) -> None:
        if path not in self._loaders:
            self._loaders[path] = self._loader_module.LegacyEventFileLoader(path)
        scalars = self._scalars.setdefault(prefix, {})
        for event in self._loaders[path].Load():
            if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                for step in [one for one in scalars if one >= event.step]:
                    del scalars[step]
            for value in event.summary.value:
                number = _scalar(value)
                if number is not None:
                    scalars.setdefault(event.step, {})[prefix + value.tag] = number


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or value.tensor.tensor_shape.dim:  # TensorFlow 2 and others write scalars as tensors
        return None
    from tensorboard.util import tensor_util

    array = tensor_util.make_ndarray(value.tensor)
    return float(array) if array.shape == () and array.dtype.kind in "biuf" else None
