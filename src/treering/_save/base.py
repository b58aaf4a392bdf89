"""Saves a tree with the files of another checkpoint: `treering.save(base=...)`."""

import logging
import os
from collections.abc import Callable

from .. import stores
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, NotFoundError
from ..formats.treering import summary
from .save_reuse import Bases
from .source import PlainTree, SavedTree
from .target import SaveTarget
from .unchanged import UnchangedArrays

_log = logging.getLogger("treering")


def sharing_files_of(base: Checkpoint | str | os.PathLike[str]) -> Callable[[SaveTarget, SavedTree], SavedTree]:
    """Returns the option `reuse` of a save that shares the files of a checkpoint.

    Raises `NotFoundError` if there is none in the native format.
    """
    path = base.path if isinstance(base, Checkpoint) else stores.absolute(base)
    store = stores.get(path)
    if summary.stat_manifest(store, path) is None:
        raise NotFoundError(
            f"base={path!r}: expected a checkpoint in the native format, found none; nothing was written"
        )
    arrays = UnchangedArrays(lambda info, nbytes: Bases([path], "", [path]))

    def reuse(target: SaveTarget, tree: SavedTree) -> SavedTree:
        if not isinstance(tree, PlainTree):
            raise MismatchError(
                f"base={path!r}: expected a tree of arrays for the native format, found rules, a checkpoint or another "
                "format; leave out base= or save the tree as it is; nothing was written"
            )
        if store is not target.store or store.sharing != "links":
            _log.warning("%s: all arrays are written, because it cannot share files with %s", target.path, path)
            return tree
        return arrays.of_save(target, tree)

    return reuse
