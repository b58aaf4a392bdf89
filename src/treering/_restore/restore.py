"""Restores a tree: plans what each leaf becomes, reads the arrays, places them, and builds the tree."""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import dtypes, expansion
from .._core.calls import Call
from .._core.entries import NO_ARRAY, ArrayEntry, Entry
from .._core.leaf_paths import join_names
from .._core.source import Source, origins, source_name
from .._core.views import View
from .._processes import progress_bar as _progress
from .._pytree import devices, iterator_restore
from .._threads.pool import prefetch
from .._threads.python_gc import gc_paused
from ..errors import MismatchError
from . import array_placement as _place
from . import collective_plan, plans, saved_shardings
from .array_placement import ShardingOrNone
from .leaf_targets import LeafTarget, is_jax_dtype
from .plans import RestorePlan
from .policy import Policy
from .read_groups import ReadGroup, group_targets, host_value, target_entry

_log = logging.getLogger("treering")
_DEFAULT_MEMORY_BYTES = 256 << 20  # bytes of host memory in use at a time, if arrays only pass through it to a device
_MAX_BYTES_PER_PROCESS, _MAX_TOGETHER = (
    128 << 20,
    8 << 30,
)  # bytes read at a time: by each process, and by all of them at most
_MAX_MESSAGE_BYTES = 64 << 20  # bytes of the budget, at most, for messages between processes that read together


class HeldLeaves:
    """The leaves of the last restore. Those that have not changed since become leaves of the next one.

    same: the stored arrays that have not changed, by path.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._sources: dict[str, tuple[Any, ...]] = {}  # by path, what a leaf is and of which stored arrays it is made
        self._same = frozenset[str]()

    def unless_changed(self, same: Collection[str]) -> "HeldLeaves":
        """Returns these leaves for a restore in which only these stored arrays have not changed."""
        self._same = frozenset(same)
        return self

    def reuse(self, plan: RestorePlan) -> RestorePlan:
        """Returns the plan that takes the leaves that have not changed."""
        before, self._sources = self._sources, {}
        kept: dict[int, LeafTarget] = {}
        for n, (path, target) in enumerate(zip(plan.paths, plan.targets, strict=True)):
            if target.entry:
                made_of = tuple(self._origins(plan.source, target.entry))
                entry = target.entry
                self._sources[path] = target.make, entry.type, entry.impl, target.dtype, target.weak, made_of
                if before.get(path) == self._sources[path] and self._same.issuperset(made_of):
                    kept[n] = LeafTarget("value", value=self._values[path])
        targets = [kept.get(n, target) for n, target in enumerate(plan.targets)]
        layouts = {n: layout for n, layout in plan.layouts.items() if n not in kept}
        return plan._replace(targets=targets, layouts=layouts, uncommitted=set(plan.uncommitted) - kept.keys())

    def note(self, paths: Sequence[str], values: Sequence[Any]) -> None:
        """Notes the leaves of a restore."""
        self._values = dict(zip(paths, values, strict=True))

    def _origins(self, source: Source, entry: ArrayEntry) -> Iterator[str]:
        found = [one.path for one, _ in source.origins(entry.path)] if isinstance(source, View) else [entry.path]
        while isinstance(source, View):
            source = source._reader
        return iter(origins(source, found))


@devices.allow_transfers()
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
    max_expansion: float = expansion.MAX_RATIO,
    held: HeldLeaves | None = None,
) -> Any:
    """Returns the tree of a source in the shape of `like`, or as nested containers if that is None.

    Everything is matched before anything is read, so that a wrong template fails at once. With a `call`, all processes
    of the job restore together. An `Initial` as `like` resumes a job: every leaf gets its saved kind and place. `held`
    has leaves of the last restore that become leaves of this one.

    Raises `MismatchError` if the template or an argument does not fit the source.
    """
    begun = time.perf_counter()
    if read not in (None, "each", "once"):
        raise MismatchError(f"read={read!r}: expected 'each' or 'once'")
    if isinstance(sharding, str) and sharding != "saved":
        raise MismatchError(f"sharding={sharding!r}: expected 'saved', a sharding or a tree of them")
    expansion.check_memory_limit(memory_limit)
    name = source_name(source)
    with gc_paused():
        plan = (
            plans.without_template(source, policy, name, sharding)
            if like is None
            else plans.by_template(source, like, policy, name, sharding)
        )
    if held:
        plan = held.reuse(plan)
    expansion.check(source, (target.entry for target in plan.targets if target.entry), name, max_expansion)
    with _wide_enough(plan.targets):
        values = _values(plan, verify, mmap, memory_limit, progress, read, call)
        source.check_present()  # In a bucket, files that were not read may be missing without an error until now.
        values = _finished(plan, values, moved=like is not None and sharding is not None)
    if held:
        held.note(plan.paths, values)
    with gc_paused():
        tree = plan.build(values)
    if _log.isEnabledFor(logging.INFO):
        filled = tuple(path for path, target in zip(plan.paths, plan.targets, strict=True) if target.filled)
        _log_restored(plan.source, name, plan.entries, plan.requested_paths(), filled, begun)
    return tree


def _wide_enough(targets: Sequence[LeafTarget]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which JAX keeps all bits of the arrays, if the template has 64 bits while they are off."""
    made = {target.dtype for target in targets if target.make == "jax"}
    return contextlib.nullcontext() if all(map(is_jax_dtype, made)) else jax.enable_x64(True)


def _finished(plan: RestorePlan, values: list[Any], *, moved: bool) -> list[Any]:
    """Returns the values with their layouts and aliases, and sets the iterators to their states.

    moved: True to also put leaves that `missing` kept from the template where `sharding` places them.
    """
    # This changes the caller's iterators in place, so it waits until nothing else can fail to be read.
    states = [(path, one.value, *one.state) for path, one in zip(plan.paths, plan.targets, strict=True) if one.state]
    if states:
        iterator_restore.set_states(states)
    if moved:
        values = [
            jax.device_put(value, place) if isinstance(value, jax.Array) and target.make == "value" else value
            for value, target, place in zip(values, plan.targets, plan.places, strict=True)
        ]
    for n, layout in plan.layouts.items():
        if isinstance(values[n], jax.Array):
            values[n] = saved_shardings.with_layout(values[n], layout)
    for n in plan.uncommitted:
        values[n] = _place.uncommitted(values[n])
    for n, first in plan.aliases.items():
        values[n] = values[first]
    return values


def _log_restored(
    reader: Source,
    name: str,
    entries: Mapping[str, Entry],
    asked: Sequence[str],
    filled: tuple[str, ...],
    begun: float,
) -> None:
    """Logs how many leaves were restored, from which checkpoint, and which were not."""
    used = set(asked)
    left = tuple(path for path, entry in entries.items() if path not in used and entry.type not in NO_ARRAY)
    step = "" if reader.step is None else f"step {reader.step}, "
    rest = f"; {len(filled)} taken from the template: {join_names(filled)}" if filled else ""
    rest += f"; {len(left)} left in the checkpoint: {join_names(left)}" if left else ""
    seconds = time.perf_counter() - begun
    _log.info("restored %d leaves of %s%s in %.2f s%s", len(asked) - len(filled), step, name, seconds, rest)


def _values(
    plan: RestorePlan,
    verify: bool,
    mmap: bool | None,
    limit: int | None,
    progress: bool,
    read: str | None,
    call: Call | None,
) -> list[Any]:
    targets, places = plan.targets, plan.places
    values: list[Any] = [target.value for target in targets]
    passing = _pass_through_host(targets, places)
    budget = _DEFAULT_MEMORY_BYTES if limit is None else limit
    room = int(min(_MAX_MESSAGE_BYTES, budget // 4))
    if limit is None and call and call.count > 1 and not passing and _is_unconverted(plan):
        # The arrays that are read are the ones that are returned, so reading less at a time would save no memory.
        budget = max(budget, min(_MAX_BYTES_PER_PROCESS * call.count, _MAX_TOGETHER))
    with gc_paused():
        collective = collective_plan.collective_reader(
            call, plan.source, targets, places, read, must_match=[budget, passing, verify], room=room
        )
        reader = collective or plan.source
        # Mapped arrays take no memory, so all of them are one group and one mapping, except to show progress.
        free = collective is None and not progress and not passing and plan.source.can_mmap(mmap)
        # Messages come on top of the default budget: smaller groups would read more blocks twice, at their ends.
        left = budget if limit is None else budget - room
        max_bytes = None if free else left if collective else budget // 2 if passing else budget
        groups = [ReadGroup(targets, places, numbers) for numbers in group_targets(targets, max_bytes)]
    if not free and not passing:
        wanted = itertools.chain.from_iterable(group.wanted for group in groups)
        expansion.check_memory(plan.source, wanted, source_name(plan.source))
    total = sum(target.entry.nbytes for target in targets if target.entry) if progress else 0
    read_group = devices.allow_transfers()(reader.read)  # in whichever thread reads; rules may compute with JAX
    jobs = [functools.partial(read_group, group.wanted, verify=verify, mmap=mmap) for group in groups]
    # The next group is read while this one is on its way to the devices. Processes that read together do not do that:
    # they wait for one another, so they must not read in a second thread.
    found = prefetch(jobs) if passing and collective is None else (job() for job in jobs)
    with _progress.bar("restoring", total, progress) as moved:
        for group in groups:
            arrays = group.put(plan.paths, next(found), values)
            if passing:  # The host memory of this group is free only after its transfers.
                jax.block_until_ready(arrays)
            if progress:
                moved(sum(target_entry(targets[n]).nbytes for n in group.numbers))
    for n, target in enumerate(targets):
        if target.entry is None and target.make != "value":  # a saved Python number where the template has a 0-d array
            array = dtypes.convert(np.array(target.value), target.dtype)
            if target.make == "jax":
                (values[n],) = _place.put_arrays([_place.ArrayToPut(places[n], (), array.dtype, target.weak, [array])])
            else:
                values[n] = host_value(array, target)
    return values


def _pass_through_host(targets: Sequence[LeafTarget], places: Sequence[ShardingOrNone]) -> bool:
    """Returns True if arrays only pass through host memory, on their way to a device."""
    wanted = {id(place): place for target, place in zip(targets, places, strict=True) if target.make == "jax"}
    platforms = {device.platform for place in wanted.values() if place is not None for device in place.device_set}
    if None in wanted.values():
        platforms.add(jax.default_backend())
    return not platforms <= {"cpu"}


def _is_unconverted(plan: RestorePlan) -> bool:
    """Returns True if no array is made of another array that would have to be in memory at the same time."""
    if isinstance(plan.source, View):
        return False
    arrays = ((target.entry, target.dtype) for target in plan.targets if target.entry is not None)
    return all(dtype is None or dtypes.to_numpy(entry.dtype) == dtype for entry, dtype in arrays)
