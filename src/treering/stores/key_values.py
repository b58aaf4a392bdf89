"""TensorStore's view of a folder in a store that it cannot reach: a copy in the memory of its context.

And errors of such a store, which come by way of TensorStore as the text of its own.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from .._threads.pool import in_parallel
from ..errors import RequestError
from .read_errors import ReplacedError

_OURS = {kind.__name__: kind for kind in (ReplacedError, RequestError)}
_FAILED = re.compile(r"\[treering (\w+)\] (.*?)(?:'\]|$)", re.DOTALL)


def brought_in(folder: str, context: Any, files: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """Copies files, by their paths within a folder, into the memory of a context; returns the specification."""
    spec = {"driver": "memory", "path": folder.rstrip("/") + "/"}
    keys = _key_values(spec, context)
    for name, data in files:
        keys[name] = data
    return spec


def take_out(
    folder: str, context: Any, which: Callable[[str], bool], put: Callable[[str, bytes], object], in_flight: int
) -> None:
    """Puts files that TensorStore has written into a folder in the memory of a context, by paths within it.

    They leave that memory.
    """
    keys = _key_values({"driver": "memory", "path": folder.rstrip("/") + "/"}, context)

    def move(key: bytes) -> None:
        put(key.decode(), bytes(keys[key]))
        del keys[key]

    in_parallel([key for key in keys.list().result() if which(key.decode())], move, in_flight)


def as_text(error: Exception) -> str:
    """An error as the text that TensorStore is told; see `of_text`."""
    name = type(error).__name__
    if name in _OURS:
        return f"[treering {name}] {error}"
    if isinstance(error, OSError) and error.errno:
        return f"[OS error {error.errno}] {error}"
    return f"[treering {RequestError.__name__}] {name}: {error}"


def of_text(text: str, path: str) -> OSError | None:
    """The error that is in a text of TensorStore's, about a path; None when there is none."""
    found = _FAILED.search(text)
    return _OURS[found[1]](f"{path}: {found[2]}") if found and found[1] in _OURS else None


def _key_values(spec: dict[str, Any], context: Any) -> Any:
    import tensorstore as ts

    return ts.KvStore.open(spec, context=context).result()
