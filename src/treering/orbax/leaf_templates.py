"""Decides for a leaf of a checkpoint what a template must have to restore it as the program asks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from .._core import dtypes
from .._core.entries import ArrayEntry, Entry, ValueEntry
from .._core.source import Source
from .._pytree.placements import PlacementError, resolve_placement
from .._restore.array_placement import ambient_mesh
from .._restore.read_groups import as_key
from ..errors import MismatchError
from .errors import UnsupportedValueError


class LeafTemplate(NamedTuple):
    """A leaf of a template for `treering.restore`, and a function that makes the result from the restored leaf."""

    leaf: Any
    finish: Callable[[Any], Any] | None = None


def host_template(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns a NumPy array that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def is_resized(entry: Entry, shape: Any) -> TypeGuard[ArrayEntry]:
    """Returns True if an array was saved with another shape."""
    return isinstance(entry, ArrayEntry) and entry.type != "key" and shape is not None and tuple(shape) != entry.shape


def resized(entry: ArrayEntry, wanted: Any, dtype: Any, place: Any, *, on_host: bool) -> LeafTemplate:
    """Returns the template of an array that gets another shape of as many axes.

    place: its sharding, None for the default device.
    """
    shape = tuple(wanted)
    if len(shape) != len(entry.shape):
        raise MismatchError(f"{entry.path}: strict=False: expected {len(entry.shape)} axes, found the shape {shape}")

    def finish(array: Any) -> Any:
        made = np.zeros(shape, array.dtype)
        kept = tuple(slice(min(sizes)) for sizes in zip(shape, array.shape, strict=True))
        made[kept] = array[kept]
        if on_host or place is None:
            return made if on_host else jax.numpy.asarray(made)
        return jax.make_array_from_callback(shape, place, lambda index: made[index])

    return LeafTemplate(
        host_template(entry.shape, dtypes.to_numpy(entry.dtype) if dtype is None else np.dtype(dtype)), finish
    )


_SCALARS = (bool, int, float, complex)
_TYPES = {"jax.Array": jax.Array, "np.ndarray": np.ndarray, "string": str}  # as the files of Orbax name them


class Leaves:
    """Makes the templates of the leaves of a checkpoint.

    fallback: the place of JAX arrays whose saved place this job lacks. Without it they raise `MismatchError`.
    strict: False to truncate arrays, or pad them with zeros, to the shapes of a target.
    """

    def __init__(self, source: Source, fallback: Any = None, *, strict: bool = True):
        self._source, self._fallback, self._strict = source, fallback, strict
        # The places by the id of a record, which is kept alive. Making a mesh for each of thousands of arrays is slow.
        self._places: dict[int, tuple[Mapping[str, Any], Any]] = {}

    def as_saved(self, entry: Entry, dtype: Any = None) -> LeafTemplate:
        """Returns the template of the kind, the shape and the place that were saved."""
        if not isinstance(entry, ArrayEntry):
            value = entry.decode()
            if dtype is not None and type(value) in _SCALARS:
                return LeafTemplate(np.zeros((), dtype))
            return LeafTemplate(..., lambda _: value)
        if entry.type in ("jax", "jax-weak", "key"):
            return LeafTemplate(self._in_jax(entry, dtype, self._saved_place(entry), entry.type == "jax-weak"))
        wanted = dtypes.to_numpy(entry.dtype) if dtype is None else np.dtype(dtype)
        return LeafTemplate(wanted.type(0) if entry.type == "numpy-scalar" else host_template(entry.shape, wanted))

    def like(self, leaf: Any, entry: Entry) -> LeafTemplate:
        """Returns the template for a leaf of the program's own template, whose kind counts."""
        if leaf is None or leaf is ...:
            return _skipped(leaf)
        if type(leaf) in _SCALARS:
            return _scalar(type(leaf), entry, leaf)
        name = type(leaf).__name__
        if name == "StringMetadata":
            return LeafTemplate("")
        if name == "ScalarMetadata":
            return _scalar(type(np.dtype(leaf.dtype).type(0).item()), entry, None)
        if not self._strict and is_resized(entry, shape := getattr(leaf, "shape", None)):
            place = real_sharding(getattr(leaf, "sharding", None))
            on_host = isinstance(leaf, np.ndarray) or (place is None and entry.type in ("numpy", "numpy-scalar"))
            return resized(entry, shape, leaf.dtype, place, on_host=on_host)
        if isinstance(entry, ArrayEntry) and entry.type == "key" and getattr(leaf, "dtype", None) == np.uint32:
            place = real_sharding(getattr(leaf, "sharding", None))  # The leaf describes the data of the keys.
            return LeafTemplate(self._in_jax(entry, None, self._saved_place(entry) if place is None else place))
        if name in ("ArrayMetadata", "ShapeDtypeStruct"):
            return self._like_shape(leaf, entry)
        return LeafTemplate(leaf)

    def by_args(self, leaf: Any, entry: Entry, args: Any) -> LeafTemplate:
        """Returns the template for the `RestoreArgs` of a leaf. Only the shape of `leaf` counts."""
        if leaf is None or leaf is ...:
            return _skipped(leaf)
        if args is None:
            return _shaped(self.as_saved(entry), leaf, entry)
        kind, dtype = args.restore_type, args.dtype
        kind = _TYPES.get(kind, kind) if isinstance(kind, str) else kind
        if kind is type(...):
            return LeafTemplate(...)
        shape = getattr(args, "global_shape", None)
        if is_resized(entry, shape):
            if getattr(args, "strict", True):  # The restore will refuse this template.
                return LeafTemplate(host_template(tuple(args.global_shape), dtypes.to_numpy(entry.dtype)))
            return resized(entry, shape, dtype, _place_of(args), on_host=False)
        if kind is None:
            return _shaped(self.as_saved(entry, dtype), leaf, entry)
        if kind in (*_SCALARS, str, bytes):
            return _scalar(kind, entry, None)
        if not isinstance(kind, type) or not issubclass(kind, jax.Array | np.ndarray | np.generic):
            raise UnsupportedValueError(
                f"{entry.path}: restore_type={kind!r}: expected numpy.ndarray, jax.Array, a Python number or text"
            )
        if not issubclass(kind, jax.Array):
            saved = entry if isinstance(entry, ArrayEntry) else _array_of(entry, np.dtype)
            wanted = dtypes.to_numpy(saved.dtype) if dtype is None else np.dtype(dtype)
            return _shaped(LeafTemplate(host_template(saved.shape, wanted)), leaf, entry)
        place = _place_of(args)
        if isinstance(entry, ArrayEntry):
            place = self._saved_place(entry) if place is None else place
            if dtype is None and entry.type.startswith("numpy"):  # JAX may lack the 64 bits of NumPy.
                dtype = jax.dtypes.canonicalize_dtype(dtypes.to_numpy(entry.dtype))
        else:
            entry = _array_of(entry, jax.dtypes.canonicalize_dtype)
        return _shaped(LeafTemplate(self._in_jax(entry, dtype, place)), leaf, entry)

    def _like_shape(self, leaf: Any, entry: Entry) -> LeafTemplate:
        place = real_sharding(leaf.sharding)
        if isinstance(entry, ValueEntry) and place is None and leaf.shape == ():
            return LeafTemplate(np.zeros((), leaf.dtype))
        if place is None and isinstance(entry, ArrayEntry):
            if type(leaf).__name__ == "ArrayMetadata" or entry.type in ("numpy", "numpy-scalar"):
                return LeafTemplate(host_template(tuple(leaf.shape), np.dtype(leaf.dtype)))
            place = self._saved_place(entry)
        weak = bool(getattr(leaf, "weak_type", False))
        return LeafTemplate(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=weak))

    def _in_jax(self, entry: ArrayEntry, dtype: Any, place: Any, weak: bool = False) -> Any:
        if entry.type == "key":
            data = jax.ShapeDtypeStruct(entry.shape, "uint32")
            key = jax.eval_shape(lambda found: as_key(found, entry), data)
            return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=place)
        wanted = dtypes.to_numpy(entry.dtype) if dtype is None else dtype
        return jax.ShapeDtypeStruct(entry.shape, wanted, sharding=place, weak_type=weak and dtype is None)

    def _saved_place(self, entry: ArrayEntry) -> Any:
        record = self._source.sharding(entry)
        if record is None:
            return None
        if id(record) not in self._places:
            self._places[id(record)] = record, self._resolved(entry, record)
        return self._places[id(record)][1]

    def _resolved(self, entry: ArrayEntry, record: Mapping[str, Any]) -> Any:
        try:
            return resolve_placement(record, ambient_mesh(), exactly=False).sharding
        except PlacementError as error:
            if self._fallback is not None:
                return self._fallback
            raise MismatchError(
                f"{entry.path}: expected a job that has the saved place of the array, found {error}; give a target "
                "with shardings, or fallback_sharding="
            ) from None


def real_sharding(sharding: Any) -> Any:
    """Returns the sharding of JAX that a `ShardingMetadata` describes, and any other value as it is."""
    make = getattr(sharding, "to_jax_sharding", None)
    return sharding if make is None else make()


def _place_of(args: Any) -> Any:
    """Returns the sharding that `ArrayRestoreArgs` say, or None."""
    place = real_sharding(getattr(args, "sharding", None))
    if place is None and getattr(args, "mesh", None) is not None and args.mesh_axes is not None:
        return jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    return place


def _skipped(leaf: Any) -> LeafTemplate:
    """Returns the template for a leaf that the program does not want: None, or `PLACEHOLDER`."""
    return LeafTemplate(..., lambda _: leaf)


def _array_of(entry: ValueEntry, kept: Callable[[Any], Any]) -> ArrayEntry:
    """Returns the entry of the array without axes that a Python number becomes. `kept` chooses its dtype."""
    return ArrayEntry(entry.path, "numpy", np.dtype(kept(np.asarray(entry.decode()).dtype)).name, ())


def _scalar(kind: type, entry: Entry, leaf: Any) -> LeafTemplate:
    """Returns the template of a Python number or text of a type, from a number or an array without axes."""
    template = LeafTemplate(kind() if leaf is None else leaf)
    if not isinstance(entry, ArrayEntry) or entry.shape or entry.type == "key":
        return template
    found = dtypes.to_numpy(entry.dtype)
    fits = {
        bool: found.kind == "b",
        int: dtypes.is_integer(found),
        float: dtypes.is_float(found),
        complex: dtypes.is_float(found) or found.kind == "c",
    }
    if not fits.get(kind, False):
        return template
    return LeafTemplate(host_template((), found), lambda array: kind(array.item()))


def _shaped(made: LeafTemplate, leaf: Any, entry: Entry) -> LeafTemplate:
    """Returns a template with the shape that the program expects, if its leaf has one and it is another."""
    shape = getattr(leaf, "shape", None)
    if shape is None or not isinstance(entry, ArrayEntry) or entry.type == "key" or tuple(shape) == entry.shape:
        return made
    return LeafTemplate(jax.ShapeDtypeStruct(tuple(shape), dtypes.to_numpy(entry.dtype)))
