"""Callbacks of Keras 3: `ModelCheckpoint` and `BackupAndRestore`, with the arguments of those that Keras has.

>>> model.fit(x, y, epochs=10, callbacks=[treering.keras.BackupAndRestore("runs/keras")])

They save `state(model)`: the variables of the model and of its optimizer, with the state of seeds. They do not save the
architecture, which is in the program, nor metrics, which start over with each epoch. All of Treering works on these
checkpoints, such as `treering show`, `open` and `restore(at="variables")`. Needs ``pip install treering[keras]``.
"""

from .callbacks import BackupAndRestore, ModelCheckpoint
from .variables import load, state

__all__ = ["BackupAndRestore", "ModelCheckpoint", "load", "state"]


def __dir__() -> list[str]:
    return __all__
