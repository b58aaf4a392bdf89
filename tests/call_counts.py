"""What a call takes, in counts that are the same on every machine."""

import contextlib
import os
import pathlib
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import xxhash

import treering as tr
from treering.formats.treering import manifest

_HERE = str(pathlib.Path(tr.__file__).parent)
BYTES = ("read", "written", "parsed", "hashed", "copied")
_OF_THE_SYSTEM = ("posix", "nt", "fcntl", "mmap")  # modules whose functions are system calls


class Counts(NamedTuple):
    """Of Treering's own code, in all threads: `calls` of its functions and steps of its generators; `builtins`, the
    calls of compiled functions from it, of which `system` are system calls, by name. Of the process: the bytes that
    were `read` and `written` otherwise than through mapped files, JSON that was `parsed`, what was `hashed` and
    `copied`, and the most that Python and NumPy held at a time beyond what they had (`held`).
    """

    calls: int
    builtins: int
    system: Counter[str]
    read: int
    written: int
    parsed: int
    hashed: int
    copied: int
    held: int


def counted(call: Callable[[], Any], *, threads: bool = True) -> Counts:
    """Calls it twice, for what counts calls takes memory itself; `threads`: in those that it starts as well."""
    calls, builtins, system = [0], [0], Counter[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(_HERE):
            return
        if event == "call":
            calls[0] += 1
            return
        builtins[0] += 1
        if getattr(argument, "__module__", None) in _OF_THE_SYSTEM:
            system[argument.__name__] += 1

    if threads:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    with _bytes() as taken:
        tracemalloc.start()
        try:
            call()
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return Counts(calls[0], builtins[0], system, **{what: taken[what] for what in BYTES}, held=held)


def walked(call: Callable[[], Any], library: ModuleType = tr) -> tuple[int, int]:
    """Returns how many files of a library a call enters, in all threads, and how many calls of functions it makes.

    A step of a generator is a call. Lambdas and comprehensions are not: not every Python calls the latter.
    """
    entered: list[str] = []
    folder = str(pathlib.Path(str(library.__file__)).parent)

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            entered.append(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return len(set(entered)), len(entered)


@contextlib.contextmanager
def _bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that go through the compiled functions which parse, hash and copy, wherever they are called."""
    taken, lock = Counter[str](), threading.Lock()

    def counting(what: str, function: Callable[..., Any], size: Callable[..., int] | None) -> Callable[..., Any]:
        def counts(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            moved = result if isinstance(result, int) else len(result) if size is None else size(arguments[0])
            with lock:
                taken[what] += moved
            return result

        return counts

    def nbytes(data: Any) -> int:
        return len(data.encode()) if isinstance(data, str) else getattr(data, "nbytes", None) or len(memoryview(data))

    def of_array(array: Any) -> int:
        return getattr(array, "nbytes", 0)  # what is made of a list is no copy

    def of_arrays(arrays: Any) -> int:
        return sum(map(of_array, arrays))

    places: list[tuple[Any, str, str, Any]] = [
        (msgspec.json, "decode", "parsed", nbytes),
        (xxhash, "xxh3_64_hexdigest", "hashed", nbytes),
        (manifest, "xxh3", "hashed", nbytes),
        (np, "copyto", "copied", of_array),
        (np, "concatenate", "copied", of_arrays),
        (np, "array", "copied", of_array),
        (np, "ascontiguousarray", "copied", of_array),
        *((os, name, "read", None) for name in ("read", "pread", "preadv", "readv") if hasattr(os, name)),
        *((os, name, "written", None) for name in ("write", "pwrite", "pwritev", "writev") if hasattr(os, name)),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, what, size in places:
            stack.enter_context(mock.patch.object(module, name, counting(what, getattr(module, name), size)))
        yield taken
