"""Describes checkpoints of version 1. Reads no arrays, except the files of a handler that describes its own item."""

import logging
import os
from typing import Any

import jax

from ... import stores
from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, check_readable
from ..._core.source import Source
from ..._restore.checkpoint import Checkpoint
from ..._restore.read_groups import as_key
from ...errors import CorruptError
from .. import handler_files
from ..errors import InvalidLayoutError
from ..metadata import ShardingMetadata, custom_metadata_of
from ..tree_restore import structure_of
from . import own_files, registry
from .contents import Contents, Part, tree_part
from .context import Context, get_context
from .loading import check_name
from .metadata_types import ArrayMetadata, CheckpointMetadata, NumpyMetadata, as_nanoseconds
from .options import CheckpointLayout
from .saving import deprecated

_log = logging.getLogger("treering")
_PLAIN = (bool, int, float, complex, str, bytes)
Path = str | os.PathLike[str]


def metadata(path: Path, checkpointable_name: str | None = "AUTO") -> CheckpointMetadata[Any]:
    """Returns the metadata of the tree of a checkpoint, which `load` takes as an abstract tree.

    Raises `InvalidLayoutError` (a `FileNotFoundError` and a `ValueError`) if there is no such tree.
    """
    check_name(checkpointable_name)
    context = get_context().check()
    return metadata_from(Contents(path, context), checkpointable_name, context)


def metadata_from(contents: Contents, name: str | None, context: Context) -> CheckpointMetadata[Any]:
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
    return checkpointables_metadata_from(Contents(path, context), context)


def checkpointables_metadata_from(contents: Contents, context: Context) -> CheckpointMetadata[dict[str, Any]]:
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
        Contents(path, get_context())
    except (InvalidLayoutError, CorruptError):
        return False
    return True


def _described(contents: Contents, context: Context, found: Any) -> CheckpointMetadata[Any]:
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


def _part_metadata(name: str, part: Part, context: Context) -> Any:
    if part.tree is not None:
        return tree_metadata(part.tree)
    handler = registry.handler_to_load(context.checkpointables.registry, name, None, part.saved_by)
    if handler is None:
        return None
    if part.files is not None:
        return own_files.metadata_of_files(part.files.restore(), handler)
    assert part.directory is not None
    directory = handler_files.path_object(part.directory)
    return own_files.run(lambda: handler.metadata(directory))
