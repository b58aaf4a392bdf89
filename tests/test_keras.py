"""The callbacks of Keras, in real trainings."""

import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is installed for `make test` and not for `make lowest`")

import treering as tr  # noqa: E402
import treering.keras as tk  # noqa: E402

pytestmark = pytest.mark.peers
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
    whole = _model()
    _fit(whole, 5)
    backup = lambda: tk.BackupAndRestore(tmp_path / "run", save_freq=freq)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        _fit(_model(), 5, backup(), _Stop())
    resumed = _model()
    # A save after the last batch of an epoch is one within it, to Keras too: it begins again.
    assert len(_fit(resumed, 5, backup())["loss"]) == (2 if freq == "epoch" else 3)
    assert _equal(whole, resumed) == (freq == "epoch")
    assert tr.steps(tmp_path / "run") == []  # deleted at the end, as Keras does


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
    whole, resumed = _model(), _model()
    _fit(whole, 5)
    assert len(tr.steps(tmp_path / "run")) in (2, 3)  # the fourth may not have been done
    latest = tr.open(tmp_path / "run")
    arrays = next(pathlib.Path(latest.path).glob("*.safetensors"))
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"\xff")  # then the one before counts
    before = tr.steps(tmp_path / "run")[-2]
    keep = tk.BackupAndRestore(tmp_path / "run", double_checkpoint=True, delete_checkpoint=False)
    assert len(_fit(resumed, 5, keep)["loss"]) == 5 - before
    assert _equal(whole, resumed)
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
    other = _model()
    tk.load(other, tmp_path / "best.safetensors")
    for mine, saved in zip(other.weights, states[1], strict=True):
        np.testing.assert_array_equal(np.array(mine.value), saved)


def test_names_are_those_of_the_model_and_not_of_the_process() -> None:
    class MyBlock(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = keras.layers.Dense(3), keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.b(self.a(x))

    def built() -> Any:
        model = keras.Sequential([keras.Input((2,)), MyBlock(), MyBlock(), keras.layers.Dense(1, name="head_7")])
        model.compile(optimizer="adam", loss="mse")
        return model

    keras.layers.Dense(1), built()
    paths = [list(tk._variables(built(), False)) for _ in range(2)]
    assert paths[0] == paths[1] and len(paths[0]) > 20
    assert {
        "trainable_variables/sequential/my_block/dense/kernel",
        "trainable_variables/sequential/my_block_1/dense_3/bias",
        "trainable_variables/sequential/head_7/kernel",
        "optimizer_variables/adam/sequential_my_block_1_dense_3_bias_momentum",
        "optimizer_variables/adam/sequential_head_7_kernel_velocity",
    } <= set(paths[0])


def test_two_variables_of_one_name_are_refused() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.layers[0].bias._path = model.layers[0].kernel.path  # of Keras' own classes none does it
    with pytest.raises(tr.errors.UnsupportedError, match="two variables of one name"):
        tk.state(model)


def test_more_is_better_for_accuracies_and_a_threshold_counts(tmp_path: pathlib.Path) -> None:
    class Given(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_accuracy"] = [0.2, 0.6, 0.5, 0.7][epoch]

    options: dict[str, Any] = {"monitor": "val_accuracy", "save_best_only": True}
    _fit(_model(), 4, Given(), tk.ModelCheckpoint(tmp_path / "a{epoch}", **options, initial_value_threshold=0.3))
    _fit(_model(), 4, Given(), tk.ModelCheckpoint(tmp_path / "b{epoch}", **options, mode="min"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a2", "a4", "b1"]


def test_every_so_many_batches(tmp_path: pathlib.Path) -> None:
    _fit(_model(), 3, tk.ModelCheckpoint(tmp_path / "{epoch}-{batch}", save_freq=3))  # 4 batches an epoch
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-3", "2-2", "3-1", "3-4"]


@pytest.mark.parametrize("callback", [tk.ModelCheckpoint, tk.BackupAndRestore])
def test_bad_arguments(tmp_path: pathlib.Path, callback: Any) -> None:
    with pytest.raises(tr.errors.MismatchError, match="save_freq=0"):
        callback(tmp_path / "x", save_freq=0)
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
