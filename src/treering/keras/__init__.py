"""Callbacks of Keras 3: `ModelCheckpoint` and `BackupAndRestore`, with the arguments of those that Keras has.

>>> model.fit(x, y, epochs=10, callbacks=[treering.keras.BackupAndRestore("runs/keras")])

What is saved is `state(model)`: the variables of the model and of its optimizer, the state of seeds among them; neither
the architecture, which is the program's, nor metrics, which start over with each epoch. All of Treering works on it:
`treering show`, `open`, `restore(at="variables")`. Needs ``pip install treering[keras]``.
"""

from .callbacks import BackupAndRestore, ModelCheckpoint
from .variables import load, state

__all__ = ["BackupAndRestore", "ModelCheckpoint", "load", "state"]


def __dir__() -> list[str]:
    return __all__
