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

from ..._core.lazy import LazyArray
from ..._restore.checkpoint import Checkpoint
from ...errors import MismatchError
from .. import handler_files, nodes
from ..tree_restore import structure_of
from .protocols import StatefulCheckpointable
from .registry import typestr

_SMALL_FILE_BYTES = 1 << 16  # bytes of a file that is read whether the handler reads it or not
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


def metadata_of_files(part: Checkpoint, handler: Any) -> Any:
    """Returns what a handler says about its files. Reads large ones only if the handler reads them.

    The handler first gets them with their sizes and without their contents. It is called again with the contents if
    the times of access say that it read one of them.
    """
    structure = structure_of(part._source)
    files = {name: LazyArray(part._source, entry) for name, entry in structure.items() if name != HANDLER}
    with tempfile.TemporaryDirectory(prefix="treering-") as folder:
        large = {name: one.shape[0] for name, one in files.items() if one.shape[0] > _SMALL_FILE_BYTES}
        empty = large if large and can_see_reads(folder) else {}
        handler_files.write_files({name: one for name, one in files.items() if name not in empty}, folder)
        handler_files.write_files(dict.fromkeys(empty, np.zeros(0, np.uint8)), folder)
        for name, size in empty.items():
            os.truncate(os.path.join(folder, name), size)
            _forget_reads(os.path.join(folder, name))

        def call() -> Any:
            return run(lambda: handler.metadata(handler_files.path_object(folder)))

        def has_read() -> bool:
            return any(_is_read(os.path.join(folder, name)) for name in empty)

        try:
            found = call()
        except Exception:
            if not has_read():
                raise
        else:
            if not has_read():
                return found
        handler_files.write_files({name: files[name] for name in empty}, folder)
        return call()


def can_see_reads(folder: str) -> bool:
    """Returns True if the file system of a folder records when a file is read."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"x")
        probe.flush()
        _forget_reads(probe.name)
        with open(probe.name, "rb") as file:
            file.read()
        return _is_read(probe.name)


def _forget_reads(path: str) -> None:
    # A time of access before that of the last change is updated by the next read, also with `relatime`.
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns))


def _is_read(path: str) -> bool:
    return not os.path.exists(path) or os.stat(path).st_atime_ns != 0


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
