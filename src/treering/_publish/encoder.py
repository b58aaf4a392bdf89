"""Turns the save of a version into the save of what has changed since the version before.

The truth is on the disk: every version names its base and the checksum of each array. The arrays in memory are those of
the last committed version, so that it need not be read. A publisher that starts again reads it once.
"""

import dataclasses
import logging
import posixpath
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core import dtypes
from .._core.boxes import full_box, slices
from .._core.entries import ArrayEntry, DeltaEntry, Entry
from .._core.leaf_paths import join_names
from .._pytree.leaves import LocalShard
from .._pytree.staged_supply import StagedSupply
from .._run import run_layout
from .._save.plan import NativePlan
from .._save.source import PlainTree, SavedTree
from .._save.target import SaveTarget
from .._threads.pool import in_parallel
from ..errors import CorruptError, MismatchError, UnsupportedError
from ..formats.treering import deltas, summary
from ..formats.treering.manifest_fields import Base
from ..formats.treering.read import Reader
from ..stores.buffers import empty_aligned_array
from ..stores.store import Store

_log = logging.getLogger("treering")


@dataclasses.dataclass
class Version:
    """A version of the stream, with the bytes of its arrays.

    chain: the paths of the versions that it is made from, back to a complete one; () for a complete one.
    arrays: by path, without those that are the same array as another leaf. `reader` reads them.
    checksums: by path, as far as they are known.
    objects: the JAX arrays that were published.
    """

    path: str
    identity: str
    chain: tuple[str, ...]
    entries: Mapping[str, ArrayEntry]
    arrays: dict[str, np.ndarray]
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, "weakref.ref[jax.Array]"] = dataclasses.field(default_factory=dict)
    reader: Reader | None = None

    def checksum(self, path: str) -> str:
        """Returns the checksum of an array's bytes."""
        if path not in self.checksums:
            self.checksums[path] = deltas.checksum(self.arrays[path])
        return self.checksums[path]


class Encoder:
    """What a process knows of the stream that it publishes.

    full_every: how many versions there are from a complete one to the next, if so many are published.
    """

    def __init__(self, root: str, full_every: int):
        self._root, self._full_every = root, full_every
        self._last: Version | None = None  # the last committed version
        self._has_looked = self._has_logged = False

    def of_save(self, target: SaveTarget, tree: SavedTree) -> SavedTree:
        """Returns the tree of a save together with the differences to make. Called in the caller's thread.

        Raises `MismatchError` for a tree with other leaves, shapes or dtypes than the versions before.
        """
        if target.call.count > 1:
            if not self._has_logged:
                self._has_logged = True
                _log.warning("%s: every version is stored completely, because several processes publish it", self._root)
            return tree
        if not self._has_looked:
            self._last, self._has_looked = _open_newest(target.store, self._root), True
        entries = tree.described.catalogue.entries if isinstance(tree, PlainTree) else list(tree.view.entries.values())
        arrays = {entry.path: entry for entry in entries if isinstance(entry, ArrayEntry)}
        if self._last:
            _check_same(self._root, arrays, self._last)
        if not isinstance(tree, PlainTree):
            return tree._replace(deltas=_Save(self, arrays, {}, frozenset()))
        _, shards, data = tree.described
        objects = {
            entry.path: leaf
            for entry, leaf in zip(entries, tree.leaves, strict=True)
            if isinstance(entry, ArrayEntry) and isinstance(leaf, jax.Array)
        }
        last = self._last
        known = last.objects if last else {}
        same = {
            path
            for path, leaf in objects.items()
            if (ref := known.get(path)) and ref() is leaf and last and path in last.arrays
        }
        if same:  # These are not copied from their devices.
            staged = [n for n, shard in enumerate(shards) if entries[shard.leaf].path not in same]
            shards, data = tuple(shards[n] for n in staged), [data[n] for n in staged]
        described = tree.described._replace(shards=shards, data=data)
        save = _Save(self, arrays, {path: weakref.ref(leaf) for path, leaf in objects.items()}, frozenset(same))
        return tree._replace(described=described, deltas=save)

    def _base(self, store: Store) -> Version | None:
        """Returns the version to store differences to; None if the next one is to be complete."""
        last = self._last
        if last is None or len(last.chain) + 1 >= self._full_every:
            return None
        if summary.identity_or_none(store, last.path) != last.identity:
            _log.warning("%s: the next version is complete: %s is gone or was replaced", self._root, last.path)
            return None
        there = {folder: {*store.list(folder)} for folder in {*map(posixpath.dirname, last.chain)}}
        if gone := [path for path in last.chain if posixpath.basename(path) not in there[posixpath.dirname(path)]]:
            _log.warning("%s: the next version is complete: %s is gone", self._root, gone[0])
            return None
        if reader := last.reader:
            try:
                last.arrays = deltas.read_arrays(reader, [path for path in last.entries if reader.origin(path) == path])
            except CorruptError as error:
                _log_unreadable(self._root, error)
                return None
            last.reader = None
        return last


class _Save:
    """One save of an `Encoder`. See `_save.source.Deltas`.

    objects: the JAX arrays of the tree. same: those that were published before.
    """

    def __init__(
        self,
        encoder: Encoder,
        entries: Mapping[str, ArrayEntry],
        objects: Mapping[str, "weakref.ref[jax.Array]"],
        same: Collection[str],
    ):
        self._encoder, self._entries, self._objects, self._same = encoder, entries, objects, same
        self._version: Version | None = None

    def encode(self, plan: NativePlan) -> tuple[NativePlan, Base | None]:
        encoder, catalogue = self._encoder, plan.catalogue
        base, last = encoder._base(plan.target.store), encoder._last
        entries: list[Entry] = list(catalogue.entries)
        found: dict[int, np.ndarray] = {}
        chain = (base.path, *base.chain) if base else ()
        version = Version(plan.target.path, "", chain, self._entries, {}, {}, self._objects)
        parts: dict[int, list[int]] = {}
        for n, shard in enumerate(plan.supply.shards):
            parts.setdefault(shard.leaf, []).append(n)
        same = [n for n, entry in enumerate(entries) if entry.path in self._same and n not in catalogue.tied]

        def one(leaf: int) -> None:
            entry = entries[leaf]
            is_same = leaf not in parts
            if is_same:
                assert last
                array = last.arrays[entry.path]
            else:
                array = _take(plan, entry, parts[leaf])
            found[leaf] = array
            if not isinstance(entry, ArrayEntry):
                return
            version.arrays[entry.path] = array
            old = base.arrays.get(entry.path) if base else None
            if base is None or old is None:
                return
            itemsize = dtypes.itemsize(entry.dtype)
            made = deltas.NO_DIFFERENCE if is_same else deltas.difference(array, old, itemsize)
            if made is None:
                return
            before = base.checksum(entry.path)
            version.checksums[entry.path] = after = deltas.checksum(array) if made.changed else before
            if not made.changed:
                version.arrays[entry.path] = old
            found[leaf] = made.data
            entries[leaf] = DeltaEntry(
                entry.path, "numpy", "uint8", (made.data.size,), "", entry, made.changed, made.gap, before, after
            )

        in_parallel([*parts, *same], one)
        is_delta = any(isinstance(entry, DeltaEntry) for entry in entries)
        if not is_delta:
            version.chain = ()
        self._version = version
        shards = [_shard(entries[leaf], leaf, array) for leaf, array in found.items()]
        supply = StagedSupply(shards, [found[shard.leaf] for shard in shards], None)
        supply.run()
        plan = plan._replace(
            catalogue=catalogue._replace(entries=entries, shardings={}, global_leaves=()), supply=supply
        )
        return plan, Base(posixpath.basename(base.path), base.identity) if base and is_delta else None

    def committed(self, identity: str) -> None:
        version = self._version
        assert version
        version.identity = identity
        self._encoder._last = version


def _shard(entry: Any, leaf: int, array: np.ndarray) -> LocalShard:
    return LocalShard(leaf, full_box(entry.shape), dtypes.to_numpy(entry.dtype), array.nbytes, False, None, entry.path)


def _take(plan: NativePlan, entry: Any, numbers: Sequence[int]) -> np.ndarray:
    """Returns an array of a plan as bytes, and releases those of the plan.

    On CPUs they may be memory of JAX, which does not reuse it, even for a donated array, while this view exists.
    """
    supply, shards = plan.supply, plan.supply.shards
    dtype = dtypes.to_numpy(entry.dtype)
    everything = full_box(entry.shape)
    first = shards[numbers[0]]
    if len(numbers) == 1 and first.box == everything:
        (out,) = supply.take([numbers[0]])
        supply.release_bytes([numbers[0]], [first.nbytes])
        return out
    out = empty_aligned_array(tuple(end - begin for begin, end in everything), dtype)
    for n in numbers:
        (data,) = supply.take([n])
        target = out[(*slices(shards[n].box, everything), ...)]
        target[...] = data.view(dtype).reshape(target.shape)
        del data
        supply.release_bytes([n], [shards[n].nbytes])
    return out.reshape(-1).view(np.uint8)


def _check_same(root: str, arrays: Mapping[str, ArrayEntry], last: Version) -> None:
    """Raises `MismatchError` unless the arrays have the paths, shapes and dtypes of the last version."""
    problems = [
        f"{path}: expected {before.dtype} {list(before.shape)}, found {now.dtype} {list(now.shape)}"
        for path, before in last.entries.items()
        if (now := arrays.get(path)) and (now.dtype, now.shape) != (before.dtype, before.shape)
    ]
    if lost := tuple(path for path in last.entries if path not in arrays):
        problems.append(f"missing: {join_names(lost)}")
    if new := tuple(path for path in arrays if path not in last.entries):
        problems.append(f"not in it: {join_names(new)}")
    if problems:
        raise MismatchError(
            f"{root}: expected the arrays of {posixpath.basename(last.path)}, found others; nothing was published; "
            "publish another model as a stream of its own\n" + "\n".join(problems)
        )


def _log_unreadable(root: str, error: Exception) -> None:
    _log.warning("%s: the next version is complete, because the last one cannot be read: %s", root, error)


def _open_newest(store: Store, root: str) -> Version | None:
    """Returns the newest version of a stream, if it can be read; else logs why the next version is complete."""
    steps = run_layout.located_steps(store, root)
    if not steps:
        return None
    path = steps[max(steps)].path
    try:
        reader = Reader(store, path)
        reader.check_present()
    except (CorruptError, UnsupportedError) as error:
        _log_unreadable(root, error)
        return None
    chain, one = list[str](), reader
    while one.made_from:
        one = one.base
        chain.append(one.path)
    entries = {path: entry for path, entry in reader.entries.items() if isinstance(entry, ArrayEntry)}
    return Version(
        path, reader.identity, (*chain,), entries, {}, {path: d.xxh3 for path, d in reader.deltas.items()}, {}, reader
    )
