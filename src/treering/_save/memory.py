"""Limits the host memory that the copies of a save may take."""

import logging

from .._core import readable
from .._processes import coordinator
from .._pytree import available_memory
from .._pytree.leaves import Described
from .._pytree.live_tree import LiveTree
from .._pytree.staging import Staging
from .target import Target

_MAX_PROCESSES_ON_A_HOST = 8  # all may ask for room at the same moment, before any of them has taken it
_log = logging.getLogger("treering")


def limited(target: Target, described: Described | None) -> Target:
    """Adds a memory limit if the caller has set none and the copies would take too much of the host's memory.

    `described` is None for a checkpoint. Treering reads a checkpoint box by box and needs no limit for it.
    """
    if described is None or target.options.memory_limit is not None:
        return target
    copies = sum([shard.nbytes for shard in described.shards if shard.copies])
    if coordinator.several():
        target = target._replace(has_room=available_memory.shared_room(copies))
    limit = available_memory.ceiling(copies)
    if limit is None:
        return target
    _log.info(
        "%s: the call waits until all but %s of its %s of copies are written: that is a quarter of the available "
        "memory; memory_limit= sets another limit",
        target.path,
        readable.nbytes(limit),
        readable.nbytes(copies),
    )
    return target._replace(options=target.options._replace(memory_limit=limit))


def staged_if_it_fits(target: Target, live: LiveTree) -> Staging | None:
    """Returns the staging of a live tree, or None if its copies take too much memory.

    With None the caller waits until the writers have read the tree.
    """
    limit = target.options.memory_limit
    copies = sum(shard.nbytes for shard in live.shards if shard.copies)
    if limit is not None and copies > limit:
        return None
    if target.has_room and not target.has_room(copies * min(target.call.count, _MAX_PROCESSES_ON_A_HOST)):
        _log.warning(
            "%s: the call waits until the tree is read, because its copies would leave the host too little memory",
            target.path,
        )
        return None
    return live.stage()
