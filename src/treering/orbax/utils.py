"""The functions of the namespaces `utils` and `test_utils` of Orbax that programs call."""

import os
from typing import Any

import jax
import numpy as np

from ..errors import UnsupportedError
from ..stores import absolute, get
from ..stores.file_io import is_folder, remove_unused
from .namespaces import lookup
from .run import as_path
from .tree_restore import real_sharding

__getattr__ = lookup("utils")


def get_key_name(key: Any) -> int | str:
    """Returns the index or the text of a key in a path of JAX. Raises `ValueError` for a key of another kind."""
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return key.key
    raise ValueError(f"expected a key of JAX, found {key!r}")


def is_sequence_key(key: Any) -> bool:
    """Returns True for the key of an element of a sequence."""
    return isinstance(key, jax.tree_util.FlattenedIndexKey | jax.tree_util.SequenceKey)


def is_dict_key(key: Any) -> bool:
    """Returns True for the key of a value in a dict, and for an attribute."""
    return isinstance(key, jax.tree_util.DictKey | jax.tree_util.GetAttrKey)


def tuple_path_from_keypath(keypath: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a path of JAX as text."""
    return tuple(str(get_key_name(key)) for key in keypath)


def _children(node: Any) -> list[Any]:
    return jax.tree.leaves(node, is_leaf=lambda one: one is not node)


def is_empty_node(x: Any) -> bool:
    """Returns True for a container without children, and for None."""
    return not _children(x)


def is_empty_or_leaf(x: Any) -> bool:
    """Returns True for a leaf, for a container without children, and for None."""
    found = _children(x)
    return not found or found[0] is x


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns a tree as nested dicts, whose keys are text, and lists. Raises `ValueError` for one without leaves."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty_or_leaf if keep_empty_nodes else None)
    return from_flattened_with_keypath(flat)


def from_flattened_with_keypath(flat_with_keys: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Returns the nested dicts and lists that have leaves at paths of JAX. Raises `ValueError` for no leaves."""
    if not flat_with_keys:
        raise ValueError("expected leaves, found none; an empty tree may be a dict or a list")
    if not flat_with_keys[0][0]:
        return flat_with_keys[0][1]
    parts: dict[Any, list[Any]] = {}
    for (key, *rest), leaf in flat_with_keys:
        parts.setdefault(get_key_name(key), []).append((tuple(rest), leaf))
    made = {name: from_flattened_with_keypath(part) for name, part in parts.items()}
    is_list = is_sequence_key(flat_with_keys[0][0][0])
    return (
        [made.get(index) for index in range(max(made) + 1)] if is_list else made
    )  # An element without leaves is None.


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Returns what `serialize_tree` made with the structure of a target."""

    def find(path: tuple[Any, ...], _: Any) -> Any:
        found = serialized
        for name in map(get_key_name, path):
            found = found[str(name) if isinstance(found, dict) and name not in found else name]
        return found

    return jax.tree_util.tree_map_with_path(find, target, is_leaf=is_empty_or_leaf if keep_empty_nodes else None)


def to_flat_dict(tree: Any, sep: str | None = None, keep_empty_nodes: bool = False, is_leaf: Any = None) -> Any:
    """Returns the leaves of a tree by their paths: tuples of text, or with `sep` the text between which it stands."""
    is_leaf = is_leaf or (is_empty_or_leaf if keep_empty_nodes else None)
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    paths = [tuple_path_from_keypath(path) for path, _ in flat]
    return {path if sep is None else sep.join(path): leaf for path, (_, leaf) in zip(paths, flat, strict=True)}


def from_flat_dict(flat_dict: Any, target: Any = None, sep: str | None = None, *, inplace: bool = False) -> Any:
    """Returns the nested dicts that `to_flat_dict` made flat, or the structure of a target with these leaves.

    inplace: True to remove the leaves from `flat_dict`.
    """
    take = flat_dict.pop if inplace else flat_dict.__getitem__
    if target is not None:
        return jax.tree.unflatten(jax.tree.structure(target), [take(path) for path in to_flat_dict(target, sep)])
    if sep is None and () in flat_dict:
        return take(())
    made: dict[str, Any] = {}
    for key in list(flat_dict):
        *parents, name = key if sep is None else key.split(sep)
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = take(key)
    return made


def is_scalar(x: Any) -> bool:
    """Returns True for a Python number or a scalar of NumPy."""
    return isinstance(x, int | float | np.number)


def to_shape_dtype_struct(arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False) -> Any:
    """Returns the shape of an array or of its metadata as a leaf of a template, and anything without a shape as it is.

    dtype: the dtype of the result; by default that of the array.
    scalar_dtype: the Python type that a number becomes.
    support_format: True to take the layout of the array, too.
    """
    if isinstance(arr, bool | int | float | complex):
        return arr if scalar_dtype is None else scalar_dtype(arr)
    if not (hasattr(arr, "shape") and hasattr(arr, "dtype")):
        return arr
    place = getattr(arr, "format", None) if support_format else None
    place = real_sharding(getattr(arr, "sharding", None)) if place is None else place
    return jax.ShapeDtypeStruct(arr.shape, arr.dtype if dtype is None else dtype, sharding=place)


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Returns an array that each process has on all of its devices as one array, replicated on all devices of the job.

    arr: its copies, or the result of `jax.pmap`, whose first axis counts the devices.

    Raises `ValueError` if the array is not on all devices of this process.
    """
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), jax.sharding.PartitionSpec())
    copies = [shard.data for shard in sorted(arr.addressable_shards, key=lambda shard: shard.device.id)]
    if copies[0].shape != arr.shape:
        copies = [one[0] for one in copies]
    return jax.make_array_from_single_device_arrays(copies[0].shape, place, copies)


def erase_and_create_empty(directory: str | os.PathLike[str]) -> Any:
    """Deletes a directory with everything in it, makes an empty one, and returns its path.

    Raises `UnsupportedError` for a directory in a bucket, and `FileNotFoundError` if its parent is missing.
    """
    path = absolute(directory)
    if "://" in path:
        raise UnsupportedError(f"{path}: expected a directory on a disk; delete the objects in the bucket yourself")
    store = get(path)
    if is_folder(store, path):
        remove_unused(store, path)
    store.make_folder(path)
    return as_path(path)
