"""Plans a restore: what each leaf becomes and where it goes, before anything is read."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from .._core import dtypes, quantized
from .._core.describe import mismatch_error
from .._core.entries import ArrayEntry, Entry, visible_shape
from .._core.leaf_paths import join_names, relative_to
from .._core.skeleton import LEAF, Node, Skeleton, build, nest_by_path
from .._core.source import Source, full_source, origins, records_kinds, static_values, subtree_path
from .._core.views import View
from .._pytree import flax, static, variable_levels, walk
from .._pytree.leaves import check_no_tracers, is_function
from ..errors import Difference
from . import array_placement as _place
from . import grown_parts, match, positional, quantized_hints, saved_kinds, saved_shardings
from .array_placement import ShardingOrNone
from .initial import Initial
from .iterator_hints import OutsideState
from .leaf_targets import LeafMismatch, LeafTarget, check_width
from .policy import Policy
from .read_groups import target_entry

_log = logging.getLogger("treering")
_NUMPY_TYPES = ("numpy", "numpy-scalar")  # values of `LeafTarget.make` that give an array on the host
_JAX_TYPES, _ARRAY_TYPES = ("jax", "jax-weak"), ("jax", "jax-weak", "numpy", "numpy-scalar")  # types of arrays


class RestorePlan(NamedTuple):
    """What each leaf becomes, decided before anything is read. Leaves are known by their position in `paths`.

    requested_paths: returns the paths of the leaves that the template wants from the checkpoint.
    build: makes the tree of the leaves' values.
    layouts: the layouts of arrays that are not row-major.
    uncommitted: the arrays that have a device without being committed to it.
    aliases: maps a leaf to the earlier leaf that is the same array object.
    """

    source: Source
    entries: Mapping[str, Entry]
    paths: Sequence[str]
    targets: Sequence[LeafTarget]
    places: Sequence[ShardingOrNone]
    requested_paths: Callable[[], Sequence[str]]
    build: Callable[[list[Any]], Any]
    layouts: Mapping[int, tuple[int, ...]] = {}
    uncommitted: Collection[int] = ()
    aliases: Mapping[int, int] = {}


def without_template(source: Source, policy: Policy, name: str, sharding: Any) -> RestorePlan:
    """Plans nested containers of NumPy arrays, or of JAX arrays at the places that `sharding` says."""
    entries, skeleton = source.entries, source.skeleton
    as_saved = isinstance(sharding, str)
    to_jax: Collection[str] = () if sharding is None else _JAX_TYPES if as_saved else _ARRAY_TYPES
    listed, paths = list(entries.values()), list(entries)
    policy = _with_quantized(policy, source, entries, name, warn=True)
    targets = match.match_without_template(entries, policy, to_jax, name)
    layouts: Mapping[int, tuple[int, ...]] = {}
    uncommitted: Collection[int] = ()
    if as_saved:
        saved = saved_shardings.saved_shardings(source, listed, targets, exactly=False)
        saved_shardings.check(saved, source, paths, targets, name)
        places = _place.on_real_devices(saved.wishes, paths, lambda: [_shaped(target) for target in targets])
        layouts, uncommitted = saved.layouts, saved.uncommitted
    else:
        places, layouts = _untemplated_places(sharding, entries, skeleton)
    build_tree = functools.partial(nest_by_path, entries) if skeleton is None else functools.partial(build, skeleton)
    return RestorePlan(
        full_source(source), entries, paths, targets, places, lambda: paths, build_tree, layouts, uncommitted
    )


def by_template(source: Source, like: Any, policy: Policy, name: str, sharding: Any) -> RestorePlan:
    """Plans a tree shaped like `like`.

    An `Initial` as `like` means that a job is resumed: kinds and places are those that were saved, not the template's.
    """
    split = like.split if isinstance(like, Initial) else flax.split(like)
    flat_tree = like.flat_tree if isinstance(like, Initial) else walk.flatten_split(split)
    check_no_tracers(flat_tree.paths, flat_tree.leaves, name)
    if not isinstance(like, Initial):
        walk.check_no_static_tracers(split, name)
    template, join = split.tree, split.join
    skeleton, elsewhere = source.skeleton, functools.partial(OutsideState.of, source)
    if source.positional:
        source = positional.name_leaves(source, flat_tree, name)
    elif source.ambiguous_dtypes:
        source = positional.name_dtypes(source, flat_tree, name)
    entries = source.entries
    level = getattr(source, "level", "")
    if level and skeleton and _has_level(flat_tree.paths, entries, level):
        alone = skeleton[0] == LEAF
        entries = {level if alone else f"{level}/{path}": entry for path, entry in entries.items()}
        skeleton = [Node("dict", "", [level]), *skeleton]
    as_written, entries = entries, variable_levels.rename_to_tree(flat_tree, entries)
    initial = like if isinstance(like, Initial) else None

    grown = functools.partial(grown_parts.grow, split, flat_tree, entries, skeleton, policy.at)
    template, join, flat_tree, problems = grown(policy.grow) if policy.grow else (template, join, flat_tree, ())
    if initial and records_kinds(source):
        policy = dataclasses.replace(policy, kinds="saved", cast_leaves=_cast(source, entries))
    policy = _with_quantized(policy, source, entries, name, warn=policy.kinds == "saved")
    targets = match.match(
        flat_tree,
        entries,
        skeleton,
        policy,
        name,
        as_written,
        records_kinds=records_kinds(source),
        elsewhere=elsewhere,
        problems=problems,
        grown=grown,
        dequantized=functools.partial(quantized_hints.dequantized, source, as_written),
    )
    plan = RestorePlan(
        full_source(source),
        entries,
        flat_tree.paths,
        targets,
        [],
        lambda: [path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if _wants_data(leaf)],
        lambda values: join(walk.unflatten(template, values, flat_tree.structure)),
    )
    if cast_codes := quantized.find_cast_codes(source):
        wanted = {entries[path].path for path in plan.requested_paths() if path in entries}
        if codes := [one for one, others in cast_codes.items() if one in wanted and wanted.isdisjoint(others)]:
            quantized.warn_of_codes(name, codes)
    if flat_tree.static:
        _log_static(source, flat_tree, name, resumed=initial is not None)
    if initial and policy.kinds == "saved" and policy.dtype is None:
        saved_kinds.log_changes(name, flat_tree.paths, flat_tree.leaves, targets)
    plan = _with_places(plan, flat_tree, template, sharding, initial, name)
    return _with_aliases(plan) if policy.kinds == "saved" else plan


def _with_quantized(policy: Policy, source: Source, entries: Mapping[str, Entry], name: str, *, warn: bool) -> Policy:
    """Returns the policy that keeps the dtypes of quantized weights.

    A scale that `extra` names by its path, not by a glob or "ignore", is left out on purpose. Then its codes are
    numbers.

    warn: True to log the weights to which the argument `dtype` would have applied otherwise.
    """

    @functools.cache
    def members() -> Mapping[str, quantized.Member]:
        found = quantized.find_members(source, entries)
        left_out = () if isinstance(policy.extra, str) else {path for path in policy.extra if path in found}
        if unscaled := {found[path].group.codes for path in left_out if found[path].role != "codes"}:
            quantized.warn_of_codes(name, unscaled)
        return {path: one for path, one in found.items() if one.group.codes not in unscaled}

    if warn and policy.dtype not in (None, "template"):
        quantized.warn_of_kept(name, [group for group, _ in members().values()], np.dtype(policy.dtype))
    return dataclasses.replace(policy, quantized=members)


def _cast(source: Source, entries: Mapping[str, Entry]) -> frozenset[str]:
    """Returns the paths of the leaves that the save cast to another dtype because of its argument `dtype`."""
    records = ((path, source.sharding(entry)) for path, entry in entries.items() if isinstance(entry, ArrayEntry))
    return frozenset(path for path, record in records if record and record.get("cast"))


def _with_places(
    plan: RestorePlan, flat_tree: walk.FlatTree, template: Any, sharding: Any, initial: Initial | None, name: str
) -> RestorePlan:
    """Returns the plan with the place of each leaf.

    A place that `sharding` gives comes first. A resumed job and ``sharding='saved'`` then take the saved place. The
    place in the template comes last.
    """
    paths, leaves, targets = flat_tree.paths, flat_tree.leaves, plan.targets
    entries = [plan.entries.get(path) for path in paths]
    arrays = functools.cache(lambda: [_shaped(target) for target in plan.targets])
    as_saved = isinstance(sharding, str)
    movable = arrays if initial else functools.cache(lambda: [_placed_array(target) for target in targets])
    wished: list[Any] = [None] * len(paths)
    if not as_saved and sharding is not None:
        wished = _place.requested_shardings(sharding, template, paths, leaves, movable)
    wished, layouts = _place.split_formats(wished)
    _place.check_layouts(layouts, paths, movable)
    if as_saved or initial:
        recorded = as_saved or records_kinds(plan.source)  # A foreign format records no places, so `init` says them.
        saved = saved_shardings.saved_shardings(
            plan.source, entries if recorded else [None] * len(entries), targets, exactly=not as_saved
        )
        if as_saved:
            saved_shardings.check(saved, plan.source, paths, targets, name)
        free = {n for n, wish in enumerate(wished) if wish is None}
        saved = saved if as_saved else saved_shardings.of_this_job(saved, free)
        layouts.update({n: layout for n, layout in saved.layouts.items() if n in free})
        plan = plan._replace(uncommitted=saved.uncommitted & free)
        rest = _place.requested_shardings(None, template, paths, leaves, arrays)
        if initial and not as_saved:
            saved_shardings.log_moves(name, paths, saved, rest)
            rest = saved_shardings.resumed_shardings(saved, rest, wished, paths, targets, initial, name)
        else:
            rest = [own if one is None else one for one, own in zip(saved.wishes, rest, strict=True)]
        wished = [other if wish is None else wish for wish, other in zip(wished, rest, strict=True)]
    elif sharding is None:
        wished = _place.requested_shardings(None, template, paths, leaves, arrays)
        layouts.update(saved_shardings.template_layouts(leaves))
        _place.check_layouts(layouts, paths, arrays)
        saved_shardings.warn_if_gathered(name, plan.source, paths, entries, targets, wished)
    else:
        plan = plan._replace(targets=_moved(plan, wished, name))
    return plan._replace(places=_place.on_real_devices(wished, paths, arrays), layouts=layouts)


def _moved(plan: RestorePlan, wishes: Sequence[Any], name: str) -> list[LeafTarget]:
    """Returns the targets; a NumPy leaf of the template becomes a JAX array if `sharding` gives it a place.

    Raises `MismatchError` for a dtype that JAX lacks.
    """
    targets = list(plan.targets)
    differences: list[Difference] = []
    for n, (target, wish) in enumerate(zip(plan.targets, wishes, strict=True)):
        if wish is None or target.make not in _NUMPY_TYPES or target.entry is None:
            continue
        try:
            check_width(target.dtype, target.entry)
            targets[n] = msgspec.structs.replace(target, make="jax")
        except LeafMismatch as difference:
            differences.append(Difference(plan.paths[n], *difference.args))
    if differences:
        raise mismatch_error(name, differences, plan.paths, plan.entries, what="cannot become JAX arrays")
    return targets


def _placed_array(target: LeafTarget) -> Any:
    """Returns the shape and dtype that a function passed as `sharding` sees, or None if the leaf is not an array.

    It sees NumPy leaves too, because it may move them to JAX.
    """
    if target.make in _NUMPY_TYPES and target.entry is not None:
        return _shape_and_dtype(target.entry.shape, target.dtype)
    return _shaped(target)


def _with_aliases(plan: RestorePlan) -> RestorePlan:
    """Returns the plan with one array for all leaves that were one JAX array when saved and go to one place."""
    if isinstance(plan.source, View):  # Rules may have made different leaves of one array.
        return plan
    arrays = [
        n for n, target in enumerate(plan.targets) if target.make in _place.JAX_MAKES and target.entry is not None
    ]
    first: dict[Any, int] = {}
    aliases: dict[int, int] = {}
    targets = list(plan.targets)
    names = origins(plan.source, [target_entry(targets[n]).path for n in arrays])
    for n, name in zip(arrays, names, strict=True):
        target, place = targets[n], (plan.places[n], plan.layouts.get(n), n in plan.uncommitted)
        other = first.setdefault((name, target.make, target.dtype, target.weak, place), n)
        if other != n:
            aliases[n] = other
            targets[n] = LeafTarget("value")
    if not aliases:
        return plan
    rest = {n for n in plan.uncommitted if n not in aliases}
    return plan._replace(targets=targets, aliases=aliases, uncommitted=rest)


def _log_static(source: Source, flat_tree: walk.FlatTree, name: str, *, resumed: bool) -> None:
    at = subtree_path(source)
    saved = {
        place: named for path, named in static_values(source).items() if (place := relative_to(path, at)) is not None
    }
    if found := static.static_differences(saved, flat_tree.static):
        _log.log(
            logging.WARNING if resumed else logging.INFO,
            "%s: %d static values differ from those of the job that saved: %s; the program's are kept, because static "
            "values are a part of the program. Keep a value that changes during training in an array or a Variable",
            name,
            len(found),
            join_names(tuple(found)),
        )


def _wants_data(leaf: Any) -> bool:
    """Returns True if a leaf of a template takes something from the checkpoint."""
    return leaf is not None and leaf is not ... and not is_function(leaf)


def _has_level(template: Sequence[str], found: Iterable[str], level: str) -> bool:
    """Returns True if all paths of a template are below `level`, and no path in the checkpoint is."""
    here = [relative_to(path, level) is not None for path in template]
    return bool(here) and all(here) and all(relative_to(path, level) is None for path in found)


def _untemplated_places(
    sharding: Any, entries: Mapping[str, Entry], skeleton: Skeleton | None
) -> tuple[list[ShardingOrNone], Mapping[int, tuple[int, ...]]]:
    """Returns the place and perhaps the layout of each entry, by its number."""
    if sharding is None:
        return [None] * len(entries), {}
    listed = list(entries.values())
    template = nest_by_path(entries, listed) if skeleton is None else build(skeleton, listed)
    flat_tree = walk.flatten_tree(template)
    shaped = [_visible_array(leaf) if isinstance(leaf, ArrayEntry) else None for leaf in flat_tree.leaves]
    chosen, layouts = _place.choose_shardings(sharding, template, flat_tree.paths, shaped, lambda: shaped)
    numbers = {path: n for n, path in enumerate(flat_tree.paths)}
    order = [numbers[path] for path in entries]
    return [chosen[n] for n in order], {at: layouts[n] for at, n in enumerate(order) if n in layouts}


def _visible_array(entry: ArrayEntry) -> ArrayEntry | jax.ShapeDtypeStruct:
    """Returns the entry with the shape that users see. The data of typed keys has one more axis than the keys."""
    return _shape_and_dtype(visible_shape(entry), dtypes.to_numpy(entry.dtype)) if entry.type == "key" else entry


def _shaped(target: LeafTarget) -> Any:
    if target.make not in _place.JAX_MAKES:
        return None
    shape = target.entry.shape if target.entry else ()
    return _shape_and_dtype(shape[:-1] if target.make == "key" else shape, target.dtype)


@functools.lru_cache(maxsize=1024)
def _shape_and_dtype(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
