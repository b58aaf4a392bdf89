"""The steps of a run: finds which are committed and which are valid, and caches what their manifests say."""

import dataclasses
import functools
import logging
import math
import os
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Container, Hashable, Sequence
from typing import Literal

from .. import formats
from .._core.values import encode_float
from .._threads.forks import free_in_children
from ..errors import CorruptError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..formats.treering.manifest_fields import Published
from ..keep import Saved
from ..stores.nfs import warn_unlistable
from ..stores.read_errors import ReplacedError, UnreadableError, raise_if_momentary, reading
from ..stores.store import Stat, Store
from . import run_layout, step_fallback
from . import tensorboard as _tensorboard

_log = logging.getLogger("treering")
_RECALLS_PER_STEP = 1 / 64  # how often a catalog answers from memory between two looks at all of so many steps
_MTIME_SETTLE_SECONDS = 2.0  # A later change of a directory surely shows in its time after these seconds.


@dataclasses.dataclass(frozen=True)
class SavedStep(Saved):
    """A saved step, with the names of the metrics that came after the save, and what a published version has sent."""

    late_metrics: frozenset[str] = frozenset()
    published: Published | None = None


def unwanted_emptied(
    saved: Sequence[Saved], emptied: Sequence[Saved], kept: Callable[[Sequence[Saved]], Container[int | None]]
) -> list[int]:
    """Returns the emptied steps before the newest valid one that a policy would not keep; see `read_emptied`.

    The commit of a deleted step may arrive a second time, after its deletion. An emptied step that the policy keeps
    stays, because another program may have removed its arrays: then it is damaged, which must be reported. The policy
    judges all of them together, as if they were valid.
    """
    before = [one for one in emptied if saved and one.step < saved[-1].step]
    wanted = kept(sorted([*saved, *before], key=lambda one: one.step)) if before else ()
    return [one.step for one in before if one.step not in wanted]


# The version and time of a step's directory. It changes when a file is replaced or added.
_Signature = tuple[Hashable, float]
StepStatus = SavedStep | Literal["damaged", "unsupported", "gone", "closed"]


class StepCatalog:
    """Caches the verdicts on one run's steps, for the caller and the thread that saves. Reads each manifest once.

    Metrics that were not given with a step are looked up in event files, if there is a directory of them.
    """

    def __init__(
        self,
        store: Store,
        root: str,
        layout: run_layout.RunLayout,
        tensorboard: str | os.PathLike[str] | None = None,
    ):
        self.store, self.root, self.layout, self.prefix = store, root, layout, layout.prefix
        self._may_lack_files = False
        self._recalls = math.inf  # since all steps were looked at
        self._lock = free_in_children(threading.RLock())
        self._cached_status: dict[int, tuple[_Signature, StepStatus]] = {}
        self._damaged_manifests: dict[int, _Signature | None] = {}  # damaged steps, and the signature of the manifest
        # Steps of other libraries by path, with the signature of the directory; None if unreadable.
        self._foreign_steps: dict[str, tuple[_Signature | None, SavedStep | None]] = {}
        self._unrecorded: dict[int, dict[str, float | str]] = {}  # the metrics of event files, by step
        self._recorded: dict[tuple[int, str], float | str] = {}  # those that this catalog has recorded
        self._tensorboard_scalars = None if tensorboard is None else _tensorboard.TensorBoardScalars(tensorboard)

    def allow_missing_files(self) -> None:
        """Allows files of a step to be missing here, because the disks of other hosts have them."""
        with self._lock:
            self._may_lack_files = True
            self._cached_status.clear()
            self._damaged_manifests.clear()

    def committed(self) -> dict[int, str]:
        """Returns the committed steps, ascending, and their directories. Only these may be changed."""
        return dict(self.lookup())

    def lookup(self) -> run_layout.Steps[str]:
        """Returns the same as `committed`, and looks at a step only on request."""
        others = self._shared if self.layout.shared_with_orbax else None
        made = functools.partial(posixpath.join, self.root)
        return run_layout.Steps(self.store, self.root, self.prefix, made, others)

    def _shared(self, own: Container[str]) -> dict[int, str]:
        """Returns the steps in the format of Orbax, and their directories."""
        found = formats.foreign_steps(self.store, self.root, own, formats.get("orbax"), self.layout.foreign_prefix)
        return {step: one.path for step, one in found.items()}

    def valid_steps(self, *, foreign: bool = False, events: bool = True) -> list[SavedStep]:
        """Returns the valid steps, ascending; with `foreign` also those of other libraries in the directory.

        events: False to leave out the metrics in event files, because reading new events may take seconds.
        """
        with self.store.glance(self.root):
            return self._valid_steps(foreign, events)

    def _valid_steps(self, foreign: bool, events: bool) -> list[SavedStep]:
        self._recalls = 0
        own_names = run_layout.own_steps(self.store, self.root, self.prefix)
        own = {step: posixpath.join(self.root, name) for step, name in own_names.items()}
        with self._lock:
            for step in self._cached_status.keys() - own.keys():  # Forget deleted steps: a long run deletes most.
                del self._cached_status[step]
        statuses = [self.status_of(step, path) for step, path in own.items()]
        valid = [status for status in statuses if isinstance(status, SavedStep)]
        if foreign or self.layout.shared_with_orbax:
            names = set(own_names.values())
            others = formats.foreign_steps(self.store, self.root, names, prefix=self.layout.foreign_prefix)
            valid += [
                saved for step, one in others.items() if step not in own and (saved := self._read_foreign(step, *one))
            ]
            valid.sort(key=lambda one: one.step)
        if self._tensorboard_scalars is None or not events:
            return valid
        written = self._tensorboard_scalars.read(one.step for one in valid)
        found: list[SavedStep] = []
        self._unrecorded = {}
        for one in valid:
            known = {name: encode_float(value) for name, value in one.metrics.items()}
            others = {
                name: value
                for name, value in written.get(one.step, {}).items()
                if name not in known or self._recorded.get((one.step, name)) == known[name]
            }
            new = {name: number for name, value in others.items() if known.get(name) != (number := encode_float(value))}
            if new and one.step in own:
                self._unrecorded[one.step] = new
            late_metrics = one.late_metrics.union(others)
            found.append(dataclasses.replace(one, metrics={**one.metrics, **others}, late_metrics=late_metrics))
        return found

    def record_events(self) -> None:
        """Records the metrics of event files that the last look has found, so that other programs see them, too.

        The caller has the lease. Logs errors, because the metrics are only needed later.
        """
        for step, numbers in self._unrecorded.items():
            try:
                if path := self.lookup().get(step):
                    summary.add_metrics(self.store, path, step, numbers, notify=False)
                    self._recorded.update(((step, name), number) for name, number in numbers.items())
            except (TreeringError, OSError) as error:
                _log.warning("%s: metrics of TensorBoard are not recorded with step %d: %s", self.root, step, error)
        self._unrecorded = {}

    def recall_valid_steps(self, metrics: Collection[str]) -> list[SavedStep] | None:
        """Returns the valid steps as they were when they were looked at last.

        Looks only at those that are not known, and at those without one of these metrics, which may come late. So what
        another process has done since to the others does not show: another value of a metric, files that are gone.
        Returns None if this has been the answer too often, or never may be. Then look at all.
        """
        is_simple = self._tensorboard_scalars is None and not (self.layout.shared_with_orbax or self._may_lack_files)
        if not (is_simple and self.store.has_folders and self._recalls < len(self._cached_status) * _RECALLS_PER_STEP):
            return None
        self._recalls += 1
        found: list[SavedStep] = []
        steps = run_layout.own_steps(self.store, self.root, self.prefix)
        for step in steps.listed:
            with self._lock:
                known = self._cached_status.get(step)
            status = known[1] if known else None
            if not (isinstance(status, SavedStep) and status.metrics.keys() >= {*metrics}):
                name = steps.get(step)
                status = self.status_of(step, posixpath.join(self.root, name)) if name else None
            if isinstance(status, SavedStep):
                found.append(status)
        return found

    def look_again(self) -> None:
        """Notes that any step may have changed, so that the next question is not answered from memory."""
        self._recalls = math.inf

    def forget(self, step: int) -> None:
        """Notes that a step may have changed."""
        with self._lock:
            self._cached_status.pop(step, None)

    def is_damaged(self, step: int, path: str) -> bool:
        """Returns True if a committed step is damaged."""
        return self.status_of(step, path) == "damaged"

    def read_emptied(self, step: int, path: str) -> SavedStep | None:
        """Returns a damaged step whose manifest is all that is left of it; None for any other step."""
        if self._may_lack_files or not self.is_damaged(step, path):
            return None
        found = summary.read_emptied(self.store, path)
        return found and self._saved(step, found)

    def _saved(self, step: int, found: summary.StepSummary) -> SavedStep:
        base = None if found.base is None else run_layout.parse_step_name(found.base, self.prefix)
        return SavedStep(
            step, found.metrics, found.created_seconds, found.nbytes, found.linked, base, found.late, found.published
        )

    def mark_damaged(self, step: int, path: str) -> None:
        """Remembers that reading a step has shown damage, until the step is replaced."""
        if signature := self._signature(path):
            with self._lock:
                self._cached_status[step] = signature, "damaged"
                self._damaged_manifests[step] = self._signature_of_manifest(path)

    def mark_unsupported(self, step: int, path: str, error: UnsupportedError) -> None:
        """Remembers that a step is of a later release, until something in its directory changes."""
        _log_unsupported(step, error)
        if signature := self._signature(path):
            with self._lock:
                self._cached_status[step] = signature, "unsupported"

    def _read_foreign(self, step: int, path: str, format: str | None) -> SavedStep | None:
        signature = self._signature(path)  # Before the read: the step may be replaced meanwhile.
        known = self._foreign_steps.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        saved = None
        try:
            ckpt = step_fallback.open_in_store(self.store, path, format)
            created = ckpt.created.timestamp() if ckpt.created else 0.0
            saved = SavedStep(step, ckpt.metrics, created, ckpt.nbytes)
        except ReplacedError:  # It was deleted or replaced just now, so nothing is remembered.
            return None
        except TreeringError as error:
            raise_if_momentary(error)
            _log.warning("step %d is ignored: %s", step, error)
        self._foreign_steps[path] = signature, saved
        return saved

    def status_of(self, step: int, path: str) -> "StepStatus":
        """Returns the verdict on a committed step: its summary, or why it is not valid."""
        signature = self._signature(path)
        if signature is None:
            return "gone"
        with self._lock:
            known = self._cached_status.get(step)
            if known and known[0] == signature:
                return known[1]
            if step in self._damaged_manifests and self._damaged_manifests[step] == self._signature_of_manifest(path):
                return "damaged"  # New files next to the manifest do not mend it.
        read = self._signature_of_manifest(path)  # Before the read: the manifest may be replaced meanwhile.
        status = self._read_status(step, path)
        if status == "damaged":
            with self._lock:
                self._cached_status[step] = signature, status
                self._damaged_manifests[step] = read
        elif status != "closed" and time.time() - signature[1] > _MTIME_SETTLE_SECONDS:
            with self._lock:
                self._cached_status[step] = signature, status
        else:  # It is read again.
            self.forget(step)
        return status

    def _read_status(self, step: int, path: str) -> StepStatus:
        try:
            return self._saved(step, summary.read(self.store, path, allow_missing_files=self._may_lack_files))
        except CorruptError as error:
            _log.warning("step %d is damaged and is ignored: %s", step, error)
            return "damaged"
        except UnsupportedError as error:
            _log_unsupported(step, error)
            return "unsupported"
        except FileNotFoundError:
            return "gone"  # deleted by another process since it was listed
        except PermissionError as error:  # Not remembered: its permissions may change.
            warn_unlistable(path, error.strerror)
            return "closed"

    def _signature(self, path: str) -> _Signature | None:
        return _stat_signature(path, lambda: self.store.stat(path))

    def _signature_of_manifest(self, path: str) -> _Signature | None:
        return _stat_signature(path, lambda: summary.stat_manifest(self.store, path))


def _stat_signature(path: str, look: Callable[[], Stat | None]) -> _Signature | None:
    try:
        with reading(path):
            found = look()
    except UnreadableError:
        return "unreadable", 0
    return found and (found.version, found.modified)


def _log_unsupported(step: int, error: UnsupportedError) -> None:
    _log.warning("step %d cannot be read by this release and is left alone: %s", step, error)
