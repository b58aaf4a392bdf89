"""Plans a restore: what each leaf becomes and where it goes, before anything is read."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import msgspec

from .._core import dtypes
from .._core.describe import mismatch
from .._core.entries import ArrayEntry, Entry
from .._core.leaf_paths import below, few
from .._core.part import below_of, whole_of
from .._core.skeleton import LEAF, Node, Skeleton, build, nest
from .._core.source import Source, origins, records_kinds, static_values
from .._core.views import View
from .._pytree import box_levels, flax, static, walk
from .._pytree.leaves import check_no_tracers, is_function
from ..errors import Difference
from . import match, positional, saved_kinds, saved_places
from . import place as _place
from .groups import entry_of
from .initial import Initial
from .place import Where
from .policy import Policy
from .positions import Elsewhere
from .targets import Differs, Target, check_width

_log = logging.getLogger("treering")
_NUMPY = ("numpy", "numpy-scalar")  # values of `Target.make` that give an array on the host
_OF_JAX, _ALL = ("jax", "jax-weak"), ("jax", "jax-weak", "numpy", "numpy-scalar")  # types of arrays


class Plan(NamedTuple):
    """What each leaf becomes, decided before anything is read. Leaves are known by their position in `paths`.

    asked: returns the paths of the leaves that the template wants from the checkpoint.
    build: makes the tree of the leaves' values.
    layouts: the layouts of arrays that are not row-major.
    uncommitted: the arrays that have a device without being committed to it.
    aliases: maps a leaf to the earlier leaf that is the same array object.
    """

    source: Source
    entries: Mapping[str, Entry]
    paths: Sequence[str]
    targets: Sequence[Target]
    places: Sequence[Where]
    asked: Callable[[], Sequence[str]]
    build: Callable[[list[Any]], Any]
    layouts: Mapping[int, tuple[int, ...]] = {}
    uncommitted: Collection[int] = ()
    aliases: Mapping[int, int] = {}


def without_template(source: Source, policy: Policy, name: str, sharding: Any) -> Plan:
    """Plans nested containers of NumPy arrays, or of JAX arrays at the places that `sharding` says."""
    entries, skeleton = source.entries, source.skeleton
    as_saved = isinstance(sharding, str)
    to_jax: Collection[str] = () if sharding is None else _OF_JAX if as_saved else _ALL
    listed, paths = list(entries.values()), list(entries)
    targets = match.untemplated(listed, policy, to_jax, name)
    layouts: Mapping[int, tuple[int, ...]] = {}
    uncommitted: Collection[int] = ()
    if as_saved:
        saved = saved_places.saved_places(source, listed, targets, exactly=False)
        saved_places.check(saved, source, paths, targets, name)
        places = _place.concrete(saved.wishes, paths, lambda: [_shaped(target) for target in targets])
        layouts, uncommitted = saved.layouts, saved.uncommitted
    else:
        places = _untemplated_places(sharding, entries, skeleton)
    build_tree = functools.partial(nest, entries) if skeleton is None else functools.partial(build, skeleton)
    return Plan(whole_of(source), entries, paths, targets, places, lambda: paths, build_tree, layouts, uncommitted)


def by_template(source: Source, like: Any, policy: Policy, name: str, sharding: Any) -> Plan:
    """Plans a tree shaped like `like`.

    An `Initial` as `like` means that a job is resumed: kinds and places are those that were saved, not the template's.
    """
    split = like.split if isinstance(like, Initial) else flax.split(like)
    walked = like.walked if isinstance(like, Initial) else walk.walk_split(split)
    check_no_tracers(walked.paths, walked.leaves, name)
    template, join = split.tree, split.join
    skeleton, elsewhere = source.skeleton, functools.partial(Elsewhere.of, source)
    if source.positional:
        source = positional.named(source, walked, name)
    entries = source.entries
    level = getattr(source, "level", "")
    if level and skeleton and _has_level(walked.paths, entries, level):
        alone = skeleton[0] == LEAF
        entries = {level if alone else f"{level}/{path}": entry for path, entry in entries.items()}
        skeleton = [Node("dict", "", [level]), *skeleton]
    as_written, entries = entries, box_levels.named(walked, entries)
    initial = like if isinstance(like, Initial) else None
    if initial and records_kinds(source):
        policy = dataclasses.replace(policy, kinds="saved", cast_leaves=_cast(source, entries))
    targets = match.match(
        walked,
        entries,
        skeleton,
        policy,
        name,
        as_written,
        numbers_are_arrays=source.numbers_are_arrays,
        elsewhere=elsewhere,
    )
    plan = Plan(
        whole_of(source),
        entries,
        walked.paths,
        targets,
        [],
        lambda: [path for path, leaf in zip(walked.paths, walked.leaves, strict=True) if _asks(leaf)],
        lambda values: join(walk.rebuilt(template, values, walked.structure)),
    )
    _log_static(source, walked, name, resumed=initial is not None)
    if initial and policy.kinds == "saved" and policy.dtype is None:
        saved_kinds.log_changes(name, walked.paths, walked.leaves, targets)
    plan = _with_places(plan, walked, template, sharding, initial, name)
    return _with_aliases(plan) if policy.kinds == "saved" else plan


def _cast(source: Source, entries: Mapping[str, Entry]) -> frozenset[str]:
    """Returns the paths of the leaves that the save cast to another dtype because of its argument `dtype`."""
    records = ((path, source.sharding(entry)) for path, entry in entries.items() if isinstance(entry, ArrayEntry))
    return frozenset(path for path, record in records if record and record.get("cast"))


def _with_places(
    plan: Plan, walked: walk.Walk, template: Any, sharding: Any, initial: Initial | None, name: str
) -> Plan:
    """Returns the plan with the place of each leaf.

    A place that `sharding` gives comes first. A resumed job and ``sharding='saved'`` then take the saved place. The
    place in the template comes last.
    """
    paths, leaves, targets = walked.paths, walked.leaves, plan.targets
    entries = [plan.entries.get(path) for path in paths]
    arrays = functools.cache(lambda: [_shaped(target) for target in plan.targets])
    as_saved = isinstance(sharding, str)
    layouts: dict[int, tuple[int, ...]] = {}
    wished = [None] * len(paths) if as_saved or sharding is None else _place.wishes(
        sharding, template, paths, leaves, arrays if initial else lambda: [_on_request(target) for target in targets]
    )  # fmt: skip
    if as_saved or initial:
        recorded = as_saved or records_kinds(plan.source)  # A foreign format records no places, so `init` says them.
        saved = saved_places.saved_places(
            plan.source, entries if recorded else [None] * len(entries), targets, exactly=not as_saved
        )
        if as_saved:
            saved_places.check(saved, plan.source, paths, targets, name)
        free = {n for n, wish in enumerate(wished) if wish is None}
        layouts.update({n: layout for n, layout in saved.layouts.items() if n in free})
        plan = plan._replace(uncommitted=saved.uncommitted & free)
        rest = _place.wishes(None, template, paths, leaves, arrays)
        if initial and not as_saved:
            saved_places.log_moves(name, paths, saved, rest)
            rest = saved_places.resumed(saved, rest, wished, paths, targets, initial, name)
        else:
            rest = [own if one is None else one for one, own in zip(saved.wishes, rest, strict=True)]
        wished = [other if wish is None else wish for wish, other in zip(wished, rest, strict=True)]
    elif sharding is None:
        wished = _place.wishes(None, template, paths, leaves, arrays)
        layouts.update(saved_places.template_layouts(leaves))
        saved_places.warn_if_gathered(name, plan.source, paths, entries, targets, wished)
    else:
        plan = plan._replace(targets=_moved(plan, wished, name))
    return plan._replace(places=_place.concrete(wished, paths, arrays), layouts=layouts)


def _moved(plan: Plan, wishes: Sequence[Any], name: str) -> list[Target]:
    """Returns the targets; a NumPy leaf of the template becomes a JAX array if `sharding` gives it a place.

    Raises `MismatchError` for a dtype that JAX lacks.
    """
    targets = list(plan.targets)
    differences: list[Difference] = []
    for n, (target, wish) in enumerate(zip(plan.targets, wishes, strict=True)):
        if wish is None or target.make not in _NUMPY or target.entry is None:
            continue
        try:
            check_width(target.dtype, target.entry)
            targets[n] = msgspec.structs.replace(target, make="jax")
        except Differs as difference:
            differences.append(Difference(plan.paths[n], *difference.args))
    if differences:
        raise mismatch(name, differences, plan.paths, plan.entries, what="cannot become JAX arrays")
    return targets


def _on_request(target: Target) -> Any:
    """Returns the shape and dtype that a function passed as `sharding` sees, or None if the leaf is not an array.

    It sees NumPy leaves too, because it may move them to JAX.
    """
    if target.make in _NUMPY and target.entry is not None:
        return _shape_and_dtype(target.entry.shape, target.dtype)
    return _shaped(target)


def _with_aliases(plan: Plan) -> Plan:
    """Returns the plan with one array for all leaves that were one JAX array when saved and go to one place."""
    if isinstance(plan.source, View):  # Rules may have made different leaves of one array.
        return plan
    arrays = [n for n, target in enumerate(plan.targets) if target.make in _place.IN_JAX and target.entry is not None]
    first: dict[Any, int] = {}
    aliases: dict[int, int] = {}
    targets = list(plan.targets)
    names = origins(plan.source, [entry_of(targets[n]).path for n in arrays])
    for n, name in zip(arrays, names, strict=True):
        target, place = targets[n], (plan.places[n], plan.layouts.get(n), n in plan.uncommitted)
        other = first.setdefault((name, target.make, target.dtype, target.weak, place), n)
        if other != n:
            aliases[n] = other
            targets[n] = Target("value")
    if not aliases:
        return plan
    rest = {n for n in plan.uncommitted if n not in aliases}
    return plan._replace(targets=targets, aliases=aliases, uncommitted=rest)


def _log_static(source: Source, walked: walk.Walk, name: str, *, resumed: bool) -> None:
    at = below_of(source)
    saved = {place: named for path, named in static_values(source).items() if (place := below(path, at)) is not None}
    if found := static.differences(saved, walked.static):
        _log.log(
            logging.WARNING if resumed else logging.INFO,
            "%s: %d static values differ from those of the job that saved: %s; the program's are kept, because static "
            "values are a part of the program. Keep a value that changes during training in an array or a Variable",
            name,
            len(found),
            few(tuple(found)),
        )


def _asks(leaf: Any) -> bool:
    """Returns True if a leaf of a template takes something from the checkpoint."""
    return leaf is not None and leaf is not ... and not is_function(leaf)


def _has_level(template: Sequence[str], found: Iterable[str], level: str) -> bool:
    """Returns True if all paths of a template are below `level`, and no path in the checkpoint is."""
    here = [below(path, level) is not None for path in template]
    return bool(here) and all(here) and all(below(path, level) is None for path in found)


def _untemplated_places(sharding: Any, entries: Mapping[str, Entry], skeleton: Skeleton | None) -> list[Where]:
    if sharding is None:
        return [None] * len(entries)
    listed = list(entries.values())
    template = nest(entries, listed) if skeleton is None else build(skeleton, listed)
    walked = walk.walk(template)
    shaped = [_as_seen(leaf) if isinstance(leaf, ArrayEntry) else None for leaf in walked.leaves]
    places = dict(
        zip(walked.paths, _place.resolve(sharding, template, walked.paths, shaped, lambda: shaped), strict=True)
    )
    return [places[path] for path in entries]


def _as_seen(entry: ArrayEntry) -> ArrayEntry | jax.ShapeDtypeStruct:
    """Returns the entry with the shape that users see. The data of typed keys has one more axis than the keys."""
    return _shape_and_dtype(entry.shape[:-1], dtypes.to_numpy(entry.dtype)) if entry.type == "key" else entry


def _shaped(target: Target) -> Any:
    if target.make not in _place.IN_JAX:
        return None
    shape = target.entry.shape if target.entry else ()
    return _shape_and_dtype(shape[:-1] if target.make == "key" else shape, target.dtype)


@functools.lru_cache(maxsize=1024)
def _shape_and_dtype(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
