import pathlib
from typing import Any

import keras
import numpy as np

import treering.keras

from .outcomes import Case, Outcome


def model() -> Any:
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    net.compile(optimizer="adam", loss="mse")
    return net


def trained(*callbacks: Any) -> Any:
    net, x = model(), np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
    net.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return net


def _same(a: Any, b: Any) -> bool:
    pairs = zip(a.weights, b.weights, strict=True)
    return all(np.array_equal(np.array(one.value), np.array(other.value)) for one, other in pairs)


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    net = trained(keras.callbacks.OrbaxCheckpoint(str(folder / "run"), save_on_background=False))
    return _same(keras.saving.load_model(str(folder / "run")), net)


def native(folder: pathlib.Path) -> bool:
    net = trained(treering.keras.ModelCheckpoint(folder / "run"))
    loaded = model()
    treering.keras.load(loaded, folder / "run")
    return _same(loaded, net)


CASE = Case(
    report="keras-team/keras#23251",
    summary="Names differ between the checkpoint and the loaded model; such weights are skipped.",
    library="Orbax in Keras",
    version="keras 3.15.1",
    today=Outcome.SILENT,
    treering=Outcome.RIGHT,
    says="weight|variable",
    reported=reported,
    native=native,
    about_orbax=False,
)
