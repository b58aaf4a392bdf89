"""Handlers that do what `save` and `load` do, for use within a handler of your own."""

import json
from collections.abc import Awaitable
from typing import Any

from ..namespaces import lacks, unsupported_name
from . import describing, loading, saving
from .trees import unsupported_leaf


@lacks("validate_abstract_leaves_handleable", "validate_leaves_handleable")
class PyTreeHandler:
    """Saves trees, as `save` does. The leaves of other types that `leaf_handler_registry` adds are not supported."""

    def __init__(self, context: Any = None, *, leaf_handler_registry: Any = None, **options: Any):
        if leaf_handler_registry is not None or options:
            raise unsupported_name(f"v1.handlers.PyTreeHandler({', '.join(['leaf_handler_registry', *options])})")
        self._context = context

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        path = await directory.await_creation()
        return _awaitable(saving.save_tree_at(path, checkpointable, self._context))

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        return _awaitable(loading.load_at(directory, None, abstract_checkpointable, self._context))

    async def metadata(self, directory: Any) -> Any:
        return describing.metadata(directory, None).metadata

    def is_handleable(self, checkpointable: Any) -> bool:
        return unsupported_leaf(checkpointable) is None

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None if abstract_checkpointable is None else self.is_handleable(abstract_checkpointable)


class JsonHandler(PyTreeHandler):
    """Saves values of JSON."""

    def is_handleable(self, checkpointable: Any) -> bool:
        try:
            json.dumps(checkpointable)
        except (TypeError, ValueError):
            return False
        return True

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        return None


async def _awaitable(value: Any) -> Any:
    return value
