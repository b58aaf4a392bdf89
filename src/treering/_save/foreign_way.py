"""Saves in the format of another library, by one process or by several together."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from .._core.entries import ArrayEntry, IteratorEntry, StatesEntry
from .._core.iterator_states import MAX_STATE_BYTES
from .._core.lazy import ReadAhead
from .._core.leaf_paths import join_names
from .._core.source import Written, arrays_of
from .._core.views import Leaf, View
from .._processes import progress_bar
from .._processes.calls import error_watcher
from .._processes.consistency import check_consistent
from .._pytree.lazy_supply import LazySupply
from .._pytree.leaves import SLICE_BYTES, Catalogue, Described
from .._threads.pool import ThreadPool
from .._threads.reentry import non_reentrant
from ..errors import UnsupportedError
from ..formats import JointFormat
from . import collective_write, save_source
from .contents import Changed
from .memory import staged_if_it_fits
from .prepared import Prepared, releasing
from .save_target import SaveTarget, check_iterators, check_replaceable, requested_options


def foreign(target: SaveTarget, contents: Changed, check: Callable[[], None] = lambda: None) -> Prepared:
    """Plans the save of a view, which the format's writer reads box by box.

    A live tree is staged first, unless its copies take too much memory. The reader calls `check` before it reads more;
    `check` raises if the save has failed elsewhere.
    """
    view, live, _ = contents
    staging = staged_if_it_fits(target, live) if live else None
    compared = (
        collective_write.replicated_shards(save_source.describe_view(view, live, SLICE_BYTES))
        if target.call.count > 1
        else None
    )
    block_caller = live is not None and staging is None
    reading = LazySupply(view, compared.shards if compared else [], block_caller=block_caller, before_read=check)
    supply = staging or reading
    write = functools.partial(_write, target, view, compared, reading, supply.check, live is not None)
    return Prepared(supply, releasing(reading, write))


@non_reentrant  # A rule's function runs in here. A save that it began would wait for this one without end.
def _write(
    target: SaveTarget,
    view: View,
    compared: Described | None,
    reading: LazySupply,
    check: Callable[[], None],
    is_live: bool,
    pool: ThreadPool,
) -> Written:
    call, format, place, options = target.call, target.format, target.path, target.options
    call.broadcast(lambda: check_replaceable(target))
    check_iterators(target, view)
    write: Callable[..., int] = format.write
    if compared:
        assert view.skeleton is not None and isinstance(format, JointFormat)
        catalogue, single = check_consistent(
            call, view.skeleton, compared.catalogue, reading, requested_options(target)
        )
        view = _with_all_states(place, view, catalogue)
        call.set_activity("writing")
        write = functools.partial(format.write_together, call=call, layouts=collective_write.layouts(catalogue, single))
    begun = time.perf_counter()
    arrays = sum(entry.nbytes for entry in view.entries.values() if isinstance(entry, ArrayEntry))
    check_others = error_watcher(call)

    def check_all() -> None:
        check()
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
