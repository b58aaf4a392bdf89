"""What is known of a run's steps: which are there, which are good, and what their manifests say."""

import dataclasses
import logging
import os
import threading
import time
from typing import Literal

from .. import formats, stores
from ..errors import CorruptError, TreeringError, UnsupportedError
from ..formats.treering import manifest, validity
from ..keep import Saved
from ..stores.local import MANIFEST
from ..stores.network import warn_of_closed
from ..stores.on_disk import read_file
from ..stores.reading import UnreadableError, reading
from . import open as _open
from . import run
from . import tensorboard as _tensorboard
from .metrics import recorded

_log = logging.getLogger("treering")
_SETTLED = 2.0  # seconds after which another change of a directory shows in its time
_Signature = tuple[int, int, int]  # of a step's directory: where a file is replaced or added, it is another
_Verdict = Saved | Literal["damaged", "unsupported", "gone", "closed"]


class History:
    """The steps of one run, seen by the caller and by the thread that saves. Each manifest is read once.

    Metrics that a step was not given are looked up in event files, if there is a directory of them.
    """

    def __init__(self, root: str, prefix: str, tensorboard: str | os.PathLike[str] | None = None):
        self.root, self.prefix = root, prefix
        self._lock = threading.RLock()
        self._known: dict[int, tuple[_Signature, _Verdict]] = {}
        self._damaged: dict[int, _Signature | None] = {}  # steps whose manifest has this signature
        self._others: dict[str, Saved | None] = {}  # steps of other libraries, by path
        self._events = None if tensorboard is None else _tensorboard.Events(tensorboard)

    def committed(self) -> dict[int, str]:
        """The committed steps, ascending, and their directories."""
        return {step: os.path.join(self.root, name) for step, name in run.committed(self.root, self.prefix).items()}

    def good(self, *, foreign: bool = False) -> list[Saved]:
        """The undamaged steps, ascending, on demand with those that another library has left in the directory."""
        own = self.committed()
        with self._lock:
            for step in self._known.keys() - own.keys():  # a run of many steps keeps few
                del self._known[step]
        found = [self._look(step, path) for step, path in own.items()]
        good = [verdict for verdict in found if isinstance(verdict, Saved)]
        if foreign:
            names = {os.path.basename(path) for path in own.values()}
            others = formats.foreign_steps(stores.DISK, self.root, names)
            good += [saved for step, path in others.items() if step not in own and (saved := self._foreign(step, path))]
            good.sort(key=lambda one: one.step)
        if self._events is None:
            return good
        written = self._events.read(one.step for one in good)
        return [dataclasses.replace(one, metrics={**written.get(one.step, {}), **one.metrics}) for one in good]

    def is_damaged(self, step: int, path: str) -> bool:
        """Whether a committed step is known or found to be damaged."""
        return self._look(step, path) == "damaged"

    def mark_damaged(self, step: int, path: str) -> None:
        """Remembers that reading a step has shown damage; until somebody replaces it."""
        if signature := _signature(path):
            with self._lock:
                self._known[step] = signature, "damaged"
                self._damaged[step] = _signature(os.path.join(path, MANIFEST))

    def mark_unsupported(self, step: int, path: str, error: UnsupportedError) -> None:
        """Remembers that a step, looked at closely, is of a later release; until something in its directory changes."""
        _log_unsupported(step, error)
        if signature := _signature(path):
            with self._lock:
                self._known[step] = signature, "unsupported"

    def _foreign(self, step: int, path: str) -> Saved | None:
        if path not in self._others:
            try:
                self._others[path] = Saved(step, _open.open_one(path).metrics)
            except TreeringError as error:
                _log.warning("step %d does not count: %s", step, error)
                self._others[path] = None
        return self._others[path]

    def _look(self, step: int, path: str) -> "_Verdict":
        signature = _signature(path)
        if signature is None:
            return "gone"
        with self._lock:
            known = self._known.get(step)
            if known and known[0] == signature:
                return known[1]
            if step in self._damaged and self._damaged[step] == _signature(os.path.join(path, MANIFEST)):
                return "damaged"  # whatever was put beside it since
        read = _signature(os.path.join(path, MANIFEST))  # asked before: it may be replaced while it is read
        verdict = _read(step, path)
        if verdict == "damaged":
            with self._lock:
                self._known[step] = signature, verdict
                self._damaged[step] = read
        elif verdict != "closed" and time.time() - signature[1] / 1e9 > _SETTLED:  # or it is looked at again
            with self._lock:
                self._known[step] = signature, verdict
        return verdict


def _signature(path: str) -> _Signature | None:
    try:
        with reading(path):
            found = stores.DISK.stat(path)
    except UnreadableError:
        return 0, 0, 0  # for as long as it is that
    return found and (found.st_ino, found.st_mtime_ns, found.st_size)


def _read(step: int, path: str) -> _Verdict:
    try:
        data = read_file(stores.DISK, os.path.join(path, MANIFEST))
        summary = manifest.summarize(data, path)
        for file in summary.files:
            with reading(path):
                found = stores.DISK.stat(os.path.join(path, file.name))
            if found is None or found.st_size != file.size:
                raise CorruptError(f"{path}: {file.name} is missing or cut short")
        metrics = validity.metrics(summary.metrics)
        metrics.update(recorded(stores.DISK, path, manifest.xxh3(data)))
        nbytes = len(data) + sum(file.size for file in summary.files)
        return Saved(step, metrics, summary.created_seconds(), nbytes)
    except CorruptError as error:
        _log.warning("step %d is damaged and does not count: %s", step, error)
        return "damaged"
    except UnsupportedError as error:
        _log_unsupported(step, error)
        return "unsupported"
    except FileNotFoundError:
        return "gone"  # deleted by somebody else since it was listed
    except PermissionError as error:  # and is asked again: somebody may let us in
        warn_of_closed(path, error.strerror)
        return "closed"


def _log_unsupported(step: int, error: UnsupportedError) -> None:
    _log.warning("step %d cannot be read by this release and is left alone: %s", step, error)
