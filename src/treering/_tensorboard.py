"""Metrics from TensorBoard's event files, read without TensorFlow."""

import os
from typing import Any

from ._paths import absolute
from .errors import UnsupportedError


class Events:
    """The scalars in a directory of event files, named ``{run}/{tag}``: the directory below it, and the tag."""

    def __init__(self, directory: str | os.PathLike[str]):
        self._root = absolute(directory)
        self._runs: dict[str, Any] = {}
        try:
            from tensorboard.backend.event_processing import event_accumulator
        except ImportError:
            raise UnsupportedError(
                "tensorboard=…: expected the package tensorboard; install treering[tensorboard]"
            ) from None
        self._module = event_accumulator

    def read(self) -> dict[int, dict[str, float]]:
        """All scalars, with what was written since the last call; of several for one step the last counts."""
        found: dict[int, dict[str, float]] = {}
        for directory, _, names in os.walk(self._root):
            if any("tfevents" in name for name in names):
                run = os.path.relpath(directory, self._root)
                for tag, step, value in self._scalars(directory):
                    found.setdefault(step, {})[tag if run == "." else f"{run}/{tag}"] = value
        return found

    def _scalars(self, directory: str) -> "list[tuple[str, int, float]]":
        if directory not in self._runs:
            keep_all = {"scalars": 0, "tensors": 0, "images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1}
            self._runs[directory] = self._module.EventAccumulator(directory, size_guidance=keep_all)
        events = self._runs[directory]
        events.Reload()
        found = [(tag, one.step, one.value) for tag in events.Tags()["scalars"] for one in events.Scalars(tag)]
        for tag in events.Tags()["tensors"]:  # what TensorFlow 2 and others write scalars as
            for one in events.Tensors(tag):
                value = _scalar(one.tensor_proto)
                if value is not None:
                    found.append((tag, one.step, value))
        return found


def _scalar(proto: Any) -> float | None:
    from tensorboard.util import tensor_util

    array = tensor_util.make_ndarray(proto)
    return float(array) if array.shape == () and array.dtype.kind in "biuf" else None
