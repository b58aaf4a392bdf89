"""TensorStore's futures: a bounded number of bytes under way, and its errors as Treering's."""

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...errors import CorruptError
from ...stores import git_lfs
from ...stores.key_values import of_text
from ...stores.store import Store
from ...stores.whole_files import is_folder

_FAILURES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED", "CANCELLED")

_CODE = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")


class PendingReads:
    """Futures under way, and the bytes they take."""

    def __init__(self, store: Store, limit: int):
        self._store = store
        self._limit, self._held = limit, 0
        self._futures: deque[tuple[Any, int, str]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest futures until `nbytes` more are within the limit, or none is left."""
        while self._futures and self._held + nbytes > self._limit:
            self._end_one()

    def add(self, future: Any, nbytes: int, path: str) -> None:
        self._held += nbytes
        self._futures.append((future, nbytes, path))

    def end(self) -> None:
        """Waits for all. Raises the first error."""
        while self._futures:
            self._end_one()

    @contextlib.contextmanager
    def ended_on_errors(self) -> Iterator[None]:
        """Waits for all futures when the block raises, for the caller then removes what was written."""
        try:
            yield
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Waits for all, whatever comes of them."""
        while self._futures:
            with contextlib.suppress(Exception):
                self._futures.popleft()[0].result()

    def _end_one(self) -> None:
        future, nbytes, path = self._futures.popleft()
        with errors(self._store, path):
            future.result()
        self._held -= nbytes


@contextlib.contextmanager
def errors(store: Store, path: str) -> Iterator[None]:
    """Raises TensorStore's errors as `OSError` if they are of the file system, and as `CorruptError` if not."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        if ours := of_text(str(error), path):
            raise ours from None
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        if text.startswith(_FAILURES):
            code = _CODE.search(text)
            raise (OSError(int(code[1]), text, path) if code else OSError(f"{path}: {text}")) from None
        with contextlib.suppress(OSError):  # the error of TensorStore says more
            place = path if is_folder(store, path, links=True) else os.path.dirname(path)  # no folders in a database
            git_lfs.check_all(store, place)  # which is where TensorStore has read
        raise CorruptError(f"{path}: {text}") from None
