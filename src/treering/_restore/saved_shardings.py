"""Finds the places that the arrays of a checkpoint had when they were saved, on the devices of this job."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from .._core.boxes import spec_axes
from .._core.entries import ArrayEntry, Entry, visible_shape
from .._core.leaf_paths import join_names
from .._core.source import Source, records_kinds
from .._pytree.placements import (
    Layout,
    Placement,
    PlacementError,
    layout_of,
    other_devices,
    resolve_placement,
)
from ..errors import MismatchError
from .array_placement import JAX_MAKES, UNCOMMITTED, ambient_mesh
from .initial import Initial
from .leaf_targets import LeafTarget

_log = logging.getLogger("treering")


class SavedShardings(NamedTuple):
    """The saved places of leaves. Dictionaries and sets have the positions of leaves as keys.

    wishes: what `place.on_real_devices` takes; None for a leaf of which no place was saved.
    layouts: the layouts that are not row-major.
    uncommitted: the leaves that have a device or a layout without being committed to it.
    problems: texts that say why this job cannot place a leaf where it was.
    unrecorded: those of them whose place was not recorded, which says nothing about the devices of the job.
    unplaced: texts that say which devices the job had, for leaves on the default device of a job with other devices.
    """

    wishes: list[Any]
    layouts: dict[int, tuple[int, ...]]
    uncommitted: set[int]
    problems: dict[int, str]
    unrecorded: set[int]
    unplaced: dict[int, str]


def saved_shardings(
    source: Source, entries: Sequence[Entry | None], targets: Sequence[LeafTarget], *, exactly: bool
) -> SavedShardings:
    """Returns the places that the arrays of a template's leaves had.

    `placements.resolve_placement` describes `exactly`.
    """
    found = SavedShardings([None] * len(targets), {}, set(), {}, set(), {})
    mesh = ambient_mesh()
    # by the id of a record, kept alive so that no other gets the id: its place, and what `other_devices` returns
    known: dict[int, tuple[Any, Placement | str, str]] = {}
    spread: dict[tuple[int, tuple[int, ...]], str] = {}
    for n, (entry, target) in enumerate(zip(entries, targets, strict=True)):
        if (
            target.make not in JAX_MAKES
            or not isinstance(entry, ArrayEntry)
            or (record := source.sharding(entry)) is None
        ):
            continue
        if id(record) not in known:
            place = _resolve(record, mesh, exactly)
            free = isinstance(place, Placement) and place.sharding is None
            known[id(record)] = record, place, other_devices(record) if free and exactly else ""
        _, place, other = known[id(record)]
        shape = visible_shape(entry)
        if isinstance(place, Placement) and isinstance(place.sharding, NamedSharding):
            key = id(record), shape
            if key not in spread:
                spread[key] = _why_not(place.sharding, shape)
            place = spread[key] or place
        if isinstance(place, str):
            found.problems[n] = place
            if "unrecorded" in record:
                found.unrecorded.add(n)
            continue
        found.wishes[n] = UNCOMMITTED if place.sharding is None else place.sharding
        if other:
            found.unplaced[n] = other
        if not place.committed and (place.sharding is not None or place.layout is not None):
            found.uncommitted.add(n)
        if place.layout is not None and len(place.layout) == len(shape):
            found.layouts[n] = place.layout
    return found


def _resolve(record: Mapping[str, Any], mesh: Any, exactly: bool) -> Placement | str:
    try:
        return resolve_placement(record, mesh, exactly=exactly)
    except PlacementError as error:
        return str(error)


def _why_not(sharding: NamedSharding, shape: tuple[int, ...]) -> str:
    if len(sharding.spec) > len(shape):
        return f"{sharding.spec} for an array of {len(shape)} axes"
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError):
        return f"{sharding.spec} on a mesh of {dict(sharding.mesh.shape)}, which does not divide {list(shape)}"
    return ""


def check(
    found: SavedShardings, source: Source, paths: Sequence[str], targets: Sequence[LeafTarget], name: str
) -> None:
    """Raises `MismatchError` if arrays cannot go where they were, or if no array has a recorded place."""
    if found.problems:
        raise MismatchError(
            f"{name}: sharding='saved': expected a job that has every saved place, found "
            f"{_list_all(found.problems, paths)}; set a mesh with the saved axes by jax.set_mesh, or pass shardings"
        )
    placed = any(target.make in JAX_MAKES for target in targets) or not records_kinds(source)
    if placed and all(wish is None for wish in found.wishes):
        raise MismatchError(
            f"{name}: sharding='saved': expected arrays whose sharding is recorded, found none; pass shardings"
        )


def _list_all(problems: Mapping[int, str], paths: Sequence[str]) -> str:
    """Returns each problem with the first leaf that has it, so that no problem hides behind the leaves of another."""
    leaves: dict[str, list[str]] = {}
    for n, why in problems.items():
        leaves.setdefault(why, []).append(paths[n] or "(root)")
    more = {why: f" and {len(named) - 1} more" if len(named) > 1 else "" for why, named in leaves.items()}
    return join_names(tuple(f"{named[0]}{more[why]} ({why})" for why, named in leaves.items()))


def of_this_job(found: SavedShardings, free: Collection[int]) -> SavedShardings:
    """Returns the saved places if they fit the devices of this job together, and none otherwise.

    Taken one by one, places of a job with other devices could bring arrays together that the program keeps apart.

    free: the leaves that the argument `sharding` does not place.
    """
    problems = {n: why for n, why in found.problems.items() if n in free}
    unplaced = {n: why for n, why in found.unplaced.items() if n in free}
    on_mesh = any(isinstance(found.wishes[n], NamedSharding) for n in free)
    if problems.keys() <= found.unrecorded and (on_mesh or not unplaced):
        return found._replace(problems=problems)
    nowhere: list[Any] = [None] * len(found.wishes)
    return SavedShardings(nowhere, {}, set(), {**problems, **unplaced}, found.unrecorded, {})


def resumed_shardings(
    found: SavedShardings,
    own: Sequence[Any],
    wished: Sequence[Any],
    paths: Sequence[str],
    targets: Sequence[LeafTarget],
    initial: Initial,
    name: str,
) -> list[Any]:
    """Returns the wishes of a resumed job: the saved place of each array, or else its place in the template.

    found: what `of_this_job` returns.
    own: the place of each leaf in the template, which comes from tracing `init`.
    wished: the place that the argument `sharding` gives each leaf. It takes precedence.

    If an array has no place at all, `init` is called to see where it places the array. All of this is logged.
    """
    mesh = ambient_mesh()
    wishes = [
        (None if _lacks_devices(mine, mesh) else mine) if saved is None else saved
        for saved, mine in zip(found.wishes, own, strict=True)
    ]
    unknown = [n for n, target in enumerate(targets) if wishes[n] is None and wished[n] is None and _is_array(target)]
    moved = not found.problems.keys() <= found.unrecorded
    # Arrays go to an only device, so their places need not be known. Without arrays JAX begins no backend, which would
    # take memory of accelerators and wait for all peers.
    if unknown and not moved and jax.device_count() == 1:
        unknown = [n for n in unknown if n in found.problems]
    calls = bool(unknown) and not initial.called
    if found.problems:
        _log.warning(
            "%s: %d arrays cannot be placed where they were saved, so %s go where init() places them%s: %s; pass "
            "sharding= to place them elsewhere",
            name,
            len(found.problems),
            "all arrays" if moved else "they",
            ", and it is called to see where" if calls else "",
            _list_all(found.problems, paths),
        )
    elif calls:
        _log.warning(
            "%s: init() is called to see where it places arrays whose place is not known: %s",
            name,
            join_names(tuple(paths[n] or "(root)" for n in unknown)),
        )
    for n in unknown:
        wishes[n] = initial.places.get(paths[n]) or UNCOMMITTED
    return wishes


def _lacks_devices(own: Any, mesh: Any) -> bool:
    """Returns True for the place of a traced array on an explicit mesh other than `mesh`, the one that is set.

    JAX records only the names and sizes of its axes.
    """
    abstract = isinstance(own, NamedSharding) and isinstance(own.mesh, jax.sharding.AbstractMesh)
    return abstract and (mesh is None or own.mesh != mesh.abstract_mesh)


def _is_array(target: LeafTarget) -> bool:
    return target.make in JAX_MAKES and target.entry is not None


def log_moves(name: str, paths: Sequence[str], saved: SavedShardings, own: Sequence[Any]) -> None:
    """Logs the arrays that a resumed job places as they were saved, although `init` says another place."""
    moved = tuple(
        f"{path or '(root)'} (init {mine}, saved {wish})"
        for path, wish, mine in zip(paths, saved.wishes, own, strict=True)
        if wish is not None and mine is not None and mine is not UNCOMMITTED and _differ(wish, mine)
    )
    if moved:
        _log.info("%s: %d arrays stay where they were saved: %s", name, len(moved), join_names(moved))


def _differ(saved: Any, own: Any) -> bool:
    specs = [getattr(one, "spec", one) for one in (saved, own)]
    if not all(isinstance(spec, PartitionSpec) for spec in specs):
        return specs[0] != specs[1]
    one, other = map(spec_axes, specs)
    axes = max(len(one), len(other))
    return one + (None,) * (axes - len(one)) != other + (None,) * (axes - len(other))


def warn_if_gathered(
    name: str,
    source: Source,
    paths: Sequence[str],
    entries: Sequence[Entry | None],
    targets: Sequence[LeafTarget],
    wishes: Sequence[Any],
) -> None:
    """Logs the arrays that were spread over devices, and that neither the template nor `sharding=` gives a place."""
    gathered = tuple(
        path or "(root)"
        for path, entry, target, wish in zip(paths, entries, targets, wishes, strict=True)
        if wish is None and target.make in JAX_MAKES and isinstance(entry, ArrayEntry) and _is_spread(source, entry)
    )
    if gathered and jax.device_count() > 1:
        _log.warning(
            "%s: %d arrays were spread over devices when they were saved, and the template does not say where they go: "
            "%s; each device of the set mesh, or else the default device, gets all of them. Pass sharding='saved', or "
            "shardings",
            name,
            len(gathered),
            join_names(gathered),
        )


def _is_spread(source: Source, entry: ArrayEntry) -> bool:
    record = source.sharding(entry)
    return record is not None and any(record.get("spec") or ())


def template_layouts(leaves: Sequence[Any]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields the number and the layout of each template leaf that has a layout other than row-major."""
    for n, leaf in enumerate(leaves):
        if type(leaf) is jax.ShapeDtypeStruct:
            layout = None if leaf.sharding is None else _order(leaf)  # A layout always comes with a sharding.
        elif not isinstance(leaf, type) and getattr(leaf, "ndim", 0) > 1 and isinstance(leaf, jax.Array):
            layout = layout_of(leaf)
        else:
            continue
        if layout is not None:
            yield n, layout


def _order(leaf: jax.ShapeDtypeStruct) -> Layout:
    layout = getattr(leaf.format, "layout", None)
    order = getattr(layout, "major_to_minor", None)
    return None if order is None or tuple(order) == tuple(range(len(leaf.shape))) else tuple(order)


def with_layout(array: Any, order: tuple[int, ...]) -> Any:
    """Returns a JAX array in the same place with the layout `order`, which names the axes from major to minor."""
    from jax.experimental.layout import Format
    from jax.experimental.layout import Layout as DeviceLayout

    layout = DeviceLayout(order)
    if array.is_fully_addressable:
        return jax.device_put(array, Format(layout, array.sharding))
    # JAX changes no layout of an array of several processes, but puts pieces together that have it.
    kind, pieces = array.sharding.memory_kind, array.addressable_shards
    places = [Format(layout, SingleDeviceSharding(piece.device, memory_kind=kind)) for piece in pieces]
    made = jax.device_put([piece.data for piece in pieces], places)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, made, dtype=array.dtype)
