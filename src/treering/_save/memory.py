"""Limits the host memory that the copies of a save may take."""

import logging

from .._core import host_memory, units
from .._processes import coordinator
from .._pytree.leaves import Described
from .._pytree.live_tree import LiveTree
from .._pytree.staged_supply import StagedSupply
from .save_target import SaveTarget

_MAX_PROCESSES_ON_A_HOST = 8  # all may ask for room at the same moment, before any of them has taken it
_log = logging.getLogger("treering")


def limited(target: SaveTarget, described: Described | None) -> SaveTarget:
    """Adds a memory limit if the caller has set none and the copies would take too much of the host's memory.

    `described` is None for a checkpoint. Treering reads a checkpoint box by box and needs no limit for it.
    """
    if described is None or target.options.memory_limit is not None:
        return target
    copies = sum([shard.nbytes for shard in described.shards if shard.needs_copy])
    if coordinator.is_multi_process():
        target = target._replace(memory_ok=host_memory.host_memory_check(copies))
    limit = host_memory.copy_limit(copies)
    if limit is None:
        return target
    _log.info(
        "%s: the call waits until all but %s of its %s of copies are written, because the available memory or a "
        "limit of this process leaves no room for more; memory_limit= sets another limit",
        target.path,
        units.nbytes(limit),
        units.nbytes(copies),
    )
    return target._replace(options=target.options._replace(memory_limit=limit))


def staged_if_it_fits(target: SaveTarget, live: LiveTree) -> StagedSupply | None:
    """Returns the staging of a live tree, or None if its copies take too much memory.

    With None the caller waits until the writers have read the tree.
    """
    limit = target.options.memory_limit
    copies = sum(shard.nbytes for shard in live.shards if shard.needs_copy)
    if limit is not None and copies > limit:
        return None
    if target.memory_ok and not target.memory_ok(copies * min(target.call.count, _MAX_PROCESSES_ON_A_HOST)):
        _log.warning(
            "%s: the call waits until the tree is read, because its copies would leave the host too little memory",
            target.path,
        )
        return None
    return live.stage()
