"""Defines the containers that stand for items in a tree of Treering: `Composite`, `HandlerFiles` and `Json`.

The manifest records the names of these classes.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._core.source import COMPOSITE, COMPOSITE_V1, HANDLER_FILES, JSON_ITEM


class Composite(dict[str, Any]):
    """A tree whose children are the items of a checkpoint."""


class CompositeV1(Composite):
    """A `Composite` that is written as version 1 of Orbax does."""


class HandlerFiles(dict[str, Any]):
    """The files that a handler wrote: arrays of bytes by their paths within its directory."""


class _JsonDict(dict[str, Any]):
    """A dict of JSON, which has an order."""


class _JsonList(list[Any]):
    """An item that is a list of JSON."""


_JsonDict.__name__ = _JsonList.__name__ = JSON_ITEM
Composite.__name__, CompositeV1.__name__, HandlerFiles.__name__ = COMPOSITE, COMPOSITE_V1, HANDLER_FILES


def composite(items: Mapping[str, Any], *, version_1: bool = False) -> Composite:
    """Returns a tree of items, for Orbax's version 1 or the older one."""
    _register()
    return CompositeV1(items) if version_1 else Composite(items)


def handler_files(files: Mapping[str, Any]) -> HandlerFiles:
    """Returns a tree of files."""
    _register()
    return HandlerFiles(files)


def json_item(value: Any) -> Any:
    """Returns a value as JSON has it, marked as such if it is a dict or a list. Its dicts keep their order."""
    _register()
    made = json.loads(json.dumps(value), object_hook=_JsonDict)
    return _JsonList(made) if isinstance(made, list) else made


@functools.cache
def _register() -> None:
    """Registers the containers with JAX, once."""
    from jax.tree_util import SequenceKey, register_pytree_with_keys

    for kind, order in ((Composite, sorted), (CompositeV1, sorted), (HandlerFiles, sorted), (_JsonDict, list)):
        register_pytree_with_keys(
            kind,
            functools.partial(_children, order),
            functools.partial(lambda kind, names, children: kind(zip(names, children, strict=True)), kind),
        )
    register_pytree_with_keys(
        _JsonList,
        lambda node: ([(SequenceKey(n), one) for n, one in enumerate(node)], None),
        lambda _, children: _JsonList(children),
    )


def _children(order: Callable[[Iterable[str]], list[str]], node: dict[str, Any]) -> tuple[list[Any], tuple[str, ...]]:
    from jax.tree_util import DictKey

    names = tuple(order(node))
    return [(DictKey(name), node[name]) for name in names], names
