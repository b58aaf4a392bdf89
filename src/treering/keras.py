"""Callbacks of Keras 3: `ModelCheckpoint` and `BackupAndRestore`, with the arguments of those that Keras has.

>>> model.fit(x, y, epochs=10, callbacks=[treering.keras.BackupAndRestore("runs/keras")])

What is saved is `state(model)`: weights, optimizer and the state of seeds; neither the architecture, which is the
program's, nor metrics, which begin anew with each epoch. All of Treering works on it: `treering show`, `open`,
`restore(at="trainable_variables")`.
Needs ``pip install treering[keras]``.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import keras

from . import formats
from ._run.checkpointer import Checkpointer
from ._run.open import open_checkpoint
from ._save.pending import PendingSave
from ._save.save import save_async
from .errors import MismatchError, UnsupportedError
from .keep import last

__all__ = ["BackupAndRestore", "ModelCheckpoint", "load", "state"]

_log = logging.getLogger("treering")
_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_NAMED = (keras.Layer, keras.Metric, keras.Optimizer, keras.random.SeedGenerator)  # classes whose objects Keras names
_NUMBERED = re.compile(r"(.+)_[0-9]+")
_BETTER_IF_MORE = re.compile(r"acc|accuracy|auc|precision|recall|f1|iou|r2", re.IGNORECASE)


def __dir__() -> list[str]:
    return __all__


def state(model: keras.Model, *, weights_only: bool = False) -> dict[str, Any]:
    """The state of a model by the names of its variables: to be saved, or a template.

    Names that Keras has numbered through the process (``dense_14``) are numbered from the model's first one, so that a
    model that is built again has the same. With the JAX backend leaves are `jax.Array`s, with others NumPy arrays.
    Raises `UnsupportedError` for two variables of one name.
    """
    tree: dict[str, Any] = {}
    for path, variable in _variables(model, weights_only).items():
        *above, name = path.split("/")
        inside = tree
        for part in above:
            inside = inside.setdefault(part, {})
        on_device = keras.backend.backend() == "jax"
        inside[name] = variable.value if on_device else keras.ops.convert_to_numpy(variable.value)
    return tree


def load(model: keras.Model, path: str | os.PathLike[str], **options: Any) -> None:
    """Sets the state of a model to that of a checkpoint, or of a run's latest good step.

    A checkpoint of the weights alone sets those; the optimizer stays as it is. `options` are those of
    `treering.restore`. Raises what that raises, `MismatchError` for a model of another architecture among them, and
    changes nothing then.
    """
    ckpt = open_checkpoint(path, step=options.pop("step", None))
    weights_only = not any(name.startswith("optimizer_variables/") for name in ckpt)
    _set(model, ckpt.restore(state(model, weights_only=weights_only), **options), weights_only=weights_only)


def _set(model: keras.Model, tree: dict[str, Any], *, weights_only: bool = False) -> None:
    for path, variable in _variables(model, weights_only).items():
        value: Any = tree
        for part in path.split("/"):
            value = value[part]
        variable.assign(value)


def _variables(model: keras.Model, weights_only: bool) -> dict[str, Any]:
    """The variables of a model by path."""
    optimizer = None if weights_only else getattr(model, "optimizer", None)  # a model may not be compiled
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    groups = {name: list(getattr(model, name)) for name in _WEIGHTS}
    if optimizer is not None:
        groups["optimizer_variables"] = list(optimizer.variables)
    numbers = _Numbers()
    found: dict[str, Any] = {}
    moments: dict[str, str] = {}  # of variables: how the optimizer names what it has of each
    for group, variables in groups.items():
        for variable in variables:
            path = numbers.renumbered(variable.path)
            if group == "trainable_variables":
                moments[variable.path.replace("/", "_")] = path.replace("/", "_")
            elif group == "optimizer_variables":
                above, _, name = path.rpartition("/")
                of = max((one for one in moments if name.startswith(f"{one}_")), key=len, default="")
                path = f"{above}/{moments.get(of, '')}{name.removeprefix(of)}"
            if found.setdefault(f"{group}/{path}", variable) is not variable:
                raise UnsupportedError(f"{group}/{path}: two variables of one name, {variable.path}; name their layers")
    return found


class _Numbers:
    """The names that Keras gives by itself, numbered in the order in which they are met."""

    def __init__(self) -> None:
        self._bases = {_snake_case(kind.__name__) for kind in _kinds(_NAMED)}
        self._new: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def renumbered(self, path: str) -> str:
        """The path, with those of its names that Keras has made numbered anew."""
        return "/".join(map(self._name, path.split("/")))

    def _name(self, name: str) -> str:
        match = _NUMBERED.fullmatch(name)
        base = match[1] if match else name
        if base not in self._bases:
            return name
        if name not in self._new:
            count = self._counts.get(base, 0)
            self._new[name] = f"{base}_{count}" if count else base
            self._counts[base] = count + 1
        return self._new[name]


def _kinds(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield kind
        yield from _kinds(kind.__subclasses__())


def _snake_case(name: str) -> str:
    """A class as Keras names its objects: ``MultiHeadAttention`` is ``multi_head_attention``."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


class ModelCheckpoint(keras.callbacks.Callback):
    """Saves the model after epochs or batches, in the background, as `keras.callbacks.ModelCheckpoint` does.

    filepath: where; ``{epoch}``, ``{batch}`` and the names of metrics are put in. A suffix chooses the format
        (``.safetensors``), else it is Treering's own. What is there is replaced, and stays until the new one is
        durable.
    monitor, save_best_only, mode, initial_value_threshold: with `save_best_only` a model is saved if the monitored
        metric is better than at any save before. "auto" takes more for better where the name says accuracy, AUC,
        precision, recall, F1, IoU or R2, and less elsewhere.
    save_weights_only: leaves the optimizer out.
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
        more = mode == "max" or (mode == "auto" and bool(_BETTER_IF_MORE.search(monitor)))
        self._sign = 1.0 if more else -1.0
        self._best = initial_value_threshold
        self._every = _Every(save_freq)
        self._epoch = 0
        self._pending: PendingSave | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every.batch():
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
        try:
            path = self._filepath.format(**metrics, **{"epoch": self._epoch + 1, **places})
        except KeyError as error:
            known = ", ".join(sorted({*metrics, "epoch", *places}))
            raise MismatchError(
                f"{self._filepath}: expected names that there are, found {error}; known: {known}"
            ) from None
        self._wait()
        tree = state(_model(self), weights_only=self._weights_only)
        beside: dict[str, Any] = {}
        if formats.for_path(path, None).name == "treering":  # others have no place for them
            beside = {"step": self._epoch + 1, "metrics": metrics}
        self._pending = save_async(path, tree, overwrite=True, **beside)
        if self._verbose:
            print(f"\nEpoch {self._epoch + 1}: saving the model to {path}")

    def _is_better(self, metrics: Mapping[str, float]) -> bool:
        value = metrics.get(self._monitor)
        if value is None:
            _log.warning("save_best_only: no metric %r, only %s; saved all the same", self._monitor, ", ".join(metrics))
            return True
        if self._best is not None and not self._sign * value > self._sign * self._best:  # NaN is never better
            return False
        if value == value:
            self._best = value
        return value == value

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
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
    ):
        super().__init__()
        self._dir, self._delete = backup_dir, delete_checkpoint
        self._keep = last(2 if double_checkpoint else 1)
        self._every = _Every(save_freq)
        self._epoch = self._step = 0
        self._ckpts: Checkpointer | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._ckpts = Checkpointer(self._dir, keep=self._keep)
        if self._ckpts.latest_step is None:
            return
        model = _model(self)
        _set(model, self._ckpts.restore(state(model)))
        self._step = self._ckpts.restored_step or 0
        self._epoch = self._ckpts.open(self._step).metadata["epoch"]
        model._initial_epoch = self._epoch  # as Keras' own callback tells `fit`

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every.batch():
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
    """When to save: after each epoch, or after so many batches."""

    def __init__(self, save_freq: Literal["epoch"] | int):
        if save_freq != "epoch" and not (type(save_freq) is int and save_freq > 0):
            raise MismatchError(f"save_freq={save_freq!r}: expected 'epoch' or a number of batches")
        self.epoch = save_freq == "epoch"
        self._batches = 0 if save_freq == "epoch" else save_freq
        self._seen = 0

    def batch(self) -> bool:
        """Counts a batch; whether to save after it."""
        self._seen += 1
        return bool(self._batches) and self._seen % self._batches == 0


def _scalars(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if getattr(value, "ndim", 0) == 0}


def _model(callback: keras.callbacks.Callback) -> keras.Model:
    """The model, which with the JAX backend takes its state from the loop when it is asked for."""
    model = callback.model
    assert model is not None
    return model
