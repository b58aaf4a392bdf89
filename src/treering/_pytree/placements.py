"""Where arrays lie: as JSON in a checkpoint, and as shardings of this job."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

Layout = tuple[int, ...] | None  # the axes from major to minor; None for row-major


class Placement(NamedTuple):
    """The place of an array in this job. Without a sharding it is uncommitted, on the default device."""

    sharding: Sharding | None
    layout: Layout = None
    committed: bool = True


class CannotFollow(Exception):
    """Says why this job cannot place an array where another job had it."""


def describe(array: Any) -> Mapping[str, Any]:
    """Returns the place of a JAX array as JSON; one object for all arrays with the same place. See `docs/format.md`."""
    return _describe(array.sharding, array.committed, layout_of(array))


def layout_of(array: Any) -> Layout:
    """Returns the axes of a JAX array from major to minor, or None if it is row-major."""
    if array.ndim < 2 or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return None
    layout = array.format.layout
    order = None if layout is None else tuple(layout.major_to_minor)
    return None if order is None or order == tuple(range(array.ndim)) else order


@functools.lru_cache(maxsize=1024)
def _describe(sharding: Sharding, committed: bool, layout: Layout) -> Mapping[str, Any]:
    try:
        if isinstance(sharding, SingleDeviceSharding):
            found = _describe_device(sharding, committed)
        else:
            found = _describe_mesh(sharding)
    except CannotFollow as error:
        return {"unrecorded": str(error)}
    memory, device = sharding.memory_kind, next(iter(sharding.addressable_devices), None)
    if device is not None and memory not in (None, device.default_memory().kind):
        found["memory_kind"] = memory
    if device is not None and device.platform != jax.default_backend():
        found["platform"] = device.platform
    if layout is not None:
        found["layout"] = list(layout)
    return found


def _describe_device(sharding: SingleDeviceSharding, committed: bool) -> dict[str, Any]:
    (device,) = sharding.device_set
    local = jax.local_devices(backend=device.client)
    if device not in local:
        raise CannotFollow("a device of another process")
    number = local.index(device)
    if committed:
        return {"device": number}
    return {"device": number, "committed": False} if number else {"committed": False}


def _describe_mesh(sharding: Sharding) -> dict[str, Any]:
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(mesh, Mesh):
        raise CannotFollow(f"a {type(sharding).__name__} over {sharding.num_devices} devices")
    spec = sharding.spec
    if getattr(spec, "reduced", None) or not all(isinstance(name, str) for name in mesh.axis_names):
        raise CannotFollow(f"{spec} on a mesh with the axes {mesh.axis_names}")
    found: dict[str, Any] = {"mesh": dict(mesh.shape), "spec": [_axis_to_json(axis) for axis in spec]}
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
        raise CannotFollow("a PartitionSpec with an unconstrained axis")
    return list(axis) if isinstance(axis, tuple) else axis


def _devices(found: Mapping[str, Any], *, local: bool) -> Sequence[Any]:
    """Returns the devices of this process, or of the job, on the recorded platform."""
    platform = found.get("platform")
    try:
        return jax.local_devices(backend=platform) if local else jax.devices(platform)
    except RuntimeError:
        raise CannotFollow(f"{platform} devices, which this job lacks") from None


def spec_of(found: Mapping[str, Any]) -> PartitionSpec:
    """Returns the recorded `PartitionSpec`."""
    return PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in found["spec"]))


def axis_types_of(found: Mapping[str, Any]) -> tuple[AxisType, ...]:
    """Returns the recorded types of the mesh axes."""
    types = {kind.name.lower(): kind for kind in AxisType}
    return tuple(types[name] for name in found.get("axis_types") or ["auto"] * len(found["mesh"]))


def follow(found: Mapping[str, Any], ambient: Any, *, exactly: bool) -> Placement:
    """Returns the recorded place as this job has it.

    If the mesh that is set has the recorded axes, it is used instead of the recorded mesh. Otherwise a mesh of the
    recorded devices is made.

    found: what `describe` returned in the job that saved, or the mesh and spec that another format records.
    ambient: the mesh that is set, or None.
    exactly: whether a mesh that spanned all devices of its job must do so in this job, too. If not, a set mesh without
        the recorded axes is an error.

    Raises `CannotFollow` if this job has no such place.
    """
    layout = tuple(found["layout"]) if found.get("layout") else None
    if "unrecorded" in found:
        raise CannotFollow(str(found["unrecorded"]))
    if "mesh" not in found:
        sharding = _on_device(found) if "device" in found else None
        return Placement(sharding, layout, bool(found.get("committed", True)))
    spec = spec_of(found)
    named = {name for axis in spec if axis for name in ((axis,) if isinstance(axis, str) else axis)}
    if ambient is not None and (named or set(found["mesh"])) <= set(ambient.axis_names):
        return Placement(_with_memory(NamedSharding(ambient, spec), found), layout)
    if ambient is not None and not exactly:
        raise CannotFollow(f"{spec} does not fit the mesh that is set, of {dict(ambient.shape)}")
    mesh = _mesh(
        tuple(found["mesh"].items()),
        axis_types_of(found),
        tuple(found.get("devices") or range(int(np.prod(list(found["mesh"].values()), dtype=np.int64)))),
        found.get("job_devices"),
        _devices(found, local=bool(found.get("local"))),
        exactly,
    )
    return Placement(_with_memory(NamedSharding(mesh, spec), found), layout)


def _on_device(found: Mapping[str, Any]) -> Sharding:
    number, local = found["device"], _devices(found, local=True)
    if number >= len(local):
        raise CannotFollow(f"local device {number} of a process with {len(local)}")
    return _with_memory(SingleDeviceSharding(local[number]), found)


def _with_memory(sharding: Any, found: Mapping[str, Any]) -> Sharding:
    kind = found.get("memory_kind")
    if kind is None:
        return sharding
    device = next(iter(sharding.addressable_devices), None)
    if device is not None and all(memory.kind != kind for memory in device.addressable_memories()):
        raise CannotFollow(f"{kind} memory, which {device.platform} devices lack")
    return sharding.with_memory_kind(kind)


def _mesh(
    axes: tuple[tuple[str, int], ...],
    types: tuple[AxisType, ...],
    positions: tuple[int, ...],
    of: int | None,
    devices: Sequence[Any],
    exactly: bool,
) -> Mesh:
    size = len(positions)
    text = ", ".join(f"{name}={length}" for name, length in axes)
    spanned = of is None or of == size
    if size > len(devices) or (exactly and spanned and size != len(devices)):
        raise CannotFollow(f"a mesh of {size} devices ({text}) in a job with {len(devices)}")
    if max(positions) >= len(devices):
        positions = tuple(range(size))
    sizes = [length for _, length in axes]
    if of is None:  # another format, or an earlier release: JAX chooses the order of the devices
        return jax.make_mesh(sizes, [name for name, _ in axes], axis_types=types, devices=devices[:size])
    chosen = np.array([devices[n] for n in positions]).reshape(sizes)
    return Mesh(chosen, tuple(name for name, _ in axes), axis_types=types)
