"""Runs handlers of your own and objects that save themselves, and keeps the files that they write."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from ...errors import MismatchError
from .. import handler_files, nodes
from .registry import StatefulCheckpointable, typestr

PathLike = str | os.PathLike[str]
Path = Any  # of `etils.epath` if that is installed, else of `pathlib`
HANDLER = ".handler"  # the file with the name of the class that wrote the others


class Directory:
    """A directory that a handler saves into, which exists already, or a path in it."""

    def __init__(self, path: Any):
        self.path = path

    def __truediv__(self, name: str | os.PathLike[str]) -> "Directory":
        return Directory(self.path / name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    async def await_creation(self) -> Any:
        """Returns the path."""
        return self.path


def save_files(value: Any, handler: Any) -> nodes.HandlerFiles:
    """Returns the files that a handler writes for an object, or that the object writes itself without a handler."""
    saver = value if handler is None else handler
    handler_files.check_one_process(saver)
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        directory = Directory(handler_files.path_object(folder))
        run(lambda: saver.save(directory) if handler is None else saver.save(directory, value))
        found = handler_files.files_in(folder)
    if handler is not None:
        found[HANDLER] = np.frombuffer(typestr(handler).encode(), np.uint8)
    return nodes.handler_files(found)


def class_of_handler(files: Mapping[str, Any]) -> str | None:
    """Returns the name of the class of the handler that wrote files, None for an object that saved itself."""
    return np.asarray(files[HANDLER]).tobytes().decode() if HANDLER in files else None


def load_files(files: Mapping[str, Any], handler: Any, abstract: Any) -> Any:
    """Returns what a handler, or an object itself, loads from files."""
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        handler_files.write_files({name: one for name, one in files.items() if name != HANDLER}, folder)
        return load_directory(handler_files.path_object(folder), handler, abstract)


def load_directory(directory: Any, handler: Any, abstract: Any) -> Any:
    """Returns what a handler, or an object itself, loads from a directory."""
    handler_files.check_one_process(handler or abstract)
    if handler is not None:
        return run(lambda: handler.load(directory, abstract))
    if not isinstance(abstract, StatefulCheckpointable):
        raise MismatchError(
            f"{directory}: expected the object that loads these files itself, or a registered handler, found "
            f"{'nothing' if abstract is None else type(abstract).__name__}"
        )
    run(lambda: abstract.load(directory))
    return abstract


def metadata_of_files(files: Mapping[str, Any], handler: Any) -> Any:
    """Returns what a handler says about files."""
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        handler_files.write_files({name: one for name, one in files.items() if name != HANDLER}, folder)
        return run(lambda: handler.metadata(handler_files.path_object(folder)))


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    """Returns the result of a coroutine. If it is another awaitable, returns the result of that one."""

    async def awaited() -> Any:
        result = await call()
        return await result if inspect.isawaitable(result) else result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # A notebook has a running loop.
        return pool.submit(contextvars.copy_context().run, asyncio.run, awaited()).result()
