"""Converts the places of arrays between shardings of a job and JSON in a checkpoint."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from .._core.boxes import spec_axes

CAST: Mapping[str, Any] = {"cast": True}  # the record of a NumPy array that was cast; it has no place
Layout = tuple[int, ...] | None  # the axes from major to minor; None for row-major


class Placement(NamedTuple):
    """The place of an array in this job. Without a sharding it is uncommitted, on the default device."""

    sharding: Sharding | None
    layout: Layout = None
    committed: bool = True


class PlacementError(Exception):
    """This job cannot place an array where another job had it. The text says why."""


@functools.lru_cache(maxsize=1024)
def placement_to_json(sharding: Sharding, committed: bool, layout: Layout, cast: bool) -> Mapping[str, Any]:
    """Returns a place as JSON; see `docs/format.md`. It is one object for all arrays with the same place.

    cast: True if the array is saved in another dtype than it has.
    """
    found = _describe(sharding, committed, layout)
    return {**found, "cast": True} if cast else found


def _describe(sharding: Sharding, committed: bool, layout: Layout) -> dict[str, Any]:
    try:
        if isinstance(sharding, SingleDeviceSharding):
            found = _describe_device(sharding, committed)
        else:
            found = _describe_mesh(sharding)
    except PlacementError as error:
        return {"unrecorded": str(error)}
    memory, device = sharding.memory_kind, next(iter(sharding.addressable_devices), None)
    if device is not None and memory not in (None, device.default_memory().kind):
        found["memory_kind"] = memory
    if device is not None and device.platform != jax.default_backend():
        found["platform"] = device.platform
    if "mesh" not in found and {"memory_kind", "platform"} & found.keys():
        found.setdefault("device", 0)  # not the default device, even if it is not committed
    if layout is not None:
        found["layout"] = list(layout)
    return found


def layout_of(array: Any) -> Layout:
    """Returns the axes of a JAX array from major to minor, or None if it is row-major."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    if not (array.is_fully_addressable or array.addressable_shards):
        return None  # This process has no part of the array.
    layout = array.format.layout
    order = None if layout is None else tuple(layout.major_to_minor)
    return None if order is None or order == tuple(range(array.ndim)) else order


def _describe_device(sharding: SingleDeviceSharding, committed: bool) -> dict[str, Any]:
    (device,) = sharding.device_set
    local = jax.local_devices(backend=device.client)
    if device not in local:
        raise PlacementError("a device of another process")
    number = local.index(device)
    found: dict[str, Any] = {"device": number} if number or committed else {}
    if not committed:
        found["committed"] = False
    found["job_devices"] = len(local)
    if jax.process_count() > 1:
        found["local"] = True
    return found


def _describe_mesh(sharding: Sharding) -> dict[str, Any]:
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh, Mesh):
        raise PlacementError(f"a {type(sharding).__name__} over {sharding.num_devices} devices")
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or not all(isinstance(name, str) for name in mesh.axis_names):
        raise PlacementError(f"{spec} on a mesh with the axes {mesh.axis_names}")
    found: dict[str, Any] = {"mesh": dict(mesh.shape), "spec": [_axis_to_json(axis) for axis in spec_axes(spec)]}
    if reduced := getattr(spec, "reduced", None):
        found["reduced"] = sorted(reduced)
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        found["axis_types"] = [kind.name.lower() for kind in mesh.axis_types]
    devices = list(mesh.devices.flat)
    own = {device.process_index for device in devices} == {jax.process_index()}
    local = own and jax.process_count() > 1
    client = devices[0].client
    everything = jax.local_devices(backend=client) if local else jax.devices(client)
    numbers = {device: n for n, device in enumerate(everything)}
    order = [numbers[device] for device in devices]
    if order != list(range(len(order))):
        found["devices"] = order
    found["job_devices"] = len(everything)
    if local:
        found["local"] = True
    return found


def _axis_to_json(axis: Any) -> Any:
    if axis is PartitionSpec.UNCONSTRAINED:
        raise PlacementError("a PartitionSpec with an unconstrained axis")
    return list(axis) if isinstance(axis, tuple) else axis


def _devices(found: Mapping[str, Any], *, local: bool) -> Sequence[Any]:
    """Returns the devices of this process, or of the job, on the recorded platform."""
    platform = found.get("platform")
    try:
        return jax.local_devices(backend=platform) if local else jax.devices(platform)
    except RuntimeError:
        raise PlacementError(f"{platform} devices, which this job lacks") from None


def resolve_placement(found: Mapping[str, Any], ambient: Any, *, exactly: bool) -> Placement:
    """Returns the place in this job that corresponds to a recorded place.

    An array on a mesh goes to a mesh of the recorded devices. A set mesh with the recorded axes is used instead if
    `exactly` is False, or if the recorded mesh spanned all devices of its job and this job has others.

    found: what `placement_to_json` returned in the job that saved, or the mesh and spec that another format records.
    ambient: the mesh that is set, or None.
    exactly: True if this job must have as many devices as the one that saved. Only the default device is the same in
        all jobs. If False, a set mesh without the recorded axes is an error.

    Raises `PlacementError` if this job has no such place.
    """
    if "unrecorded" in found:
        raise PlacementError(str(found["unrecorded"]))
    try:
        sharding = _on_mesh(found, ambient, exactly) if "mesh" in found else _on_device(found, exactly)
    except PlacementError:
        raise
    except Exception as error:  # The file may contain anything, and JAX raises many kinds of errors for it.
        raise PlacementError(f"a place that JAX refuses: {error}") from None
    layout = tuple(found.get("layout") or ())
    is_order = layout and sorted(layout) == list(range(len(layout)))
    return Placement(sharding, layout if is_order else None, "mesh" in found or bool(found.get("committed", True)))


def _on_mesh(found: Mapping[str, Any], ambient: Any, exactly: bool) -> Sharding:
    reduced: dict[str, Any] = {"reduced": frozenset(found["reduced"])} if found.get("reduced") else {}
    spec = PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in found["spec"]), **reduced)
    named = {name for axis in spec_axes(spec) if axis for name in ((axis,) if isinstance(axis, str) else axis)}
    if ambient is None:
        return _with_memory(NamedSharding(_mesh(found, exactly), spec), found)
    fits = (named or set(found["mesh"])) <= set(ambient.axis_names)
    if not (exactly or fits):
        raise PlacementError(f"{spec} does not fit the mesh that is set, of {dict(ambient.shape)}")
    mesh = ambient
    try:
        if exactly:
            own = _mesh(found, exactly)
            mesh = ambient if fits and _replaces(ambient, own) else own
    except PlacementError:
        if not (fits and found.get("job_devices") in (None, math.prod(found["mesh"].values()))):
            raise
    return _with_memory(NamedSharding(mesh, spec), found)


def _replaces(ambient: Mesh, recorded: Mesh) -> bool:
    """Returns True if a set mesh replaces the recorded one.

    It does if it is the same mesh, or if both span all devices of this job with different sizes. Otherwise the recorded
    mesh has only some devices, or all of them in another order. The program then made it in addition to the set mesh.
    """
    if dict(ambient.shape) == dict(recorded.shape):
        return list(ambient.devices.flat) == list(recorded.devices.flat)
    return ambient.size == recorded.size == jax.device_count()


def _mesh(found: Mapping[str, Any], exactly: bool) -> Mesh:
    names, sizes = tuple(found["mesh"]), tuple(found["mesh"].values())
    kinds = {kind.name.lower(): kind for kind in AxisType}
    types = tuple(kinds[name] for name in found.get("axis_types") or ["auto"] * len(names))
    devices = _devices(found, local=bool(found.get("local")))
    size, of = math.prod(sizes), found.get("job_devices")
    positions = found.get("devices") or range(size)
    last = max(positions) if found.get("devices") else size - 1
    if last >= len(devices) or (exactly and (of or size) != len(devices)):
        text = ", ".join(f"{name}={length}" for name, length in found["mesh"].items())
        part = "" if of in (None, size) else f" up to number {last} of {of}"
        raise PlacementError(f"a mesh of {size} devices{part} ({text}) in a job with {len(devices)}")
    if of is None:  # Other formats and earlier releases do not record devices, so JAX chooses their order.
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices[:size])
    return Mesh(np.array([devices[n] for n in positions]).reshape(sizes), names, axis_types=types)


def other_devices(found: Mapping[str, Any]) -> str:
    """Returns what differs if this job has other devices than the one that recorded a place on one device, or ""."""
    if "job_devices" not in found:  # written by an earlier release
        return ""
    was = found["job_devices"], bool(found.get("local"))
    now = len(_devices(found, local=True)), jax.process_count() > 1
    texts = [f"{count}{' in each process' if several else ''}" for count, several in (was, now)]
    return "" if was == now else f"device {found.get('device', 0)} of {texts[0]} in a job with {texts[1]}"


def _on_device(found: Mapping[str, Any], exactly: bool) -> Sharding | None:
    """Returns the sharding on a device of this process, or None for the default device."""
    if not {"device", "memory_kind", "platform"} & found.keys():
        return None
    if exactly and (why := other_devices(found)):
        raise PlacementError(why)
    number, local = found.get("device", 0), _devices(found, local=True)
    if number >= len(local):
        raise PlacementError(f"local device {number} of a process with {len(local)}")
    return _with_memory(SingleDeviceSharding(local[number]), found)


def _with_memory(sharding: Any, found: Mapping[str, Any]) -> Sharding:
    kind = found.get("memory_kind")
    if kind is None:
        return sharding
    device = next(iter(sharding.addressable_devices), None)
    if device is not None and all(memory.kind != kind for memory in device.addressable_memories()):
        raise PlacementError(f"{kind} memory, which {device.platform} devices lack")
    return sharding.with_memory_kind(kind)
