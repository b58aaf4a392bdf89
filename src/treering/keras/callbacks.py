"""Callbacks that save a model while it trains, and continue an interrupted training."""

import logging
import numbers
import operator
import os
import re
import string
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import keras

from .. import formats, stores
from .._restore.checkpoint import Checkpoint
from .._run.checkpointer import Checkpointer
from .._run.open import open_checkpoint
from .._save.pending import PendingSave
from .._save.save import save_async
from ..errors import MismatchError, NotFoundError, TreeringError
from ..formats.treering import summary
from ..keep import last
from ..stores.read_errors import reading
from ..stores.store import Stat, Store
from .variables import assign, state

_log = logging.getLogger("treering")
_restored_models: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()  # those whose `fit` continues that of another job


class ModelCheckpoint(keras.callbacks.Callback):
    """Saves the model after epochs or batches, in the background, as `keras.callbacks.ModelCheckpoint` does.

    filepath: the path, in which ``{epoch}``, ``{batch}`` and names of metrics are replaced. The suffix chooses the
        format (``.safetensors``); without one it is the native format. An existing checkpoint is replaced, and stays
        until the new one is durable. ``.keras`` and ``.h5`` are refused, because these files contain the architecture.
    monitor, save_best_only, mode, initial_value_threshold: with `save_best_only` a model is saved only if the monitored
        metric is better than at any save before, also of the job that this one continues: the checkpoint has it. A new
        training, from epoch 0 on, replaces the checkpoints of earlier ones, as in Keras. "auto" asks the metric, as
        Keras does, and raises `MismatchError` if the metric does not say which direction is better. NaN is never
        better.
    save_weights_only: omits the optimizer. (In Keras it omits the architecture, which is never saved here.)
    save_freq: "epoch", or a number of batches.

    The next save, or the end of training, raises the error of a failed save.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
    ):
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise MismatchError(f"mode={mode!r}: expected 'auto', 'min' or 'max'")
        self._filepath, self._monitor, self._verbose = os.fspath(filepath), monitor, verbose
        self._best_only, self._weights_only = save_best_only, save_weights_only
        if self._filepath.endswith((".keras", ".h5")):
            raise MismatchError(
                f"{self._filepath}: expected a path without a suffix of Keras, found one; Treering does not write its "
                "files, so use .safetensors or no suffix"
            )
        self._mode = mode
        self._best = initial_value_threshold
        self._frequency = _SaveFrequency(save_freq)
        self._epoch = 0
        self._continues: bool | None = None  # True if an earlier job began this training; None before it is known
        self._has_compared = False  # True once the metric was compared with that of an earlier job
        self._pending: PendingSave | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._continues is None:
            self._continues = epoch > 0 or _model(self) in _restored_models
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._frequency.count_batch(batch):
            self._save(logs or {}, batch=batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._frequency.epoch:
            self._save(logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        self._wait()

    def _save(self, logs: Mapping[str, Any], **places: int) -> None:
        metrics = _scalars(logs)
        if self._best_only and not self._is_better(metrics):
            return
        known = {**places, **logs, "epoch": self._epoch + 1}
        try:
            path = self._filepath.format(**known)
        except KeyError as error:
            known = ", ".join(sorted(known))
            raise MismatchError(
                f"{self._filepath}: expected names of metrics, epoch or batch, found {error}; known: {known}"
            ) from None
        self._wait()
        tree = state(_model(self), weights_only=self._weights_only)
        extra: dict[str, Any] = {}
        if formats.for_path(path, None).name in ("treering", "safetensors"):  # Other formats refuse step and metrics.
            extra = {"step": self._epoch + 1, "metrics": metrics}
        self._pending = save_async(path, tree, overwrite=True, **extra)
        if self._verbose:
            print(f"\nEpoch {self._epoch + 1}: saving the model to {path}")

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._monitor)
        if value is None:
            _log.warning(
                "save_best_only: expected the metric %r, found %s; saved anyway",
                self._monitor,
                ", ".join(metrics),
            )
            return True
        more = _is_higher_better(_model(self), self._monitor) if self._mode == "auto" else self._mode == "max"
        if value != value or not _is_better(value, self._best, more):
            return False
        if not self._has_compared:
            self._has_compared = True
            if not self._is_better_than_saved(value, more):
                return False
        self._best = value
        return True

    def _is_better_than_saved(self, value: float, more: bool) -> bool:
        """Compares a metric with that of the last checkpoint of an earlier job. In a new training, warns at most."""
        saved = _last_saved(self._filepath)
        if saved is None or not (self._continues or saved.path == stores.absolute(self._filepath)):
            return True  # A new training does not replace files with the numbers of other epochs.
        best = saved.metrics.get(self._monitor)
        if best is None or best != best:
            what = f"the metric {self._monitor!r}" if best is None else f"a number as its {self._monitor!r}"
            _log.warning("%s: save_best_only: expected %s, found none; saved anyway", saved.path, what)
        elif _is_better(value, best, more):
            pass
        elif self._continues:
            self._best = best
            _log.info("%s: has %s=%g; only a better model replaces it", saved.path, self._monitor, best)
            return False
        else:
            _log.warning(
                "%s: %s=%g was better than that of the new training so far, %g, which begins at epoch 0 and saves "
                "anyway; pass initial_value_threshold=, or another filepath, to keep the old model",
                saved.path, self._monitor, best, value,
            )  # fmt: skip
        return True

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


class BackupAndRestore(keras.callbacks.Callback):
    """Continues an interrupted training, as `keras.callbacks.BackupAndRestore` does.

    backup_dir: a run of Treering, used by this training only; a directory or a URL.
    save_freq: "epoch", or a number of batches. An interrupted epoch begins again, with its last weights.
    double_checkpoint: keeps the two latest states, so that one is left if the latest is damaged.
    delete_checkpoint: deletes the states when training has ended without an error.

    An interrupted program that is still alive, such as a notebook, holds the run. It may call `fit` again; other
    processes are refused until it ends.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        if not os.fspath(backup_dir):
            raise MismatchError("backup_dir: expected a directory or a URL, found an empty text")
        self._dir, self._delete = backup_dir, delete_checkpoint
        self._keep = last(2 if double_checkpoint else 1)
        self._frequency = _SaveFrequency(save_freq)
        self._epoch = self._step = 0
        self._ckpts: Checkpointer | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._ckpts = Checkpointer(self._dir, keep=self._keep)
        self._epoch = 0
        _restored_models.discard(_model(self))
        try:
            self._ckpts.open()  # Waits for saves of an interrupted `fit`, which `latest_step` does not list yet.
        except NotFoundError:
            return
        model = _model(self)
        assign(model, self._ckpts.restore(state(model)))
        self._step = self._ckpts.restored_step or 0
        self._epoch = self._ckpts.open(self._step).metadata["epoch"]
        _restored_models.add(model)
        model._initial_epoch = self._epoch  # The callback of Keras sets the same attribute, which `fit` reads.

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._frequency.count_batch(batch):
            self._save(logs, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        if self._frequency.epoch:
            self._save(logs, 0)

    def on_train_end(self, logs: Any = None) -> None:
        assert self._ckpts is not None
        _restored_models.discard(_model(self))
        with self._ckpts:
            self._ckpts.wait()
            if self._delete:
                for step in self._ckpts.steps:
                    self._ckpts.delete(step)

    def _save(self, logs: Mapping[str, Any] | None, batch: int) -> None:
        assert self._ckpts is not None
        self._step += 1
        metadata = {"epoch": self._epoch, "batch": batch}
        self._ckpts.save(self._step, state(_model(self)), metrics=_scalars(logs or {}), metadata=metadata)


class _SaveFrequency:
    """Decides when to save: after each epoch, after a number of batches, or never if `save_freq` is False."""

    def __init__(self, save_freq: Literal["epoch"] | int):
        self.epoch = save_freq == "epoch"
        try:
            self._batches = 0 if self.epoch or save_freq is False else operator.index(save_freq)  # type: ignore[arg-type]
        except TypeError:
            self._batches = -1
        if self._batches < (0 if self.epoch or save_freq is False else 1):
            raise MismatchError(f"save_freq={save_freq!r}: expected 'epoch' or a number of batches")
        self._last_batch, self._batch_count = -1, 0

    def count_batch(self, batch: int) -> bool:
        """Counts the batches of the epoch up to this one, and returns True if a save is due.

        One call of Keras may cover several batches (`steps_per_execution`).
        """
        self._batch_count += batch - self._last_batch if batch > self._last_batch else batch + 1
        self._last_batch = batch
        if not self._batches or self._batch_count < self._batches:
            return False
        self._batch_count = 0
        return True


def _last_saved(filepath: str) -> Checkpoint | None:
    """Returns the checkpoint that was saved last under a path with fields like ``{epoch}``; None if there is none.

    With `save_best_only` it is the best one: those of earlier trainings are older. Logs those that cannot be read.
    """
    place = stores.absolute(filepath)
    store = stores.get(place)
    try:
        with reading(place):
            times = {path: found.modified for path in _matching(store, place) if (found := _stat(store, path))}
    except (TreeringError, OSError) as error:
        _log.warning("save_best_only: expected to find the last save: %s", error)
        return None
    for path in sorted(times, key=times.__getitem__, reverse=True):
        try:
            return open_checkpoint(path)
        except NotFoundError:  # Another process has deleted it.
            continue
        except (TreeringError, OSError) as error:
            _log.warning("save_best_only: expected to read the metrics of a save: %s", error)
    return None


def _stat(store: Store, path: str) -> Stat | None:
    return summary.stat_manifest(store, path) or store.stat(path)


def _matching(store: Store, place: str) -> list[str]:
    """Returns the paths that a path with fields may stand for."""
    found = [""]
    for n, part in enumerate(place.split("/")):
        pieces = list(string.Formatter().parse(part))
        if all(field is None for _, field, _, _ in pieces):
            literal = "".join(text for text, _, _, _ in pieces)
            found = [f"{folder}/{literal}" if n else literal for folder in found]
        else:
            pattern = "".join(re.escape(text) + ("" if field is None else ".+") for text, field, _, _ in pieces)
            found = [
                f"{folder}/{name}" for folder in found for name in store.list(folder) if re.fullmatch(pattern, name)
            ]
    return found


def _is_better(value: float, best: float | None, more: bool) -> bool:
    return best is None or (value > best if more else value < best)


def _is_higher_better(model: keras.Model, monitor: str) -> bool:
    """Returns True if larger values of a metric are better, by the attribute that the callback of Keras reads too.

    Raises `MismatchError` if the metric does not say it.
    """
    name = monitor.removeprefix("val_")
    if name == "loss":
        return False
    found = [one for metric in model.metrics for one in (metric, *getattr(metric, "metrics", ()))]
    says = {getattr(one, "_direction", None) for one in found if one.name == name} - {None}
    if len(says) != 1:
        raise MismatchError(
            f"monitor={monitor!r}: expected a metric that says which direction is better; pass mode='min' or 'max'"
        )
    return says == {"up"}


def _scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns the logs that are numbers."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        scalar = isinstance(value, numbers.Real) or (getattr(value, "shape", None) == () and not isinstance(value, str))
        if scalar:
            found[name] = float(value)
    return found


def _model(callback: keras.callbacks.Callback) -> keras.Model:
    """Returns the model. With the JAX backend, this attribute first copies the state of the loop into the model."""
    model = callback.model
    assert model is not None
    return model
