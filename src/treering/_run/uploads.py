"""Copying the steps of a run in the background, from where they are saved to where they stay."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import CorruptError, MismatchError, SaveError, TreeringError
from .chores import Chores
from .retention import Retention

if TYPE_CHECKING:
    from .two_places import TwoPlaces

_log = logging.getLogger("treering")


class _PausedError(Exception):
    """The run is about to be changed: copying was interrupted."""


class Uploads:
    """Copies what is lacking, one step after the other, the newest first.

    `step` is the one that is being copied. What fails is logged, and tried again after the next save and at the end.
    """

    def __init__(self, places: "TwoPlaces", far: Retention, bytes_per_second: float | None):
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise MismatchError(f"upload_limit={bytes_per_second!r}: expected a number of bytes a second above 0")
        self.step: int | None = None
        self._places, self._far = places, far
        self._chores = Chores()
        self._pace = _Pace(bytes_per_second)
        self._one = threading.Lock()  # held by the only one who copies, or changes the run otherwise
        self._stopped = threading.Event()
        self._error: BaseException | None = None  # of the last attempt
        self._damage: CorruptError | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work under way or queued."""
        return self._chores.busy

    def begin(self, retain: Callable[[], None] = lambda: None) -> None:
        """Begins to copy what is lacking; calls `retain`, which deletes steps near, whenever that may help."""
        if self._places.claimed:
            self._chores.add("copying steps", lambda: self._copy_all(retain))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Copies nothing within a `with` block; a copy that is under way is given up, and begun anew after it."""
        self._stopped.set()
        try:
            with self._one:
                self._stopped.clear()
                yield
        finally:  # after an interrupt as well
            self._stopped.clear()
            self.begin()

    def finish(self) -> SaveError | None:
        """Waits until all is copied, and old steps are deleted. Returns what kept some steps from it."""
        self.begin()
        self._chores.wait()
        self._far.wait()
        near, far = self._places.near.root, self._places.far.root
        if error := self._error:
            problem = SaveError(
                f"{far}: the newest steps are not all there, for copying them failed: {error}; they are in {near}, and "
                "the next job that saves from there copies them"
            )
        elif error := self._damage:
            problem = SaveError(f"{far}: a step is not there, for the one in {near} is damaged: {error}")
        else:
            return None
        self._damage = None
        problem.__cause__ = error
        return problem

    def _copy_all(self, retain: Callable[[], None]) -> None:
        with self._one:
            self._error = None
            try:
                self._far.remove_leftovers()
                while (step := self._next(retain)) is not None:
                    self._copy(step)
            except _PausedError as error:  # it begins anew when the run was changed
                self._error = error
            except BaseException as error:  # whatever it is, `finish` must not say that all is copied
                self._error = error
                about = "%s: copying steps failed; it is tried again after the next save: %s"
                unexpected = not isinstance(error, TreeringError | OSError)
                _log.error(about, self._places.root, error, exc_info=unexpected)

    def _next(self, retain: Callable[[], None]) -> int | None:
        """The step to copy next, when what was added to the others is copied and no old ones are there."""
        if self._stopped.is_set():
            raise _PausedError
        far = self._places.far.steps
        with far.store.glance(far.root):
            self._places.copy_marks()
        self._far.retain(None)  # by the metrics that are there by now
        with far.store.glance(far.root):
            todo = self._places.to_copy()
            retain()
        return todo[0] if todo else None

    def _copy(self, step: int) -> None:
        begun = time.monotonic()
        self.step = step
        try:
            self._places.copy(step, self._moved)
        except CorruptError as error:  # no copy of it can be made, and the others are copied all the same
            self._places.mark_damaged(self._places.near.place(step, self._places.near.path(step)))
            self._damage = error
            _log.error("%s: step %d is not copied, for it is damaged: %s", self._places.root, step, error)
            return
        finally:
            self.step = None
        _log.info("%s: step %d copied in %.1f s", self._places.root, step, time.monotonic() - begun)

    def _moved(self, nbytes: int) -> None:
        if self._stopped.wait(self._pace.delay(nbytes)):
            raise _PausedError


class _Pace:
    """A limit of bytes a second."""

    def __init__(self, bytes_per_second: float | None):
        self._rate = bytes_per_second
        self._free = 0.0  # when the bytes so far have taken their time

    def delay(self, nbytes: int) -> float:
        """The seconds to wait before so many bytes may go."""
        if not self._rate:
            return 0
        now = time.monotonic()
        self._free = max(self._free, now) + nbytes / self._rate
        return self._free - now
