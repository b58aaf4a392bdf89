"""Finds the arrays of a run that have not changed since earlier steps, so that a save need not write them again.

An array is certainly unchanged if it is the same `jax.Array` object as in the last save: JAX arrays never change. Only
weak references are held, so device memory is not used longer than the loop uses it. A new object probably has the
values of the one before if that was so in the last two saves, by the checksums of their blocks. Such arrays get files
of their own, and the writers compare the checksums of all blocks with those of an earlier file before they share it.
On an accelerator such arrays get digests too. If a digest is that of the last save, the array counts as unchanged, and
is not copied to the host.

Damage to one file must not cost all steps. So a save shares no file with the newest step that stays together with the
new one: two copies take turns. If no other step stays, it shares none: damage to the only file would pass from step to
step. Once an array is known to be unchanged, Treering writes it to a file of its own. So a loop writes it three times,
or four times if it is a new object each time.

A bucket has no links, but its server copies objects. A copy is independent of its source, so it may come from the last
step. Unchanged arrays get objects of their own too, and each object whose checksums are those of one of the last step
is copied. So no step is chosen beforehand: if the object of the last step is gone, the process uploads the bytes.

Each process knows the arrays that it writes. Process 0 knows the steps.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._pytree.device_digests import Digest
from .._pytree.leaves import LocalShard
from . import pending, saved_arrays
from .save_reuse import Bases, RunState, SaveReuse
from .source import PlainTree, SavedTree
from .target import Info, SaveTarget


class UnchangedArrays:
    """The arrays that this process has saved in one run. For `bases` see `RunState`."""

    def __init__(self, bases: Callable[[Info, int], Bases | None]):
        self.state = RunState(bases)
        self._last_shards: tuple[Any, Mapping[int, bool]] = (None, {})  # and the large leaves among them

    def of_save(self, target: SaveTarget, tree: SavedTree) -> SavedTree:
        """Returns the tree of a save together with what it may reuse. Called in the caller's thread."""
        if not isinstance(tree, PlainTree):
            return tree
        if target.options.hosts and target.options.copies > 1:
            return tree  # The second copy of a file that is shared would have to be planned in the same way.
        if target.store.sharing is None or not self.state.can_share:
            return tree
        shards = tree.described.shards
        if shards is not self._last_shards[0]:
            self._last_shards = shards, _large_leaves(shards)
        large = self._last_shards[1]
        alone = target.call.count == 1
        if not large and alone:
            return tree
        leaves, (catalogue, shards, data) = tree.leaves, tree.described
        arrays = {n: array for n in large if isinstance(array := leaves[n], jax.Array)}
        digests: Mapping[int, Digest] = {}
        deferred: set[int] = set()
        # While another save is under way, the caller would wait for it, because the plan comes after it.
        shares = target.store.sharing == "links"
        if shares and True in large.values() and ((last := pending.saves_finished) is None or last.is_set()):
            before = {tensor[0]: saved for tensor, saved in self.state.saved.arrays.items()}
            known = {n: saved for n in arrays if large[n] and (saved := before.get(catalogue.entries[n].path))}
            stable = {n: saved for n, saved in known.items() if saved.times > 1 or saved.equal_times}
            new = {n for n, saved in stable.items() if saved.array is None or saved.array() is not arrays[n]}
            digests = self.state.digests.of(new, shards, data)
            same = stable.keys() - {n for n in new if n not in digests or digests[n] != stable[n].digest}
            # The processes compare the other leaves before the plan.
            deferred = same if alone else same.intersection(catalogue.global_leaves)
        objects = {n: weakref.ref(array) for n, array in arrays.items()}
        return tree._replace(reuse=SaveReuse(self.state, target, catalogue.entries, objects, digests, deferred))


def _large_leaves(shards: Sequence[LocalShard]) -> dict[int, bool]:
    """Returns the leaves of large arrays of which this process has parts: True for those that must be copied."""
    nbytes: dict[int, int] = {}
    for shard in shards:
        nbytes[shard.leaf] = nbytes.get(shard.leaf, 0) + shard.nbytes
    copied = {shard.leaf for shard in shards if shard.needs_copy}
    return {leaf: leaf in copied for leaf, own in nbytes.items() if own >= saved_arrays.MIN_BYTES}
