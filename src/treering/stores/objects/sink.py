"""A new object that is being written. See `stores.store.Sink`."""

import contextlib
import os
import threading
from collections.abc import Hashable
from typing import Any

from ...errors import SaveError
from .. import lease_registry
from ..buffers import copy
from ..lease_registry import LeaseLostError
from ..store import ABSENT, FinishedFile, Stored
from . import round_trip
from .bucket import Bucket, Version
from .heartbeat import Heartbeat
from .request_errors import ChangedError
from .upload import Stream, Upload, Uploads, copy_version

# `finish` puts an object of at most so many bytes before it returns, and a larger one in the background.
_MAX_FOREGROUND_BYTES = 256 << 10


class ObjectSink:
    """A new object of one of two kinds.

    Without `visible`, nothing exists at `key` until `finish` puts the data there.

    With `visible`, a heartbeat exists at `key` from the start: it names the writer, and is renewed. The data is put
    under the name that `publish` gives it, and only there.
    """

    def __init__(self, bucket: Bucket, key: str, uploads: Uploads, *, visible: bool, expected: int):
        self.path = f"{bucket.url}/{key}"
        self._bucket, self._key, self._uploads = bucket, key, uploads
        self._owner_process = os.getpid()
        self.heartbeat = None
        if visible:
            self.heartbeat = Heartbeat(bucket, key, self.path.rpartition("/")[0])
            try:
                round_trip.check(bucket, self.heartbeat)
            except BaseException:
                with contextlib.suppress(OSError):  # the caller needs the first error
                    self.heartbeat.stop(delete=True)
                raise
        self._buffer: memoryview | None = None
        self._stream = Stream(bucket, key, buffered=visible, expected=expected)
        self._tail: Any = None  # The last buffer is held back, because `finish` may cut it.
        self._offset = 0
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self.stored: Stored | None = None
        self._versions: dict[str, Version] = {}  # of the objects that this sink has put, by key

    @classmethod
    def copied(cls, bucket: Bucket, key: str, uploads: Uploads, version: Version) -> "ObjectSink":
        """Returns the sink of an object that the server has made from another one."""
        sink = cls(bucket, key, uploads, visible=False, expected=0)
        sink._versions[key], sink.stored = version, Stored(version, True)
        return sink

    def preallocate(self, nbytes: int) -> memoryview:
        self._buffer = self._uploads.acquire_buffer(nbytes)
        return self._buffer

    def write(self, data: memoryview, offset: int) -> None:
        if self._buffer is not None:
            copy(self._buffer[offset : offset + len(data)], data)
            return
        with self._lock:
            if offset != self._offset:
                raise SaveError(f"{self.path}: expected bytes from {self._offset} on, found some from {offset} on")
            if self._tail is not None:
                self._stream.write(self._tail)
            self._tail = bytes(data)
            self._offset += len(data)

    def finish(self, nbytes: int, *, read_only: bool = False, same_as: FinishedFile | None = None) -> None:
        if self._buffer is not None:
            data, self._buffer = self._buffer[:nbytes], None
            if nbytes > _MAX_FOREGROUND_BYTES and not self.heartbeat:
                self._upload = self._uploads.start(self.path, lambda: self._put(data, same_as))
                return
            self._stream.write(data)
        elif self._tail is not None:
            self._stream.write(self._tail[: nbytes - self._stream.size])
            self._tail = None
        if not self.heartbeat:
            self._versions[self._key] = version = self._stream.put(replaces=None, overwrite=False)
            self.stored = Stored(version, False)

    def _put(self, data: memoryview, same_as: FinishedFile | None) -> None:
        copied = same_as and copy_version(self._bucket, same_as, self._key)
        # The put needs no condition: the name has a random part, so no other writer uses it.
        version = copied or self._bucket.put(self._key, data, overwrite=True)
        self.stored = Stored(version, copied is not None)
        self._uploads.release_buffer(data)

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None) -> None:
        self._uploads.wait_for_folder(self.path.rpartition("/")[0])
        key = path[len(self._bucket.url) + 1 :]
        # The put creates the object, or replaces the version that the caller saw, or overwrites any object.
        replaces: Any = version if overwrite and version != ABSENT else None
        overwrites_any = overwrite and version is None
        lease_registry.check(path)
        data = self._stream.contents()
        try:
            published = self._bucket.put(key, data, replaces=replaces, overwrite=overwrites_any)
        except ChangedError:
            raise
        except OSError:
            found = self._bucket.find_same(key, data)  # The put may have succeeded and its answer may be lost.
            if found is None:
                raise
            published = found.version
        self._versions[key] = published
        try:
            lease_registry.check(path)
        except LeaseLostError as error:  # The put took so long that another job may have begun to write here.
            if replaces is None and not overwrites_any:
                raise  # The put has created the object, so the caller may remove it.
            raise LeaseLostError(f"{path}: it is in place, but another job may have replaced it: {error}") from None
        except OSError as error:
            raise LeaseLostError(
                f"{path}: it is in place, but the lease could not be checked, so another job may write here: {error}"
            ) from error
        if overwrite and key != self._key and self.heartbeat:
            self.heartbeat.stop(delete=True)

    def is_at(self, path: str) -> bool:
        key = path[len(self._bucket.url) + 1 :]
        if self._upload is not None and key == self._key:
            self._upload.wait()
            self._upload.check()
            return True  # No other writer uses this name.
        if self.heartbeat and key == self._key:
            return self.heartbeat.verify()
        if key not in self._versions:
            # The put got no answer. If it succeeded nevertheless, an object with these bytes is in place.
            if self.heartbeat is None or self._bucket.find_same(key, self._stream.contents()) is None:
                return False
            lease_registry.check(path)
            return True
        found = self._bucket.head(key)
        return found is not None and found.version[0] == self._versions[key][0]

    def close(self) -> None:
        if os.getpid() != self._owner_process:
            return  # In a forked child, the threads and uploads belong to its parent.
        if self.heartbeat:
            self.heartbeat.stop(delete=False)
        self._stream.abort()
        self._buffer = self._tail = None
        self._uploads.wait_for(self.path)
