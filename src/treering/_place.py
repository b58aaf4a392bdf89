"""From host arrays to JAX arrays: which sharding each gets, and the transfer in one batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._sharding import Box, box_of, whole
from ._tree import flatten
from .errors import MismatchError

Where = Sharding | None  # None: the default device, uncommitted
_UNCOMMITTED = object()


def resolve(
    wish: Any, template: Any, paths: Sequence[str], leaves: Sequence[Any], arrays: Sequence[Any]
) -> list[Where]:
    """The sharding of every leaf.

    `wish` is what the caller passed: None (the template's own), one sharding or `PartitionSpec`, a function
    of (path, shape, dtype), or a pytree of such that is a prefix of the template. `arrays` are shaped things.
    """
    if wish is None:
        wishes = [_own(leaf) for leaf in leaves]
    elif isinstance(wish, Sharding | PartitionSpec):
        wishes = [wish] * len(leaves)
    elif callable(wish):
        wishes = [None if a is None else wish(p, a.shape, a.dtype) for p, a in zip(paths, arrays, strict=True)]
    else:
        is_leaf: Callable[[Any], bool] = lambda x: x is None or isinstance(x, Sharding | PartitionSpec)  # noqa: E731
        try:
            spread = jax.tree.map(lambda s, part: [s] * len(flatten(part)[0]), wish, template, is_leaf=is_leaf)
            wishes = jax.tree.leaves(spread, is_leaf=is_leaf)
        except (ValueError, TypeError) as error:
            raise MismatchError(f"sharding: expected a sharding or a prefix of the template's tree: {error}") from None
    mesh = _ambient_mesh()
    return [_concrete(w, mesh) for w in wishes]


def _own(leaf: Any) -> Any:
    """The template's own sharding; an uncommitted array stays uncommitted, whatever mesh is set."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return _UNCOMMITTED
    return getattr(leaf, "sharding", None)


def _ambient_mesh() -> Any:
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _concrete(wish: Any, mesh: Any) -> Where:
    """A sharding on real devices: specs and abstract meshes are taken to the mesh that is set."""
    if wish is _UNCOMMITTED:
        return None
    if wish is None:
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())
    if isinstance(wish, NamedSharding) and isinstance(wish.mesh, jax.sharding.AbstractMesh):
        wish = wish.spec
    if isinstance(wish, PartitionSpec):
        if mesh is None:
            raise MismatchError(f"sharding: {wish} needs a mesh; set one with jax.set_mesh, or pass a NamedSharding")
        return NamedSharding(mesh, wish)
    if not isinstance(wish, Sharding):
        raise MismatchError(f"sharding: expected a jax.sharding.Sharding or a PartitionSpec, found {wish!r}")
    return wish


class Item(msgspec.Struct, frozen=True, gc=False):
    """A JAX array to be made of one host array per box."""

    where: Any
    shape: tuple[int, ...]
    arrays: list[np.ndarray]


def on_one_device(where: Sharding) -> bool:
    """Whether an array with this sharding is one buffer."""
    return isinstance(where, SingleDeviceSharding) or where.num_devices == 1


def boxes(where: Where, shape: tuple[int, ...]) -> list[Box]:
    """The distinct boxes of an array that the devices of this process need."""
    if where is None:
        return [whole(shape)]
    indices = where.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(box_of(index or (), shape) for index in indices))


def put(items: Sequence[Item]) -> list[jax.Array]:
    """Makes the JAX arrays: one batch for all, adopted instead of copied where the backend can."""
    free: list[np.ndarray] = []
    bound: list[np.ndarray] = []
    places: list[Any] = []
    for item in items:
        if item.where is None:
            free.append(item.arrays[0])
        elif on_one_device(item.where):
            bound.append(item.arrays[0])
            places.append(item.where)
        else:
            at = dict(zip(boxes(item.where, item.shape), item.arrays, strict=True))
            for device, index in item.where.addressable_devices_indices_map(item.shape).items():
                bound.append(at[box_of(index or (), item.shape)])
                places.append(SingleDeviceSharding(device, memory_kind=item.where.memory_kind))
    free_out = iter(jax.device_put(free))
    bound_out = iter(jax.device_put(bound, places))
    return [_made(item, free_out, bound_out) for item in items]


def _made(item: Item, free: Iterator[jax.Array], bound: Iterator[jax.Array]) -> jax.Array:
    if item.where is None:
        return next(free)
    if on_one_device(item.where):
        return next(bound)
    shards = [next(bound) for _ in item.where.addressable_devices_indices_map(item.shape)]
    return jax.make_array_from_single_device_arrays(item.shape, item.where, shards)


def weaken(array: jax.Array) -> jax.Array:
    """The same array with a weak type, which JAX has no public way to make."""
    aval = core.ShapedArray(array.shape, array.dtype, weak_type=True)
    shards = [shard.data for shard in array.addressable_shards]
    make: Any = type(array)
    return make(aval, array.sharding, shards, committed=array.committed)
