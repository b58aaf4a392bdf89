"""The choice among the ways to save: one function decides, from what is saved, where to, and by how many processes.

| tree | processes | format | way |
| --- | --- | --- | --- |
| unchanged | any number | native | `STAGED` |
| checkpoint | several | any | `COPIED_BY_PROCESS_0` |
| changed by rules or the format, cannot be written in parts | several | any | `VIA_NATIVE` |
| any other | any number | native | `READ_WHILE_WRITTEN` |
| any other | any number | foreign | `FOREIGN` |

The memory limit does not choose a way: within one it decides if the caller waits.
"""

import enum

import msgspec
import xxhash

from .._core.views import View
from .._processes.consistency import gather_alike
from .._pytree.live_tree import LiveTree
from ..errors import UnsupportedError
from ..formats import JointFormat
from . import inputs, joint
from .contents import Contents, Unchanged
from .target import Target, requested


class Way(enum.Enum):
    """A way to save."""

    STAGED = enum.auto()
    READ_WHILE_WRITTEN = enum.auto()
    FOREIGN = enum.auto()
    COPIED_BY_PROCESS_0 = enum.auto()
    VIA_NATIVE = enum.auto()


def choose(target: Target, contents: Contents) -> Way:
    """Chooses the way to save; all processes of a call choose the same.

    Raises `MismatchError` if rules make a leaf of another one in another process, and `UnsupportedError` if each
    process has its own disk and none can write its part.
    """
    if isinstance(contents, Unchanged):
        return Way.STAGED
    if target.call.count > 1:
        if contents.live is None:
            return Way.COPIED_BY_PROCESS_0
        if not _can_write_in_parts(target, contents.view, contents.live):
            if target.options.own_disks:
                raise UnsupportedError(
                    f"{target.path}: expected a save of which each process writes its own part, for the hosts' disks "
                    "are not shared; found rules for which one process needs what others have: make those arrays in "
                    "the program"
                )
            return Way.VIA_NATIVE
    return Way.READ_WHILE_WRITTEN if target.format.name == "treering" else Way.FOREIGN


def _can_write_in_parts(target: Target, view: View, live: LiveTree) -> bool:
    """Returns True if each process can write its part of a view of a live tree.

    The processes agree on it: an array that lies in one process alone looks to that process like any of its own.
    Raises `MismatchError` if rules make a leaf of another one in another process.
    """
    can = target.format.name == "treering"
    if isinstance(target.format, JointFormat) and target.store.has_folders:
        can = joint.can_write(target.format, inputs.described(view, live, None).catalogue)
    can = can and not inputs.spread_over_processes(view, live)
    sources = xxhash.xxh3_128_hexdigest(msgspec.json.encode([[path, view.source(path)] for path in view.leaves]))
    return gather_alike(target.call, requested(target), [can, sources], inputs.all_can)
