"""The Keras callbacks in real trainings."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is installed for `make test` and not for `make lowest`")

import treering as tr  # noqa: E402
import treering.keras as tk  # noqa: E402
from treering.keras.variables import variables  # noqa: E402
from treering.stores.posix import Disk  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.long]
X = np.linspace(-1, 1, 64, dtype="float32").reshape(32, 2)
Y = X.sum(1, keepdims=True)


def _model(width: int = 4) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(width), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    )
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


def _fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)).history


def _equal(a: Any, b: Any) -> bool:
    return not tr.diff(tk.state(a), tk.state(b))


class _Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("freq", ["epoch", 4])
def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path: pathlib.Path, freq: Any) -> None:
    uninterrupted = _model()
    _fit(uninterrupted, 5)
    backup = lambda: tk.BackupAndRestore(tmp_path / "run", save_freq=freq)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        _fit(_model(), 5, backup(), _Stop())
    resumed = _model()
    # As in Keras, a save after the last batch of an epoch is a save within it: the epoch begins again.
    assert len(_fit(resumed, 5, backup())["loss"]) == (2 if freq == "epoch" else 3)
    assert _equal(uninterrupted, resumed) == (freq == "epoch")
    assert tr.steps(tmp_path / "run") == []  # They are deleted at the end, as in Keras.


def test_a_training_continues_from_a_save_still_under_way(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class SlowDisk(Disk):
        def link(self, old: str, new: str) -> None:
            time.sleep(0.3)  # seconds: the next `fit` begins before this commit
            super().link(old, new)

    use_disk(SlowDisk())
    model = _model()
    stop = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epoch == 1 and signal.raise_signal(2))
    with pytest.raises(KeyboardInterrupt):
        _fit(model, 2, tk.BackupAndRestore(tmp_path / "run"), stop)
    assert tr.steps(tmp_path / "run") == []
    assert len(_fit(model, 2, tk.BackupAndRestore(tmp_path / "run"))["loss"]) == 1


@pytest.mark.rare
def test_a_killed_training_goes_on(tmp_path: pathlib.Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import os, signal, test_keras as t
class Kill(t.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 3: os.kill(os.getpid(), signal.SIGKILL)
t._fit(t._model(), 5, t.tk.BackupAndRestore({str(tmp_path / "run")!r}, double_checkpoint=True), Kill())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -9
    uninterrupted, resumed = _model(), _model()
    _fit(uninterrupted, 5)
    assert len(tr.steps(tmp_path / "run")) in (2, 3)  # The kill may have stopped the fourth save.
    latest = tr.open(tmp_path / "run")
    arrays = next(pathlib.Path(latest.path).glob("*.safetensors"))
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"\xff")  # Then the step before is restored.
    before = tr.steps(tmp_path / "run")[-2]
    keep = tk.BackupAndRestore(tmp_path / "run", double_checkpoint=True, delete_checkpoint=False)
    assert len(_fit(resumed, 5, keep)["loss"]) == 5 - before
    assert _equal(uninterrupted, resumed)
    assert tr.open(tmp_path / "run").metadata["epoch"] == 5


def test_each_epoch_is_saved_under_its_name(tmp_path: pathlib.Path) -> None:
    model = _model()
    history = _fit(model, 3, tk.ModelCheckpoint(tmp_path / "{epoch:02d}-{loss:.3f}"))
    names = [f"{n + 1:02d}-{history['loss'][n]:.3f}" for n in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    ckpt = tr.open(tmp_path / names[2])
    assert ckpt.step == 3 and ckpt.metrics["mae"] == pytest.approx(history["mae"][2])
    other = _model()
    tk.load(other, tmp_path / names[2])
    assert _equal(model, other)
    with pytest.raises(tr.errors.MismatchError, match="does not fit"):
        tk.load(_model(width=5), tmp_path / names[2])
    uncompiled = keras.Sequential([keras.Input((2,)), *_model().layers])
    tk.load(uncompiled, tmp_path / names[2])  # for inference
    np.testing.assert_array_equal(uncompiled(X), model(X))


def test_the_best_is_kept_and_the_weights_alone_are_saved(tmp_path: pathlib.Path) -> None:
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_loss"] = [3.0, 1.0, float("nan"), 2.0][epoch]

    best = tk.ModelCheckpoint(tmp_path / "best.safetensors", save_best_only=True, save_weights_only=True)
    states: list[Any] = []
    model = _model()
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.append([np.array(v.value) for v in model.weights])
    )
    _fit(model, 4, Worse(), best, note)
    ckpt = tr.open(tmp_path / "best.safetensors")
    assert ckpt.format == "safetensors" and not any("optimizer" in path for path in ckpt)
    assert ckpt.step == 2 and ckpt.metrics["val_loss"] == 1.0
    other = _model()
    tk.load(other, tmp_path / "best.safetensors")
    for mine, saved in zip(other.weights, states[1], strict=True):
        np.testing.assert_array_equal(np.array(mine.value), saved)


class Block(keras.layers.Layer):
    """A layer as in the guides of Keras, with weights that have no names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(3, 3))
        self.b = self.add_weight(shape=(3,))

    def call(self, x: Any) -> Any:
        return self.inner(x) @ self.w + self.b


def _blocks(optimizer: Any = "adam", *, frozen: int | None = None) -> Any:
    keras.utils.set_random_seed(3)
    layers = [Block(), Block(), keras.layers.Dense(3, name="head_7"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    if frozen is not None:
        model.layers[frozen].trainable = False
    model.compile(optimizer=optimizer, loss="mse")
    return model


def test_names_are_those_of_the_model_and_not_of_the_process() -> None:
    paths = [[path for path, _ in variables(_blocks())] for _ in range(2)]
    assert paths[0] == paths[1] and len(set(paths[0])) == len(paths[0]) > 20
    assert {
        "variables/block[1]/inner/bias",
        "variables/block[0]/w",
        "variables/head_7/kernel",
        "variables/dense[0]/kernel",
        "optimizer/adam/momentum/block[1]/inner/bias",
        "optimizer/adam/velocity/head_7/kernel",
        "optimizer/adam/learning_rate",
    } <= set(paths[0])


def test_names_do_not_depend_on_what_is_trainable(tmp_path: pathlib.Path) -> None:
    saved, other = _blocks(frozen=3), _blocks(frozen=0)
    for layer in saved.layers:
        layer.set_weights([np.full(one.shape, n, "float32") for n, one in enumerate(layer.weights)])
    tr.save(tmp_path / "c", tk.state(saved, weights_only=True))
    tk.load(other, tmp_path / "c")
    for mine, theirs in zip(other.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(np.array(mine.value), np.array(theirs.value))
    tr.save(tmp_path / "d", tk.state(saved))
    with pytest.raises(tr.errors.MismatchError, match="optimizer"):  # The saved moments are of other layers.
        tk.load(other, tmp_path / "d")


@pytest.mark.parametrize("optimizer", ["Adam", "Nadam", "Adafactor", "SGD", "RMSprop", "Lion", "Ftrl"])
def test_a_model_that_is_built_again_takes_what_was_saved(tmp_path: pathlib.Path, optimizer: str) -> None:
    def built() -> Any:
        return _blocks(getattr(keras.optimizers, optimizer)(learning_rate=0.01))

    model, again = built(), built()
    x = np.ones((16, 3), "float32")
    model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    tr.save(tmp_path / "c", tk.state(model))
    tk.load(again, tmp_path / "c")
    for each in (model, again):
        each.fit(x, x, batch_size=4, epochs=1, verbose=0, shuffle=False)
    assert _equal(model, again)


class Pair(keras.Model):
    """A model with its own optimizers, whose parts are attributes. `turned` makes them in the opposite order."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        for name in ("b", "a") if turned else ("a", "b"):
            setattr(self, name, keras.layers.Dense(2))
        self.more = [keras.layers.Dense(2), keras.layers.Dense(2)]
        self.own_optimizer = keras.optimizers.SGD(0.25, momentum=0.5)

    def call(self, x: Any) -> Any:
        for one in (self.a, self.b, *self.more):
            x = one(x)
        return x


def test_attributes_are_names_and_no_optimizer_is_left_out(tmp_path: pathlib.Path) -> None:
    first, second, unbuilt = Pair(), Pair(turned=True), Pair()
    for model in (first, second, unbuilt):
        model.compile("adam", "mse")
        with pytest.raises(tr.errors.MismatchError, match="expected a built model"):
            tk.state(model)
        if model is not unbuilt:
            model(X)
            model.own_optimizer.build(model.trainable_variables)
    for n, variable in enumerate([*first.variables, *first.own_optimizer.variables]):
        variable.assign(np.full(variable.shape, n))
    tr.save(tmp_path / "c", tk.state(first))
    tk.load(second, tmp_path / "c")
    np.testing.assert_array_equal(first(X), second(X))
    np.testing.assert_array_equal(first.b.kernel.value, second.b.kernel.value)
    assert _equal(first, second)
    paths = {path for path, _ in variables(second)}
    assert {"variables/a/kernel", "variables/more/1/bias", "optimizers/own_optimizer/sgd/momentum/b/kernel"} <= paths


def test_a_layer_that_was_frozen_after_training_began(tmp_path: pathlib.Path) -> None:
    def built() -> Any:
        model = _blocks()
        model.optimizer.build(model.trainable_variables)
        model.layers[0].trainable = False
        return model

    model, again = built(), built()
    for n, variable in enumerate(model.optimizer.variables):
        variable.assign(np.full(variable.shape, n))
    tr.save(tmp_path / "c", tk.state(model))
    tk.load(again, tmp_path / "c")
    assert _equal(model, again)
    assert not any("dense_" in path or "block_" in path for path in tr.open(tmp_path / "c"))


def test_layers_compute_with_what_was_loaded(tmp_path: pathlib.Path) -> None:
    def built(data: Any) -> Any:
        inside = keras.layers.Normalization()
        inside.adapt(data)
        return keras.Sequential([keras.Input((2,)), inside, keras.layers.Dense(1)])

    model, other = built(X), built(10 * X + 3)
    tr.save(tmp_path / "c", tk.state(model))
    tk.load(other, tmp_path / "c")
    np.testing.assert_array_equal(model(X), other(X))


def test_layer_names_that_look_alike_have_distinct_paths(tmp_path: pathlib.Path) -> None:
    """Layers whose names look alike have distinct paths."""

    class Block_2(keras.layers.Dense):  # It looks like an automatic name of Keras.
        pass

    class Odd(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            for n, name in enumerate(("w", "w", "w[1]")):
                self.add_weight(shape=(2,), name=name, initializer=keras.initializers.Constant(n))

        def call(self, x: Any) -> Any:
            return x

    def built() -> Any:
        inside = [Odd(), Block_2(2), Block_2(2), keras.layers.Dense(2, name="iteration")]
        model = keras.Sequential([keras.Input((2,)), *inside])
        model.compile("adam", "mse")
        return model

    Block_2(1)
    models = [built(), built()]
    names = [[path for path, _ in variables(model)] for model in models]
    assert names[0] == names[1] and len(set(names[0])) == len(names[0])
    models[1].set_weights([0 * np.array(one.value) for one in models[1].weights])
    tr.save(tmp_path / "c", tk.state(models[0]))
    tk.load(models[1], tmp_path / "c")
    assert [float(one.value[0]) for one in models[1].weights[:3]] == [0, 1, 2]


def test_unnamed_moments_do_not_fit_other_trained_variables(tmp_path: pathlib.Path) -> None:
    """Unnamed optimizer variables do not fit a model that trains other variables."""
    tr.save(tmp_path / "c", tk.state(_blocks("adafactor", frozen=0)))
    with pytest.raises(tr.errors.MismatchError):
        tk.load(_blocks("adafactor", frozen=1), tmp_path / "c")


def test_layers_of_one_name_have_distinct_paths(tmp_path: pathlib.Path) -> None:
    """Layers with the same name, and copies in a wrapper, have distinct paths."""

    def built() -> Any:
        keras.utils.set_random_seed(1)
        inside = keras.layers.Bidirectional(keras.layers.LSTM(2))
        model = keras.Sequential([keras.Input((4, 3)), inside, keras.layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    first, second = built(), built()
    tr.save(tmp_path / "c", tk.state(first))
    second.set_weights([0 * np.array(one.value) for one in second.weights])
    tk.load(second, tmp_path / "c")
    assert _equal(first, second)


def test_more_is_better_for_accuracies_and_a_threshold_counts(tmp_path: pathlib.Path) -> None:
    class Given(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs |= {name: [0.2, 0.6, 0.5, 0.7][epoch] for name in ("val_cosine_similarity", "val_mae", "val_psnr")}
            logs |= {"phase": "warm", "nothing": None, "many": [1, 2]}  # Keras also logs values that are not metrics.

    def fit(name: str, monitor: str, **options: Any) -> None:
        model = _model()
        model.compile("adam", "mse", metrics=[keras.metrics.CosineSimilarity(name="cosine_similarity"), "mae"])
        best = tk.ModelCheckpoint(tmp_path / (name + "{epoch}"), monitor, save_best_only=True, **options)
        _fit(model, 4, Given(), best)

    fit("a", "val_cosine_similarity", initial_value_threshold=0.3)
    fit("b", "val_cosine_similarity", mode="min")
    fit("c", "val_mae")
    with pytest.raises(tr.errors.MismatchError, match="pass mode="):  # Keras demands it too.
        fit("d", "val_psnr")
    fit("e", "val_psnr", mode="max")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a2", "a4", "b1", "c1", "e1", "e2", "e4"]


class _Given(keras.callbacks.Callback):
    """Logs these values, epoch by epoch, as `val_loss`."""

    def __init__(self, *values: float):
        super().__init__()
        self._values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["val_loss"] = self._values[epoch]


@pytest.mark.parametrize("first", ["backup", "best"])
@pytest.mark.parametrize("name", ["best", "best.safetensors", "{epoch}/best-{val_loss:.1f}"])
def test_a_restarted_training_keeps_the_best_model(tmp_path: pathlib.Path, name: str, first: str) -> None:
    """A better model replaces the best one of the killed job, a worse one does not, wherever the epoch began again."""
    (tmp_path / "0").mkdir()
    tr.save(tmp_path / "0" / "best-0.1", {"w": X}, metrics={"val_loss": 0.1})  # of an earlier training
    path = tmp_path / name
    values, saved = (3.0, 1.0, 2.0, 0.5, 0.7), list[float]()
    for epochs in (2, 3, 4, 5):
        backup = tk.BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
        best = tk.ModelCheckpoint(path, save_best_only=True)
        _fit(_model(), epochs, _Given(*values), *((backup, best) if first == "backup" else (best, backup)))
        found = max(path.parent.parent.glob("*/best-*") if "/" in name else [path], key=os.path.getmtime)
        saved.append(tr.open(found).metrics["val_loss"])
    assert saved == [1.0, 1.0, 0.5, 0.5]


def test_a_training_killed_in_its_first_epoch_keeps_the_best(tmp_path: pathlib.Path) -> None:
    class Given(keras.callbacks.Callback):
        def __init__(self, value: float):
            super().__init__()
            self._value = value

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            logs["val_loss"] = self._value

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    for value in (1.0, 2.0):
        backup = tk.BackupAndRestore(tmp_path / "run", save_freq=1)
        best = tk.ModelCheckpoint(tmp_path / "best", save_best_only=True, save_freq=1)
        with pytest.raises(KeyboardInterrupt):
            _fit(_model(), 1, Given(value), best, backup, Stop())
        del backup  # It holds the run.
        best._wait()
        assert tr.open(tmp_path / "best").metrics["val_loss"] == 1.0


def test_a_training_that_its_user_continues_keeps_the_best_model(tmp_path: pathlib.Path, caplog: Any) -> None:
    """An epoch that begins again continues the training. A new training replaces the model, and says so."""
    path = tmp_path / "best"

    def fit(epochs: int, initial_epoch: int, *callbacks: Any, **options: Any) -> list[str]:
        caplog.clear()
        best = tk.ModelCheckpoint(path, save_best_only=True, **options)
        _model().fit(X, Y, epochs=epochs, initial_epoch=initial_epoch, verbose=0, callbacks=[*callbacks, best])
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    assert fit(1, 0, _Given(2.0)) == []
    assert fit(3, 1, _Given(0, 3.0, 4.0)) == [] and tr.open(path).metrics["val_loss"] == 2.0
    assert fit(2, 1, _Given(0, 2.5), initial_value_threshold=3.0) == [] and tr.open(path).metrics["val_loss"] == 2.0
    assert fit(2, 1, _Given(0, 1.5), mode="max") == [] and tr.open(path).metrics["val_loss"] == 2.0
    (warning,) = fit(1, 0, _Given(5.0))
    assert "val_loss=2 was better" in warning and "initial_value_threshold=" in warning
    assert tr.open(path).metrics["val_loss"] == 5.0
    tr.save(path, {"w": X}, metrics={"val_auc": 0.5}, overwrite=True)
    (warning,) = fit(2, 1, _Given(0, 1.0))
    assert "save_best_only: expected the metric 'val_loss', found none; saved anyway" in warning
    assert tr.open(path).metrics["val_loss"] == 1.0
    (path / "treering.json").chmod(0o600)
    (path / "treering.json").write_bytes(b"{")
    (warning,) = fit(2, 1, _Given(0, 1.0))
    assert "expected to read the metrics" in warning and tr.open(path).metrics["val_loss"] == 1.0


def test_every_so_many_batches(tmp_path: pathlib.Path) -> None:
    _fit(_model(), 3, tk.ModelCheckpoint(tmp_path / "{epoch}-{batch}", save_freq=3))  # 4 batches an epoch
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-3", "2-2", "3-1", "3-4"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras warns about its own HDF5 files.
def test_batches_count_where_a_call_makes_several(tmp_path: pathlib.Path) -> None:
    """`save_freq` counts batches also if one call of Keras covers several."""
    for name, kind in (("mine", tk.ModelCheckpoint), ("keras", keras.callbacks.ModelCheckpoint)):
        (tmp_path / name).mkdir()
        model = _model()
        model.compile("adam", "mse", steps_per_execution=2)
        path = tmp_path / name / ("{epoch}-{batch}" + (".keras" if name == "keras" else ""))
        _fit(model, 3, kind(path, save_freq=4))
    mine, theirs = (sorted(path.stem for path in (tmp_path / name).iterdir()) for name in ("mine", "keras"))
    assert mine == theirs and len(mine) == 3


@pytest.mark.parametrize("callback", [tk.ModelCheckpoint, tk.BackupAndRestore])
def test_bad_arguments(tmp_path: pathlib.Path, callback: Any) -> None:
    with pytest.raises(tr.errors.MismatchError, match="save_freq=0"):
        callback(tmp_path / "x", save_freq=0)
    callback(tmp_path / "x", save_freq=np.int64(3)), callback(tmp_path / "x", save_freq=False)
    with pytest.raises(tr.errors.MismatchError, match="suffix of Keras"):
        tk.ModelCheckpoint(tmp_path / "best.keras")
    with pytest.raises(tr.errors.MismatchError, match="backup_dir"):
        tk.BackupAndRestore("")
    with pytest.raises(tr.errors.MismatchError, match="nothing_of_that_name"):
        _fit(_model(), 1, tk.ModelCheckpoint(tmp_path / "{nothing_of_that_name}"))


def test_the_arguments_are_those_that_keras_has() -> None:
    import inspect

    for mine, theirs in [
        (tk.ModelCheckpoint, keras.callbacks.ModelCheckpoint),
        (tk.BackupAndRestore, keras.callbacks.BackupAndRestore),
    ]:
        signatures = [inspect.signature(one).parameters for one in (mine, theirs)]
        found = [{name: one.default for name, one in signature.items()} for signature in signatures]
        assert found[0] == found[1]
