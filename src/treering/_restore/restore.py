"""Restoring: match, read, place, and the tree again."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from .._core import dtypes
from .._core.describe import mismatch
from .._core.entries import NO_ARRAY, ArrayEntry, Entry
from .._core.leaf_paths import below, few
from .._core.part import name_of, whole_of
from .._core.skeleton import LEAF, Node, Skeleton, build, nest
from .._core.source import Source, origins, records_kinds, static_values
from .._core.views import View
from .._processes import progress_bar as _progress
from .._processes.calls import Call
from .._pytree import box_levels, devices, flax, iterators, static, walk
from .._pytree.leaves import is_function
from .._threads.ahead import ahead
from .._threads.python_gc import gc_paused
from ..errors import Difference, MismatchError
from . import match, positional, saved_kinds, saved_places, shared_reads
from . import place as _place
from .groups import Group, entry_of, in_groups, on_host
from .initial import Initial
from .match import Policy
from .place import Where
from .targets import Differs, Target, check_width

_log = logging.getLogger("treering")
_BUDGET = 256 << 20  # bytes of host memory in use at a time, where arrays pass through it
_SHARE, _MOST_TOGETHER = 128 << 20, 8 << 30  # bytes for each process to read at a time, and for all of them
_MESSAGES = 64 << 20  # bytes of it, at most, for what processes that read together send to one another
_NUMPY = ("numpy", "numpy-scalar")  # values of `Target.make` that give an array on the host
_OF_JAX, _ALL = ("jax", "jax-weak"), ("jax", "jax-weak", "numpy", "numpy-scalar")  # types of arrays


class _Plan(NamedTuple):
    """The fate of each leaf, known before anything is read; `asked` are the paths that the template asks for.

    `layouts` has the layouts of arrays that are not row-major. `uncommitted` are arrays that have a device without
    being committed to it. `aliases` maps a leaf to the earlier one that is the same array object.
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


@devices.explicit()
def restore(
    source: Source,
    like: Any,
    policy: Policy,
    *,
    call: Call | None,
    sharding: Any = None,
    verify: bool = True,
    mmap: bool | None = None,
    memory_limit: int | None = None,
    progress: bool = False,
    read: str | None = None,
) -> Any:
    """The tree of a source in the shape of `like`, or as nested containers when that is None.

    In this order: match the leaves, read and place them, unflatten. With a `call`, all processes of the job do this
    together. With an `Initial` as `like`, a job is resumed: every leaf gets the kind and the place that were saved.
    """
    begun = time.perf_counter()
    if read not in (None, "each", "once"):
        raise MismatchError(f"read={read!r}: expected 'each' or 'once'")
    if isinstance(sharding, str) and sharding != "saved":
        raise MismatchError(f"sharding={sharding!r}: expected 'saved', a sharding or a tree of them")
    name = name_of(source)
    with gc_paused():
        plan = (
            _plan_without_template(source, policy, name, sharding)
            if like is None
            else _plan_by_template(source, like, policy, name, sharding)
        )
    values = _values(plan, verify, mmap, memory_limit, progress, read, call)
    source.check_present()  # of a bucket, what was not read is looked for now
    values = _with_what_is_there(plan, values, moved=like is not None and sharding is not None)
    with gc_paused():
        tree = plan.build(values)
    if _log.isEnabledFor(logging.INFO):
        filled = tuple(path for path, target in zip(plan.paths, plan.targets, strict=True) if target.filled)
        _tell(plan.source, name, plan.entries, plan.asked(), filled, begun)
    return tree


def _plan_without_template(source: Source, policy: Policy, name: str, sharding: Any) -> _Plan:
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
    return _Plan(whole_of(source), entries, paths, targets, places, lambda: paths, build_tree, layouts, uncommitted)


def _plan_by_template(source: Source, like: Any, policy: Policy, name: str, sharding: Any) -> _Plan:
    split = like.split if isinstance(like, Initial) else flax.split(like)
    template, join, walked = split.tree, split.join, walk.walk_split(split)
    skeleton = source.skeleton
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
        policy = dataclasses.replace(policy, kinds="saved")
    targets = match.match(
        walked, entries, skeleton, policy, name, as_written, numbers_are_arrays=source.numbers_are_arrays
    )
    plan = _Plan(
        whole_of(source),
        entries,
        walked.paths,
        targets,
        [],
        lambda: [path for path, leaf in zip(walked.paths, walked.leaves, strict=True) if _asks(leaf)],
        lambda values: join(walk.rebuilt(template, values, walked.structure)),
    )
    _log_static(source, walked, name, resumed=initial is not None)
    if initial and policy.kinds == "saved":
        saved_kinds.log_changes(name, walked.paths, walked.leaves, targets)
        plan = _with_aliases(plan)
    return _with_places(plan, walked, template, sharding, initial, name)


def _with_places(
    plan: _Plan, walked: walk.Walk, template: Any, sharding: Any, initial: Initial | None, name: str
) -> _Plan:
    """Returns the plan with the place of each leaf: what `sharding` says, else what was saved, else the template's."""
    paths, leaves, targets = walked.paths, walked.leaves, plan.targets
    entries = [plan.entries.get(path) for path in paths]
    arrays = functools.cache(lambda: [_shaped(target) for target in plan.targets])
    as_saved = isinstance(sharding, str)
    layouts: dict[int, tuple[int, ...]] = {}
    wished = [None] * len(paths) if as_saved or sharding is None else _place.wishes(
        sharding, template, paths, leaves, lambda: [_on_request(target) for target in targets]
    )  # fmt: skip
    if as_saved or initial:
        saved = saved_places.saved_places(plan.source, entries, targets, exactly=not as_saved)
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


def _moved(plan: _Plan, wishes: Sequence[Any], name: str) -> list[Target]:
    """Returns the targets, in JAX for the NumPy leaves of the template that `sharding` places.

    Raises `MismatchError` for a dtype that JAX does not have.
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
    """Returns the shape and dtype of an array for a function that is passed as `sharding`, or None."""
    if target.make in _NUMPY and target.entry is not None:
        return _shape_and_dtype(target.entry.shape, target.dtype)
    return _shaped(target)


def _with_aliases(plan: _Plan) -> _Plan:
    """Returns the plan with one array for all leaves that were one JAX array when they were saved."""
    if isinstance(plan.source, View):
        return plan
    arrays = [n for n, target in enumerate(plan.targets) if target.make in _place.IN_JAX and target.entry is not None]
    first: dict[Any, int] = {}
    aliases: dict[int, int] = {}
    targets = list(plan.targets)
    names = origins(plan.source, [entry_of(targets[n]).path for n in arrays])
    for n, name in zip(arrays, names, strict=True):
        other = first.setdefault((name, targets[n].make, targets[n].dtype, targets[n].weak), n)
        if other != n:
            aliases[n] = other
            targets[n] = Target("value")
    return plan._replace(targets=targets, aliases=aliases) if aliases else plan


def _log_static(source: Source, walked: walk.Walk, name: str, *, resumed: bool) -> None:
    if found := static.differences(static_values(source), walked.static):
        _log.log(
            logging.WARNING if resumed else logging.INFO,
            "%s: %d static values differ from those of the job that saved: %s; the program's are kept, because static "
            "values are a part of it. Keep what changes during training in an array or a Variable",
            name,
            len(found),
            few(tuple(found)),
        )


def _with_what_is_there(plan: _Plan, values: list[Any], *, moved: bool) -> list[Any]:
    """Sets iterators to their states; with `moved`, puts what `missing` took from the template where the rest goes."""
    for path, target in zip(plan.paths, plan.targets, strict=True):
        if target.state:  # in place, and so only now that everything else is there
            iterators.put_back(path, target.value, *target.state)
    if moved:
        values = [
            jax.device_put(value, place) if isinstance(value, jax.Array) and target.make == "value" else value
            for value, target, place in zip(values, plan.targets, plan.places, strict=True)
        ]
    for n, layout in plan.layouts.items():
        if isinstance(values[n], jax.Array):
            values[n] = saved_places.laid_out(values[n], layout)
    for n in plan.uncommitted:
        values[n] = _place.uncommitted(values[n])
    for n, first in plan.aliases.items():
        values[n] = values[first]
    return values


def _asks(leaf: Any) -> bool:
    """Whether a leaf of a template asks for something of the checkpoint."""
    return leaf is not None and leaf is not ... and not is_function(leaf)


def _tell(
    reader: Source,
    name: str,
    entries: Mapping[str, Entry],
    asked: Sequence[str],
    filled: tuple[str, ...],
    begun: float,
) -> None:
    """Logs which leaves were restored, from where, and which were not."""
    used = set(asked)
    left = tuple(path for path, entry in entries.items() if path not in used and entry.type not in NO_ARRAY)
    step = "" if reader.step is None else f"step {reader.step}, "
    rest = f"; {len(filled)} taken from the template: {few(filled)}" if filled else ""
    rest += f"; {len(left)} left in the checkpoint: {few(left)}" if left else ""
    seconds = time.perf_counter() - begun
    _log.info("restored %d leaves of %s%s in %.2f s%s", len(asked) - len(filled), step, name, seconds, rest)


def _has_level(template: Sequence[str], found: Iterable[str], level: str) -> bool:
    """Whether all of a template lies at a level, and nothing of what was found."""
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
    """An array with the shape that its user sees: of typed keys, the data has one more axis."""
    return _shape_and_dtype(entry.shape[:-1], dtypes.to_numpy(entry.dtype)) if entry.type == "key" else entry


def _shaped(target: Target) -> Any:
    if target.make not in _place.IN_JAX:
        return None
    shape = target.entry.shape if target.entry else ()
    return _shape_and_dtype(shape[:-1] if target.make == "key" else shape, target.dtype)


@functools.lru_cache(maxsize=1024)
def _shape_and_dtype(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _values(
    plan: _Plan,
    verify: bool,
    mmap: bool | None,
    limit: int | None,
    progress: bool,
    read: str | None,
    call: Call | None,
) -> list[Any]:
    targets, places = plan.targets, plan.places
    values: list[Any] = [target.value for target in targets]
    passing = _leave_host(targets, places)
    budget = _BUDGET if limit is None else limit
    room = int(min(_MESSAGES, budget // 4))
    if limit is None and call and call.count > 1 and not passing and _as_they_are(plan):
        # What is read is what is returned: no memory is saved by reading little at a time.
        budget = max(budget, min(_SHARE * call.count, _MOST_TOGETHER))
    with gc_paused():
        joint = shared_reads.shared(
            call, plan.source, targets, places, read, alike=[budget, passing, verify], room=room
        )
    reader = joint or plan.source
    # Mapped arrays need no memory, so all of them are one group, and one mapping, unless a progress bar is shown.
    free = joint is None and not progress and not passing and plan.source.can_mmap(mmap)
    # What is sent has room beside the default, for where one group ends and the next begins blocks are read twice.
    left = budget if limit is None else budget - room
    most = None if free else left if joint else budget // 2 if passing else budget
    with gc_paused():
        groups = [Group(targets, places, numbers) for numbers in in_groups(targets, most)]
    total = sum(target.entry.nbytes for target in targets if target.entry) if progress else 0
    read_group = devices.explicit()(reader.read)  # in another thread too, for a rule may compute with JAX
    jobs = [functools.partial(read_group, group.wanted, verify=verify, mmap=mmap) for group in groups]
    # While one group is on its way to the devices the next one is read, but never by what other processes wait for.
    found = ahead(jobs) if passing and joint is None else (job() for job in jobs)
    with _progress.bar("restoring", total, progress) as moved:
        for group in groups:
            there = group.put(plan.paths, next(found), values)
            if passing:  # the memory that they pass through is free only then
                jax.block_until_ready(there)
            if progress:
                moved(sum(entry_of(targets[n]).nbytes for n in group.numbers))
    for n, target in enumerate(targets):
        if target.entry is None and target.make != "value":  # an int where the template has a 0-d array
            array = dtypes.cast(np.array(target.value), target.dtype)
            if target.make == "jax":
                (values[n],) = _place.put([_place.Item(places[n], (), array.dtype, target.weak, [array])])
            else:
                values[n] = on_host(array, target)
    return values


def _leave_host(targets: Sequence[Target], places: Sequence[Where]) -> bool:
    """Whether arrays only pass through host memory, on their way to a device."""
    wanted = {id(place): place for target, place in zip(targets, places, strict=True) if target.make == "jax"}
    platforms = {device.platform for place in wanted.values() if place is not None for device in place.device_set}
    if None in wanted.values():
        platforms.add(jax.default_backend())
    return not platforms <= {"cpu"}


def _as_they_are(plan: _Plan) -> bool:
    """Whether no array is made of another one that has to be in memory meanwhile."""
    if isinstance(plan.source, View):
        return False
    arrays = ((target.entry, target.dtype) for target in plan.targets if target.entry is not None)
    return all(dtype is None or dtypes.to_numpy(entry.dtype) == dtype for entry, dtype in arrays)
