"""Loads trees and checkpointables, each checkpoint from its path."""

import os
from collections.abc import Mapping
from typing import Any

from ..._pytree import state_methods
from ...errors import MismatchError
from .. import handler_files, item_restore
from ..arguments import PLACEHOLDER as PLACEHOLDER
from ..errors import NoEntryError
from ..namespaces import unsupported_name as unsupported
from . import own_files, registry
from .contents import Contents, Part, tree_part
from .context import Context, get_context
from .metadata_types import CheckpointMetadata
from .saving import RESERVED, deprecated
from .trees import load_tree

Path = str | os.PathLike[str]


def load(path: Path, abstract_state: Any = None, *, checkpointable_name: str | None = "AUTO") -> Any:
    """Loads the tree of a checkpoint, written by Treering or by Orbax.

    abstract_state: a tree of arrays, `jax.ShapeDtypeStruct`, types of numbers, or metadata, which says the structure,
        the dtypes and the places of the result. Without it the result is nested dicts and lists, as they were saved.
    checkpointable_name: the name of the tree; by default `state`, or the first one.

    Raises `InvalidLayoutError` (a `FileNotFoundError` and a `ValueError`) if there is no such tree, and the errors of
    `treering.restore`.
    """
    return load_at(path, checkpointable_name, abstract_state, None)


def load_at(path: Path, name: str | None, abstract: Any, context: Context | None) -> Any:
    """Loads a tree with the options of a context."""
    check_name(name)
    context = (context or get_context()).check()
    return load_from(Contents(path, context), name, abstract, context)


def load_from(contents: Contents, name: str | None, abstract: Any, context: Context) -> Any:
    """Loads a tree of an open checkpoint."""
    return load_tree(tree_part(contents, name), plain(abstract), context)


def load_checkpointables(path: Path, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Loads checkpointables by name, those of `abstract_checkpointables` or all.

    abstract_checkpointables: abstract trees, iterators and objects by name; None loads an object as it was saved.

    Raises `InvalidLayoutError` if there is no checkpoint, and `NoCheckpointableError`, which is a `KeyError`, if it
    lacks a name.
    """
    context = get_context().check()
    wanted = check_wanted(abstract_checkpointables)
    return load_checkpointables_from(Contents(path, context), wanted, context)


def check_wanted(abstract_checkpointables: Any) -> Mapping[str, Any] | None:
    """Returns the abstract checkpointables by name. Raises `MismatchError` if they are not a dict with such names."""
    wanted = plain(abstract_checkpointables)
    if wanted is not None and not isinstance(wanted, Mapping):
        raise MismatchError(f"abstract_checkpointables: expected a dict, found a {type(wanted).__name__}")
    for name in wanted or ():
        check_name(name)
    return wanted


def load_checkpointables_from(contents: Contents, wanted: Mapping[str, Any] | None, context: Context) -> dict[str, Any]:
    """Loads checkpointables of an open checkpoint."""
    wanted = dict.fromkeys(contents.names) if wanted is None else wanted
    parts = {name: contents.part(name) for name in wanted}
    return {name: _load(name, part, wanted[name], context) for name, part in parts.items()}


def load_async(path: Path, abstract_state: Any = None, *, checkpointable_name: str | None = "AUTO") -> Any:
    """Is not supported, as in Orbax itself for its own format. Raises `UnsupportedError`."""
    raise unsupported("v1.load_async")


def load_checkpointables_async(path: Path, abstract_checkpointables: Any = None) -> Any:
    """Is not supported, as in Orbax itself. Raises `UnsupportedError`."""
    raise unsupported("v1.load_checkpointables_async")


def load_pytree(*args: Any, **kwargs: Any) -> Any:
    """Does what `load` does. Deprecated."""
    deprecated("load")
    return load(*args, **kwargs)


def load_pytree_async(*args: Any, **kwargs: Any) -> Any:
    """Does what `load_async` does. Deprecated."""
    deprecated("load_async")
    return load_async(*args, **kwargs)


def check_name(name: str | None) -> None:
    """Raises `MismatchError`, which is a `ValueError`, for a name that Orbax uses itself."""
    if name is not None and name != "AUTO" and (not name or name in RESERVED):
        raise MismatchError(f"{name!r}: expected the name of a checkpointable, found one that Orbax uses itself")


def plain(abstract: Any) -> Any:
    """Returns what `CheckpointMetadata` holds, and anything else as it is."""
    return abstract.metadata if isinstance(abstract, CheckpointMetadata) else abstract


def _load(name: str, part: Part, abstract: Any, context: Context) -> Any:
    if part.tree is not None:
        if abstract is not None and state_methods.is_iterator(type(abstract)):
            return item_restore.restore_iterator(part.tree, abstract)
        return load_tree(part.tree, abstract, context)
    handler = handler_of(name, part, abstract, context)
    if part.files is not None:
        return own_files.load_files(part.files.restore(), handler, abstract)
    assert part.directory is not None
    return own_files.load_directory(handler_files.path_object(part.directory), handler, abstract)


def handler_of(name: str, part: Part, abstract: Any, context: Context) -> Any:
    """Returns the handler that loads a checkpointable; None if an object loads itself.

    Raises `NoEntryError`, which is a `KeyError`, if a handler wrote it and none is registered that fits.
    """
    found = registry.handler_to_load(context.checkpointables.registry, name, abstract, part.saved_by)
    if found is None and part.saved_by is not None and not isinstance(abstract, own_files.StatefulCheckpointable):
        raise NoEntryError(
            f"{name}: expected a registered handler such as {part.saved_by}, which saved it, found none that fits"
        )
    return found
