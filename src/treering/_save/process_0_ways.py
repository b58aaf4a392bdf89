"""Saves by several processes where process 0 alone writes the requested checkpoint.

Process 0 reads the leaves from a checkpoint that all processes have opened, or from a temporary native one that all
processes save first.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from .. import formats
from .._core.source import Written
from .._core.views import View
from .._processes import coordinator
from .._pytree.lazy_supply import LazySupply
from .._restore.checkpoint import Checkpoint
from .._threads.pool import ThreadPool
from . import native_ways
from .contents import Changed
from .foreign_way import foreign
from .prepared import Prepared
from .save_target import SaveTarget, check_iterators, check_path_free


def copied_by_process_0(target: SaveTarget, contents: Changed) -> Prepared:
    """Plans the save of a checkpoint that all processes have opened. Process 0 copies it while its peers wait."""
    call = target.call
    if call.index == 0:
        own = _copying(target, contents.view)
    else:
        own = Prepared(LazySupply(contents.view, []), lambda pool: Written(0, 0))

    def write(pool: ThreadPool) -> Written:
        call.set_activity("copying in process 0")
        return Written(*call.broadcast(lambda: list(own.write(pool))))

    return Prepared(own.supply, write)


def via_native(target: SaveTarget, contents: Changed) -> Prepared:
    """Plans the save of a live tree that is spread over processes, in a form that only one process can write.

    All processes save the tree next to the path, in the native format. Process 0 then makes the requested checkpoint
    from that temporary one, in bounded memory.
    """
    assert contents.live and contents.change
    if target.format.name != "treering":
        check_iterators(target, contents.view)
    parts = native_ways.stage_parts(target, contents.live.skeleton, contents.live.described)
    # Bind `contents.change` and not `contents`: the live arrays can then be freed once they are staged.
    return Prepared(parts.supply, functools.partial(_write_via_native, target, parts, contents.change))


def _write_via_native(
    target: SaveTarget, parts: native_ways.Parts, change: Callable[[Checkpoint], View], pool: ThreadPool
) -> Written:
    call = target.call
    with contextlib.ExitStack() as scratch:

        def begin() -> str:
            check_path_free(target)
            return scratch.enter_context(target.store.scratch_folder(target.path))

        def copy() -> list[Any]:
            saved = Checkpoint(formats.get("treering").open(target.store, folder))
            return list(_copying(target, change(saved), parts.supply.check).write(pool))

        folder = call.broadcast(begin)
        try:
            native_ways.write(target._replace(path=folder), parts, pool)
        except BaseException:
            if call.index:  # Process 0 cannot remove the folder while files of this process are in it.
                with contextlib.suppress(OSError):
                    target.store.remove_folder(folder)
            raise
        call.set_activity("writing in process 0")
        return Written(*call.broadcast(copy))


def _copying(target: SaveTarget, view: View, check: Callable[[], None] = lambda: None) -> Prepared:
    """Plans the save of a view of a checkpoint by this process alone."""
    write_alone = native_ways.read_while_written if target.format.name == "treering" else foreign
    return write_alone(target._replace(call=coordinator.begin_call("copy", processes="this")), Changed(view), check)
