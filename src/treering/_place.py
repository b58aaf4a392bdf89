"""From host arrays to JAX arrays: which sharding each gets, and the transfer in one batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ._sharding import Box, box_of, whole
from .errors import MismatchError

Where = Sharding | None  # None: the default device, uncommitted


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
            wishes = jax.tree.leaves(
                jax.tree.map(
                    lambda s, part: jax.tree.map(lambda _: _Box(s), part, is_leaf=lambda x: x is None),
                    wish,
                    template,
                    is_leaf=is_leaf,
                ),
                is_leaf=lambda x: isinstance(x, _Box),
            )
            wishes = [box.value for box in wishes]
        except (ValueError, TypeError) as error:
            raise MismatchError(f"sharding: expected a sharding or a prefix of the template's tree: {error}") from None
    return [_concrete(w) for w in wishes]


class _Box:
    def __init__(self, value: Any):
        self.value = value


def _own(leaf: Any) -> Any:
    """The template's own sharding; an uncommitted array has none."""
    if isinstance(leaf, jax.Array) and not getattr(leaf, "committed", True):
        return None
    return getattr(leaf, "sharding", None)


def _concrete(wish: Any) -> Where:
    """A sharding on real devices: specs and abstract meshes are taken to the mesh that is set."""
    mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    mesh = None if mesh is None or mesh.empty else mesh
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


def boxes(where: Where, shape: tuple[int, ...]) -> list[Box]:
    """The distinct boxes of an array that the devices of this process need."""
    if where is None or isinstance(where, SingleDeviceSharding):
        return [whole(shape)]
    indices = where.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(box_of(index or (), shape) for index in indices))


def put(items: Sequence[tuple[Where, tuple[int, ...], Sequence[np.ndarray]]]) -> list[jax.Array]:
    """Makes JAX arrays of (sharding, shape, one host array per box). One batch for all, adopted where possible."""
    free = [arrays[0] for where, _, arrays in items if where is None]
    bound: list[np.ndarray] = []
    places: list[Any] = []
    for where, shape, arrays in items:
        if isinstance(where, SingleDeviceSharding):
            bound.append(arrays[0])
            places.append(where)
        elif where is not None:
            at = dict(zip(boxes(where, shape), arrays, strict=True))
            for device, index in where.addressable_devices_indices_map(shape).items():
                bound.append(at[box_of(index or (), shape)])
                places.append(SingleDeviceSharding(device, memory_kind=where.memory_kind))
    free_out = iter(jax.device_put(free))
    bound_out = iter(jax.device_put(bound, places))
    out: list[jax.Array] = []
    for where, shape, _ in items:
        if where is None:
            out.append(next(free_out))
        elif isinstance(where, SingleDeviceSharding):
            out.append(next(bound_out))
        else:
            shards = [next(bound_out) for _ in where.addressable_devices_indices_map(shape)]
            out.append(jax.make_array_from_single_device_arrays(shape, where, shards))
    return out


def weaken(array: jax.Array) -> jax.Array:
    """The same array with a weak type, which JAX has no public way to make."""
    aval = core.ShapedArray(array.shape, array.dtype, weak_type=True)
    shards = [shard.data for shard in array.addressable_shards]
    make: Any = type(array)
    return make(aval, array.sharding, shards, committed=array.committed)
