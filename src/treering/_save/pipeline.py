"""Prepares a save: describes the tree, chooses a way to save it, and plans that way.

`save.start_save` then runs the plan: the caller's thread stages the arrays, and a background thread writes and commits.
"""

from collections.abc import Callable
from typing import Any

from .. import stores
from .._processes.calls import Call
from .._rules.base import check_list
from ..formats import Format
from ..formats.treering import write as native
from .choose import Way, choose
from .contents import Changed, describe
from .foreign_way import foreign
from .memory import limited
from .native_ways import read_while_written, staged
from .options import SaveOptions
from .prepared import Prepared
from .process_0_ways import copied_by_process_0, via_native
from .save_target import SaveTarget, check_info_kept

_PLANS: dict[Way, Callable[[SaveTarget, Any], Prepared]] = {
    Way.STAGED: staged,
    Way.READ_WHILE_WRITTEN: read_while_written,
    Way.FOREIGN: foreign,
    Way.COPIED_BY_PROCESS_0: copied_by_process_0,
    Way.VIA_NATIVE: via_native,
}


def prepare(call: Call, path: str, tree: Any, info: native.Info, options: SaveOptions, format: Format) -> Prepared:
    """Describes the tree and plans what this process writes.

    Raises the errors that `treering.save` raises before it writes anything.
    """
    check_list(options.rules)
    target = SaveTarget(call, stores.get(path), path, format, info, options)
    contents = describe(target, tree)
    if options.reuse:
        contents = options.reuse(target, contents)
    target = limited(target, contents.described)
    way = choose(target, contents)
    if isinstance(contents, Changed) and format.name != "treering":
        check_info_kept(target, contents.view)
    return _PLANS[way](target, contents)
