"""Defines the arguments of saves and restores of each kind of item, and the options of single leaves."""

import dataclasses
from collections.abc import Iterator, KeysView, Mapping, ValuesView
from typing import Any

from ..errors import MismatchError
from .errors import warn_unused
from .registration import CheckpointArgs


class Composite(Mapping[str, Any], CheckpointArgs):
    """Holds arguments or results by the names of items, which are keys and attributes. It cannot be changed."""

    _items: Mapping[str, Any]

    def __init__(self, **items: Any):
        taken = set(dir(self))
        object.__setattr__(self, "_items", items)
        for name, value in items.items():
            if name.startswith("__"):
                raise MismatchError(f"Composite: expected names of items without leading '__', found {name!r}")
            if name not in taken:  # An item with the name of a method is only a key.
                object.__setattr__(self, name, value)

    def __getitem__(self, key: str) -> Any:
        try:
            return self._items[key]
        except KeyError:
            raise KeyError(f"there is no item {key!r}; expected one of {', '.join(self._items) or 'none'}") from None

    def __getattr__(self, key: str) -> Any:
        if key == "_items" or (key.startswith("__") and key.endswith("__")):  # asked by `copy` and `pickle`
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise MismatchError(f"Composite: {key} cannot be set; make a new Composite")

    def __reduce__(self) -> tuple[Any, ...]:
        return _composite_of, (dict(self._items),)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __and__(self, other: Mapping[str, Any]) -> "Composite":
        return Composite(**{name: value for name, value in self._items.items() if name in other})

    def __or__(self, other: Mapping[str, Any]) -> "Composite":
        return Composite(**{**self._items, **other})

    def __repr__(self) -> str:
        return f"Composite({dict(self._items)!r})"

    def keys(self) -> KeysView[str]:
        return self._items.keys()

    def values(self) -> ValuesView[Any]:
        return self._items.values()


def _composite_of(items: Mapping[str, Any]) -> Composite:
    return Composite(**items)


@dataclasses.dataclass
class StandardSave(CheckpointArgs):
    """Saves a tree of arrays and Python numbers.

    item: the tree.
    save_args: a tree of `SaveArgs`, or of None, with the structure of `item`.
    custom_metadata: JSON, recorded with the checkpoint.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        _refuse_metadata(self.item)


@dataclasses.dataclass
class StandardRestore(CheckpointArgs):
    """Restores a tree.

    item: the template, of arrays, `jax.ShapeDtypeStruct`, numbers, or metadata. Without it the result is nested dicts
        and lists, with the kinds and the shardings that were saved.
    strict: False to truncate arrays, or pad them with zeros, to the shapes of the template.
    support_layout: accepted; a layout in the template is always applied.
    fallback_sharding: the place of JAX arrays whose saved sharding this job lacks.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None

    def __post_init__(self) -> None:
        self.item = tree_in(self.item)


@dataclasses.dataclass
class PyTreeSave(CheckpointArgs):
    """Saves a tree.

    item: the tree.
    save_args: a tree of `SaveArgs`, or of None, with the structure of `item`.
    ocdbt_target_data_file_size: has no effect, which is logged. Treering chooses the sizes of files.
    custom_metadata: JSON, recorded with the checkpoint.
    """

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        _refuse_metadata(self.item)


@dataclasses.dataclass
class PyTreeRestore(CheckpointArgs):
    """Restores a tree.

    item: the structure of the result. Only shapes of its leaves matter; their kinds are those that were saved, or those
        that `restore_args` says.
    restore_args: a tree of `RestoreArgs` with the structure of `item`.
    transforms, transforms_default_to_original, legacy_transform_fn: not supported, except for an empty `transforms`,
        which leaves out what `item` lacks.
    partial_restore: leaves out what `item` lacks.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False

    def __post_init__(self) -> None:
        self.item = tree_in(self.item)
        self.restore_args = tree_in(self.restore_args)
        self.transforms = tree_in(self.transforms)


@dataclasses.dataclass
class JsonSave(CheckpointArgs):
    """Saves `item`, a value of JSON."""

    item: Any


@dataclasses.dataclass
class JsonRestore(CheckpointArgs):
    """Restores a value of JSON. `item` is not used."""

    item: Any = None


@dataclasses.dataclass
class ArraySave(CheckpointArgs):
    """Saves `item`, an array or a number. `save_args` is a `SaveArgs`."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class ArrayRestore(CheckpointArgs):
    """Restores an array or a number. `item` is its template, `restore_args` a `RestoreArgs`."""

    item: Any = None
    restore_args: Any = None


@dataclasses.dataclass
class JaxRandomKeySave(CheckpointArgs):
    """Saves `item`, a PRNG key of JAX, typed or not."""

    item: Any
    save_args: Any = None


@dataclasses.dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    """Restores a PRNG key of JAX. `restore_args` is a `RestoreArgs`."""

    restore_args: Any = None


@dataclasses.dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Saves `item`, a state that `numpy.random.get_state` returned: a tuple, or a dict."""

    item: Any


@dataclasses.dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restores the state of NumPy's generator."""


def tree_in(value: Any) -> Any:
    """Returns the tree within a `TreeMetadata`, and any other value as it is."""
    return value.tree if type(value).__name__.endswith("TreeMetadata") else value


def _refuse_metadata(item: Any) -> None:
    if tree_in(item) is not item:
        raise MismatchError("item: expected a tree of arrays, found the metadata of one")


PLACEHOLDER = ...  # a leaf of a template that stays as it is


@dataclasses.dataclass
class SaveArgs:
    """Options of a leaf in a save.

    dtype: the dtype to which the leaf is cast.
    aggregate, chunk_byte_size, shard_axes: have no effect, which is logged.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        warn_unused(
            "SaveArgs",
            aggregate=(self.aggregate, False),
            chunk_byte_size=(self.chunk_byte_size, None),
            shard_axes=(tuple(self.shard_axes), ()),
        )


@dataclasses.dataclass
class RestoreArgs:
    """Options of a leaf in a restore.

    restore_type: `numpy.ndarray`, `jax.Array`, a Python type, or None for the kind that was saved.
    dtype: the dtype of the result. Floats are cast to floats, and integers to integers that hold the values.
    """

    restore_type: Any = None
    dtype: Any = None


def _jax_array() -> Any:
    import jax

    return jax.Array


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Options of an array of JAX.

    sharding: its place; or else `mesh` and `mesh_axes`; or else the saved place.
    global_shape, shape: the shape that is expected. Unless `strict`, the array is truncated, or padded with zeros.
    """

    restore_type: Any = dataclasses.field(default_factory=_jax_array)
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if self.shape is not None and self.global_shape is not None and self.shape != self.global_shape:
            raise MismatchError(
                f"ArrayRestoreArgs: expected shape= and global_shape= to be equal, found {self.shape} and "
                f"{self.global_shape}"
            )
        self.shape = self.global_shape = self.global_shape if self.shape is None else self.shape


@dataclasses.dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """Options of an array that one replica reads. Treering divides reads between processes by itself; see `read=`."""

    single_replica_sharding: Any = None
