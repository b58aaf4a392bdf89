import pathlib
from typing import Any

import keras

import treering.keras

from .other_weights_than_saved import trained
from .outcomes import Case, Outcome


class _Count(keras.callbacks.Callback):
    """Keeps the number of updates that the optimizer has made when the first epoch begins."""

    updates: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model: Any = self.model
        if self.updates is None:
            self.updates = int(model.optimizer.iterations)


class _Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def _resumed(backup: Any) -> bool:
    try:
        trained(backup(), _Crash())
    except KeyboardInterrupt:
        pass
    count = _Count()
    trained(backup(), count)
    return count.updates == 1


def reported(ocp: Any, folder: pathlib.Path) -> bool:
    return _resumed(lambda: keras.callbacks.BackupAndRestore(str(folder / "backup")))


def native(folder: pathlib.Path) -> bool:
    return _resumed(lambda: treering.keras.BackupAndRestore(folder / "backup"))


CASE = Case(
    report="keras-team/keras#19389",
    summary="A restarted program restores the weights of a backup without the optimizer.",
    library="Keras",
    version="keras 3.15.1",
    today=Outcome.RIGHT,
    treering=Outcome.RIGHT,
    says="optimizer",
    reported=reported,
    native=native,
    about_orbax=False,
)
