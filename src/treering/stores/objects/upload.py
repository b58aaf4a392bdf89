"""Uploads objects: small ones in one request, those of unknown length in parts."""

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
IN_FLIGHT = 10  # objects that are uploaded at a time
_PART_BYTES = 8 << 20  # bytes per part of a stream, unless its expected size needs larger parts
_PART_OF_ANY_BYTES = 16 << 20  # bytes per part of a stream of unknown size
_MAX_PARTS = 10_000  # per object; more are refused by stores
_DIRECT_BYTES = 1 << 20  # once parts are being sent, a write of so many bytes is sent at once; fewer are collected
_NOTHING = memoryview(b"")
_PARTS, _PARTS_BYTES = 8, 128 << 20  # parts of a stream that are in flight, and their bytes


class Stream:
    """Writes an object from start to end. Small objects are held in memory until the end.

    expected: the approximate number of bytes, if it is known.
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
        """Returns all bytes of a stream that was held."""
        self._chunks = [b"".join(self._chunks)]
        return self._chunks[0]

    def put(self, *, replaces: Version | None, overwrite: bool) -> Version:
        """Creates the object, which appears complete under its name. Raises `ChangedError` as `Bucket.put` does.

        obstore cannot make an upload in parts conditional. For such an upload, the old object is checked just before
        the end.
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
        except OSError as raised:  # The server may have carried it out, and its answer may be lost.
            error = raised
        path = f"{bucket.url}/{key}"
        try:
            found = bucket.head(key)
        except OSError as unknown:
            raise SaveError(
                f"{path}: upload not confirmed ({unknown}); the complete new object is in place, or "
                f"{'the old one' if before else 'none'}; save again"
            ) from error
        is_new = found is not None and (before is None or found.version != before.version)
        if found and found.nbytes == self.size and (is_new or not error):  # equal bytes may keep their version
            return found.version
        if error and not is_unknown(error):
            raise error
        done = f"has not confirmed that it joined them ({error})" if error else "has confirmed that it joined them"
        raise SaveError(
            f"{path}: upload not confirmed: expected {self.size} bytes that were uploaded in parts, found "
            f"{found.nbytes if found else 'nothing'}; the store {done}, which may take minutes, so it is unknown which "
            "object will be in place; check later"
        ) from error

    def give_up(self) -> None:
        """Aborts the upload and leaves nothing behind."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            with contextlib.suppress(Exception):
                parts.__exit__(SaveError, SaveError("given up"), None)

    def _send(self, last: memoryview = _NOTHING) -> None:
        """Sends the collected bytes and those of `last`, which may be many, a part at a time."""
        if self._parts is None:
            self._parts = contextlib.ExitStack()
            parts = max(2, min(_PARTS, _PARTS_BYTES // self._part_bytes))
            self._writer = self._parts.enter_context(self._bucket.writer(self._key, self._part_bytes, parts))
        with self._bucket.asked(self._key):
            for chunk in self._chunks:
                self._writer.write(chunk)
            for begin in range(0, len(last), _PART_BYTES):
                self._writer.write(bytes(last[begin : begin + _PART_BYTES]))  # a copy: obstore keeps a reference
        self._chunks, self._chunk_bytes = [], 0


class Uploads:
    """The objects that are being uploaded, a few at a time."""

    def __init__(self) -> None:
        self._room = threading.BoundedSemaphore(IN_FLIGHT)
        self._lock = threading.Lock()
        self._under_way: dict[str, Upload] = {}
        self._free: list[Any] = []  # buffers of finished uploads
        _alive.add(self)

    def memory(self, nbytes: int) -> memoryview:
        """Returns memory for an object, with arbitrary contents. Reused pages are much faster than new ones."""
        with self._lock:
            fitting = (n for n, one in enumerate(self._free) if nbytes <= len(one) <= 2 * nbytes)
            found = next(fitting, None)
            return aligned(nbytes) if found is None else memoryview(self._free.pop(found))

    def give_back(self, data: memoryview) -> None:
        """Takes back the memory of an uploaded object, unless the client still refers to it, as `memory://` does."""
        memory: Any = data.obj
        try:
            data.release()
            memory.resize(len(memory))  # the same size: this fails with BufferError while anything refers to it
        except BufferError:
            return
        except (AttributeError, OSError, SystemError, TypeError, ValueError):
            return  # The system cannot resize mappings, so whether the client refers to it is unknown.
        with self._lock:
            if self._under_way and len(self._free) < IN_FLIGHT:
                self._free.append(memory)

    def begin(self, path: str, put: Callable[[], None]) -> "Upload":
        """Starts to upload an object in the background, as soon as a slot is free."""
        upload = Upload(put, self._room)
        folder = path.rpartition("/")[0]
        with self._lock:
            for other, one in self._under_way.items():
                if other.rpartition("/")[0] == folder:
                    one.check()  # After one failure, thousands of further uploads of this folder would be in vain.
            self._under_way[path] = upload
        self._room.acquire()
        try:
            start(threading.Thread(target=upload.run, name="treering-upload", daemon=False))
        except SaveError:  # no more threads are allowed, or the program is ending
            upload.run()
        return upload

    def end(self, path: str) -> None:
        """Waits until an object is no longer being uploaded, with or without success."""
        with self._lock:
            upload = self._under_way.pop(path, None)
            self._forget_if_idle()
        if upload:
            upload.wait()

    def settle(self, folder: str) -> None:
        """Waits for all uploads below a folder. Raises the first error."""
        with self._lock:
            own = [path for path in self._under_way if path.startswith(folder + "/")]
            waiting = [self._under_way.pop(path) for path in own]
            self._forget_if_idle()
        for upload in waiting:
            upload.wait()
        for upload in waiting:
            upload.check()

    def _forget_if_idle(self) -> None:
        """Frees the memory that no save needs. Called with `_lock` held."""
        if not self._under_way:
            self._free.clear()


def _forget_after_fork() -> None:
    """Leaves running uploads to the process that this one was forked from."""
    for one in _alive.all():
        one._room, one._lock = threading.BoundedSemaphore(IN_FLIGHT), threading.Lock()
        one._under_way, one._free = {}, []


_alive: "Alive[Uploads]" = Alive()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class Upload:
    """An object that is being uploaded."""

    def __init__(self, put: Callable[[], None], room: threading.Semaphore):
        self._put, self._room = put, room
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Uploads it."""
        try:
            self._put()
        except BaseException as error:
            self._error = error.with_traceback(None)  # the traceback would keep the bytes in memory
        finally:
            self._put = lambda: None  # frees the bytes
            self._room.release()
            self._over.set()

    def wait(self) -> None:
        """Returns when the upload has ended."""
        self._over.wait()

    def check(self) -> None:
        """Raises the error of the upload, if it failed."""
        if self._error is not None:
            raise self._error
