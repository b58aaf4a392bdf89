"""Executes the plan of a save in the background: writes what it names, and commits."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import formats
from .._core.boxes import Cells, full_box
from .._core.calls import error_watcher
from .._core.entries import IteratorEntry, StatesEntry
from .._core.iterator_states import MAX_STATE_BYTES
from .._core.layouts import Layout, held_by, owner
from .._core.lazy import ReadAhead
from .._core.leaf_paths import join_names
from .._core.source import Written, arrays_of
from .._core.views import Leaf, View
from .._processes import assignment, progress_bar
from .._processes.consistency import check_consistent
from .._processes.layouts import layout_of
from .._pytree.lazy_supply import LazySupply
from .._pytree.leaves import Catalogue
from .._restore.checkpoint import Checkpoint
from .._threads.pool import ThreadPool
from .._threads.reentry import non_reentrant
from ..errors import UnsupportedError
from ..formats import JointFormat
from .native_save import NativeSave
from .plan import CopyPlan, ForeignPlan, NativePlan, Plan, TemporaryPlan, array_of, plan_copy
from .save_manifest import Job

# The record of the place of a leaf that only one process has; see `_write_native`.
_SINGLE_PROCESS_PLACE = {"unrecorded": "the devices of one process of several"}


def write(plan: Plan, pool: ThreadPool) -> Written:
    """Writes a checkpoint durably, together with the other processes of the call."""
    try:
        if isinstance(plan, NativePlan):
            return _write_native(plan, pool)
        if isinstance(plan, ForeignPlan):
            return _write_foreign(plan)
        if isinstance(plan, CopyPlan):
            return _copy_in_process_0(plan, pool)
        return _write_by_way_of_native(plan, pool)
    finally:
        if isinstance(plan.caller, LazySupply):  # A caller that waits until the tree is read returns now at the latest.
            plan.caller.release_caller()


def _write_native(plan: NativePlan, pool: ThreadPool) -> Written:
    """Compares the trees of all processes, writes the part of this process, and commits."""
    target, skeleton, catalogue, shares, supply, _, reuse, deltas = plan
    call, options = target.call, target.options
    if call.count > 1:
        catalogue, single = check_consistent(call, skeleton, catalogue, supply, target.requested())
        # `single` maps each leaf that only one process has to that process. It must write the leaf.
        if single:
            # These shares have no keepers, because the second copies that are staged may not fit them. The files are
            # copied after the commit instead.
            shares = assignment.assign(catalogue, call.count, single)
            # The manifest has the places as process 0 sees them. If process 0 has such a leaf, that looks to it like a
            # leaf of which each process has a copy on its own devices. A restore would then put it on the devices of
            # every process. So the places of these leaves are not recorded.
            places = [_SINGLE_PROCESS_PLACE if n in single else place for n, place in enumerate(catalogue.places)]
            catalogue = catalogue._replace(places=places)
        if shares is not None:
            shares = {**shares, **assignment.assign_states(catalogue.entries, call.count)}
    encoded = None
    if deltas:
        encoded = deltas.encode(target, catalogue, shares, supply)
        catalogue, shares, supply = encoded[:3]
    job = Job(
        target.path, options.overwrite, skeleton, catalogue, shares, target.info, options.hosts, options.room_maker,
        reuse, deltas, encoded,
    )  # fmt: skip
    save = NativeSave(target.store, job, supply, pool, call)
    if not options.progress:
        return save.run()
    with progress_bar.bar(f"saving {os.path.basename(target.path)}", supply.nbytes, True) as supply.on_progress:
        return save.run()


@non_reentrant  # A rule's function runs in here. A save that it began would wait for this one without end.
def _write_foreign(plan: ForeignPlan) -> Written:
    target, view, compared, reading, caller, is_live = plan
    call, format, place, options = target.call, target.format, target.path, target.options
    call.broadcast(target.check_replaceable)
    target.check_iterators(view)
    write: Callable[..., int] = format.write
    if compared:
        assert view.skeleton is not None and isinstance(format, JointFormat)
        catalogue, single = check_consistent(call, view.skeleton, compared.catalogue, reading, target.requested())
        view = _with_all_states(place, view, catalogue)
        call.set_activity("writing")
        write = functools.partial(format.write_together, call=call, layouts=_layouts(catalogue, single))
    begun = time.perf_counter()
    arrays = sum(entry.nbytes for entry in arrays_of(view)) if options.progress else 0
    check_others = error_watcher(call)

    def check_all() -> None:
        caller.check()
        check_others()

    with progress_bar.bar(f"saving {os.path.basename(place)}", arrays, options.progress) as moved:
        # Each read of a checkpoint in a bucket takes a request.
        source: Any = view if is_live or view.is_local else ReadAhead(view, arrays_of(view))
        watched: Any = progress_bar.ObservedSource(source, moved, check_all)
        nbytes = write(target.store, place, watched, overwrite=options.overwrite, **options.format_options)
    return Written(nbytes, time.perf_counter() - begun)


def _with_all_states(place: str, view: View, catalogue: Catalogue) -> View:
    """Returns the view that has, in process 0, the states of the iterators of all processes, because that writes them.

    Raises `UnsupportedError` for states that are too large to be sent.
    """
    found = {entry.path: entry for entry in catalogue.entries if isinstance(entry, IteratorEntry)}
    if large := [path for path, entry in found.items() if isinstance(entry, StatesEntry) and len(entry.value) > 1]:
        raise UnsupportedError(
            f"{place}: {join_names(tuple(large))}: the states of an iterator in several processes, one of them larger "
            f"than {MAX_STATE_BYTES >> 20} MiB; save in the native format, and convert that"
        )
    if not found:
        return view
    assert view.skeleton is not None
    own = {path: Leaf(entry, source=view.leaves[path].source) for path, entry in found.items()}
    return view.changed({**view.leaves, **own}, view.skeleton)


def _layouts(catalogue: Catalogue, single: Mapping[int, int]) -> dict[str, Layout]:
    """Returns, by path, the layout of each array of which some process lacks a part.

    `single` maps each leaf that only one process holds to that process.
    """
    found: dict[str, Layout] = {}
    for leaf in catalogue.global_leaves - single.keys():
        entry = array_of(catalogue, leaf)
        layout = layout_of(catalogue.shardings[leaf], entry.shape)
        if math.prod(entry.shape) and owner(layout) is None:
            found[entry.path] = layout
    for leaf, process in single.items():
        entry = array_of(catalogue, leaf)
        if math.prod(entry.shape):
            found[entry.path] = held_by(Cells.of([full_box(entry.shape)])[0], (process,))
    return found


def _copy_in_process_0(plan: CopyPlan, pool: ThreadPool) -> Written:
    """Lets process 0 copy a checkpoint while its peers wait."""
    call, own = plan.target.call, plan.own
    call.set_activity("copying in process 0")
    return Written(*call.broadcast(lambda: own and list(write(own, pool))))


def _write_by_way_of_native(plan: TemporaryPlan, pool: ThreadPool) -> Written:
    target, temporary, change, caller = plan
    call = target.call
    with contextlib.ExitStack() as scratch:

        def begin() -> str:
            target.check_path_free()
            return scratch.enter_context(target.store.scratch_folder(target.path))

        def copy() -> list[Any]:
            saved = Checkpoint(formats.get("treering").open(target.store, folder))
            return list(write(plan_copy(target, change(saved), caller.check), pool))

        folder = call.broadcast(begin)
        try:
            _write_native(temporary._replace(target=target._replace(path=folder)), pool)
        except BaseException:
            if call.index:  # Process 0 cannot remove the folder while files of this process are in it.
                with contextlib.suppress(OSError):
                    target.store.remove_folder(folder)
            raise
        call.set_activity("writing in process 0")
        return Written(*call.broadcast(copy))
