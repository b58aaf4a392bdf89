"""Turns the save of a version into the save of what has changed since the version before.

The truth is on the disk: every version names its base and the checksum of each array. The arrays in memory are those of
the last committed version, so that it need not be read. A publisher that starts again reads it once.

With several processes, each holds the parts of the arrays that it writes, and makes their differences by itself.
Process 0 decides which version is the base. A process that lacks parts of it reads them: after a start, perhaps with
another number of processes, or after a version that process 0 published alone.
"""

import dataclasses
import logging
import math
import posixpath
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import dtypes
from .._core.boxes import Box, box_shape, full_box, intersect, slices
from .._core.entries import ArrayEntry, Entry, StatesEntry
from .._core.leaf_paths import join_names
from .._processes import assignment
from .._processes.assignment import Assignment
from .._pytree.device_digests import DeviceDigests, Digest
from .._pytree.lazy_supply import ShardSupply
from .._pytree.leaves import Catalogue, LocalShard
from .._pytree.staged_supply import StagedSupply
from .._run import run_layout
from .._save.source import Encoded, OwnParts, PlainTree, SavedTree
from .._save.target import SaveTarget
from .._threads.pool import in_parallel
from ..errors import CorruptError, MismatchError, UnsupportedError
from ..formats.treering import deltas, summary
from ..formats.treering.manifest import piece_key
from ..formats.treering.manifest_fields import Base, Delta
from ..formats.treering.read import Reader
from ..stores.buffers import empty_aligned_array
from ..stores.store import Store

_log = logging.getLogger("treering")
_MAX_READ_BYTES = 1 << 30  # of complete arrays that a process reads together if it needs only parts of them


class _Part(NamedTuple):
    """A part of an array that this process writes.

    number: that of its box in the assignment of the leaf.
    name: its name in the array file, which says only where its box begins. `key` is for parts of any versions.
    """

    leaf: int
    number: int
    path: str
    box: Box
    name: str

    @property
    def key(self) -> "_Key":
        return self.path, self.box


_Key = tuple[str, Box]


@dataclasses.dataclass
class Version:
    """A version of the stream, with the bytes of the parts that this process writes.

    chain: the paths of the versions that it is made from, back to a complete one; () for a complete one.
    arrays: by path and box, without arrays that are the same as another leaf. `reader` reads those that are missing.
    checksums: by path and box, as far as they are known.
    objects: the JAX arrays that were published, by path.
    digests: of arrays that did not change, by path.
    stable: the paths of arrays of which no part that this process writes has changed.
    """

    path: str
    identity: str
    chain: tuple[str, ...]
    entries: Mapping[str, ArrayEntry]
    arrays: dict[_Key, np.ndarray]
    checksums: dict[_Key, str] = dataclasses.field(default_factory=dict)
    objects: Mapping[str, "weakref.ref[jax.Array]"] = dataclasses.field(default_factory=dict)
    digests: Mapping[str, Digest] = dataclasses.field(default_factory=dict)
    stable: Collection[str] = ()
    reader: Reader | None = None

    def checksum(self, key: _Key) -> str:
        """Returns the checksum of the bytes of a part."""
        if key not in self.checksums:
            self.checksums[key] = deltas.checksum(self.arrays[key])
        return self.checksums[key]


class Encoder:
    """What a process knows of the stream that it publishes.

    full_every: how many versions there are from a complete one to the next, if so many are published.
    """

    def __init__(self, root: str, full_every: int):
        self._root, self._full_every = root, full_every
        self._last: Version | None = None  # the last committed version
        self._digests = DeviceDigests()
        self._has_looked = False

    def of_save(self, target: SaveTarget, tree: SavedTree) -> SavedTree:
        """Returns the tree of a save together with the differences to make. Called in the caller's thread.

        Raises `MismatchError` for a tree with other leaves, shapes or dtypes than the versions before.
        """
        if not self._has_looked:
            self._last, self._has_looked = _open_newest(target.store, self._root), True
        entries = tree.described.catalogue.entries if isinstance(tree, PlainTree) else list(tree.view.entries.values())
        arrays = {entry.path: entry for entry in entries if isinstance(entry, ArrayEntry)}
        if self._last:
            _check_same(self._root, arrays, self._last)
        if not isinstance(tree, PlainTree):
            return tree._replace(deltas=_Save(self, arrays, {}, {}, frozenset()))
        catalogue, shards, data = tree.described
        objects = {
            n: leaf
            for n, (entry, leaf) in enumerate(zip(entries, tree.leaves, strict=True))
            if isinstance(entry, ArrayEntry) and isinstance(leaf, jax.Array)
        }
        known = self._known_leaves(target, catalogue, objects)
        same, digests = self._unchanged(known, objects, shards, data, entries)
        if same:  # These are not copied from their devices.
            staged = [n for n, shard in enumerate(shards) if shard.leaf not in same]
            shards, data = tuple(shards[n] for n in staged), [data[n] for n in staged]
        described = tree.described._replace(shards=shards, data=data)
        weak = {entries[n].path: weakref.ref(leaf) for n, leaf in objects.items()}
        save = _Save(self, arrays, weak, {entries[n].path: one for n, one in digests.items()}, frozenset(same))
        return tree._replace(described=described, deltas=save)

    def _known_leaves(self, target: SaveTarget, catalogue: Catalogue, objects: Collection[int]) -> list[int]:
        """Returns the leaves of which the last version has all that this process writes."""
        last, call = self._last, target.call
        if not last or not last.arrays:
            return []
        if call.count == 1:
            known = {path for path, _ in last.arrays}
            return [n for n in objects if n not in catalogue.tied and catalogue.entries[n].path in known]
        # The processes compare all other leaves before the save, for which each needs its copy.
        leaves = {*catalogue.global_leaves}.intersection(objects).difference(catalogue.tied)
        everyone = tuple(range(call.count))
        joint = [n for n in leaves if assignment.held_layout(catalogue, n, everyone)[1]]
        if not joint:
            return []
        shares = _cut(target, catalogue, assignment.assign(catalogue, call.count))
        missing = {p.leaf for p in _parts_of(catalogue.entries, shares, call.index) if p.key not in last.arrays}
        return [n for n in joint if n not in missing]

    def _unchanged(
        self,
        known: Collection[int],
        objects: Mapping[int, jax.Array],
        shards: Sequence[LocalShard],
        data: Sequence[Any],
        entries: Sequence[Entry],
    ) -> tuple[set[int], dict[int, Digest]]:
        """Returns the leaves that are certainly those of the last version, and digests of leaves."""
        if not (last := self._last):
            return set(), {}
        same = {n for n in known if (ref := last.objects.get(entries[n].path)) and ref() is objects[n]}
        # An array that did not change in the last version has perhaps not changed again.
        stable = {n for n in known if n not in same and entries[n].path in last.stable}
        copied = {shard.leaf for shard in shards if shard.needs_copy} if stable else set[int]()
        digests = self._digests.of(stable & copied, shards, data)
        same.update(n for n, digest in digests.items() if digest == last.digests.get(entries[n].path))
        held = {n: last.digests[path] for n in same if (path := entries[n].path) in last.digests}
        return same, {**held, **digests}

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
        return last

    def _agreed_base(self, target: SaveTarget, entries: Sequence[Entry], parts: Sequence[_Part]) -> Version | None:
        """Returns the base that process 0 has chosen, with these parts; None in all processes if one cannot read it."""
        store, call = target.store, target.call
        chosen = call.broadcast(lambda: (base := self._base(store)) and [base.path, base.identity])
        if not chosen:
            return None
        path, identity = chosen
        problem = None
        try:
            if self._last is None or self._last.identity != identity:
                self._last = _open(store, path)
            self._read_missing(self._last, store, entries, parts)
        except (CorruptError, UnsupportedError) as error:
            problem = str(error)
            _log_unreadable(self._root, problem)
        is_read = call.gather_and_decide(problem is None, all)
        return self._last if is_read else None

    def _read_missing(self, version: Version, store: Store, entries: Sequence[Entry], parts: Sequence[_Part]) -> None:
        """Reads the parts of a version that are not in memory."""
        missing = [part for part in parts if part.key not in version.arrays]
        missing = [part for part in missing if isinstance(entries[part.leaf], ArrayEntry)]
        if missing:
            reader = version.reader or Reader(store, version.path)
            for group in _groups(entries, missing):
                arrays = deltas.read_arrays(reader, {entries[part.leaf].path for part in group})
                for part in group:
                    entry: Any = entries[part.leaf]
                    array = arrays[entry.path]
                    if part.name != entry.path:
                        array = deltas.piece_of(array, entry, part.box).copy().reshape(-1).view(np.uint8)
                    version.arrays[part.key] = array
        version.reader = None


class _Save:
    """One save of an `Encoder`. See `_save.source.Deltas`.

    objects: the JAX arrays of the tree, by path. digests: those of leaves that may not change again.
    same: the leaves that are those of the last version, and are not staged.
    """

    def __init__(
        self,
        encoder: Encoder,
        entries: Mapping[str, ArrayEntry],
        objects: Mapping[str, "weakref.ref[jax.Array]"],
        digests: Mapping[str, Digest],
        same: Collection[int],
    ):
        self._encoder, self._entries, self._objects, self._digests, self._same = (
            encoder,
            entries,
            objects,
            digests,
            same,
        )
        self._version: Version | None = None
        self.begun = time.perf_counter()

    def encode(
        self, target: Any, catalogue: Catalogue, shares: Mapping[int, Assignment] | None, supply: ShardSupply
    ) -> Encoded:
        encoder, entries, last = self._encoder, catalogue.entries, self._encoder._last
        if shares is not None and any(isinstance(entries[n], StatesEntry) for n in shares):
            _log.warning("%s: stored completely, because it has large states of iterators", target.path)
            return Encoded(catalogue, shares, supply)
        shares = shares if shares is None else _cut(target, catalogue, shares)
        shards = _by_leaf(supply.shards)
        parts = _parts_of(entries, shares, target.call.index, {*shards, *self._same}.difference(catalogue.tied))
        base = encoder._agreed_base(target, entries, parts)
        version = Version(
            target.path,
            "",
            (base.path, *base.chain) if base else (),
            self._entries,
            {},
            {},
            self._objects,
            self._digests,
        )
        found: dict[int, tuple[np.ndarray, Delta | None]] = {}
        if shares is not None:
            _plan_reads(supply, entries, parts, shards)

        def one(n: int) -> None:
            part = parts[n]
            entry: Any = entries[part.leaf]
            is_same = part.leaf in self._same
            if is_same:
                assert last
                array = last.arrays[part.key]
            else:
                array = _take(supply, entry, part.box, shards[part.leaf])
            found[n] = array, None
            if not isinstance(entry, ArrayEntry):
                return
            version.arrays[part.key] = array
            old = base.arrays.get(part.key) if base else None
            if base is None or old is None:
                return
            # A process that missed the commit of the base knows only that the leaf is that of the version before.
            is_same_as_base = is_same and base is last
            size = dtypes.itemsize(entry.dtype)
            made = deltas.NO_DIFFERENCE if is_same_as_base else deltas.difference(array, old, size)
            if made is None:
                return
            before = base.checksum(part.key)
            version.checksums[part.key] = after = made.xxh3 or before
            if not made.changed:
                version.arrays[part.key] = old
            found[n] = made.data, Delta(made.data.size, made.changed, made.gap, before, after)

        in_parallel([*range(len(parts))], one)
        changed = {parts[n].leaf for n, (_, delta) in found.items() if delta is None or delta.count}.difference(
            self._same
        )
        version.stable = {entries[part.leaf].path for part in parts if part.leaf not in changed}
        self._version = version
        return _encoded(target, catalogue, shares, parts, found, base)

    def committed(self, identity: str, is_complete: bool) -> None:
        if not (version := self._version):
            return
        version.identity = identity
        if is_complete:
            version.chain = ()
        self._encoder._last = version
        self._encoder._digests.compile()


def _encoded(
    target: SaveTarget,
    catalogue: Catalogue,
    shares: Mapping[int, Assignment] | None,
    parts: Sequence[_Part],
    found: Mapping[int, tuple[np.ndarray, Delta | None]],
    base: Version | None,
) -> Encoded:
    """Returns what to write: bytes of differences, and parts as they are."""
    entries: list[Any] = list(catalogue.entries)
    leaves: dict[int, tuple[int, int]] = {}
    differences: dict[int, tuple[Entry, Delta]] = {}
    shards: list[LocalShard] = []
    data: list[np.ndarray] = []
    for n, part in enumerate(parts):
        array, delta = found[n]
        entry, leaf, box = entries[part.leaf], part.leaf, part.box
        if base and shares is not None:
            leaf, box = len(entries), full_box(box_shape(box))
            leaves[leaf] = part.leaf, part.number
            entries.append(ArrayEntry(part.name, "numpy", entry.dtype, box_shape(part.box)))
        if delta:
            differences[leaf] = entry, delta
            entries[leaf] = ArrayEntry(part.name, "numpy", "uint8", (delta.nbytes,))
            box = full_box((delta.nbytes,))
        dtype = dtypes.to_numpy(entries[leaf].dtype)
        shards.append(LocalShard(leaf, box, dtype, array.nbytes, False, None, entry.path))
        data.append(array)
    supply = StagedSupply(shards, data, None)
    supply.run()
    named = Base(posixpath.basename(base.path), base.identity) if base and (differences or shares) else None
    own = None
    if shares is None:
        catalogue = catalogue._replace(entries=entries, shardings={}, global_leaves=())
    elif base:
        index = target.call.index
        own = OwnParts(entries, {shard.leaf: Assignment([shard.box], [index]) for shard in shards}, leaves)
    return Encoded(catalogue, shares, supply, named, differences, own)


def _cut(target: SaveTarget, catalogue: Catalogue, shares: Mapping[int, Assignment]) -> Mapping[int, Assignment]:
    """Returns the shares of the arrays. In a store that limits the size of objects, each part fits one."""
    max_file_bytes = target.store.object_bytes
    return assignment.cut_assignments(catalogue.entries, shares, max_file_bytes) if max_file_bytes else shares


def _parts_of(
    entries: Sequence[Any], shares: Mapping[int, Assignment] | None, index: int, leaves: Collection[int] = ()
) -> list[_Part]:
    """Returns the parts that process `index` writes; all of each leaf in `leaves` if it has no peers."""
    if shares is None:
        return [_Part(n, 0, (path := entries[n].path), full_box(entries[n].shape), path) for n in sorted(leaves)]
    found: list[_Part] = []
    for leaf, share in sorted(shares.items()):
        path = entries[leaf].path
        for n in np.flatnonzero(np.asarray(share.writers) == index).tolist():
            box = share.boxes[n]
            found.append(_Part(leaf, n, path, box, path if len(share.boxes) == 1 else piece_key(path, box)))
    return found


def _groups(entries: Sequence[Any], parts: Sequence[_Part]) -> list[list[_Part]]:
    """Returns parts in groups of leaves that are read together, all leaves of which one needs everything at once."""
    groups: list[list[_Part]] = [[part for part in parts if part.name == entries[part.leaf].path]]
    nbytes, last = _MAX_READ_BYTES, -1
    for part in parts:
        if part.name == entries[part.leaf].path:
            continue
        if part.leaf != last:
            nbytes += entries[part.leaf].nbytes
            if nbytes > _MAX_READ_BYTES:
                groups.append([])
                nbytes = entries[part.leaf].nbytes
        last = part.leaf
        groups[-1].append(part)
    return [group for group in groups if group]


def _by_leaf(shards: Sequence[LocalShard]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for n, shard in enumerate(shards):
        found.setdefault(shard.leaf, []).append(n)
    return found


def _overlaps(shards: Sequence[LocalShard], numbers: Sequence[int], box: Box) -> list[tuple[int, Box]]:
    """Returns the shards from which a box is made, each with its part of it."""
    exact = [n for n in numbers if shards[n].box == box][:1]
    around = exact or [n for n in numbers if intersect(shards[n].box, box) == box][:1]
    return [(n, inner) for n in around or numbers if (inner := intersect(shards[n].box, box)) is not None]


def _plan_reads(
    supply: ShardSupply, entries: Sequence[Any], parts: Sequence[_Part], shards: Mapping[int, Sequence[int]]
) -> None:
    """Tells the supply which shards are taken, in order."""
    wanted: dict[int, int] = {}
    for part in parts:
        for n, inner in _overlaps(supply.shards, shards.get(part.leaf, ()), part.box):
            wanted[n] = wanted.get(n, 0) + _nbytes(inner, entries[part.leaf])
    supply.plan_reads(sorted(wanted), [wanted[n] for n in sorted(wanted)])


def _nbytes(box: Box, entry: Any) -> int:
    return dtypes.itemsize(entry.dtype) * math.prod(box_shape(box))


def _take(supply: ShardSupply, entry: Any, box: Box, numbers: Sequence[int]) -> np.ndarray:
    """Returns a box of an array of a supply as bytes, and releases those of the supply.

    On CPUs they may be memory of JAX, which does not reuse it, even for a donated array, while this view exists.
    """
    dtype = dtypes.to_numpy(entry.dtype)
    found = _overlaps(supply.shards, numbers, box)
    if len(found) == 1 and supply.shards[found[0][0]].box == box:
        n, _ = found[0]
        (out,) = supply.take([n])
        supply.release_bytes([n], [supply.shards[n].nbytes])
        return out
    out = empty_aligned_array(box_shape(box), dtype)
    for n, inner in found:
        (data,) = supply.take([n])
        shard = supply.shards[n].box
        array = data.view(dtype).reshape(box_shape(shard))
        out[(*slices(inner, box), ...)] = array[(*slices(inner, shard), ...)]
        del data, array
        supply.release_bytes([n], [_nbytes(inner, entry)])
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


def _log_unreadable(root: str, error: object) -> None:
    _log.warning("%s: the next version is complete, because the last one cannot be read: %s", root, error)


def _open_newest(store: Store, root: str) -> Version | None:
    """Returns the newest version of a stream, if it can be read; else logs why the next version is complete."""
    steps = run_layout.located_steps(store, root)
    if not steps:
        return None
    if foreign := sorted(steps.keys() - run_layout.own_steps(store, root).keys()):
        found = posixpath.basename(steps[foreign[0]].path)
        raise MismatchError(
            f"{root}: expected the versions of a Publisher, found {found}, which another program has written; nothing "
            "was published; publish to another place"
        )
    try:
        return _open(store, steps[max(steps)].path)
    except (CorruptError, UnsupportedError) as error:
        _log_unreadable(root, error)
        return None


def _open(store: Store, path: str) -> Version:
    """Returns a version of the stream. Its arrays are not read yet."""
    reader = Reader(store, path)
    reader.check_present()
    chain, one = list[str](), reader
    while one.made_from:
        one = one.base
        chain.append(one.path)
    entries = {path: entry for path, entry in reader.entries.items() if isinstance(entry, ArrayEntry)}
    checksums = {
        (path, part.box or full_box(entries[path].shape)): part.delta.xxh3
        for path, parts in reader.deltas.items()
        for part in parts
        if part.delta
    }
    return Version(path, reader.identity, (*chain,), entries, {}, checksums, reader=reader)
