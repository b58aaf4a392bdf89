"""The steps of a run: finds which are committed and which are valid, and caches what their manifests say."""

import dataclasses
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable, Hashable
from typing import Literal

from .. import formats
from ..errors import CorruptError, TreeringError, UnsupportedError
from ..formats.treering import summary
from ..keep import Saved
from ..stores.nfs import warn_of_closed
from ..stores.read_errors import ReplacedError, UnreadableError, raise_if_momentary, reading
from ..stores.store import Stat, Store
from . import latest_good, run
from . import tensorboard as _tensorboard

_log = logging.getLogger("treering")
_SETTLED = 2.0  # A later change of a directory surely shows in its time after these seconds.


@dataclasses.dataclass(frozen=True)
class SavedStep(Saved):
    """A saved step, with the names of the metrics that came after the save."""

    late: frozenset[str] = frozenset()


# The version and time of a step's directory. It changes when a file is replaced or added.
_Signature = tuple[Hashable, float]
Verdict = SavedStep | Literal["damaged", "unsupported", "gone", "closed"]


class Steps:
    """Caches the verdicts on one run's steps, for the caller and the thread that saves. Reads each manifest once.

    Metrics that were not given with a step are looked up in event files, if there is a directory of them.
    """

    def __init__(self, store: Store, root: str, prefix: str, tensorboard: str | os.PathLike[str] | None = None):
        self.store, self.root, self.prefix = store, root, prefix
        self._partial = False
        self._lock = threading.RLock()
        self._known: dict[int, tuple[_Signature, Verdict]] = {}
        self._damaged: dict[int, _Signature | None] = {}  # damaged steps, and the signature of the manifest
        self._others: dict[str, SavedStep | None] = {}  # steps of other libraries, by path; None if unreadable
        self._events = None if tensorboard is None else _tensorboard.Events(tensorboard)

    def hold_parts(self) -> None:
        """Allows files of a step to be missing here, because the disks of other hosts have them."""
        with self._lock:
            self._partial = True
            self._known.clear()
            self._damaged.clear()

    def committed(self) -> dict[int, str]:
        """Returns the committed steps, ascending, and their directories."""
        names = run.committed(self.store, self.root, self.prefix)
        return {step: posixpath.join(self.root, name) for step, name in names.items()}

    def good(self, *, foreign: bool = False) -> list[SavedStep]:
        """Returns the valid steps, ascending; with `foreign` also those of other libraries in the directory."""
        with self.store.glance(self.root):
            return self._good(foreign)

    def _good(self, foreign: bool) -> list[SavedStep]:
        own = self.committed()
        with self._lock:
            for step in self._known.keys() - own.keys():  # Forget deleted steps: a long run deletes most of them.
                del self._known[step]
        verdicts = [self.look(step, path) for step, path in own.items()]
        good = [verdict for verdict in verdicts if isinstance(verdict, SavedStep)]
        if foreign:
            names = {os.path.basename(path) for path in own.values()}
            others = formats.foreign_steps(self.store, self.root, names)
            good += [saved for step, one in others.items() if step not in own and (saved := self._foreign(step, *one))]
            good.sort(key=lambda one: one.step)
        if self._events is None:
            return good
        written = self._events.read(one.step for one in good)
        found: list[SavedStep] = []
        for one in good:
            others = {name: value for name, value in written.get(one.step, {}).items() if name not in one.metrics}
            late = one.late.union(others)
            found.append(dataclasses.replace(one, metrics={**others, **one.metrics}, late=late))
        return found

    def is_damaged(self, step: int, path: str) -> bool:
        """Returns True if a committed step is damaged."""
        return self.look(step, path) == "damaged"

    def mark_damaged(self, step: int, path: str) -> None:
        """Remembers that reading a step has shown damage, until the step is replaced."""
        if signature := self._signature(path):
            with self._lock:
                self._known[step] = signature, "damaged"
                self._damaged[step] = self._signature_of_manifest(path)

    def mark_unsupported(self, step: int, path: str, error: UnsupportedError) -> None:
        """Remembers that a step is of a later release, until something in its directory changes."""
        _log_unsupported(step, error)
        if signature := self._signature(path):
            with self._lock:
                self._known[step] = signature, "unsupported"

    def _foreign(self, step: int, path: str, format: str | None) -> SavedStep | None:
        if path not in self._others:
            try:
                self._others[path] = SavedStep(step, latest_good.open_one(self.store, path, format).metrics)
            except ReplacedError:  # It was deleted or replaced just now, so nothing is remembered.
                return None
            except TreeringError as error:
                raise_if_momentary(error)
                _log.warning("step %d is ignored: %s", step, error)
                self._others[path] = None
        return self._others[path]

    def look(self, step: int, path: str) -> "Verdict":
        """Returns the verdict on a committed step: its summary, or why it is not valid."""
        signature = self._signature(path)
        if signature is None:
            return "gone"
        with self._lock:
            known = self._known.get(step)
            if known and known[0] == signature:
                return known[1]
            if step in self._damaged and self._damaged[step] == self._signature_of_manifest(path):
                return "damaged"  # New files next to the manifest do not mend it.
        read = self._signature_of_manifest(path)  # Before the read: the manifest may be replaced meanwhile.
        verdict = self._read(step, path)
        if verdict == "damaged":
            with self._lock:
                self._known[step] = signature, verdict
                self._damaged[step] = read
        elif verdict != "closed" and time.time() - signature[1] > _SETTLED:  # Otherwise it is read again.
            with self._lock:
                self._known[step] = signature, verdict
        return verdict

    def _read(self, step: int, path: str) -> Verdict:
        try:
            return SavedStep(step, *summary.read(self.store, path, partial=self._partial))
        except CorruptError as error:
            _log.warning("step %d is damaged and is ignored: %s", step, error)
            return "damaged"
        except UnsupportedError as error:
            _log_unsupported(step, error)
            return "unsupported"
        except FileNotFoundError:
            return "gone"  # deleted by another process since it was listed
        except PermissionError as error:  # Not remembered: its permissions may change.
            warn_of_closed(path, error.strerror)
            return "closed"

    def _signature(self, path: str) -> _Signature | None:
        return _seen(path, lambda: self.store.stat(path))

    def _signature_of_manifest(self, path: str) -> _Signature | None:
        return _seen(path, lambda: summary.look(self.store, path))


def _seen(path: str, look: Callable[[], Stat | None]) -> _Signature | None:
    try:
        with reading(path):
            found = look()
    except UnreadableError:
        return "unreadable", 0
    return found and (found.version, found.modified)


def _log_unsupported(step: int, error: UnsupportedError) -> None:
    _log.warning("step %d cannot be read by this release and is left alone: %s", step, error)
