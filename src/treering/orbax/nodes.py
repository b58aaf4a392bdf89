"""Defines the containers that stand for items in a tree of Treering: `ItemsTree`, `HandlerFiles` and `Json`.

The manifest records the names of these classes. The program's own handlers run in directories. The files that they
write are kept as arrays of bytes.
"""

import asyncio
import concurrent.futures
import functools
import inspect
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .._core.source import COMPOSITE, COMPOSITE_V1, HANDLER_FILES, JSON_ITEM
from .._processes.coordinator import is_multi_process
from ..errors import MismatchError, UnsupportedError
from ..formats._shared.safety import problems_of_names


class ItemsTree(dict[str, Any]):
    """A tree whose children are the items of a checkpoint."""


class ItemsTreeV1(ItemsTree):
    """A `ItemsTree` that is written as version 1 of Orbax does."""


class HandlerFiles(dict[str, Any]):
    """The files that a handler wrote: arrays of bytes by their paths within its directory."""


class _JsonDict(dict[str, Any]):
    """A dict of JSON, which has an order."""


class _JsonList(list[Any]):
    """An item that is a list of JSON."""


_JsonDict.__name__ = _JsonList.__name__ = JSON_ITEM
ItemsTree.__name__, ItemsTreeV1.__name__, HandlerFiles.__name__ = COMPOSITE, COMPOSITE_V1, HANDLER_FILES


def composite(items: Mapping[str, Any], *, version_1: bool = False) -> ItemsTree:
    """Returns a tree of items, for Orbax's version 1 or the older one."""
    _register()
    return ItemsTreeV1(items) if version_1 else ItemsTree(items)


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

    for kind, order in ((ItemsTree, sorted), (ItemsTreeV1, sorted), (HandlerFiles, sorted), (_JsonDict, list)):
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


def save_files(handler: Any, args: Any) -> HandlerFiles:
    """Returns the files that a handler writes for arguments. Raises `MismatchError` for a handler without a save."""
    check_one_process(handler)
    if not (hasattr(handler, "save") or hasattr(handler, "async_save")):
        raise MismatchError(
            f"{type(handler).__name__}: expected a handler with a method save or async_save, found none"
        )
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        directory = path_object(folder)
        given, named = call_of(args)
        if hasattr(handler, "async_save"):
            with concurrent.futures.ThreadPoolExecutor(1) as thread:  # The caller may run in an event loop itself.
                thread.submit(asyncio.run, _saved(handler, directory, given, named)).result()
        else:
            handler.save(directory, *given, **named)
        if hasattr(handler, "finalize"):
            handler.finalize(directory)
        return handler_files(files_in(folder))


def files_in(folder: str) -> dict[str, Any]:
    """Returns the files in a folder, as arrays of bytes by their paths in it.

    Raises `UnsupportedError` for anything else there, and for a name that a restore could not write on every system.
    """
    found: dict[str, Any] = {}
    for base, folders, names in os.walk(folder):
        for file in (pathlib.Path(base, name) for name in (*folders, *names)):
            path = file.relative_to(folder).as_posix()
            if file.is_file():
                found[path] = np.fromfile(file, np.uint8)
            elif file.is_symlink() or not file.is_dir() or not any(file.iterdir()):
                raise UnsupportedError(
                    f"{path}: expected files and directories that have some, because a checkpoint keeps nothing else, "
                    "found an empty directory, a link or a special file; let the handler write files only"
                )
    _check_names(found)
    return found


def _check_names(files: Mapping[str, Any]) -> None:
    if problems := [f"{name!r:.100}: {reason}" for name, reason in problems_of_names(files)]:
        raise UnsupportedError("a handler's files: " + "; ".join(problems))


async def _saved(handler: Any, directory: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    for future in await handler.async_save(directory, *given, **named) or ():
        if inspect.isawaitable(future):
            await future
        else:
            future.result()


def restore_files(files: Mapping[str, Any], handler: Any, args: Any) -> Any:
    """Returns what a handler restores from files that it wrote."""
    check_one_process(handler)
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        write_files(files, folder)
        return restore_directory(path_object(folder), handler, args)


def write_files(files: Mapping[str, Any], folder: str) -> None:
    """Writes files into a folder. Raises `UnsupportedError` for a name that leads out of it."""
    _check_names(files)
    for name, content in files.items():
        file = pathlib.Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(content).tofile(file)


def restore_directory(directory: Any, handler: Any, args: Any) -> Any:
    """Returns what a handler restores from a directory."""
    given, named = call_of(args)
    return handler.restore(directory, *given, **named)


class CallArgs:
    """Arguments of a call in the old style, for a handler without registered arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.args, self.kwargs = args, kwargs


def call_of(args: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the positional and the keyword arguments that pass `args` to a handler."""
    if isinstance(args, CallArgs):
        return args.args, args.kwargs
    return (), {} if args is None else {"args": args}


def path_object(path: str) -> Any:
    """Returns a path as handlers expect it: that of etils, which Orbax passes, if it is in use."""
    epath = sys.modules.get("etils.epath")
    return pathlib.Path(path) if epath is None else epath.Path(path)


def check_one_process(handler: Any) -> None:
    """Raises `UnsupportedError` in a job of several processes."""
    if is_multi_process():
        raise UnsupportedError(
            f"{type(handler).__name__}: a handler of your own saves and restores in a job of one process only; put the "
            "data into a tree, or use Grain's handler for iterators"
        )
