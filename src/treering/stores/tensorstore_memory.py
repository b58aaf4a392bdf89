"""Exchanges files with TensorStore through the memory of its context, for stores that TensorStore cannot reach.

Also turns errors of such a store into text and back: TensorStore passes on only the text of an error.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from .._threads.pool import in_parallel
from ..errors import RequestError
from .read_errors import ReplacedError

_ERROR_KINDS = {kind.__name__: kind for kind in (ReplacedError, RequestError)}
_ERROR_PATTERN = re.compile(r"\[treering (\w+)\] (.*?)(?:'\]|$)", re.DOTALL)


def load_into_memory(folder: str, context: Any, files: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """Copies files, given by their paths within a folder, into the memory of a context.

    Returns TensorStore's specification.
    """
    spec = {"driver": "memory", "path": folder.rstrip("/") + "/"}
    keys = _key_values(spec, context)
    for name, data in files:
        keys[name] = data
    return spec


def drain_memory(
    folder: str, context: Any, which: Callable[[str], bool], put: Callable[[str, bytes], object], in_flight: int
) -> None:
    """Passes the files that TensorStore wrote to a folder in the memory of a context to `put`.

    which: chooses the files, by their paths within the folder. They are removed from that memory.
    in_flight: how many calls of `put` run at a time.
    """
    keys = _key_values({"driver": "memory", "path": folder.rstrip("/") + "/"}, context)

    def move(key: bytes) -> None:
        put(key.decode(), bytes(keys[key]))
        del keys[key]

    in_parallel([key for key in keys.list().result() if which(key.decode())], move, in_flight)


def encode_error(error: Exception) -> str:
    """Returns an error as text for TensorStore; `decode_error` reads it."""
    name = type(error).__name__
    if name in _ERROR_KINDS:
        return f"[treering {name}] {error}"
    if isinstance(error, OSError) and error.errno:
        return f"[OS error {error.errno}] {error}"
    return f"[treering {RequestError.__name__}] {name}: {error}"


def decode_error(text: str, path: str) -> OSError | None:
    """Returns the error that an error text of TensorStore contains, with the path; None if it contains none."""
    found = _ERROR_PATTERN.search(text)
    return _ERROR_KINDS[found[1]](f"{path}: {found[2]}") if found and found[1] in _ERROR_KINDS else None


def _key_values(spec: dict[str, Any], context: Any) -> Any:
    import tensorstore as ts

    return ts.KvStore.open(spec, context=context).result()
