"""Metrics from TensorBoard's event files, read without TensorFlow."""

import os
import posixpath
import threading
from collections.abc import Iterable
from typing import Any

from .._core.leaf_paths import absolute
from .._threads.forks import free_in_children
from ..errors import CorruptError, UnsupportedError


class TensorBoardScalars:
    """The scalars in a directory of event files, named ``{run}/{tag}``: the directory below it, and the tag.

    TensorBoard's own accumulators also keep other data than scalars, and stop reading a file once there is a newer one.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self._root = absolute(directory)
        self._lock = free_in_children(threading.Lock())
        self._loaders: dict[str, Any] = {}
        # Of all steps: a step may be saved after its events came
        self._scalars_by_step: dict[int, dict[str, float]] = {}
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
            for directory, _, names in os.walk(self._root):
                run = os.path.relpath(directory, self._root)
                for name in sorted(names):  # Names begin with the time of the file.
                    if "tfevents" in name:
                        path = posixpath.join(directory, name)
                        try:
                            self._read_file(path, "" if run == "." else f"{run}/")
                        except Exception as error:  # The libraries document no error classes.
                            if os.path.exists(path):  # Otherwise it was removed meanwhile.
                                raise CorruptError(f"{path}: expected TensorBoard's events: {error}") from error
            return {step: dict(self._scalars_by_step[step]) for step in steps if step in self._scalars_by_step}

    def _read_file(self, path: str, prefix: str) -> None:
        if path not in self._loaders:
            self._loaders[path] = self._loader_module.LegacyEventFileLoader(path)
        for event in self._loaders[path].Load():
            for value in event.summary.value:
                number = _scalar(value)
                if number is not None:
                    self._scalars_by_step.setdefault(event.step, {})[prefix + value.tag] = number


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or value.tensor.tensor_shape.dim:  # TensorFlow 2 and others write scalars as tensors
        return None
    from tensorboard.util import tensor_util

    array = tensor_util.make_ndarray(value.tensor)
    return float(array) if array.shape == () and array.dtype.kind in "biuf" else None
