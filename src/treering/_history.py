"""What is known of a run's steps: which are there, which are good, and what their manifests say."""

import logging
import os
import threading
from typing import Literal

from . import _run, stores
from ._catalogue import decode
from .errors import CorruptError, UnsupportedError
from .formats.treering import manifest
from .keep import Saved
from .stores.disk import read_file
from .stores.local import MANIFEST

_log = logging.getLogger("treering")
_Signature = tuple[int, int, int]  # of a manifest: a replaced one has another
_Verdict = Saved | Literal["damaged", "foreign", "gone"]


class History:
    """The steps of one run, seen by the caller and by the thread that saves. Each manifest is read once."""

    def __init__(self, root: str, prefix: str):
        self.root, self.prefix = root, prefix
        self._lock = threading.RLock()
        self._known: dict[int, tuple[_Signature, _Verdict]] = {}

    def committed(self) -> dict[int, str]:
        """The committed steps, ascending, and their directories."""
        return {step: os.path.join(self.root, name) for step, name in _run.committed(self.root, self.prefix).items()}

    def good(self) -> list[Saved]:
        """The undamaged steps, ascending."""
        found = [self._look(step, path) for step, path in self.committed().items()]
        return [verdict for verdict in found if isinstance(verdict, Saved)]

    def is_damaged(self, step: int, path: str) -> bool:
        """Whether a committed step is known or found to be damaged."""
        return self._look(step, path) == "damaged"

    def mark_damaged(self, step: int, path: str) -> None:
        """Remembers that reading a step has shown damage; until somebody replaces it."""
        if signature := _signature(path):
            with self._lock:
                self._known[step] = signature, "damaged"

    def _look(self, step: int, path: str) -> "_Verdict":
        signature = _signature(path)
        if signature is None:
            return "gone"
        with self._lock:
            known = self._known.get(step)
        if known is None or known[0] != signature:
            known = signature, _read(step, path)
            with self._lock:
                self._known[step] = known
        return known[1]


def _signature(path: str) -> _Signature | None:
    found = stores.DISK.stat(os.path.join(path, MANIFEST))
    return found and (found.st_ino, found.st_mtime_ns, found.st_size)


def _read(step: int, path: str) -> _Verdict:
    try:
        summary = manifest.summarize(read_file(stores.DISK, os.path.join(path, MANIFEST)), path)
        for file in summary.files:
            found = stores.DISK.stat(os.path.join(path, file.name))
            if found is None or found.st_size != file.size:
                raise CorruptError(f"{path}: {file.name} is missing or cut short")
        metrics = {name: decode("float", value) for name, value in summary.metrics.items()}
        return Saved(step, metrics, summary.created_seconds())
    except CorruptError as error:
        _log.warning("step %d is damaged and does not count: %s", step, error)
        return "damaged"
    except UnsupportedError as error:
        _log.warning("step %d was written by a later release and is left alone: %s", step, error)
        return "foreign"
    except FileNotFoundError:
        return "gone"  # deleted by somebody else since it was listed
