"""A new object that is being written. See `stores.store.Sink`."""

import contextlib
import os
import threading
from collections.abc import Hashable
from typing import Any

from ...errors import RequestError, SaveError
from .. import claims
from ..buffers import copy
from ..claims import TakenOverError
from ..store import ABSENT
from . import round_trip
from .bucket import Bucket, Version
from .heartbeat import Heartbeat
from .upload import Stream, Upload, Uploads

_AT_ONCE = 256 << 10  # bytes; a smaller object is put before `finish` returns, a larger one in the background


class ObjectSink:
    """An object that does not exist before it is finished.

    A `visible` one has a heartbeat under its name from the start, which names the writer and is renewed. Its data is
    put only under the name that `publish` gives it.
    """

    def __init__(self, bucket: Bucket, key: str, uploads: Uploads, *, visible: bool, expected: int):
        self.path = f"{bucket.url}/{key}"
        self._bucket, self._key, self._uploads = bucket, key, uploads
        self._process = os.getpid()
        self.heartbeat = None
        if visible:
            self.heartbeat = Heartbeat(bucket, key)
            try:
                round_trip.check(bucket, self.heartbeat)
            except BaseException:
                with contextlib.suppress(OSError):  # the caller needs the first error
                    self.heartbeat.stop(delete=True)
                raise
        self._buffer: memoryview | None = None
        self._stream = Stream(bucket, key, held=visible, expected=expected)
        self._kept: Any = None  # The last buffer is held back, because `finish` may cut it.
        self._at = 0
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._versions: dict[str, Version] = {}  # of the objects that this sink has put, by key

    def protect(self) -> bool:
        return True

    def preallocate(self, nbytes: int) -> memoryview:
        self._buffer = self._uploads.memory(nbytes)
        return self._buffer

    def write(self, data: memoryview, offset: int) -> None:
        if self._buffer is not None:
            copy(self._buffer[offset : offset + len(data)], data)
            return
        with self._lock:
            if offset != self._at:
                raise SaveError(f"{self.path}: expected bytes from {self._at} on, found some from {offset} on")
            if self._kept is not None:
                self._stream.write(self._kept)
            self._kept = bytes(data)
            self._at += len(data)

    def finish(self, nbytes: int, *, read_only: bool = False) -> None:
        if self._buffer is not None:
            data, self._buffer = self._buffer[:nbytes], None
            if nbytes > _AT_ONCE and not self.heartbeat:
                self._upload = self._uploads.begin(self.path, lambda: self._put(data))
                return
            self._stream.write(data)
        elif self._kept is not None:
            self._stream.write(self._kept[: nbytes - self._stream.size])
            self._kept = None
        if not self.heartbeat:
            self._versions[self._key] = self._stream.put(replaces=None, overwrite=False)

    def _put(self, data: memoryview) -> None:
        self._bucket.put(self._key, data, overwrite=True)  # safe without a condition: no other object gets this name
        self._uploads.give_back(data)

    def publish(self, path: str, *, overwrite: bool, version: Hashable | None = None, retract: bool = True) -> None:
        self._uploads.settle(self.path.rpartition("/")[0])
        key = path[len(self._bucket.url) + 1 :]
        replaces: Any = version if overwrite and version != ABSENT else None
        anything = overwrite and version is None
        claims.check(path)
        self._check_alive()
        data = self._stream.contents()
        try:
            published = self._bucket.put(key, data, replaces=replaces, overwrite=anything)
        except RequestError:
            found = self._bucket.same(key, data)  # The put may have succeeded and its answer may be lost.
            if found is None:
                raise
            published = found.version
        self._versions[key] = published
        try:
            claims.check(path)
            self._check_alive()
        except TakenOverError as error:  # The put took so long that another job may have begun to write here.
            # If it replaced an object, removing it could leave nothing at all, so it stays.
            if replaces is not None or anything or not retract:
                raise TakenOverError(f"{path}: it is in place, but another job may have replaced it: {error}") from None
            self._take_back(key, published)
            raise
        except OSError as error:
            raise TakenOverError(
                f"{path}: it is in place, but it is unknown if another job has begun to write here: {error}"
            ) from error
        if overwrite and key != self._key and self.heartbeat:
            self.heartbeat.stop(delete=True)

    def _take_back(self, key: str, published: Version) -> None:
        """Removes the published object, unless another writer has replaced it by now."""
        with contextlib.suppress(OSError):
            found = self._bucket.head(key)
            if found and found.version[0] == published[0]:
                self._bucket.delete([key])

    def _check_alive(self) -> None:
        beat = self.heartbeat
        if beat and not beat.holds():
            raise TakenOverError(f"{self.path}: another job considered the writer of this save dead, and removed it")

    def is_at(self, path: str) -> bool:
        key = path[len(self._bucket.url) + 1 :]
        if self._upload is not None and key == self._key:
            self._upload.wait()
            self._upload.check()
            return True  # no other object gets this name
        if self.heartbeat and key == self._key:
            return self.heartbeat.confirm()
        if key not in self._versions:  # The answer to the put may be lost, and the object in place.
            if self.heartbeat is None or self._bucket.same(key, self._stream.contents()) is None:
                return False
            claims.check(path)
            self._check_alive()
            return True
        found = self._bucket.head(key)
        return found is not None and found.version[0] == self._versions[key][0]

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # In a forked child, the threads and uploads belong to its parent.
        if self.heartbeat:
            self.heartbeat.stop(delete=False)
        self._stream.give_up()
        self._buffer = self._kept = None
        self._uploads.end(self.path)
