"""Chooses the way to save, by the tree, the format and the number of processes.

| tree | processes | format | way |
| --- | --- | --- | --- |
| unchanged | any number | native | `STAGED` |
| checkpoint | several | any | `COPIED_BY_PROCESS_0` |
| changed by rules or the format, cannot be written in parts | several | any | `VIA_NATIVE` |
| any other | any number | native | `READ_WHILE_WRITTEN` |
| any other | any number | foreign | `FOREIGN` |

The memory limit does not choose the way. It decides only whether the caller waits until its arrays are copied. Where
each host has its own disk, `VIA_NATIVE` is impossible, so `choose` raises an error.
"""

import enum

import msgspec
import xxhash

from .._core.views import View
from .._processes.consistency import gather_from_equal_calls
from .._pytree.live_tree import LiveTree
from ..errors import UnsupportedError
from ..formats import JointFormat
from . import collective_write, save_source
from .contents import Contents, Unchanged
from .save_target import SaveTarget, requested_options


class Way(enum.Enum):
    """A way to save."""

    STAGED = enum.auto()  # The caller copies the arrays to host memory, and the writers write them as they are.
    READ_WHILE_WRITTEN = enum.auto()  # The writers read what they need, box by box, because rules change the arrays.
    FOREIGN = enum.auto()  # The format writes by itself, and reads what it needs.
    COPIED_BY_PROCESS_0 = enum.auto()  # Process 0 copies a checkpoint that all processes have opened.
    VIA_NATIVE = enum.auto()  # All processes save a temporary native checkpoint, and process 0 converts it.


def choose(target: SaveTarget, contents: Contents) -> Way:
    """Chooses the way to save. All processes of a call choose the same way.

    Raises `MismatchError` if the rules of two processes make a leaf from different leaves. Raises `UnsupportedError` if
    each host has its own disk and the processes cannot write their parts separately.
    """
    if isinstance(contents, Unchanged):
        return Way.STAGED
    if target.call.count > 1:
        if contents.live is None:
            return Way.COPIED_BY_PROCESS_0
        if not _can_write_in_parts(target, contents.view, contents.live):
            if target.options.hosts:
                raise UnsupportedError(
                    f"{target.path}: expected a save in which each process writes its own part, because the hosts' "
                    "disks are not shared; found rules for which one process needs arrays of its peers: make those "
                    "arrays in the program"
                )
            return Way.VIA_NATIVE
    return Way.READ_WHILE_WRITTEN if target.format.name == "treering" else Way.FOREIGN


def _can_write_in_parts(target: SaveTarget, view: View, live: LiveTree) -> bool:
    """Returns True if each process can write its part of a view of a live tree.

    Raises `MismatchError` if the rules of two processes make a leaf from different leaves.
    """
    can = target.format.name == "treering"
    if isinstance(target.format, JointFormat) and target.store.has_folders:
        can = collective_write.can_write(target.format, save_source.describe_view(view, live, None).catalogue)
    can = can and not save_source.cross_process_paths(view, live)
    # Every process must return the same answer, so they exchange theirs. They can differ: an array that only one
    # process holds looks to that process like a local array, and to its peers like a global one.
    sources = xxhash.xxh3_128_hexdigest(msgspec.json.encode([[path, view.source(path)] for path in view.leaves]))
    return gather_from_equal_calls(target.call, requested_options(target), [can, sources], save_source.agree_can_write)
