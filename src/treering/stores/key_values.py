"""TensorStore's view of a folder in a store that it cannot reach: a copy in the memory of its context."""

from collections.abc import Iterable, Iterator
from typing import Any


def brought_in(folder: str, context: Any, files: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """Copies files, by their paths within a folder, into the memory of a context; returns the specification."""
    spec = {"driver": "memory", "path": folder.rstrip("/") + "/"}
    keys = _key_values(spec, context)
    for name, data in files:
        keys[name] = data
    return spec


def taken_out(folder: str, context: Any) -> Iterator[tuple[str, bytes]]:
    """The files that TensorStore has written into a folder in the memory of a context."""
    keys = _key_values({"driver": "memory", "path": folder.rstrip("/") + "/"}, context)
    for key in keys.list().result():
        yield key.decode(), bytes(keys[key])


def _key_values(spec: dict[str, Any], context: Any) -> Any:
    import tensorstore as ts

    return ts.KvStore.open(spec, context=context).result()
