"""Uploads objects: small ones in one request, those of unknown length in parts.

Bytes that the server has already are copied there.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from ..._threads.forks import WeakRegistry, free_in_children
from ..._threads.thread import Latch, Thread, lost_thread, start_threads
from ...errors import SaveError, UnsupportedError
from ..buffers import aligned, round_up
from ..store import FinishedFile
from .bucket import Bucket, ObjectMeta, Version
from .request_errors import is_in_doubt

_log = logging.getLogger("treering")


def copy_version(bucket: Bucket, file: FinishedFile, key: str) -> Version | None:
    """Copies an object of a known size and version to another key of the bucket. Returns the version of the copy.

    Returns None if the bytes must be uploaded: the object is gone or was replaced, or the server refuses. Then the key
    has no copy, unless an answer of the server was lost. Once the server has refused, this process copies nothing more
    in the bucket.

    obstore cannot make a copy conditional. So the ETags are compared: if the copy has that of the object, the bytes are
    equal. Otherwise the object must still have its version once it is copied.
    """
    version: Any = file.version
    source, tag = ObjectMeta(file.path[len(bucket.url) + 1 :], file.nbytes, 0.0, version), version[0]
    if not bucket.can_copy or tag is None or tag.startswith("W/"):  # Weak ETags may be equal for other bytes.
        return None
    try:
        bucket.copy(source.key, key)
        made = bucket.head(key)
        if made and made.nbytes == source.nbytes and (made.version[0] == tag or _is_unchanged(bucket, source)):
            return made.version
        bucket.delete([key])  # Wrong bytes must not stay, and an object can only be created at a free key.
        problem = "it was replaced, or the copy has another size"
    except FileNotFoundError:
        problem = "it is gone"
    except (OSError, UnsupportedError) as error:
        if bucket.can_copy:
            bucket.can_copy = False
            _log.warning("%s: unchanged arrays are uploaded from now on, because copies failed: %s", bucket.url, error)
        return None
    _log.info("%s/%s: uploaded again, not copied from %s: %s", bucket.url, key, source.key, problem)
    return None


def _is_unchanged(bucket: Bucket, expected: ObjectMeta) -> bool:
    found = bucket.head(expected.key)
    return found is not None and found.is_same(expected)


OBJECT_BYTES = 16 << 20  # bytes of an array object, which is put in one request
IN_FLIGHT = 10  # objects that are uploaded at a time
_PART_BYTES = 8 << 20  # bytes per part of a stream, unless its expected size needs larger parts
_UNKNOWN_SIZE_PART_BYTES = 16 << 20  # bytes per part of a stream of unknown size
_MAX_PARTS = 10_000  # per object; more are refused by stores
_MIN_DIRECT_BYTES = 1 << 20  # once parts are being sent, a write of so many bytes is sent at once; fewer are collected
_LOST_POLL_SECONDS = 1.0  # after which a thread that waits for a slot looks whether an upload has lost its thread
_NO_BYTES = memoryview(b"")
_MAX_PARTS_IN_FLIGHT, _MAX_BYTES_IN_FLIGHT = 8, 128 << 20  # parts of a stream that are in flight, and their bytes


class Stream:
    """Writes an object from start to end. Small objects are held in memory until the end.

    expected: the approximate number of bytes, if it is known.
    """

    def __init__(self, bucket: Bucket, key: str, *, buffered: bool = False, expected: int = 0):
        self.size = 0
        enough = round_up(expected // (_MAX_PARTS * 9 // 10), 1 << 20)
        self._part_bytes = max(_PART_BYTES, enough) if expected else _UNKNOWN_SIZE_PART_BYTES
        self._bucket, self._key, self._is_buffered = bucket, key, buffered
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._parts: contextlib.ExitStack | None = None
        self._writer: Any = None

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        goes = not self._is_buffered and self._chunk_bytes + len(view) >= OBJECT_BYTES
        if goes or (self._parts is not None and len(view) >= _MIN_DIRECT_BYTES):
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
            with bucket.translate_errors(key):
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
        if error and not is_in_doubt(error):
            raise error
        done = f"has not confirmed that it joined them ({error})" if error else "has confirmed that it joined them"
        raise SaveError(
            f"{path}: upload not confirmed: expected {self.size} bytes that were uploaded in parts, found "
            f"{found.nbytes if found else 'nothing'}; the store {done}, which may take minutes, so it is unknown which "
            "object will be in place; check later"
        ) from error

    def abort(self) -> None:
        """Aborts the upload and leaves nothing behind."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            with contextlib.suppress(Exception):
                parts.__exit__(SaveError, SaveError("given up"), None)

    def _send(self, last: memoryview = _NO_BYTES) -> None:
        """Sends the collected bytes and those of `last`, which may be many, a part at a time."""
        if self._parts is None:
            self._parts = contextlib.ExitStack()
            parts = max(2, min(_MAX_PARTS_IN_FLIGHT, _MAX_BYTES_IN_FLIGHT // self._part_bytes))
            self._writer = self._parts.enter_context(self._bucket.writer(self._key, self._part_bytes, parts))
        with self._bucket.translate_errors(self._key):
            for chunk in self._chunks:
                self._writer.write(chunk)
            for begin in range(0, len(last), _PART_BYTES):
                self._writer.write(bytes(last[begin : begin + _PART_BYTES]))  # a copy: obstore keeps a reference
        self._chunks, self._chunk_bytes = [], 0


class Uploads:
    """The objects that are being uploaded, a few at a time."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(IN_FLIGHT)
        self._lock = free_in_children(threading.Lock())
        self._pending: dict[str, Upload] = {}
        self._free_buffers: list[Any] = []  # buffers of finished uploads
        _pools.add(self)

    def acquire_buffer(self, nbytes: int) -> memoryview:
        """Returns memory for an object, with arbitrary contents. Reused pages are much faster than new ones."""
        with self._lock:
            fitting = (n for n, one in enumerate(self._free_buffers) if nbytes <= len(one) <= 2 * nbytes)
            found = next(fitting, None)
            return aligned(nbytes) if found is None else memoryview(self._free_buffers.pop(found))

    def release_buffer(self, data: memoryview) -> None:
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
            if self._pending and len(self._free_buffers) < IN_FLIGHT:
                self._free_buffers.append(memory)

    def start(self, path: str, put: Callable[[], None]) -> "Upload":
        """Starts to upload an object in the background, as soon as a slot is free."""
        upload = Upload(path, put, self._slots)
        folder = path.rpartition("/")[0]
        with self._lock:
            for other, one in self._pending.items():
                if other.rpartition("/")[0] == folder:
                    one.check()  # After one failure, thousands of further uploads of this folder would be in vain.
            self._pending[path] = upload
        while not self._slots.acquire(timeout=_LOST_POLL_SECONDS):
            for one in list(self._pending.values()):
                one.end_if_lost()  # A thread that ended without a result has not released its slot.
        thread = Thread(target=upload.run, name="treering-upload", daemon=False)
        try:
            start_threads(thread)
        except SaveError:  # no more threads are allowed, or the program is ending
            upload.run()
        else:
            upload.is_over.is_lost = lambda: thread.has_ended
        return upload

    def wait_for(self, path: str) -> None:
        """Waits until an object is no longer being uploaded, with or without success."""
        with self._lock:
            upload = self._pending.pop(path, None)
            self._drop_buffers_if_idle()
        if upload:
            upload.wait()

    def wait_for_folder(self, folder: str) -> None:
        """Waits for all uploads below a folder. Raises the first error."""
        with self._lock:
            own = [path for path in self._pending if path.startswith(folder + "/")]
            waiting = [self._pending.pop(path) for path in own]
            self._drop_buffers_if_idle()
        for upload in waiting:
            upload.wait()
        for upload in waiting:
            upload.check()

    def _drop_buffers_if_idle(self) -> None:
        """Frees the memory that no save needs. Called with `_lock` held."""
        if not self._pending:
            self._free_buffers.clear()


def _forget_after_fork() -> None:
    """Leaves running uploads to the process that this one was forked from."""
    for one in _pools.all():
        one._slots = threading.BoundedSemaphore(IN_FLIGHT)
        one._pending, one._free_buffers = {}, []


_pools: "WeakRegistry[Uploads]" = WeakRegistry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


class Upload:
    """An object that is being uploaded. `is_over` is set when the upload has ended, with or without success."""

    def __init__(self, path: str, put: Callable[[], None], slots: threading.Semaphore):
        self._path, self._slots = path, slots
        self._put: Callable[[], None] | None = put
        self._is_put = False
        self._error: BaseException | None = None
        self._has_slot = threading.Lock()  # acquired by the thread that releases the slot
        self.is_over = Latch()

    def run(self) -> None:
        """Uploads it."""
        try:
            assert self._put
            self._put()
            self._is_put = True
        except BaseException as error:
            self._error = error.with_traceback(None)  # the traceback would keep the bytes in memory
        finally:
            self._end()

    def wait(self) -> None:
        """Returns when the upload has ended."""
        self.is_over.wait()
        self._end()

    def end_if_lost(self) -> None:
        """Ends the upload if its thread has ended."""
        if self.is_over.is_set():
            self._end()

    def check(self) -> None:
        """Raises the error of the upload, if it failed."""
        if self._error is not None:
            raise self._error
        if self.is_over.is_set() and not self._is_put:
            raise lost_thread(f"{self._path}: expected the upload of an object")

    def _end(self) -> None:
        """Releases the bytes and the slot, once."""
        self._put = None
        if self._has_slot.acquire(blocking=False):
            self._slots.release()
        self.is_over.set()
