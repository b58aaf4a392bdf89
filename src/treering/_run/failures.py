"""The error policy of background saves: raise the error of a failed save, or log it and notify the user's function."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

from ..errors import MismatchError, TreeringError

OnError = Literal["raise", "log"] | Callable[[BaseException], object]
_log = logging.getLogger("treering")


class Failures:
    """The failures of a run's saves.

    `last_error` is the failure of the newest save that is over, None if it succeeded.
    """

    def __init__(self, on_error: OnError):
        if on_error not in ("raise", "log") and not callable(on_error):
            raise MismatchError(f"on_error={on_error!r}: expected 'raise', 'log' or a function of an error")
        self.raises = on_error == "raise"
        self.last_error: BaseException | None = None
        self._raised_error: BaseException | None = None
        self._on_error = on_error if callable(on_error) else None

    def raise_last(self) -> None:
        """Raises the last failure, once, unless a later save succeeded."""
        if self.last_error is not None and self.last_error is not self._raised_error:
            self._raised_error = self.last_error
            raise self.last_error

    def report(self, error: BaseException) -> None:
        """Logs a failure that is not raised, and calls the user's function with it. Does so once for each failure."""
        if error is self.last_error:
            return
        self.last_error = error
        _log.error("a save failed, and the run continues because of on_error; the next save tries again: %s", error)
        self.notify(error)

    def notify(self, error: BaseException) -> None:
        """Calls the user's function, if there is one, with an error that is already logged."""
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                _log.exception("on_error failed")


@contextlib.contextmanager
def log_failure() -> Iterator[None]:
    """Logs the failure of a background save, so that it does not hide the error that is being raised."""
    try:
        yield
    except TreeringError:
        _log.exception("a background save failed as well")
