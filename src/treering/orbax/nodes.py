"""Defines the containers that stand for items in a tree of Treering: `Composite` and `HandlerFiles`.

The manifest records the names of these classes.
"""

import functools
from collections.abc import Mapping
from typing import Any


class Composite(dict[str, Any]):
    """A tree whose children are the items of a checkpoint."""


class HandlerFiles(dict[str, Any]):
    """The files that a handler wrote: arrays of bytes by their paths within its directory."""


def composite(items: Mapping[str, Any]) -> Composite:
    """Returns a tree of items."""
    _register()
    return Composite(items)


def handler_files(files: Mapping[str, Any]) -> HandlerFiles:
    """Returns a tree of files."""
    _register()
    return HandlerFiles(files)


@functools.cache
def _register() -> None:
    """Registers the containers with JAX, once."""
    from jax.tree_util import DictKey, register_pytree_with_keys

    for kind in (Composite, HandlerFiles):
        register_pytree_with_keys(
            kind,
            lambda node: ([(DictKey(name), node[name]) for name in sorted(node)], tuple(sorted(node))),
            functools.partial(lambda kind, names, children: kind(zip(names, children, strict=True)), kind),
        )
