"""Checkpoints of other libraries, read here and by the library that wrote them."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import treering as tr

from . import measure, states
from .table import Row

_STATES = {"16 × 16 MiB": (16, (2048, 2048)), "2,000 small": (2000, (512,))}


def rows(directory: str, repeats: int) -> list[Row]:
    """Seconds from the page cache until all arrays are there, in the kind of array that the library gives."""
    found: list[Row] = []
    for library, make in _LIBRARIES.items():
        for name, (count, shape) in _STATES.items():
            random = np.random.default_rng(0)
            state = {f"leaf_{n:04d}": random.standard_normal(shape, np.float32) for n in range(count)}
            path = os.path.join(directory, f"{library}-{count}")
            theirs, ours = make(path, state)
            _check(state, theirs(), library)
            _check(state, ours(), "treering")

            def run(restore: Callable[[], Any], path: str) -> float:
                measure.fill_cache(os.path.dirname(path))
                return measure.seconds(restore)

            runs = {
                "treering": functools.partial(run, ours, path),
                "its library": functools.partial(run, theirs, path),
            }
            found.append(Row(f"read what {library} wrote", name, "s", measure.race(runs, repeats)))
    return found


def _check(state: dict[str, np.ndarray], restored: Any, name: str) -> None:
    assert all(np.array_equal(array, restored[key]) for key, array in state.items()), name


def _safetensors(path: str, state: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from safetensors.numpy import load_file, save_file

    path += ".safetensors"
    save_file(state, path)
    return lambda: load_file(path), lambda: tr.restore(path)  # neither with a template


def _flax(path: str, state: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    from flax import serialization

    path += ".msgpack"
    with open(path, "wb") as file:
        file.write(serialization.to_bytes(state))

    def theirs() -> Any:
        with open(path, "rb") as file:
            return serialization.from_bytes(state, file.read())

    return theirs, lambda: tr.restore(path, state)


def _equinox(path: str, state: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import equinox

    path += ".eqx"
    like = jax.tree.map(jax.numpy.asarray, state)
    equinox.tree_serialise_leaves(path, like)
    return (
        lambda: jax.block_until_ready(equinox.tree_deserialise_leaves(path, like)),
        lambda: jax.block_until_ready(tr.restore(path, like)),
    )


def _orbax(path: str, state: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    arrays = jax.tree.map(jax.numpy.asarray, state)
    checkpointer.save(path, arrays)
    checkpointer.wait_until_finished()
    like = states.abstract(arrays)
    return (
        lambda: jax.block_until_ready(checkpointer.restore(path, like)),
        lambda: jax.block_until_ready(tr.restore(path, like)),
    )


# Orbax is the last: whatever makes many Python objects is slower in the memory that it leaves behind.
_LIBRARIES = {"safetensors": _safetensors, "Flax": _flax, "Equinox": _equinox, "Orbax": _orbax}
