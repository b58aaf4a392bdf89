"""A local tier that is a separate disk on each host: uploads steps from all disks, and deletes what no step needs.

Process 0 commits a step on its own disk when all processes have written their arrays to theirs. Its manifest lists all
array files. The disks of the other hosts have only array files, known by the token in their names. A step is complete
while every file of its manifest is on some disk.
"""

import contextlib
import itertools
import logging
import os
import posixpath
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from .. import stores
from .._core.leaf_paths import join_names
from .._processes import coordinator
from .._processes.calls import Call, error_watcher
from ..errors import CorruptError, SaveError, TreeringError
from ..formats.treering import host_parts as parts
from ..formats.treering import removal
from ..formats.treering.copy import copy_local_files
from ..formats.treering.manifest_fields import File
from ..formats.treering.save_files import SaveFiles
from . import deleted, run_layout
from .origin import Origin
from .step_catalog import StepCatalog

_log = logging.getLogger("treering")
_Key = tuple[str, str]  # the name of a step, and a key of some of its files
Moved = Callable[[int, Callable[[], None]], None]


class HostDisks:
    """The disk of this host, one of several disks of the job.

    Steps are uploaded in rounds, which process 0 leads and the other processes `follow`. One process of each host, for
    which `leads` is True, uploads the files on its disk. It deletes files that no step needs any more: those of steps
    that process 0 has replaced or deleted, or that are uploaded. Files of steps that process 0 does not know are
    archived, never deleted.

    `missing`: the steps that had parts on no disk when the job began, or that process 0 does not know. `stale`: of the
    files that this disk had then, only those of steps that process 0 knows belong to the run. `to_archive`: identities
    of the steps to archive on every disk. `known`: identities of steps whose files may be deleted, because the steps
    were deleted (as the disks said when the job began), were replaced, or have been uploaded.
    """

    def __init__(
        self, local: StepCatalog, remote: StepCatalog, index: int, *, leads: bool, stale: bool, missing: set[int]
    ):
        self.missing = missing
        self.to_archive: set[str] = set()
        self.known: set[str] = set()
        self.stale = stale
        self._local, self._remote, self._index, self._leads = local, remote, index, leads
        self._gave_up = not (leads and index)  # True if all manifests here are process 0's
        self._gone: set[str] = set()  # identities of steps that this disk no longer has
        self._seen: set[_Key] = set()  # files in the round before that no running save used
        self._moving = threading.RLock()
        self._call: Call | None = None  # the round that process 0 leads

    # In process 0

    @contextlib.contextmanager
    def round(self, what: str, timeout: float) -> Iterator[None]:
        """Gathers what each disk has. Within the block all hosts upload steps. After it they delete files."""
        call = coordinator.begin_call(what, timeout=timeout)
        with coordinator.ending_call(call):
            call.set_activity("uploading steps")
            there: list[Any] = []
            marks = deleted.noted(self._local.store, self._local.root)
            call.gather_and_decide(None, there.extend)
            self._call = call
            try:
                yield
            finally:
                self._call = None
            call.broadcast(lambda: None)
            call.broadcast(lambda: self._unneeded(there, marks))
            call.gather_and_decide(None, lambda _: None)  # Wait for the deletions of all, however long they take.
            call.close()

    def look(self) -> None:
        """Raises the error of another process in this round, or `PeerError` if a process has died."""
        if call := self._call:
            call.check_all()

    def give_up(self, reason: BaseException) -> None:
        """Cancels the round that process 0 leads."""
        if call := self._call:
            call.cancel(reason)

    def copying(self, path: str, to: str) -> "_Together":
        """Returns the peers that upload the step at `path` to the path `to` together with process 0."""
        assert self._call is not None
        return _Together(self._call, posixpath.basename(path), to)

    def _unneeded(self, there: Sequence[Any], old_marks: set[str]) -> tuple[list[_Key], list[str], list[str]]:
        """Returns the files that other disks are to delete, the steps that they are to archive, and the steps that may
        be archived with those, if they are in the same folder. Steps are given by their identities.

        there: the files of those disks, as they reported them. old_marks: the marks of deleted steps when the round
            began. Removes those of steps that no disk has a part of, or that this disk still has.
        """
        store, root = self._local.store, self._local.root
        keys: dict[str, set[str]] = {}
        identities: dict[str, set[str]] = {}
        for name, of_all, of_steps in itertools.chain(*filter(None, there)):
            keys.setdefault(name, set()).update(of_all)
            identities.setdefault(name, set()).update(of_steps)
        needed = {name: parts.needed(store, posixpath.join(root, name)) for name in keys}
        marks = deleted.noted(store, root)  # Read after the manifests: a mark is made before its manifest is deleted.
        self.to_archive |= archived_identities(self._local, keys)
        found: list[_Key] = []
        for name, of_all in keys.items():
            own = needed[name]
            if own is None or of_all & self.to_archive:
                continue
            if own:
                self.known |= identities[name] - own  # These steps were replaced.
            if own or not (rest := identities[name] - marks - self.known) or self._is_copied(name, rest):
                found += [(name, key) for key in of_all - own]
        alive = old_marks & set().union(*filter(None, needed.values()))  # A crash interrupted their deletion.
        deleted.drop(store, root, old_marks.difference(*identities.values()) | alive)
        there_are = set().union(*identities.values())
        return sorted(found), sorted(self.to_archive & there_are), sorted((marks | self.known) & there_are)

    def _is_copied(self, name: str, identities: set[str]) -> bool:
        """Returns True if a step of which only other disks have parts is complete remotely. If it is not, archives it.

        Returns False also if that cannot be known now, and while the remote step is damaged.
        """
        step = run_layout.parse_step_name(name, self._local.prefix)
        try:
            path = self._remote.committed().get(step) if step is not None else None
            if step is not None and path is not None:
                if self._remote.is_damaged(step, path):
                    return False
                self.known |= parts.identities(self._remote.store, path)
        except OSError:
            return False
        if not (rest := identities - self.known):
            return True
        self.to_archive |= rest
        _log.warning(
            "%s: other hosts' disks have parts of %s that this disk does not know: the step is ignored, and archived",
            self._local.root, name,
        )  # fmt: skip
        return False

    # In the other processes

    def follow(self, what: str, timeout: float, moved: Moved) -> None:
        """Takes part in a round.

        `moved` is called with the number of bytes that are about to be sent, and a function that raises the errors of
        other processes.
        """
        try:
            call = coordinator.begin_call(what, timeout=timeout)
            with coordinator.ending_call(call):
                call.set_activity("uploading steps")
                mine = self._there() if self._leads else None
                call.gather_and_decide(mine, _not_here)
                while job := call.broadcast(_not_here):
                    self._take_part(call, *job, moved=moved)
                unneeded, archived, free = call.broadcast(_not_here)
                if self._leads:
                    with removal.logging_errors(self._local.root):
                        self._archive_identities(archived, free)
                    self._take_away({(name, key) for name, key in unneeded} & self._seen)
                    self._seen = {(name, key) for name, keys, _ in mine or () for key in keys}
                call.gather_and_decide(None, _not_here)
                call.close()
        except (TreeringError, OSError) as error:  # Process 0 reports it to the user.
            _log.info("%s: %s ended: %s", self._local.root, what, error)

    def _take_part(
        self, call: Call, name: str, to: str, token: str, made: Sequence[str] | None, *, moved: Moved
    ) -> None:
        files: SaveFiles | None = None
        report: list[File] = []
        problem: list[str] = []
        keep = False
        look = error_watcher(call)
        try:
            if self._leads:
                try:
                    if made is not None:
                        made = [os.fsdecode(folder.encode("latin-1")) for folder in made]
                        files = SaveFiles.join(stores.get(to), to, token, made, timeout=call.timeout, check=call.check)
                    path = posixpath.join(self._local.root, name)
                    report = copy_local_files(
                        self._local.store, path, token, files, on_progress=lambda nbytes: moved(nbytes, look)
                    )
                except (TreeringError, OSError) as error:
                    call.check()  # Raises the error of process 0, if that is the cause.
                    problem = [type(error).__name__, f"process {self._index}: {error}"]
            keep = call.gather_and_decide([msgspec.to_builtins(report), problem], _not_here)
        finally:
            if files and (keep or call.in_doubt or not files.store.has_locks):
                files.close()  # Do not delete them: they may be committed, or another job's.
            elif files:
                files.abort()

    def _there(self) -> list[tuple[str, list[str], list[str]]]:
        """Returns the files on this disk that no running save uses: step names, keys and identities of the steps.

        Deletes the unfinished files that killed processes have left.
        """
        store, root = self._local.store, self._local.root
        paths = {name: posixpath.join(root, name) for name in folders(self._local)}
        for path in paths.values():
            with removal.logging_errors(path):
                removal.remove_temporaries(store, path, store.list(path))
        found = {name: (parts.there(store, path), parts.identities(store, path)) for name, path in paths.items()}
        return [(name, sorted(keys), sorted(identities)) for name, (keys, identities) in found.items() if keys]

    def take_part(self, origin: Origin, mark: bytes, to_archive: Collection[str]) -> None:
        """Prepares this disk for a save: writes the mark of process 0's disk, and archives the steps `to_archive`.

        Afterwards this disk has no manifests and no marks of deleted steps of its own: process 0's disk decides.
        """
        if not (self._leads and self._index):
            self.stale = False
            return
        store, root = self._local.store, self._local.root
        if new := set(to_archive) - self._gone:
            self._archive_identities(to_archive)
            self._gone |= new
        if own := origin.part_mark(mark):
            origin.take_over(own, part=True)  # First: a disk without all its manifests must not be authoritative.
        if own or not self._gave_up:
            for name in folders(self._local):
                parts.give_up_manifest(store, posixpath.join(root, name))
            deleted.drop(store, root, deleted.noted(store, root))
        self.stale, self._gave_up = False, True

    def _archive_identities(self, identities: Collection[str], free: Collection[str] = ()) -> None:
        """Archives the steps with these identities, unless their folder also has a step that is not in `free`."""
        store, paths = self._local.store, [posixpath.join(self._local.root, name) for name in folders(self._local)]
        with self._moving:  # Otherwise two threads may move a folder, the second one that of a new save.
            found = {path: parts.identities(store, path) for path in paths} if identities else {}
            archived = [path for path, own in found.items() if own & {*identities} and own <= {*identities, *free}]
            self.archive([path for path in archived if not parts.is_in_use(store, path)])

    def archive(self, paths: Sequence[str]) -> None:
        """Archives the parts that this disk has of steps that process 0 archives on its own disk."""
        if paths and self._leads and self._index:
            with self._moving:
                place = run_layout.archive_steps(self._local.store, self._local.root, sorted(paths, reverse=True))
            _log.warning("%s: %d steps were archived in %s", self._local.root, len(paths), place)

    def forget(self, paths: Sequence[str]) -> None:
        """Notes that the steps at these paths are deleted. A later round deletes their files."""
        for path in paths if self._leads and self._index else ():
            parts.forget(self._local.store, path)

    def _take_away(self, keys: set[_Key]) -> None:
        """Deletes files that no step needs.

        The caller passes only files that the round before has seen too: newer ones may belong to a save that begins.
        """
        for name in sorted({name for name, _ in keys}):
            own = {key for one, key in keys if one == name}
            parts.take_away(self._local.store, posixpath.join(self._local.root, name), own)


class _Together:
    """Process 0's side of an upload in which all hosts take part; see `formats.treering.copy.Others`."""

    def __init__(self, call: Call, name: str, to: str):
        self._call, self._name, self._to = call, name, to

    def copy(
        self,
        token: str,
        files: SaveFiles | None,
        own: Callable[[], list[File]],
        commit: Callable[[Sequence[File]], None],
    ) -> None:
        made = None if files is None else [os.fsencode(folder).decode("latin-1") for folder in files.made]
        self._call.broadcast(lambda: [self._name, self._to, token, made])
        copied: list[File] = []
        problem: BaseException | None = None
        try:
            copied = own()
        except (TreeringError, OSError) as error:
            problem = error

        def decide(reports: Sequence[Any]) -> bool:
            nonlocal problem
            failed = [report[1] for report in reports if report[1]]
            if failed and problem is None:
                damaged = all(kind == CorruptError.__name__ for kind, _ in failed)
                problem = (CorruptError if damaged else SaveError)(join_names(tuple(text for _, text in failed)))
            if problem is None:
                found = [msgspec.convert(one, File) for report, _ in reports for one in report]
                try:
                    commit([*copied, *found])
                except (TreeringError, OSError) as error:
                    problem = error
            return problem is None or (files is not None and files.must_stay)

        try:
            self._call.gather_and_decide([[], []], decide)
        except BaseException:
            if files is not None and files.must_stay:
                self._call.close()  # without the error, or the others would remove their files of what is committed
            raise
        if problem:
            raise problem


def steps_in_part(local: StepCatalog) -> dict[int, str]:
    """Returns the committed steps, and their paths, of which this disk has a part and another disk the manifest."""
    found = {
        run_layout.parse_step_name(name, local.prefix): posixpath.join(local.root, name) for name in folders(local)
    }
    return {step: path for step, path in found.items() if step is not None and parts.part_of(local.store, path)}


def archived_identities(local: StepCatalog, names: Collection[str]) -> set[str]:
    """Returns the identities of the steps with these names that are archived on this disk."""
    places = run_layout.archived_runs(local.store, local.root) if names else ()
    found = (parts.identities(local.store, posixpath.join(place, name)) for place in places for name in names)
    return set().union(*found)


def folders(local: StepCatalog) -> list[str]:
    """Returns the names of the folders of steps, committed or not. A link is not part of the run."""
    names = [
        name for name in local.store.list(local.root) if run_layout.parse_step_name(name, local.prefix) is not None
    ]
    return [name for name in names if not local.store.is_link(posixpath.join(local.root, name))]


def _not_here(*_: Any) -> Any:
    raise AssertionError("process 0 decides")
