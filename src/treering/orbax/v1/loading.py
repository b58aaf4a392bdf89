"""Loads and describes trees and checkpointables, each checkpoint from its path.

Describing reads no arrays, except the files of a handler that describes its own item. The handlers at the end do what
`save` and `load` do, for use within a handler of your own.
"""

import json
import logging
import os
from collections.abc import Awaitable, Mapping
from typing import Any

import jax

from ... import stores
from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, check_readable
from ..._core.source import Source
from ..._pytree import state_methods
from ..._restore.checkpoint import Checkpoint
from ..._restore.read_groups import as_key
from ...errors import CorruptError, MismatchError
from .. import items, nodes
from ..arguments import PLACEHOLDER as PLACEHOLDER
from ..errors import InvalidLayoutError, NoEntryError
from ..metadata import ShardingMetadata, custom_metadata_of
from ..namespaces import lacks, unsupported_name
from ..namespaces import unsupported_name as unsupported
from ..tree_restore import structure_of
from . import registry, saving
from .contents import CheckpointContents, ItemPart, tree_part
from .context import Context, get_context
from .options import CheckpointLayout
from .saving import RESERVED, deprecated
from .trees import ArrayMetadata, CheckpointMetadata, NumpyMetadata, as_nanoseconds, load_tree, unsupported_leaf

Path = str | os.PathLike[str]
_log = logging.getLogger("treering")
_PLAIN = (bool, int, float, complex, str, bytes)


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
    return load_from(CheckpointContents(path, context), name, abstract, context)


def load_from(contents: CheckpointContents, name: str | None, abstract: Any, context: Context) -> Any:
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
    return load_checkpointables_from(CheckpointContents(path, context), wanted, context)


def check_wanted(abstract_checkpointables: Any) -> Mapping[str, Any] | None:
    """Returns the abstract checkpointables by name. Raises `MismatchError` if they are not a dict with such names."""
    wanted = plain(abstract_checkpointables)
    if wanted is not None and not isinstance(wanted, Mapping):
        raise MismatchError(f"abstract_checkpointables: expected a dict, found a {type(wanted).__name__}")
    for name in wanted or ():
        check_name(name)
    return wanted


def load_checkpointables_from(
    contents: CheckpointContents, wanted: Mapping[str, Any] | None, context: Context
) -> dict[str, Any]:
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


def _load(name: str, part: ItemPart, abstract: Any, context: Context) -> Any:
    if part.tree is not None and abstract is not None and state_methods.is_iterator(type(abstract)):
        return items.restore_iterator(part.tree, abstract)
    handler = handler_of(name, part, abstract, context)
    if part.tree is not None and handler is None and not _loads_itself(part, abstract):
        return load_tree(part.tree, abstract, context)
    if part.files is not None:
        return registry.load_files(part.files.restore(), handler, abstract)
    assert part.directory is not None
    return registry.load_directory(nodes.path_object(part.directory), handler, abstract)


def handler_of(name: str, part: ItemPart, abstract: Any, context: Context) -> Any:
    """Returns the handler that loads a checkpointable; None if an object loads itself, or it is loaded as a tree.

    Raises `NoEntryError`, which is a `KeyError`, if a handler wrote it and none is registered that fits.
    """
    handlers = context.checkpointables.registry
    if part.tree is not None:
        return registry.handler_on_record(handlers, name, abstract, part.saved_by) if part.directory else None
    found = registry.handler_to_load(handlers, name, abstract, part.saved_by)
    if found is None and part.saved_by is not None and not isinstance(abstract, registry.StatefulCheckpointable):
        raise NoEntryError(
            f"{name}: expected a registered handler such as {part.saved_by}, which saved it, found none that fits"
        )
    return found


def _loads_itself(part: ItemPart, abstract: Any) -> bool:
    return part.directory is not None and isinstance(abstract, registry.StatefulCheckpointable)


def metadata(path: Path, checkpointable_name: str | None = "AUTO") -> CheckpointMetadata[Any]:
    """Returns the metadata of the tree of a checkpoint, which `load` takes as an abstract tree.

    Raises `InvalidLayoutError` (a `FileNotFoundError` and a `ValueError`) if there is no such tree.
    """
    check_name(checkpointable_name)
    context = get_context().check()
    return metadata_from(CheckpointContents(path, context), checkpointable_name, context)


def metadata_from(contents: CheckpointContents, name: str | None, context: Context) -> CheckpointMetadata[Any]:
    """Returns the metadata of the tree of an open checkpoint."""
    return _described(contents, context, tree_metadata(tree_part(contents, name)))


def checkpointables_metadata(path: Path) -> CheckpointMetadata[dict[str, Any]]:
    """Returns the metadata of the checkpointables of a checkpoint by name.

    It is None for one without a registered handler, and for a damaged one, which is logged.

    Raises `InvalidLayoutError` if there is no checkpoint.
    """
    context = get_context().check()
    if context.checkpoint_layout is CheckpointLayout.SAFETENSORS:
        raise NotImplementedError(f"{path}: a file of safetensors is one tree; use metadata()")
    return checkpointables_metadata_from(CheckpointContents(path, context), context)


def checkpointables_metadata_from(contents: CheckpointContents, context: Context) -> CheckpointMetadata[dict[str, Any]]:
    """Returns the metadata of the checkpointables of an open checkpoint by name."""
    found: dict[str, Any] = {}
    for name in contents.names:
        try:
            found[name] = _part_metadata(name, contents.part(name), context)
        except CorruptError as error:
            _log.warning("%s: %s is damaged, and has no metadata: %s", contents.path, name, error)
            found[name] = None
    return _described(contents, context, found)


def pytree_metadata(*args: Any, **kwargs: Any) -> CheckpointMetadata[Any]:
    """Does what `metadata` does. Deprecated."""
    deprecated("metadata")
    return metadata(*args, **kwargs)


def is_orbax_checkpoint(path: Path) -> bool:
    """Returns True if there is a checkpoint at a path that `load_checkpointables` can open, of either format."""
    try:
        CheckpointContents(path, get_context())
    except (InvalidLayoutError, CorruptError):
        return False
    return True


def _described(contents: CheckpointContents, context: Context, found: Any) -> CheckpointMetadata[Any]:
    ckpt = contents.ckpt
    created = as_nanoseconds(None if ckpt is None else ckpt.created)
    # Some formats record no time. Then the commit is the last change of the file.
    there = stores.get(contents.path).stat(contents.path) if created is None else None
    return CheckpointMetadata(
        context.path(contents.path),
        metadata=found,
        init_timestamp_nsecs=created,
        commit_timestamp_nsecs=created if there is None else int(there.modified * 1e9),
        custom_metadata={} if ckpt is None else custom_metadata_of(ckpt),
    )


def tree_metadata(part: Checkpoint) -> Any:
    """Returns a tree of abstract leaves, as nested dicts and lists. Raises `CorruptError` for a leaf that is lost."""
    source = part._source
    check_readable(source.entries.values())
    leaves, treedef = jax.tree.flatten(structure_of(source), is_leaf=lambda leaf: leaf is None)
    return treedef.unflatten([_abstract(source, leaf) for leaf in leaves])


def _abstract(source: Source, entry: Entry) -> Any:
    if not isinstance(entry, ArrayEntry):
        kind = type(entry.decode())
        return kind() if kind in _PLAIN else None
    shape, dtype = entry.shape, dtypes.to_numpy(entry.dtype)
    if entry.type not in ("jax", "jax-weak", "key"):
        return NumpyMetadata(shape, dtype)
    if entry.type == "key":
        key = jax.eval_shape(lambda data: as_key(data, entry), jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = key.shape, key.dtype
    record = source.sharding(entry)
    weak = entry.type == "jax-weak"
    return ArrayMetadata(shape, dtype, None if record is None else ShardingMetadata(record), weak_type=weak)


def _part_metadata(name: str, part: ItemPart, context: Context) -> Any:
    handlers = context.checkpointables.registry
    if part.tree is None:
        handler = registry.handler_to_load(handlers, name, None, part.saved_by)
    else:
        handler = handler_of(name, part, None, context)
    if handler is None:
        return None if part.tree is None else tree_metadata(part.tree)
    if part.files is not None:
        return registry.metadata_of_files(part.files.restore(), handler)
    assert part.directory is not None
    directory = nodes.path_object(part.directory)
    return registry.run(lambda: handler.metadata(directory))


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
        return _awaitable(load_at(directory, None, abstract_checkpointable, self._context))

    async def metadata(self, directory: Any) -> Any:
        return metadata(directory, None).metadata

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
