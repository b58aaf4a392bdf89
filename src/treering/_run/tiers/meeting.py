"""The first call of a job with a local tier: finds which processes share a disk, and which steps of the run exist.

Process 0 merges the reports of all disks (`step_states`). Its own disk then gets the manifests that it lacks.
"""

import contextlib
import logging
import os
import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._core.calls import Call
from ...errors import ExistsError, SaveError
from ...formats.treering import host_files, summary
from ...stores.file_io import create_in_folder, make_empty
from ...stores.nfs import refresh_dir_cache, wait_until
from ...stores.store import Store
from ...stores.temporary_names import final_name
from .. import run_layout
from ..step_catalog import StepCatalog
from . import step_states
from .journal import Claim, Generations, read_generations
from .local_tier import LocalTier, Orders, Report, decode, encode

_log = logging.getLogger("treering")
_OLD_SECONDS = 3600.0  # No discovery takes longer than this.
_LOOK_SECONDS = 2.5  # to wait for the marks of other processes on a network file system


def find_hosts(call: Call, store: Store, root: str) -> list[int]:
    """Returns, for each process, the lowest process that shares its local directory.

    Each process makes a file there for a moment, and looks which files of other processes it sees. Raises `SaveError`
    if this process cannot write there.
    """
    if call.count == 1:
        return [0]
    token = call.broadcast(lambda: os.urandom(3).hex())
    made: list[str] = []
    marks = [f".process-{n}.{token}.tmp" for n in range(call.index + 1)]
    own = posixpath.join(root, marks[-1])

    def first() -> int:
        there = {marks[-1], *store.list(root)}
        return next(n for n, mark in enumerate(marks) if mark in there)

    try:
        create_in_folder(lambda: store.make_folders(root, made), lambda: make_empty(store, own))
    except OSError as error:
        raise SaveError(f"local={root!r}: expected a directory that this process can write to ({error})") from error
    try:
        call.gather_and_decide(None, lambda _: None)  # All files exist now.
        if not store.is_local(root):  # Over a network, new files of other hosts may show later.
            wait_until(lambda: first() == 0, lambda: refresh_dir_cache(store, root), _LOOK_SECONDS)
        return call.gather_and_decide(first(), list)
    finally:
        with contextlib.suppress(OSError):
            store.delete(own)
            _remove_old_marks(store, root)
            for folder in reversed(made):
                store.remove_folder(folder)


def _remove_old_marks(store: Store, root: str) -> None:
    """Removes the files of processes that were killed during this call."""
    for name in store.list(root):
        path = posixpath.join(root, name)
        there = store.stat(path) if (final_name(name) or "").startswith("process-") else None
        if there and time.time() - there.modified > _OLD_SECONDS:
            store.delete(path)


class Meeting:
    """The disks of the job, as process 0 sees them.

    `lock` holds the leases of the run within a `with` block. A step is missing if it lacks files that no disk of the
    job has, or if another job holds the run, so that its manifest could not be adopted.
    """

    def __init__(self, local: LocalTier, remote: StepCatalog, lock: Callable[[], Any]):
        self._local, self._remote, self._lock = local, remote, lock
        self._reports: dict[int, Report] = {}
        self._remote_paths: dict[int, str] | None = None  # listed on first use
        self._generations: Generations | None = None
        self._verdict = step_states.Verdict((), False, {}, {})
        self._missing: set[int] = set()

    def run(self, call: Call, *, leads: bool) -> tuple[dict[str, str], set[int]]:
        """Runs the meeting in all processes.

        Returns the names and identities of the run's steps that are complete, and the numbers of those that are not.
        """
        local = self._local
        report = local.report() if leads else None
        asked = call.gather_and_decide(encode(report) if report else None, self._decide)
        with contextlib.ExitStack() as leases:
            names = asked.get(str(call.index), ())
            notes = {name: found for name in names if (found := host_files.notes(local.store, local.path(name)))}
            steps, missing = call.gather_and_decide(
                notes or None, lambda answers: self._take(answers, lambda: leases.enter_context(self._lock()))
            )
        return steps, set(missing)

    def _decide(self, reports: Sequence[Any]) -> dict[str, list[str]]:
        """Merges the reports. Returns the names of the steps whose notes each process is to send."""
        self._reports = {n: decode(one, Report) for n, one in enumerate(reports) if one}
        self._merge(read_generations(self._remote.store, self._remote.root))
        heirs, own = self._verdict.heirs, self._reports[0].steps
        asked: dict[str, list[str]] = {}
        for name, (identity, source) in self._verdict.steps.items():
            lacks = name not in own or own[name].identity != identity
            # The disk of the last process 0 has the pins and metrics. Without it, any disk may have some.
            sources = [source] if not self._verdict.lost_first else [index for index in heirs if index]
            for index in sources if lacks or sources != [0] else ():
                if index and self._reports[index].steps.get(name, ("",))[0] == identity:
                    asked.setdefault(str(index), []).append(name)
        return asked

    def _merge(self, generations: Generations | None) -> None:
        self._generations, self._remote_paths = generations, None
        disks = {
            index: step_states.DiskReport(
                one.journal,
                {name: files.identity for name, files in one.steps.items()},
                [name for name, files in one.steps.items() if files.is_unreadable],
            )
            for index, one in self._reports.items()
        }
        is_empty = generations is None and not self._committed_remotely()
        self._verdict = step_states.merge(disks, generations, self._remote_identity, is_empty=is_empty)

    def _take(self, answers: Sequence[Any], lock: Callable[[], Any]) -> list[Any]:
        """Adopts the notes that other disks have sent. Returns what `run` returns."""
        found = [(name, notes) for answer in filter(None, answers) for name, notes in answer.items()]
        if found:
            try:
                lock()
                for name, notes in found:
                    self._local.adopt(name, notes, unpin=not self._verdict.lost_first)
            except ExistsError as error:
                _log.warning("%s: the steps on other hosts' disks are ignored: %s", self._local.root, error)
        self._log_abandoned()
        own = self._local.identities()
        names = [
            name
            for name, (identity, _) in self._verdict.steps.items()
            if own.get(name) != identity or not self._is_complete(name)
        ]
        self._missing = {
            step
            for name in names
            if (step := self._step(name)) is not None and self._remote_identity(name) != self._verdict.steps[name][0]
        }
        steps = {name: one for name, (one, _) in self._verdict.steps.items() if self._step(name) not in self._missing}
        return [steps, sorted(self._missing)]

    def _log_abandoned(self) -> None:
        retired = self._verdict.retired
        names = {
            name
            for one in self._reports.values()
            for name, files in one.steps.items()
            if retired.get(files.identity) == "archived" and name not in self._verdict.steps
        }
        if names:
            _log.warning(
                "%s: steps %s are ignored; other jobs continued the run without the disks that have them, and the next "
                "save archives them there",
                self._local.root, ", ".join(str(self._step(name)) for name in sorted(names)),
            )  # fmt: skip

    def _is_complete(self, name: str) -> bool:
        listed = host_files.listed_files(self._local.store, self._local.path(name))
        sizes = [one.steps[name].sizes for one in self._reports.values() if name in one.steps]
        return listed is not None and all(any(own.get(one.name) == one.size for own in sizes) for one in listed)

    def claims(self) -> list[Claim]:
        """Returns the claims that the disks have recorded."""
        return [claim for one in self._reports.values() for claim in one.journal.claims]

    def orders(self, base: Generations, found: Generations | None) -> Orders:
        """Returns the orders for all disks when the job claims the run.

        base: the generations of the run before this claim, or those of a new series. found: None for a new series.
        """
        if found != self._generations:
            self._merge(found)  # Another job has claimed the run since this one began.
        verdict, reports = self._verdict, self._reports
        missing = {name: one for name, (one, _) in verdict.steps.items() if self._step(name) in self._missing}
        retired = {**verdict.retired, **dict.fromkeys(missing.values(), "archived")}
        manifests: dict[str, str] = {}
        for name, (identity, _) in verdict.steps.items():
            # A disk that is new to the run gets them, too: it may be the only one of this job that the next job has.
            others = [one.steps[name].identity if name in one.steps else None for one in reports.values()]
            if name not in missing and any(other != identity for other in others):
                manifests |= self._local.manifest_of(name)
        ids = {index: one.journal.disk for index, one in reports.items()}
        claim = Claim(
            base.next,
            base.written_by,
            tuple(ids[index] for index in sorted(ids)),
            tuple(ids[index] for index in verdict.heirs),
            base.series,
        )
        unnamed = {
            name
            for one in reports.values()
            for name, files in one.steps.items()
            if files.is_unreadable or (not files.identity and verdict.heirs and verdict.lost_first)
        }
        return Orders(claim, retired, manifests, tuple(sorted(unnamed)))

    def _step(self, name: str) -> int | None:
        return run_layout.parse_step_name(name, self._local.steps.prefix)

    def _committed_remotely(self) -> Mapping[int, str]:
        if self._remote_paths is None:
            self._remote_paths = self._remote.committed()
        return self._remote_paths

    def _remote_identity(self, name: str) -> str | None:
        path = self._committed_remotely().get(self._step(name) or 0)
        return summary.identity_or_none(self._remote.store, path) if path else None
