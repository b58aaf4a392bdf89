"""Runs the program's own handlers in directories, and keeps the files that they write as arrays of bytes."""

import asyncio
import concurrent.futures
import inspect
import os
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._processes.coordinator import is_multi_process
from ..errors import MismatchError, UnsupportedError
from ..formats._shared.safety import problems_of_names
from .nodes import HandlerFiles, handler_files


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
