"""Finds the arrays of a run that have not changed since earlier steps, so that a save need not write them again.

An array is unchanged if it is the same `jax.Array` object as in an earlier save: JAX arrays never change. Only weak
references are held, so device memory is not used longer than the loop uses it.

Damage to one file must not cost all steps. So a save shares no file with the newest step that stays together with the
new one: two copies take turns. If no other step stays, it shares none: damage to the only file would pass from step to
step. From the second save on, unchanged arrays are in files of their own. So a loop writes them three times.
"""

import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._core.boxes import Box
from .._processes.assignment import Piece
from .._pytree.leaves import Described, LocalShard
from ..formats.treering import write as native
from ..formats.treering.manifest_fields import File
from ..formats.treering.shared_files import Reused, SavedFile, SharedFile, hold, version
from ..stores.store import Store
from .contents import Unchanged
from .save_target import SaveTarget

_log = logging.getLogger("treering")
_MAX_SHARED_FILES = 64  # of a save, which has two descriptors of each; the arrays of the others get one file together
_MIN_BYTES = 1 << 20  # of an array; it takes 4 µs to look at one and to note it, 1 % of the time to write a megabyte


class Bases(NamedTuple):
    """The steps whose files a save may share.

    paths: of the steps, the newest first.
    newest_kept: the path of the newest step that stays when retention has followed the save; None if all go.
    committed: the paths of all committed steps. The others have no files any more.
    """

    paths: Sequence[str]
    newest_kept: str | None
    committed: Collection[str]


class _Candidate(NamedTuple):
    """An array that is worth a look."""

    leaf: int
    path: str
    dtype: str
    boxes: tuple[Box, ...]

    @property
    def tensor(self) -> tuple[Any, ...]:
        """The key of its bytes in a file: they are the same only if this is."""
        return self.path, self.dtype, self.boxes


class _Saved(NamedTuple):
    """An array that was saved: its tensor, the files that have it, by their origin, and the number of the saves."""

    array: "weakref.ref[Any]"
    tensor: tuple[Any, ...]
    files: Mapping[str, SavedFile]
    times: int


class UnchangedArrays:
    """The arrays of the saves of one run in this process.

    bases: returns the steps whose files a save of so many bytes may share, or None if they cannot be found. It is
        called only if an array has not changed.
    """

    def __init__(self, bases: Callable[[native.Info, int], Bases | None]):
        self._bases = bases
        self._saved: dict[int, _Saved] = {}  # by the identity of the array
        self._holders: dict[str, set[str]] = {}  # by the origin of a file, the paths of the steps that share it
        self._is_sharing = False  # True from the plan of a save that shares files until its commit
        self._can_share = True  # False once a file had to be copied
        self._shards: Any = None  # the structure of the last save, and its candidates
        self._candidates: Sequence[_Candidate] = ()
        self._last_written: tuple[Any, ...] = (None, (), (), ())

    def without_unchanged(self, target: SaveTarget, contents: Unchanged) -> Unchanged:
        """Returns the contents of a save without the arrays that files of earlier steps have."""
        if target.call.count > 1 or target.options.hosts or not (target.store.has_links and self._can_share):
            return contents
        if self._is_sharing:  # The last save has failed, perhaps because of these files.
            self._saved = {}
        described, leaves = contents.described, contents.leaves
        if described.shards is not self._shards:
            self._shards, self._candidates = described.shards, _candidates(described)
        known = [one for one in self._candidates if isinstance(leaves[one.leaf], jax.Array)]
        if not known:
            return contents
        arrays = {one.leaf: weakref.ref(leaves[one.leaf]) for one in known}
        unchanged = {one.leaf: one for one in known if self._is_saved(leaves[one.leaf], one)}
        shared = self._share(target, described, unchanged, leaves) if unchanged else []
        self._is_sharing = bool(shared)
        in_files = {piece.leaf for one in shared for piece in one.pieces}
        groups: Sequence[int] = ()
        if unchanged:
            again = {leaf: self._saved[id(leaves[leaf])].times > 1 for leaf in unchanged.keys() - in_files}
            described, groups = self._to_write(described, frozenset(in_files), again)
        store, path, candidates = target.store, target.path, {one.leaf: one for one in known}

        def on_commit(files: Sequence[tuple[File, Sequence[Piece]]]) -> None:
            try:
                self._note(store, path, [one.saved for one in shared], files, candidates, arrays)
            except Exception as error:  # The step is committed, so no error may fail the save.
                self._saved, self._is_sharing = {}, False
                _log.info("%s: the next save writes all arrays: %s", path, error)

        return contents._replace(described=described, reused=Reused(shared, groups, on_commit))

    def _is_saved(self, array: Any, candidate: _Candidate) -> bool:
        saved = self._saved.get(id(array))
        return saved is not None and saved.array() is array and saved.tensor == candidate.tensor

    def _share(
        self, target: SaveTarget, described: Described, unchanged: Mapping[int, _Candidate], leaves: Sequence[Any]
    ) -> list[SharedFile]:
        """Opens the files that the save shares.

        Leaves out those that also have other arrays: another reader of safetensors could take these for the new ones.
        """
        bases = self._bases(target.info, sum(shard.nbytes for shard in described.shards))
        if bases is None or bases.newest_kept is None:
            return []
        self._forget_all_but(bases.committed)
        newest_first = {path: n for n, path in enumerate(bases.paths)}
        taken = {origin for origin, paths in self._holders.items() if bases.newest_kept in paths}
        chosen: dict[tuple[str, str], tuple[SavedFile, list[_Candidate]]] = {}
        for leaf, candidate in unchanged.items():
            files = self._saved[id(leaves[leaf])].files
            usable = [file for origin, file in files.items() if file.path in newest_first and origin not in taken]
            if usable:
                file = min(usable, key=lambda one: newest_first[one.path])
                chosen.setdefault((file.path, file.listed.name), (file, []))[1].append(candidate)
        shared: list[SharedFile] = []
        fitting = [(file, own) for file, own in chosen.values() if sum(len(one.boxes) for one in own) == file.pieces]
        for file, own in sorted(fitting, key=lambda one: -one[0].listed.size)[:_MAX_SHARED_FILES]:
            if held := hold(target.store, file):
                pieces = [Piece(one.leaf, box, -1, 0, 0) for one in own for box in one.boxes]
                shared.append(SharedFile(file, held, pieces))
                continue
            for one in own:
                saved = self._saved[id(leaves[one.leaf])]
                files = {origin: other for origin, other in saved.files.items() if other is not file}
                self._saved[id(leaves[one.leaf])] = saved._replace(files=files)
        return shared

    def _forget_all_but(self, paths: Collection[str]) -> None:
        """Forgets the files of deleted steps."""
        paths = set(paths)
        for holders in self._holders.values():
            holders.intersection_update(paths)
        for key, saved in self._saved.items():
            files = {origin: file for origin, file in saved.files.items() if file.path in paths}
            self._saved[key] = saved._replace(files=files)

    def _to_write(
        self, described: Described, in_files: frozenset[int], again: Mapping[int, bool]
    ) -> tuple[Described, Sequence[int]]:
        """Returns what is left to write, and the groups of its shards.

        The unchanged arrays, which are written `again`, get a file of their own. A later save can share it, unless one
        of them has changed. So those that have not changed for longer (True) get another file.
        """
        last = self._last_written
        if last[0] is not described.shards or last[1:3] != (in_files, again):
            numbers = [n for n, shard in enumerate(described.shards) if shard.leaf not in in_files]
            age = {n: again.get(described.shards[n].leaf, -1) for n in numbers}
            order = sorted(numbers, key=lambda n: -age[n])
            groups = [len(list(group)) for _, group in itertools.groupby(order, age.get)]
            shards = tuple(described.shards[n] for n in order)
            last = self._last_written = described.shards, in_files, again, order, shards, groups
        _, _, _, order, shards, groups = last
        return described._replace(shards=shards, data=[described.data[n] for n in order]), groups

    def _note(
        self,
        store: Store,
        path: str,
        shared: Sequence[SavedFile],
        files: Sequence[tuple[File, Sequence[Piece]]],
        candidates: Mapping[int, _Candidate],
        arrays: Mapping[int, "weakref.ref[Any]"],
    ) -> None:
        """Notes which files of a committed step have which arrays. `shared`: the shared files, which come first."""
        saved_files: list[SavedFile] = []
        by_leaf: dict[int, set[int]] = {}
        for n, (listed, pieces) in enumerate(files):
            origin, found = listed.name, version(store, path, listed)
            if n < len(shared) and shared[n].version == found:
                origin = shared[n].origin
            elif n < len(shared):
                self._can_share = False
                _log.info("%s: unchanged arrays are written at each step, because sharing %s failed", path, origin)
            saved_files.append(SavedFile(path, listed, origin, found, len(pieces)))
            for leaf in {piece.leaf for piece in pieces} & candidates.keys():
                by_leaf.setdefault(leaf, set()).add(n)
        self._is_sharing = False
        for paths in self._holders.values():  # A step that was here before is replaced.
            paths.discard(path)
        alive = {key: one for key, one in self._saved.items() if one.array() is not None}
        for leaf, numbers in by_leaf.items():
            array = arrays[leaf]()
            if array is None or len(numbers) > 1:
                continue
            file = saved_files[min(numbers)]
            tensor, before = candidates[leaf].tensor, alive.get(id(array))
            others, times = (before.files, before.times) if before and before.tensor == tensor else ({}, 0)
            alive[id(array)] = _Saved(arrays[leaf], tensor, {**others, file.origin: file}, times + 1)
        self._saved = alive
        known = {origin for one in alive.values() for origin in one.files}
        self._holders = {origin: paths for origin, paths in self._holders.items() if origin in known}
        for one in saved_files:
            if one.origin in known:
                self._holders.setdefault(one.origin, set()).add(path)


def _candidates(described: Described) -> list[_Candidate]:
    """Returns the large arrays of a tree."""
    by_leaf: dict[int, list[LocalShard]] = {}
    for shard in described.shards:
        by_leaf.setdefault(shard.leaf, []).append(shard)
    found: list[_Candidate] = []
    for leaf, own in by_leaf.items():
        if sum(shard.nbytes for shard in own) >= _MIN_BYTES:
            entry: Any = described.catalogue.entries[leaf]
            found.append(_Candidate(leaf, entry.path, entry.dtype, tuple(shard.box for shard in own)))
    return found
