"""Describes checkpoints without reading arrays, in objects with the attributes of Orbax's metadata."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from .._core import dtypes
from .._core.entries import ArrayEntry, Entry
from .._core.source import Source
from .._pytree.placements import PlacementError, resolve_placement
from .._restore.array_placement import ambient_mesh
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError
from .arguments import Composite
from .namespaces import lacks, lookup
from .tree_restore import structure_of

__getattr__ = lookup("metadata")


@lacks("from_deserialized_dict", "from_jax_sharding", "to_serialized_string")
@dataclasses.dataclass(frozen=True)
class ShardingMetadata:
    """The place of an array when it was saved, as the checkpoint records it."""

    record: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the mesh, () for a single device."""
        return tuple(self.record.get("mesh", {}).values())

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of the mesh, () for a single device."""
        return tuple(self.record.get("mesh", {}))

    @property
    def partition_spec(self) -> tuple[Any, ...]:
        """The axes of the mesh that divide each axis of the array."""
        return tuple(tuple(axis) if isinstance(axis, list) else axis for axis in self.record.get("spec", ()))

    def to_jax_sharding(self) -> Any:
        """Returns the place in this job. Raises `MismatchError` if there is none."""
        try:
            place = resolve_placement(self.record, ambient_mesh(), exactly=False).sharding
        except PlacementError as error:
            raise MismatchError(f"sharding: expected a job that has the saved place, found {error}") from None
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if place is None else place


@dataclasses.dataclass(frozen=True)
class ValueMetadata:
    """The path of a leaf, and the directory of the checkpoint."""

    name: str = dataclasses.field(compare=False)
    directory: Any = dataclasses.field(default=None, compare=False)


@lacks("from_shape_dtype_struct")
@dataclasses.dataclass(frozen=True)
class ArrayMetadata(ValueMetadata):
    """An array. `sharding` is None if it was a NumPy array."""

    shape: tuple[int, ...] = ()
    sharding: ShardingMetadata | None = None
    dtype: Any = None
    storage: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class ScalarMetadata(ArrayMetadata):
    """A Python number."""


@dataclasses.dataclass(frozen=True)
class StringMetadata(ValueMetadata):
    """A text."""


class TreeMetadata(Mapping[str, Any]):
    """The metadata of a tree: its keys are those at the top of `tree`."""

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree, self.custom_metadata = tree, custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __eq__(self, other: object) -> bool:
        return self.tree == (other.tree if isinstance(other, TreeMetadata) else other)

    def __repr__(self) -> str:
        return f"TreeMetadata({self.tree!r})"


jax.tree_util.register_pytree_node(
    TreeMetadata, lambda made: ((made.tree,), made.custom_metadata), lambda custom, trees: TreeMetadata(*trees, custom)
)


@dataclasses.dataclass
class StepMetadata:
    """The metadata of a checkpoint. Times are nanoseconds since 1970."""

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    performance_metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class RootMetadata:
    """The metadata of a run, which are the same for all its steps."""

    internal_metadata: Any = dataclasses.field(default_factory=dict)
    custom_metadata: Any = dataclasses.field(default_factory=dict)


CompositeItemMetadata = Composite


def tree_metadata(part: Checkpoint) -> TreeMetadata:
    """Returns the metadata of a checkpoint, or of a part of one, as nested dicts and lists."""
    source = part._source
    tree = structure_of(source)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
    custom = source.metadata if isinstance(source.metadata, dict) else None
    return TreeMetadata(treedef.unflatten([_leaf(source, leaf) for leaf in leaves]), custom)


def step_metadata(ckpt: Checkpoint, item_metadata: Any, item_handlers: Any = None) -> StepMetadata:
    """Returns the metadata of a checkpoint with that of its items."""
    created = None if ckpt.created is None else int(ckpt.created.timestamp() * 1_000_000) * 1000
    return StepMetadata(
        item_handlers=item_handlers,
        item_metadata=item_metadata,
        metrics=ckpt.metrics,
        init_timestamp_nsecs=created,
        commit_timestamp_nsecs=created,
        custom_metadata=custom_metadata_of(ckpt),
    )


def custom_metadata_of(ckpt: Checkpoint) -> Any:
    """Returns the custom metadata of a checkpoint, {} without any as in Orbax. Those of its run are not among them."""
    found = getattr(ckpt._source, "step_metadata", ckpt.metadata)
    return {} if found is None else found


def _leaf(source: Source, entry: Entry | None) -> Any:
    if entry is None:  # an empty container
        return None
    if isinstance(entry, ArrayEntry):
        record = source.sharding(entry) if entry.type in ("jax", "jax-weak", "key") else None
        if record is None and entry.type in ("jax", "jax-weak", "key"):
            record = {"committed": False}
        sharding = None if record is None else ShardingMetadata(record)
        shape, dtype = entry.shape, dtypes.to_numpy(entry.dtype)
        return ArrayMetadata(entry.path, source.path, shape, sharding, dtype)
    value = entry.decode()
    if isinstance(value, bool | int | float | complex):
        return ScalarMetadata(entry.path, source.path, (), None, np.asarray(value).dtype)
    return None if value is None else StringMetadata(entry.path, source.path)
