"""Describes checkpoints without reading arrays."""

import os
from typing import Any

import jax
import numpy as np

from ..._core import dtypes
from ..._core.entries import ArrayEntry
from ..._restore.checkpoint import Checkpoint
from ...errors import CorruptError
from .. import handler_files
from ..leaf_templates import was_in_jax
from ..metadata import ShardingMetadata
from ..tree_restore import structure_of
from . import own_files, registry
from .contents import Contents, Part, tree_part
from .context import Context, get_context
from .errors import InvalidLayoutError
from .loading import check_name
from .metadata_types import ArrayMetadata, CheckpointMetadata, NumpyMetadata, as_nanoseconds
from .options import CheckpointLayout
from .saving import deprecated

Path = str | os.PathLike[str]


def metadata(path: Path, checkpointable_name: str | None = "AUTO") -> CheckpointMetadata[Any]:
    """Returns the metadata of the tree of a checkpoint, which `load` takes as an abstract tree.

    Raises `InvalidLayoutError` (a `FileNotFoundError` and a `ValueError`) if there is no such tree.
    """
    check_name(checkpointable_name)
    context = get_context().check()
    contents = Contents(path, context)
    return _described(contents, context, tree_metadata(tree_part(contents, checkpointable_name)))


def checkpointables_metadata(path: Path) -> CheckpointMetadata[dict[str, Any]]:
    """Returns the metadata of the checkpointables of a checkpoint by name; None for one without a registered handler.

    Raises `InvalidLayoutError` if there is no checkpoint.
    """
    context = get_context().check()
    if context.checkpoint_layout is CheckpointLayout.SAFETENSORS:
        raise NotImplementedError(f"{path}: a file of safetensors is one tree; use metadata()")
    contents = Contents(path, context)
    found = {name: _part_metadata(name, contents.part(name), context) for name in contents.names}
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
    return CheckpointMetadata(
        context.path(contents.path),
        metadata=found,
        init_timestamp_nsecs=created,
        commit_timestamp_nsecs=created,
        custom_metadata=None if ckpt is None else ckpt.metadata,
    )


def tree_metadata(part: Checkpoint) -> Any:
    """Returns a tree of abstract leaves, as nested dicts and lists."""
    source = part._source

    def described(entry: Any) -> Any:
        if not isinstance(entry, ArrayEntry):
            value = entry.decode()
            return None if value is None else type(value)()
        shape, dtype = entry.shape, dtypes.to_numpy(entry.dtype)
        if not was_in_jax(source, entry):
            return NumpyMetadata(shape, np.dtype(dtype))
        record = source.sharding(entry)
        return ArrayMetadata(shape, dtype, None if record is None else ShardingMetadata(record))

    leaves, treedef = jax.tree.flatten(structure_of(source), is_leaf=lambda leaf: leaf is None)
    return treedef.unflatten([described(leaf) for leaf in leaves])


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
