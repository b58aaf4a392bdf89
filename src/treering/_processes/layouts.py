"""Finds the layouts of arrays from their shardings; see `_core.layouts`."""

import functools
import itertools
import math
from typing import Any

import jax
import numpy as np

from .._core.boxes import Box, Cells, box_of, spec_axes
from .._core.layouts import Holders, Layout


@functools.lru_cache(maxsize=4096)
def layout_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout:
    """Returns the layout of arrays of a shape and sharding."""
    if (known := _of_mesh(sharding, shape)) is not None:
        return known
    holders: dict[Box, set[int]] = {}
    ranges: dict[Any, Any] = {}  # Boxes share equal ranges: with thousands of boxes this saves most of the memory.
    for device, index in sharding.devices_indices_map(shape).items():
        box = tuple(ranges.setdefault(one, one) for one in box_of(index or (), shape))
        holders.setdefault(box, set()).add(device.process_index)
    return Layout(list(holders), [sorted(own) for own in holders.values()])


def _of_mesh(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout | None:
    """Returns the layout of a sharding with a mesh, computed from mesh and spec; None for other shardings.

    `devices_indices_map` would make a box for each of thousands of devices.
    """
    if type(sharding) is not jax.NamedSharding or not isinstance(sharding.mesh, jax.sharding.Mesh):
        return None
    mesh, spec = sharding.mesh, sharding.spec
    axes = spec_axes(spec)
    plain = all(part is None or isinstance(part, str | tuple) for part in axes)
    if not plain or len(axes) > len(shape) or getattr(spec, "unreduced", None):
        return None
    names = [(part,) if isinstance(part, str) else part or () for part in axes]
    parts = [math.prod(mesh.shape[name] for name in own) for own in names] + [1] * (len(shape) - len(names))
    if any(size % n or not size for size, n in zip(shape, parts, strict=True)):
        return None
    cuts = map(_even_cuts, shape, parts)
    return Layout(Cells(cuts), _mesh_holders(mesh, tuple(itertools.chain(*names))))


@functools.lru_cache(maxsize=256)
def _even_cuts(size: int, parts: int) -> tuple[int, ...]:
    """Returns the cuts of an axis. Cached, because arrays of many shapes share them and they may be 100,000 numbers."""
    return tuple(range(0, size + 1, size // parts))


@functools.lru_cache(maxsize=256)
def _mesh_holders(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> Holders:
    """Returns, for each position along some axes of a mesh, in C order, the processes that have devices there."""
    first = [mesh.axis_names.index(name) for name in axes]
    order = [*first, *(n for n in range(mesh.devices.ndim) if n not in first)]
    numbers = np.array([device.process_index for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    rows = numbers.transpose(order).reshape(math.prod(mesh.shape[name] for name in axes), -1)
    if rows.shape[1] == 1:
        return Holders(zip(rows[:, 0].tolist(), strict=True))
    return Holders(tuple(sorted(set(row))) for row in rows.tolist())
