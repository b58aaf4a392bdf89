"""Callbacks of Keras 3: `ModelCheckpoint` and `BackupAndRestore`, with the arguments of those that Keras has.

>>> model.fit(x, y, epochs=10, callbacks=[treering.keras.BackupAndRestore("runs/keras")])

What is saved is `state(model)`: the variables of the model and of its optimizer, the state of seeds among them; neither
the architecture, which is the program's, nor metrics, which begin anew with each epoch. All of Treering works on it:
`treering show`, `open`, `restore(at="variables")`. Needs ``pip install treering[keras]``.
"""

import logging
import numbers
import operator
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import keras

from . import formats
from ._run.checkpointer import Checkpointer
from ._run.open import open_checkpoint
from ._save.pending import PendingSave
from ._save.save import save_async
from .errors import MismatchError
from .keep import last

__all__ = ["BackupAndRestore", "ModelCheckpoint", "load", "state"]

_log = logging.getLogger("treering")
_NUMBER = re.compile(r"_[0-9]+$")


def __dir__() -> list[str]:
    return __all__


def state(model: keras.Model, *, weights_only: bool = False) -> dict[str, Any]:
    """The variables of a model by name: to be saved, or a template.

    A layer that has the name that Keras gives by itself (``dense_14``: a class, and how many of it the process has
    made) is called by its class and its place in the model: ``dense[0]``. Other names stay. So a model that is built
    again has the same names, whatever of it is trainable. With the JAX backend the leaves are `jax.Array`s, with others
    NumPy arrays.
    """
    tree: dict[str, Any] = {}
    for path, variable in _variables(model, weights_only):
        *above, name = path.split("/")
        inside = tree
        for part in above:
            inside = inside.setdefault(part, {})
        on_device = keras.backend.backend() == "jax"
        inside[name] = variable.value if on_device else keras.ops.convert_to_numpy(variable.value)
    return tree


def load(model: keras.Model, path: str | os.PathLike[str], **options: Any) -> None:
    """Sets the variables of a model to those of a checkpoint, or of a run's latest good step.

    Where the checkpoint or the model has no optimizer, the weights alone are set, which the log notes. `options` are
    those of `treering.restore`. Raises what that raises, `MismatchError` for a model of another architecture among
    them, and changes nothing then.
    """
    ckpt = open_checkpoint(path, step=options.pop("step", None))
    saved, wanted = any(name.startswith("optimizer/") for name in ckpt), getattr(model, "optimizer", None) is not None
    if saved != wanted:
        _log.info("%s: the weights alone are set: the %s has no optimizer", path, "model" if saved else "checkpoint")
    if saved and not wanted:
        options.setdefault("extra", ["optimizer/**"])
    weights_only = not (saved and wanted)
    _set(model, ckpt.restore(state(model, weights_only=weights_only), **options), weights_only=weights_only)


def _set(model: keras.Model, tree: dict[str, Any], *, weights_only: bool = False) -> None:
    for path, variable in _variables(model, weights_only):
        value: Any = tree
        for part in path.split("/"):
            value = value[part]
        variable.assign(value)


def _variables(model: keras.Model, weights_only: bool) -> Iterator[tuple[str, Any]]:
    """The variables with their paths, in the order of the layers, which `trainable` does not change."""
    names = _Names()
    paths: dict[int, str] = {}
    for path, variable in _of_layer(model, "", names, paths):
        yield f"variables/{path}", variable
    optimizer = None if weights_only else getattr(model, "optimizer", None)  # a model may not be compiled
    if optimizer is None:
        return
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    trained = {variable.path.replace("/", "_"): paths[id(variable)] for variable in model.trainable_variables}
    which = f"{zlib.crc32(repr([*trained.values()]).encode()):08x}"
    for variable in optimizer.variables:
        scope, _, name = variable.path.partition("/")
        above, name = f"{_NUMBER.sub('', scope)}/", name.strip("/")
        of = max((one for one in trained if name.startswith(f"{one}_")), key=len, default=None)
        if of is not None:
            path = f"{above}{trained[of]}/{name.removeprefix(of + '_')}"
        else:  # where nothing but its place says what it belongs to, it must not fit where others are trained
            path = names.named(f"{above}{which}/" if variable.ndim else above, name, "variable")
        yield "optimizer/" + names.unique(path), variable


def _of_layer(layer: Any, above: str, names: "_Names", paths: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """The variables of a layer and those in it, each once, as `keras.Layer.variables` orders them."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    for variable in [*own, *(generator.state for generator in layer._seed_generators)]:
        if id(variable) not in paths:
            paths[id(variable)] = path = names.unique(names.named(above, variable.name, "variable"))
            yield path, variable
    for one in layer._layers:
        place = names.unique(names.named(above, one.name, _snake_case(type(one).__name__)))
        yield from _of_layer(one, f"{place}/", names, paths)


class _Names:
    """Names that do not depend on what else the process has made."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def named(self, above: str, name: str, kind: str) -> str:
        """The path of what has a name below `above`; if that is what Keras calls a `kind`, with its place instead."""
        stem = _NUMBER.sub("", name)
        if re.sub(r"^(forward|backward)_", "", stem) != kind:  # as `keras.layers.Bidirectional` calls its copies
            return f"{above}{name}"
        return f"{above}{stem}[{self._next(f'{above}{stem}[]')}]"

    def unique(self, path: str) -> str:
        """The path, with a number if it was asked for before: two layers may have one name."""
        count = self._next(path)
        return f"{path}[{count}]" if count else path

    def _next(self, name: str) -> int:
        self._counts[name] = self._counts.get(name, -1) + 1
        return self._counts[name]


def _snake_case(name: str) -> str:
    """A class as Keras names its objects: ``MultiHeadAttention`` is ``multi_head_attention``."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


class ModelCheckpoint(keras.callbacks.Callback):
    """Saves the model after epochs or batches, in the background, as `keras.callbacks.ModelCheckpoint` does.

    filepath: where; ``{epoch}``, ``{batch}`` and the names of metrics are put in. A suffix chooses the format
        (``.safetensors``), else it is Treering's own. What is there is replaced, and stays until the new one is
        durable. Not ``.keras`` or ``.h5``, which hold the architecture as well.
    monitor, save_best_only, mode, initial_value_threshold: with `save_best_only` a model is saved if the monitored
        metric is better than at any save before. "auto" asks the metric, as Keras does; where that does not say which
        way is better, `MismatchError` is raised. NaN is never better.
    save_weights_only: leaves the optimizer out (Keras leaves the architecture out, which is never saved here).
    save_freq: "epoch", or a number of batches.

    An error of a save is raised by the next one, or at the end of training.
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
                f"{self._filepath}: expected a path without a suffix of Keras', for none of its files is made"
            )
        self._mode = mode
        self._best = initial_value_threshold
        self._every = _Every(save_freq)
        self._epoch = 0
        self._pending: PendingSave | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every.batch(batch):
            self._save(logs or {}, batch=batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every.epoch:
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
                f"{self._filepath}: expected names that there are, found {error}; known: {known}"
            ) from None
        self._wait()
        tree = state(_model(self), weights_only=self._weights_only)
        beside: dict[str, Any] = {}
        if formats.for_path(path, None).name in ("treering", "safetensors"):  # others have no place for them
            beside = {"step": self._epoch + 1, "metrics": metrics}
        self._pending = save_async(path, tree, overwrite=True, **beside)
        if self._verbose:
            print(f"\nEpoch {self._epoch + 1}: saving the model to {path}")

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._monitor)
        if value is None:
            _log.warning("save_best_only: no metric %r, only %s; saved all the same", self._monitor, ", ".join(metrics))
            return True
        more = _more_is_better(_model(self), self._monitor) if self._mode == "auto" else self._mode == "max"
        if value != value or (self._best is not None and not (value > self._best if more else value < self._best)):
            return False
        self._best = value
        return True

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


class BackupAndRestore(keras.callbacks.Callback):
    """Goes on where training was interrupted, as `keras.callbacks.BackupAndRestore` does.

    backup_dir: a run of Treering, of this training alone; a directory or a URL.
    save_freq: "epoch", or a number of batches; an epoch that was interrupted begins again, with its last weights.
    double_checkpoint: keeps the two latest states, so that one is left if the latest turns out damaged.
    delete_checkpoint: deletes the states when training has ended well.

    As long as an interrupted program lives, as a notebook does, it holds the run: `fit` may be called again there,
    while another process is refused until it ends.
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
        self._every = _Every(save_freq)
        self._epoch = self._step = 0
        self._ckpts: Checkpointer | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._ckpts = Checkpointer(self._dir, keep=self._keep)
        self._epoch = 0
        if self._ckpts.latest_step is None:
            return
        model = _model(self)
        _set(model, self._ckpts.restore(state(model)))
        self._step = self._ckpts.restored_step or 0
        self._epoch = self._ckpts.open(self._step).metadata["epoch"]
        model._initial_epoch = self._epoch  # as Keras' own callback tells `fit`

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every.batch(batch):
            self._save(logs, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch + 1
        if self._every.epoch:
            self._save(logs, 0)

    def on_train_end(self, logs: Any = None) -> None:
        assert self._ckpts is not None
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


class _Every:
    """When to save: after each epoch, or after so many batches; never, if that is False."""

    def __init__(self, save_freq: Literal["epoch"] | int):
        self.epoch = save_freq == "epoch"
        try:
            self._batches = 0 if self.epoch or save_freq is False else operator.index(save_freq)  # type: ignore[arg-type]
        except TypeError:
            self._batches = -1
        if self._batches < (0 if self.epoch or save_freq is False else 1):
            raise MismatchError(f"save_freq={save_freq!r}: expected 'epoch' or a number of batches")
        self._last, self._seen = -1, 0

    def batch(self, batch: int) -> bool:
        """Counts the batches up to this one of its epoch, of which a call may make several; whether to save."""
        self._seen += batch - self._last if batch > self._last else batch + 1
        self._last = batch
        if not self._batches or self._seen < self._batches:
            return False
        self._seen = 0
        return True


def _more_is_better(model: keras.Model, monitor: str) -> bool:
    """Which way a metric is better, by what it says of itself; Keras' own callback asks the same."""
    name = monitor.removeprefix("val_")
    if name == "loss":
        return False
    found = [one for metric in model.metrics for one in (metric, *getattr(metric, "metrics", ()))]
    says = {getattr(one, "_direction", None) for one in found if one.name == name} - {None}
    if len(says) != 1:
        raise MismatchError(
            f"monitor={monitor!r}: expected a metric that says which way is better; pass mode='min' or 'max'"
        )
    return says == {"up"}


def _scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers, which others need not be."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        scalar = isinstance(value, numbers.Real) or (getattr(value, "shape", None) == () and not isinstance(value, str))
        if scalar:
            found[name] = float(value)
    return found


def _model(callback: keras.callbacks.Callback) -> keras.Model:
    """The model, which with the JAX backend takes its state from the loop when it is asked for."""
    model = callback.model
    assert model is not None
    return model
