"""Limits the memory of TensorStore's pending futures, and translates TensorStore's errors into Treering's."""

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...errors import CorruptError
from ...stores import file_io
from ...stores.file_io import is_folder
from ...stores.store import Store
from ...stores.tensorstore_memory import decode_error

_FAILURES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED", "CANCELLED")

_CODE = re.compile(r"(?:os_error_code='|\[OS error )(\d+)")


class PendingReads:
    """Pending futures, and the bytes of memory that they take together, at most `limit`."""

    def __init__(self, store: Store, limit: int):
        self._store = store
        self._limit, self._bytes_in_flight = limit, 0
        self._futures: deque[tuple[Any, int, str]] = deque()

    def make_room(self, nbytes: int) -> None:
        """Waits for the oldest futures until `nbytes` more are within the limit, or until none is pending."""
        while self._futures and self._bytes_in_flight + nbytes > self._limit:
            self._end_one()

    def add(self, future: Any, nbytes: int, path: str) -> None:
        self._bytes_in_flight += nbytes
        self._futures.append((future, nbytes, path))

    def end(self) -> None:
        """Waits for all futures. Raises the first error."""
        while self._futures:
            self._end_one()

    @contextlib.contextmanager
    def ended_on_errors(self) -> Iterator[None]:
        """Waits for all futures if the `with` block raises.

        The caller then removes the files, and a future that is still pending could write one again.
        """
        try:
            yield
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """Waits for all futures and ignores their errors."""
        while self._futures:
            with contextlib.suppress(Exception):
                self._futures.popleft()[0].result()

    def _end_one(self) -> None:
        future, nbytes, path = self._futures.popleft()
        with errors(self._store, path):
            future.result()
        self._bytes_in_flight -= nbytes


@contextlib.contextmanager
def errors(store: Store, path: str) -> Iterator[None]:
    """Translates TensorStore's errors: into `OSError` if the file system has failed, into `CorruptError` if not."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        if ours := decode_error(str(error), path):
            raise ours from None
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        if text.startswith(_FAILURES):
            code = _CODE.search(text)
            raise (OSError(int(code[1]), text, path) if code else OSError(f"{path}: {text}")) from None
        # A git-lfs pointer that TensorStore has read as data explains the error better. If looking for one fails, the
        # error of TensorStore is the better one.
        with contextlib.suppress(OSError):
            # Below the file of a database, `path` is not a folder of the store.
            place = path if is_folder(store, path, links=True) else os.path.dirname(path)
            file_io.check_all_fetched(store, place)
        raise CorruptError(f"{path}: {text}") from None
