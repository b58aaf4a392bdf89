"""Writing objects: small ones in one request, those of unknown length in parts."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from ..._threads.alive import Alive
from ..._threads.pool import start
from ...errors import SaveError
from ..buffers import aligned, round_up
from .bucket import Bucket, Version
from .request_errors import is_unknown

OBJECT_BYTES = 16 << 20  # bytes of an array object, which is put in one request
IN_FLIGHT = 10  # objects that are being put at a time
_PART_BYTES = 8 << 20  # bytes of the parts of a stream, unless it is known to be larger
_PART_OF_ANY_BYTES = 16 << 20  # the same of one that may become as large as it likes
_MAX_PARTS = 10_000  # that stores take
_DIRECT_BYTES = 1 << 20  # that are sent at once when others were; fewer are gathered
_NOTHING = memoryview(b"")
_PARTS, _PARTS_BYTES = 8, 128 << 20  # of a stream that are in flight


class Stream:
    """The bytes of an object from one end to the other; those of a small one are held until the end.

    `expected` is about how many it will have, where that is known.
    """

    def __init__(self, bucket: Bucket, key: str, *, held: bool = False, expected: int = 0):
        self.size = 0
        enough = round_up(expected // (_MAX_PARTS * 9 // 10), 1 << 20)
        self._part_bytes = max(_PART_BYTES, enough) if expected else _PART_OF_ANY_BYTES
        self._bucket, self._key, self._held = bucket, key, held
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._parts: contextlib.ExitStack | None = None
        self._writer: Any = None

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        goes = not self._held and self._chunk_bytes + len(view) >= OBJECT_BYTES
        if goes or (self._parts is not None and len(view) >= _DIRECT_BYTES):
            self._send(view)
        else:
            self._chunks.append(bytes(view))
            self._chunk_bytes += len(view)

    def contents(self) -> bytes:
        """All bytes of one that is held."""
        self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def put(self, *, replaces: Version | None, overwrite: bool) -> Version:
        """Makes the object: its name is there from now on, as a whole. Raises `ChangedError` as `Bucket.put` does.

        One that went in parts cannot be tied to a condition by obstore: what is there is looked up just before.
        """
        if self._parts is None:
            return self._bucket.put(self._key, self.contents(), replaces=replaces, overwrite=overwrite)
        self._send()
        bucket, key = self._bucket, self._key
        before = bucket.head(key) if overwrite else bucket.check_unchanged(key, replaces)
        parts, self._parts = self._parts, None
        error: OSError | None = None
        try:
            with bucket.asked(key):
                parts.close()
        except OSError as raised:  # it may have been carried out, and its answer lost
            error = raised
        path = f"{bucket.url}/{key}"
        try:
            found = bucket.head(key)
        except OSError as unknown:
            raise SaveError(
                f"{path}: it cannot be known whether the new one is in place, for looking was not answered "
                f"({unknown}); {'it is, whole, or what was there before is' if before else 'it is, whole, or nothing'}"
            ) from error
        is_new = found is not None and (before is None or found.version != before.version)
        if found and found.nbytes == self.size and (is_new or not error):  # the same bytes may get no new version
            return found.version
        if error and not is_unknown(error):
            raise error
        done = f"has not said that it put them together ({error})" if error else "says that it put them together"
        raise SaveError(
            f"{path}: expected {self.size} bytes that were put in parts, found {found.nbytes if found else 'nothing'}: "
            f"the store {done}, which may take minutes, so it cannot be known what will be in place; look there later"
        ) from error

    def give_up(self) -> None:
        """Leaves nothing behind."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            with contextlib.suppress(Exception):
                parts.__exit__(SaveError, SaveError("given up"), None)

    def _send(self, last: memoryview = _NOTHING) -> None:
        """Sends what has come so far, and some bytes more, a part at a time: they may be many."""
        if self._parts is None:
            self._parts = contextlib.ExitStack()
            parts = max(2, min(_PARTS, _PARTS_BYTES // self._part_bytes))
            self._writer = self._parts.enter_context(self._bucket.writer(self._key, self._part_bytes, parts))
        with self._bucket.asked(self._key):
            for chunk in self._chunks:
                self._writer.write(chunk)
            for begin in range(0, len(last), _PART_BYTES):
                self._writer.write(bytes(last[begin : begin + _PART_BYTES]))  # obstore copies nothing, and keeps it
        self._chunks, self._chunk_bytes = [], 0


class Uploads:
    """The objects that are on their way, a few at a time."""

    def __init__(self) -> None:
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._lock = threading.Lock()
        self._under_way: dict[str, Upload] = {}
        self._free: list[Any] = []  # memory of objects that are there
        _alive.add(self)

    def memory(self, nbytes: int) -> memoryview:
        """Memory for an object, with any bytes in it: pages that were in use before come far quicker than new ones."""
        with self._lock:
            fitting = (n for n, one in enumerate(self._free) if nbytes <= len(one) <= 2 * nbytes)
            found = next(fitting, None)
            return aligned(nbytes) if found is None else memoryview(self._free.pop(found))

    def give_back(self, data: memoryview) -> None:
        """Takes the memory of an object that was put, unless the client holds any of it, as `memory://` does."""
        memory: Any = data.obj
        try:
            data.release()
            memory.resize(len(memory))  # to what it is, which is refused while anything refers to it
        except BufferError:
            return
        except (AttributeError, OSError, SystemError, TypeError, ValueError):  # no resizing here: who knows
            return
        with self._lock:
            if self._under_way and len(self._free) < IN_FLIGHT:
                self._free.append(memory)

    def begin(self, path: str, put: Callable[[], None]) -> "Upload":
        """Begins to put an object in the background, as soon as there is room for it."""
        upload = Upload(put, self._room)
        folder = path.rpartition("/")[0]
        with self._lock:
            for other, one in self._under_way.items():
                if other.rpartition("/")[0] == folder:
                    one.check()  # or thousands more would be tried in vain
            self._under_way[path] = upload
        self._room.acquire()
        try:
            start(threading.Thread(target=upload.run, name="treering-upload", daemon=False))
        except SaveError:  # as many threads as there may be, or the program is ending
            upload.run()
        return upload

    def end(self, path: str) -> None:
        """Waits until an object is no longer on its way, whatever became of it."""
        with self._lock:
            upload = self._under_way.pop(path, None)
            self._forget_if_idle()
        if upload:
            upload.wait()

    def settle(self, folder: str) -> None:
        """Waits for all below a folder. Raises the first error."""
        with self._lock:
            own = [path for path in self._under_way if path.startswith(folder + "/")]
            waiting = [self._under_way.pop(path) for path in own]
            self._forget_if_idle()
        for upload in waiting:
            upload.wait()
        for upload in waiting:
            upload.check()

    def _forget_if_idle(self) -> None:
        """Lets go of memory that no save needs. Called with `_lock` held."""
        if not self._under_way:
            self._free.clear()


def _forget_after_fork() -> None:
    """Leaves what is on its way to the process that this one was forked from."""
    for one in _alive.all():
        one._room, one._lock = threading.BoundedSemaphore(IN_FLIGHT), threading.Lock()
        one._under_way, one._free = {}, []


_alive: "Alive[Uploads]" = Alive()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class Upload:
    """An object on its way."""

    def __init__(self, put: Callable[[], None], room: threading.Semaphore):
        self._put, self._room = put, room
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Puts it."""
        try:
            self._put()
        except BaseException as error:
            self._error = error.with_traceback(None)  # which would keep the bytes
        finally:
            self._put = lambda: None  # and its bytes
            self._room.release()
            self._over.set()

    def wait(self) -> None:
        """Returns when it is over."""
        self._over.wait()

    def check(self) -> None:
        """Raises the error that it ended with."""
        if self._error is not None:
            raise self._error
