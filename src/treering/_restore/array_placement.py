"""Makes JAX arrays of host arrays: chooses the sharding of each array, and transfers them in one batch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax import core
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._core.boxes import Box, box_of, full_box, spec_axes
from .._pytree import flax, jax_private
from .._pytree.walk import flatten_leaves
from ..errors import MismatchError

ShardingOrNone = Sharding | None  # None stands for the default device; JAX may move such an uncommitted array
JAX_MAKES = ("jax", "key")  # values of `LeafTarget.make` that give a JAX array
_MAX_LINES = 20  # arrays that an error names
UNCOMMITTED = object()  # a wish for the default device


def choose_shardings(
    wish: Any, template: Any, paths: Sequence[str], leaves: Sequence[Any], arrays: Callable[[], Sequence[Any]]
) -> tuple[list[ShardingOrNone], dict[int, tuple[int, ...]]]:
    """Returns the place of every leaf, and the layouts, by the number of the leaf, that are wished for.

    wish: what the caller passed as `sharding=`; see `requested_shardings`.
    arrays: returns for each leaf an object with the shape and dtype, and None for a leaf that is not an array.
    """
    wishes, layouts = split_formats(requested_shardings(wish, template, paths, leaves, arrays))
    check_layouts(layouts, paths, arrays)
    return on_real_devices(wishes, paths, arrays), layouts


def requested_shardings(
    wish: Any, template: Any, paths: Sequence[str], leaves: Sequence[Any], arrays: Callable[[], Sequence[Any]]
) -> list[Any]:
    """Returns for every leaf the sharding or `PartitionSpec` that the caller wishes, or None.

    wish: None (the template's own), one sharding, `PartitionSpec` or `Format` (a layout and a sharding), a function of
        (path, shape, dtype), or a pytree of these that is a prefix of the template.

    Raises `MismatchError` for anything else.
    """
    if wish is None:
        boxed = (flax.partitioning(template) if ambient_mesh() else None) or [None] * len(leaves)
        return [
            (leaf.sharding if type(leaf) is jax.ShapeDtypeStruct else _own_sharding(leaf)) or spec
            for leaf, spec in zip(leaves, boxed, strict=True)
        ]
    kinds = Sharding | PartitionSpec | Format
    if isinstance(wish, kinds):
        return [wish] * len(leaves)
    if callable(wish):
        return [None if a is None else wish(p, a.shape, a.dtype) for p, a in zip(paths, arrays(), strict=True)]
    is_leaf: Callable[[Any], bool] = lambda x: x is None or isinstance(x, kinds)  # noqa: E731
    try:
        spread = jax.tree.map(lambda s, part: [s] * len(flatten_leaves(part)[0]), wish, template, is_leaf=is_leaf)
        return jax.tree.leaves(spread, is_leaf=is_leaf)
    except (ValueError, TypeError) as error:
        raise MismatchError(f"sharding: expected a sharding or a prefix of the template's tree: {error}") from None


def split_formats(wishes: Sequence[Any]) -> tuple[list[Any], dict[int, tuple[int, ...]]]:
    """Returns the wishes with the sharding of each `Format`, and the layouts of these by the number of the leaf."""
    layouts: dict[int, tuple[int, ...]] = {}
    places = list(wishes)
    for n, wish in enumerate(wishes):
        if isinstance(wish, Format):
            places[n] = wish.sharding
            if order := getattr(wish.layout, "major_to_minor", None):
                layouts[n] = tuple(order)
    return places, layouts


def check_layouts(
    layouts: Mapping[int, tuple[int, ...]], paths: Sequence[str], arrays: Callable[[], Sequence[Any]]
) -> None:
    """Raises `MismatchError` for a layout that does not order all axes of its array."""
    for n, order in layouts.items():
        array = arrays()[n]
        if array is not None and sorted(order) != [*range(len(array.shape))]:
            raise MismatchError(
                f"{paths[n] or '(root)'}: expected a layout that orders the {len(array.shape)} axes of "
                f"{list(array.shape)}, found the order {order}; give this array a Format of its own, or a sharding"
            )


def on_real_devices(
    wished: Sequence[Any], paths: Sequence[str], arrays: Callable[[], Sequence[Any]]
) -> list[ShardingOrNone]:
    """Returns the place of every leaf on real devices: as wished, or else on the mesh that is set, if any.

    Raises `MismatchError` for a wish that is not a place, and for arrays that JAX cannot spread as wished.
    """
    mesh = ambient_mesh()
    # JAX makes a sharding for each array; here equal ones become one object
    known: dict[ShardingOrNone, ShardingOrNone] = {}
    meant: dict[Any, ShardingOrNone] = {}  # places by the sharding that was wished
    places: list[ShardingOrNone] = []
    for one, path in zip(wished, paths, strict=True):
        if one is UNCOMMITTED or (one is None and mesh is None):
            places.append(None)
            continue
        place = meant.get(one) if isinstance(one, Sharding) else None
        if place is None:
            place = _concrete(one, mesh, path)
            place = known.setdefault(place, place)
            if isinstance(one, Sharding):
                meant[one] = place
        places.append(place)
    if any(isinstance(place, NamedSharding) for place in known):
        _check_shapes(places, paths, arrays())
    return places


def _check_shapes(places: Sequence[ShardingOrNone], paths: Sequence[str], arrays: Sequence[Any]) -> None:
    """Raises `MismatchError` for arrays that JAX cannot spread as wished.

    Such an array has too few axes for the spec, or an axis that the mesh does not divide evenly.
    """
    problems: list[str] = []
    ranks: dict[PartitionSpec, int] = {}  # axes that each spec needs which has too many for some array
    for place, path, array in zip(places, paths, arrays, strict=True):
        if array is not None and isinstance(place, NamedSharding):
            try:
                place.shard_shape(array.shape)
            except (ValueError, IndexError) as error:
                why: Any = error
                rank = max([n for n, axis in enumerate(spec_axes(place.spec), 1) if axis is not None], default=0)
                if rank > len(array.shape):
                    ranks[place.spec] = rank
                    why = f"the array has {len(array.shape)} axes, and the spec divides axis {rank - 1}"
                problems.append(f"  {path or '(root)'}: {list(array.shape)} on {place.spec}: {why}")
    if len(problems) > _MAX_LINES:
        problems[_MAX_LINES:] = [f"  and {len(problems) - _MAX_LINES:,} more"]
    for spec, rank in ranks.items():
        where = spec if ambient_mesh() else f"NamedSharding(mesh, {spec})"
        called = f"lambda path, shape, dtype: {where} if len(shape) >= {rank} else None"
        problems.append(f"sharding={called} leaves out arrays with fewer axes")
    if problems:
        raise MismatchError("\n".join(["expected shardings that fit the shapes:", *problems]))


def _own_sharding(leaf: Any) -> Any:
    """Returns the template's own sharding, or None. An uncommitted array stays uncommitted, even if a mesh is set."""
    if type(leaf) is np.ndarray:  # tested first, because the test for an array of JAX is slow
        return None
    if isinstance(leaf, type):  # A class may have the attributes of an array.
        return None
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return UNCOMMITTED
    return getattr(leaf, "sharding", None)


def ambient_mesh() -> Any:
    """Returns the mesh that `jax.set_mesh` has set, or None."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # raised while JAX traces, for example an `init` that restores something itself
        return None
    return None if mesh.empty else mesh


def _concrete(wish: Any, mesh: Any, path: str) -> ShardingOrNone:
    """Returns a sharding on real devices. A spec or an abstract mesh refers to the mesh that is set.

    Raises `MismatchError` if no mesh is set for it, if it does not fit the mesh, and for anything but a sharding.
    """
    if wish is None:
        return NamedSharding(mesh, PartitionSpec())
    memory_kind = None
    if isinstance(wish, NamedSharding) and isinstance(wish.mesh, jax.sharding.AbstractMesh):
        wish, memory_kind = wish.spec, wish.memory_kind
    if isinstance(wish, PartitionSpec):
        if mesh is None:
            raise MismatchError(f"{path}: {wish} needs a mesh; set one with jax.set_mesh, or pass a NamedSharding")
        try:
            wish = NamedSharding(mesh, wish, memory_kind=memory_kind)
        except ValueError as error:
            raise MismatchError(f"{path}: {wish} does not fit the mesh that is set: {error}") from None
    if not isinstance(wish, Sharding):
        raise MismatchError(f"{path}: sharding: expected a Sharding, PartitionSpec or Format, found {wish!r}")
    spec = getattr(wish, "spec", None)
    if unreduced := getattr(spec, "unreduced", None):
        axes = ", ".join(sorted(map(str, unreduced)))
        raise MismatchError(
            f"{path}: expected a sharding of complete values, found {spec}, of partial sums over the mesh axes "
            f"{axes}; restore without unreduced=, and make partial sums by jax.reshard"
        )
    return wish


class ArrayToPut(msgspec.Struct, frozen=True, gc=False):
    """A JAX array that is still to be made, of one host array per box.

    It needs no host array here if all its devices belong to other processes.
    """

    where: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak: bool
    arrays: list[np.ndarray]


@functools.lru_cache(maxsize=1024)
def single_device(where: Sharding) -> Any:
    """Returns the device if an array with this sharding is one buffer on a device of this process, or else None."""
    one = isinstance(where, SingleDeviceSharding) or where.num_devices == 1
    return next(iter(where.device_set)) if one and where.is_fully_addressable else None


def key_data_sharding(where: ShardingOrNone) -> ShardingOrNone:
    """Returns the sharding for the data of typed keys, which have one more axis, or None if it cannot be derived."""
    return where if where is None or isinstance(where, NamedSharding) or single_device(where) else None


def local_boxes(where: ShardingOrNone, shape: tuple[int, ...]) -> list[Box]:
    """Returns the distinct boxes of an array that the devices of this process need."""
    if where is None:
        return [full_box(shape)]
    indices = where.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(box_of(index or (), shape) for index in indices))


def put_arrays(items: Sequence[ArrayToPut]) -> list[jax.Array]:
    """Makes the JAX arrays. A backend that can adopts the memory of the host arrays instead of copying it."""
    if not items:
        return []
    put_shards = jax_private.put_shards()
    try:
        return _put_publicly(items) if put_shards is None else _put_quickly(items, put_shards)
    except (AttributeError, TypeError):  # This version of JAX has changed the private function.
        return _put_publicly(items)


def _put_quickly(items: Sequence[ArrayToPut], put_shards: Callable[..., jax.Array]) -> list[jax.Array]:
    """Makes the arrays with the private function that `jax.device_put` calls last, in a tenth of the time.

    For 5,000 small arrays, `jax.device_put` spends 65 of 75 ms before it calls that function. The function also makes
    sharded and weakly typed arrays directly.
    """
    free = jax.device_put(np.zeros(0, np.int8)).sharding
    out: list[jax.Array] = []
    last, device = free, single_device(free)
    alike, aval = items[0], _aval(items[0].shape, items[0].dtype, items[0].weak, free)
    for item in items:  # Thousands in a row may have one shape and one device, so the last type is reused.
        where = free if item.where is None else item.where
        moved = where is not last
        if moved:
            last, device = where, single_device(where)
        if moved or item.shape != alike.shape or item.dtype is not alike.dtype or item.weak != alike.weak:
            alike, aval = item, _aval(item.shape, item.dtype, item.weak, where)
        shards, devices = (item.arrays, [device]) if device else _shards(item, where)
        out.append(put_shards(aval, where, shards, devices, item.where is not None))
    return out


def _put_publicly(items: Sequence[ArrayToPut]) -> list[jax.Array]:
    shards: list[np.ndarray] = []
    places: list[Any] = []
    for item in items:
        if item.where is not None:
            found, devices = _shards(item, item.where)
            shards += found
            places += [SingleDeviceSharding(d, memory_kind=item.where.memory_kind) for d in devices]
    free = iter(jax.device_put([item.arrays[0] for item in items if item.where is None]))
    bound = iter(jax.device_put(shards, places))
    out: list[jax.Array] = []
    for item in items:
        if item.where is None:
            array = next(free)
        else:
            own = [next(bound) for _ in item.where.addressable_devices]
            array = jax.make_array_from_single_device_arrays(item.shape, item.where, own, dtype=item.dtype)
        out.append(_weaken(array) if item.weak else array)
    return out


def _shards(item: ArrayToPut, where: Sharding) -> tuple[list[np.ndarray], list[Any]]:
    if device := single_device(where):
        return item.arrays, [device]
    at = dict(zip(local_boxes(where, item.shape), item.arrays, strict=True))
    indices = where.addressable_devices_indices_map(item.shape)
    return [at[box_of(index or (), item.shape)] for index in indices.values()], list(indices)


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype[Any], weak: bool, where: Sharding) -> Any:
    return jax_private.placed_aval(core.ShapedArray(shape, dtype, weak_type=weak), where)


def _weaken(array: jax.Array) -> jax.Array:
    """Returns the array with a weak type. JAX has no public function for that either."""
    return _remake(array, weak=True, committed=array.committed)


def uncommitted(array: jax.Array) -> jax.Array:
    """Returns the array uncommitted: it stays where it is, and JAX may move it. JAX has no public function for that."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = uncommitted(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return _remake(array, weak=array.aval.weak_type, committed=False)


def _remake(array: jax.Array, *, weak: bool, committed: bool) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    make: Any = type(array)
    return make(_aval(array.shape, array.dtype, weak, array.sharding), array.sharding, shards, committed=committed)
