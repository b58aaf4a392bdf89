"""The state of a Keras model: its variables and those of its optimizers, by names that every process gives alike.

The automatic names of Keras count the layers that a process has made, so they differ between processes.
"""

import logging
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import keras

from .._run.open import open_checkpoint
from ..errors import MismatchError

_log = logging.getLogger("treering")
_NUMBER = re.compile(r"_[0-9]+$")


def state(model: keras.Model, *, weights_only: bool = False) -> dict[str, Any]:
    """Returns the variables of a model by name, to save or to use as a template.

    An attribute of a layer or model has the attribute's name: ``encoder``, ``blocks/0``. Other parts, as in a
    `Sequential`, have the name of the layer. An automatic name of Keras (``dense_14``: the class, and how many of it
    the process has made) is replaced by the class and the place: ``dense[0]``. So a rebuilt model has the same names,
    whichever parts are trainable. With the JAX backend the leaves are `jax.Array`s, with others NumPy arrays. Raises
    `MismatchError` for a model that is not built yet.
    """
    tree: dict[str, Any] = {}
    for path, variable in variables(model, weights_only=weights_only):
        *above, name = path.split("/")
        inside = tree
        for part in above:
            inside = inside.setdefault(part, {})
        on_device = keras.backend.backend() == "jax"
        inside[name] = variable.value if on_device else keras.ops.convert_to_numpy(variable.value)
    return tree


def load(model: keras.Model, path: str | os.PathLike[str], **options: Any) -> None:
    """Sets the variables of a model to those of a checkpoint, or of a run's latest valid step.

    If the checkpoint or the model has no optimizer, only the weights are set, and the log says so. `options` are those
    of `treering.restore`. Raises the errors of `treering.restore`, such as `MismatchError` for a model of another
    architecture, and changes nothing then.
    """
    ckpt = open_checkpoint(path, step=options.pop("step", None))
    if ckpt.format == "keras":
        raise MismatchError(
            f"{path}: expected a checkpoint of Treering, found weights of Keras; use model.load_weights"
        )
    saved = any(name.startswith("optimizer") for name in ckpt)
    wanted = getattr(model, "optimizer", None) is not None
    if saved != wanted:
        _log.info("%s: only the weights are set: the %s has no optimizer", path, "model" if saved else "checkpoint")
    if saved and not wanted:
        options.setdefault("extra", ["optimizer/**", "optimizers/**"])
    weights_only = not (saved and wanted)
    assign(model, ckpt.restore(state(model, weights_only=weights_only), **options), weights_only=weights_only)


def assign(model: keras.Model, tree: dict[str, Any], *, weights_only: bool = False) -> None:
    for path, variable in variables(model, weights_only=weights_only):
        value: Any = tree
        for part in path.split("/"):
            value = value[part]
        variable.assign(value)
    for layer in model._flatten_layers():
        # `keras.layers.Normalization` computes with constants that it derives from its variables.
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def variables(model: keras.Model, *, weights_only: bool = False) -> Iterator[tuple[str, Any]]:
    """Yields the variables with their paths. Raises `MismatchError` for a model that is not built yet."""
    if not model.built:
        raise MismatchError(f"{model.name}: expected a built model, found one without variables; call it on data first")
    names = _UniqueNames()
    paths: dict[int, str] = {}
    for path, variable in _layer_variables(model, "", names, paths, set()):
        yield f"variables/{path}", variable
    compiled = getattr(model, "optimizer", None)  # A model that is not compiled has none.
    optimizers = {} if compiled is None else {"optimizer": compiled}
    optimizers |= {
        f"optimizers/{name}": one
        for name, one in vars(model).items()
        if isinstance(one, keras.Optimizer) and one is not compiled
    }
    for place, optimizer in {} if weights_only else optimizers.items():
        if optimizer is compiled and not optimizer.built:
            optimizer.build(model.trainable_variables)
        for path, variable in _optimizer_variables(optimizer, model, paths):
            yield f"{place}/{path}", variable


def _layer_variables(
    layer: Any, above: str, names: "_UniqueNames", paths: dict[int, str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yields the variables of a layer and its sublayers, each once. The program's names precede those of Keras."""
    seen.add(id(layer))
    attributes = dict(_attributes(layer))
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    for variable in [*own, *(generator.state for generator in layer._seed_generators)]:
        if id(variable) not in paths:
            name = str(variable.name)
            if _is_automatic(name, "variable"):
                name = attributes.get(id(variable), name)
            paths[id(variable)] = path = names.unique(names.path_for(above, name, "variable"))
            yield path, variable
    for one in layer._layers:
        if id(one) not in seen:
            name, kind = attributes.get(id(one), str(one.name)), _snake_case(type(one).__name__)
            place = names.unique(above + name if id(one) in attributes else names.path_for(above, name, kind))
            yield from _layer_variables(one, f"{place}/", names, paths, seen)


def _attributes(layer: Any) -> Iterator[tuple[int, str]]:
    """Yields the names that the program gives to parts of a layer: ``encoder``, ``blocks/0``, ``heads/left``.

    Each comes with the identity of its part.
    """
    # In reverse, because the caller's dict keeps the last name: of two names for one part, the first in the alphabet.
    for name, value in sorted(vars(layer).items(), reverse=True):
        if name.startswith("_"):
            continue
        yield id(value), name
        if isinstance(value, list | tuple):
            yield from ((id(one), f"{name}/{n}") for n, one in enumerate(value))
        elif isinstance(value, dict):
            yield from ((id(one), f"{name}/{str(key).replace('/', '_')}") for key, one in value.items())


def _optimizer_variables(optimizer: Any, model: keras.Model, paths: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Yields the variables of an optimizer, by kind (``momentum``) and by the model variable that they belong to."""
    known = {variable.path.replace("/", "_"): paths.get(id(variable), variable.path) for variable in model.variables}
    trained = getattr(optimizer, "_trainable_variables", model.trainable_variables)
    which = f"{zlib.crc32(repr([paths.get(id(variable)) for variable in trained]).encode()):08x}"
    names = _UniqueNames()
    for variable in optimizer.variables:
        scope, _, name = variable.path.partition("/")
        above, name = f"{_NUMBER.sub('', scope)}/", name.strip("/")
        of = max((one for one in known if name.startswith(f"{one}_")), key=len, default=None)
        if of is not None:
            path = f"{above}{name.removeprefix(of + '_')}/{known[of]}"
        else:
            # Only its place says which variable it belongs to. The checksum of the trained variables keeps it from
            # fitting a model that trains others.
            path = names.path_for(f"{above}{which}/" if variable.ndim else above, name, "variable")
        yield names.unique(path), variable


class _UniqueNames:
    """Makes names that do not depend on what else the process has made."""

    def __init__(self) -> None:
        self._place_counts: dict[str, int] = {}
        self._used_names: set[str] = set()

    def path_for(self, above: str, name: str, kind: str) -> str:
        """Returns the path of a name below `above`. An automatic name of a `kind` is replaced by its place."""
        if not _is_automatic(name, kind):
            return f"{above}{name}"
        stem = f"{above}{name[: name.index(kind) + len(kind)]}"
        self._place_counts[stem] = place = self._place_counts.get(stem, -1) + 1
        return f"{stem}[{place}]"

    def unique(self, path: str) -> str:
        """Returns the path, with a number if it is taken. Two layers may have the same name."""
        free, n = path, 0
        while free in self._used_names:
            n += 1
            free = f"{path}[{n}]"
        self._used_names.add(free)
        return free


def _is_automatic(name: str, kind: str) -> bool:
    """Returns True if Keras gives this name to a `kind` automatically: ``dense``, ``dense_14``, ``backward_lstm``."""
    return re.fullmatch(rf"(forward_|backward_)?{re.escape(kind)}(_[0-9]+)?", name) is not None


def _snake_case(name: str) -> str:
    """Returns the name that Keras derives from a class: ``multi_head_attention`` for ``MultiHeadAttention``."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
