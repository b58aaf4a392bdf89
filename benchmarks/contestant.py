"""Describes a library that takes part, as functions of a path."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Wait = Callable[[], object]


def _unchanged(restored: Any) -> Any:
    return restored


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Functions of a path. `save` returns when the save is over; `restore` when the arrays are ready.

    `start` begins a save in the background and returns the function that waits for its end. `more` are others by name.
    `arrays` makes JAX or NumPy arrays of what `restore` returns, outside of what is timed.
    """

    name: str
    save: Callable[[str], object]
    restore: Callable[[str], Any]
    start: Callable[[str], Wait] | None = None
    more: Mapping[str, Callable[[str], object]] = dataclasses.field(default_factory=dict)
    arrays: Callable[[Any], Any] = _unchanged


def named(state: Any) -> dict[str, np.ndarray]:
    """Returns the leaves as NumPy arrays, by the path of each."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
