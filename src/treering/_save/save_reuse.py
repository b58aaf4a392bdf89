"""Chooses the files of earlier steps, also of earlier jobs, that one save shares. `unchanged` explains the rules."""

import dataclasses
import itertools
import logging
import posixpath
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from .._core.boxes import full_box
from .._core.entries import ArrayEntry, Entry
from .._processes.assignment import Piece
from .._pytree.device_digests import DeviceDigests, Digest
from .._threads.python_gc import gc_paused
from ..errors import TreeringError
from ..formats.treering import ledger, manifest, summary
from ..formats.treering.array_file import ArrayFile
from ..formats.treering.ledger import Ledger, WrittenFile
from ..formats.treering.manifest_fields import File
from ..stores.file_io import read_file
from ..stores.store import FinishedFile, Store
from . import layout
from .layout import PlannedFile
from .saved_arrays import LargeArray, SavedArray, SavedArrays, SavedPart
from .target import Info, SaveTarget

_log = logging.getLogger("treering")
_MAX_SHARED_FILES = 64  # of a save; each takes two descriptors
_MAX_BASES = 100  # steps; the processes know files by the newest ones
_NO_BASES = ((), None, ())
# Arrays of one age get a file together: new ones have the age 0, the same objects 1 or 2, and new objects that probably
# have the values of the ones before a greater age.
_AGES_OF_OBJECTS = 2
_MAX_ADOPTED = 3  # steps of earlier jobs; their headers are read


class Bases(NamedTuple):
    """The steps whose files a save may share.

    paths: of the steps, the newest first.
    newest_kept: the path of the newest step that stays when retention has followed the save, the neighbor of the new
        one; see `Ledger`. None if all go: then no files are shared. "" if no step counts: then all may be.
    committed: the paths of all committed steps, in order. The files of all other steps are gone.
    """

    paths: Sequence[str]
    newest_kept: str | None
    committed: Collection[str]


@dataclasses.dataclass
class RunState:
    """What this process knows of the arrays that it has saved in a run.

    bases: returns the steps whose files a save of so many bytes may share, or None if they cannot be found. A process
        that saves alone calls it in its first save, and later only if an array may be unchanged.
    is_new: True until the first save.
    is_sharing: True from the plan of a save that shares files until its commit.
    can_share: False once the disk has refused a link.
    ledger: the files of the last steps; in a bucket, of the last step.
    digests: makes those of arrays on accelerators.
    """

    bases: Callable[[Info, int], Bases | None]
    saved: SavedArrays = dataclasses.field(default_factory=SavedArrays)
    is_new: bool = True
    is_sharing: bool = False
    can_share: bool = True
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    digests: DeviceDigests = dataclasses.field(default_factory=DeviceDigests)

    def forget(self) -> None:
        """Forgets all arrays and files, so that the next save writes all."""
        self.saved.arrays = {}
        self.ledger.keep(())


class Chosen(NamedTuple):
    """The files of a save.

    shared: the files that are shared, held open. Their `numbers` are those of the pieces of this save.
    order: the numbers of the other pieces, in the order of writing.
    groups: how many successive pieces each file has. A large group may take several files.
    compare_first: how many of these pieces, the first ones, have probably not changed. Before they are written, they
        are compared with files of `SaveReuse.same_layout`.
    """

    shared: Sequence[WrittenFile]
    order: Sequence[int]
    groups: Sequence[int]
    compare_first: int = 0


class SaveReuse:
    """What one save may reuse. A piece is known by its number in the list of `choose`.

    deferred: the leaves that are copied last, because the files of earlier steps probably have them.
    """

    def __init__(
        self,
        run: RunState,
        target: SaveTarget,
        entries: Sequence[Entry],
        objects: Mapping[int, "weakref.ref[Any]"],
        digests: Mapping[int, Digest],
        deferred: Collection[int],
    ):
        self.deferred = deferred
        self._run, self._target, self._entries, self._objects, self._digests = run, target, entries, objects, digests
        self._large: Sequence[LargeArray] = ()
        self._unchanged: Collection[int] = ()  # leaves
        self._usable: dict[Hashable, WrittenFile] = {}  # the files that may be shared, by their versions
        self._equal: dict[tuple[int, int, str], WrittenFile] = {}  # those that a server may copy, by their contents

    def find_bases(self) -> Any:
        """Returns the steps whose files the save may share, as JSON. Process 0 calls it."""
        run = self._run
        if self._target.store.sharing == "copies":
            return None
        # Process 0 does not know the arrays of its peers, nor those of jobs before.
        knows_all = self._target.call.count == 1 and not run.is_new
        if knows_all and not any(one.times > 1 or one.equal_times for one in run.saved.arrays.values()):
            return None
        nbytes = sum(entry.nbytes for entry in self._entries if isinstance(entry, ArrayEntry))
        bases = run.bases(self._target.info, nbytes)
        if bases is None:
            return _NO_BASES
        return [bases.paths[:_MAX_BASES], bases.newest_kept, list(bases.committed)[-_MAX_BASES:]]

    def choose(self, bases: Any, entries: Sequence[Entry], pieces: Sequence[Piece], *, by_shard: bool) -> Chosen | None:
        """Chooses the files of this process. Returns None if no array is known to be unchanged.

        by_shard: True if the writers must take the shards in order, because memory is limited.
        """
        run = self._run
        if run.is_sharing:  # The last save has failed, perhaps because of these files.
            run.forget()
        if self._target.store.sharing == "copies":
            bases, self._equal = None, {file.listed.content: file for file in run.ledger.usable(None).values()}
        elif bases is None and self._target.call.count > 1:
            bases = _NO_BASES  # Process 0 shares no files.
        self._large = run.saved.large_arrays(entries, pieces)
        unchanged: dict[int, LargeArray] = {}
        ages: dict[int, int] = {}  # of the pieces that are not new, by their numbers; those of one age get a file
        is_new, run.is_new = run.is_new, False
        if is_new and bases is not None:
            call, paths = self._target.call, self._on_own_disk(bases[0][:_MAX_ADOPTED])
            found = _adopt(run, self._target.store, paths, entries, pieces, self._large, call.index, call.count)
            ages = {n: _AGES_OF_OBJECTS + 1 + file for n, file in found.items()}
        if bases is not None:
            newest_first, newest_kept, committed = bases
            neighbor = newest_kept and self._on_own_disk([newest_kept])[0]
            run.ledger.keep({neighbor, *self._on_own_disk(committed)})
            if newest_kept is not None:
                self._usable = run.ledger.usable(neighbor, self._on_own_disk(newest_first))
        for one in () if is_new else self._large:
            if (saved := run.saved.arrays.get(one.tensor)) is None:
                continue
            array = (ref := self._objects.get(one.leaf)) and ref()
            is_object = array is not None and saved.array and saved.array() is array
            if is_object or ((digest := self._digests.get(one.leaf)) and digest == saved.digest):
                unchanged[one.leaf] = one
                ages.update(dict.fromkeys(one.numbers, min(saved.times, 2)))
            elif saved.equal_times:
                ages.update(dict.fromkeys(one.numbers, _AGES_OF_OBJECTS + min(saved.equal_times, 2)))
        self._unchanged = unchanged.keys()
        if not ages:
            return None
        shared = self._share(unchanged.values())
        run.is_sharing = bool(shared)
        in_files = {n for one in shared for n in one.numbers}
        left = [n for n in range(len(pieces)) if n not in in_files]
        order = sorted(left, key=lambda n: pieces[n].shard if by_shard else -ages.get(n, 0))
        groups = [len(list(group)) for _, group in itertools.groupby(order, lambda n: ages.get(n, 0))]
        # In the order of shards, nothing is compared, because a comparison takes shards twice.
        compare_first = sum(ages.get(n, 0) > _AGES_OF_OBJECTS for n in order)
        if by_shard and (compare_first or len(groups) > _MAX_SHARED_FILES):
            _log.info("%s: arrays are written although they may be unchanged: memory is short", self._target.path)
        if len(groups) > _MAX_SHARED_FILES:  # Each file is open until the commit.
            groups, compare_first = [len(order)], 0
        return Chosen(shared, order, groups, 0 if by_shard else compare_first)

    def same_layout(self, plan: PlannedFile, numbers: Sequence[int]) -> WrittenFile | None:
        """Returns a file, held open, that has the same pieces at the same places as the planned file."""
        for saved in self._usable.values():
            listed = saved.listed
            if (listed.header, listed.size) != (len(plan.header), len(plan.header) + plan.nbytes):
                continue
            if manifest.xxh3(layout.fill_checksums(plan.header, saved.checksums)) != listed.xxh3:
                continue
            if held := ledger.open_if_unchanged(self._target.store, saved):
                self._run.is_sharing = True
                return held._replace(numbers=numbers)
        return None

    def same_content(self, listed: File, checksums: str) -> FinishedFile | None:
        """Returns a file that the server may copy because it has the same bytes, by the checksums of its blocks."""
        file = self._equal.get(listed.content)
        return file.finished if file and file.checksums == checksums else None

    def committed(self, files: Sequence[WrittenFile]) -> None:
        """Notes the files of this process after the commit, in the order of writing. Does not raise."""
        run, path = self._run, self._target.path
        run.is_sharing = False
        if any(one.link_refused for one in files):
            run.can_share = False
            _log.info("%s: unchanged arrays are written at each step, because sharing a file failed", path)
        try:
            store = self._target.store
            if store.sharing == "copies":
                run.ledger.keep(())
            else:
                files = [file._replace(version=ledger.version(store, path, file.listed)) for file in files]
            run.ledger.note(path, files)
            run.saved.note(files, run.ledger.versions(), self._large, self._objects, self._digests, self._unchanged)
            if store.sharing != "copies":  # The server copies objects of small arrays too.
                run.ledger.keep_versions({own for one in run.saved.arrays.values() for own in one.versions})
            run.digests.compile()
        except Exception as error:  # The step is committed, so no error may fail the save. Its files are unknown.
            run.forget()
            _log.info("%s: the next save writes all arrays: %s", path, error)

    def _on_own_disk(self, paths: Sequence[str]) -> list[str]:
        """Returns the paths of steps as this process sees them: each host may have its own folder for its disk."""
        if not self._target.options.hosts:
            return list(paths)
        run = posixpath.dirname(self._target.path)
        return [posixpath.join(run, posixpath.basename(path)) for path in paths]

    def _share(self, unchanged: Collection[LargeArray]) -> list[WrittenFile]:
        """Opens the files that the save shares, because all of their arrays are the same objects as before.

        Leaves out those that also have other arrays: another reader of safetensors could take these for the new ones.
        """
        chosen: dict[Hashable, list[int]] = {}
        for one in unchanged:
            versions = self._run.saved.arrays[one.tensor].versions
            newest = next((own for own in self._usable if own in versions), None)
            if newest is not None:
                chosen.setdefault(newest, []).extend(one.numbers)
        fitting = [own for own, numbers in chosen.items() if len(numbers) == len(self._usable[own].numbers)]
        shared: list[WrittenFile] = []
        for own in sorted(fitting, key=lambda own: -self._usable[own].listed.size)[:_MAX_SHARED_FILES]:
            held = ledger.open_if_unchanged(self._target.store, self._usable[own])
            if held and not ledger.is_damaged(held):
                shared.append(held._replace(numbers=chosen[own]))
            else:
                del self._usable[own]
                self._run.ledger.keep_versions(self._run.ledger.usable(None).keys() - {own})
        return shared


def _adopt(
    run: RunState,
    store: Store,
    paths: Sequence[str],
    entries: Sequence[Entry],
    pieces: Sequence[Piece],
    large: Sequence[LargeArray],
    index: int,
    count: int,
) -> dict[int, int]:
    """Notes the files of committed steps, as if this job had saved them.

    Returns the number of the file that has a piece in the newest step, by the number of the piece. If the save has the
    same pieces in each file, it can share those whose bytes are the same.

    paths: those of the steps, the newest first.
    index, count: only the files that process `index` of `count` has written are opened.
    """
    keys = {_key(entries, piece): n for n, piece in enumerate(pieces)}
    found: dict[int, int] = {}
    arrays: dict[tuple[Any, ...], SavedArray] = {}
    for path in paths:
        try:
            opened = _open_files(store, path, index, count)
        except (TreeringError, OSError) as error:
            _log.info("%s: its files are not shared: %s", path, error)
            continue
        run.ledger.note(path, [file for file, _ in opened])
        for number, (file, tensors) in enumerate(opened if path == paths[0] else ()):
            places = {keys[key]: span for key, span in tensors.items() if key in keys}
            found.update(dict.fromkeys(places, number))
            for one in large:
                if all(n in places for n in one.numbers):
                    spans = [places[n] for n in one.numbers]
                    is_run = all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
                    part = SavedPart(file.checksums, (spans[0][0], spans[-1][1]) if is_run else None)
                    arrays[one.tensor] = SavedArray(None, frozenset(), 0, 1, [part])
    run.saved.arrays = arrays
    return found


def _key(entries: Sequence[Entry], piece: Piece) -> str:
    entry: Any = entries[piece.leaf]
    return manifest.piece_key(entry.path, None if piece.box == full_box(entry.shape) else piece.box)


def _open_files(
    store: Store, path: str, index: int, count: int
) -> list[tuple[WrittenFile, dict[str, tuple[int, int]]]]:
    """Returns the array files of a step that a process has written, and the place of each tensor in them."""
    name = summary.manifest_path(path)
    with gc_paused():
        files = manifest.decode(read_file(store, name), name).files
    found: list[tuple[WrittenFile, dict[str, tuple[int, int]]]] = []
    for listed in files:
        number = listed.name.partition("-of-")[0].rpartition("-")[2]
        if not number.isdecimal() or int(number) % count != index:
            continue
        own_version = ledger.version(store, path, listed)
        file = ArrayFile(store, path, listed)
        file.close()
        tensors = {key: tensor.data_offsets for key, tensor in file.header.tensors.items()}
        one = WrittenFile(path, listed, own_version, file.header.checksums, range(len(tensors)), is_own=False)
        found.append((one, tensors))
    return found
