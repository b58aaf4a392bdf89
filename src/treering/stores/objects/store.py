"""Buckets as a `Store`: names without folders, objects that appear complete, and writers that renew a heartbeat."""

import contextlib
import contextvars
import errno
import logging
import os
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal

from ..._core.leaf_paths import join_names
from ..._threads.forks import free_in_children
from ...errors import CorruptError, ExistsError, MismatchError, NotFoundError, UnsupportedError
from .. import lease_registry
from ..file_io import check_free, files_in, is_folder
from ..read_errors import ReplacedError
from ..store import CheckOthers, FinishedFile, Owned, Stat, Store, Writer
from ..temporary_names import final_name
from ..tensorstore_memory import drain_memory, load_into_memory
from . import clients, heartbeat, loopback, round_trip, temporary_folder
from .blob import ObjectBlob
from .bucket import Bucket, ObjectMeta, join_key, relative_key
from .heartbeat import Heartbeat
from .lease import ObjectLease
from .listing_cache import ListingCache
from .request_errors import ChangedError
from .sink import ObjectSink
from .temporary_folder import TemporaryFolder
from .upload import IN_FLIGHT, OBJECT_BYTES, Stream, Uploads, copy_version

_log = logging.getLogger("treering")
_MAX_CACHED_OBJECTS = 5000  # With more objects, single requests for those that matter take less time than the listing.
# The caches of the `with` blocks around the current code, of all stores. Helper threads inherit them.
_listing_caches: "contextvars.ContextVar[tuple[ListingCache, ...]]" = contextvars.ContextVar("glances", default=())


class ObjectStore:
    """The buckets that URLs name. `stores.store.Store` documents the methods.

    The first write of a process to a bucket tests whether its server returns what was stored; see `round_trip`.

    conditional: requests have conditions. Without them, two jobs that write the same checkpoint or run at the same time
        replace each other's files, and neither notices.
    """

    has_folders = False
    has_locks = False
    sharing: Literal["links", "copies"] | None = "copies"
    object_bytes = OBJECT_BYTES

    def __init__(self, make: Callable[..., Any] = clients.make_client, *, conditional: bool = True):
        self._make, self._conditional = make, conditional
        self._buckets: dict[str, Bucket] = {}
        self._given: set[str] = set()  # the URLs of buckets for which the caller has given a client
        self._uploads = Uploads()
        self._heartbeats: weakref.WeakValueDictionary[str, Heartbeat] = weakref.WeakValueDictionary()
        self._lock = free_in_children(threading.Lock())

    def add(self, url: str, client: Any) -> None:
        """Makes a store object of obstore the client of all paths that begin with a URL."""
        with self._lock:
            known = self._buckets.get(url)
            if known and known.client is not client and known.client != client:
                raise MismatchError(
                    f"{url}: expected the store object that this process already uses for the URL, found another; use "
                    "one store object for each bucket"
                )
            self._buckets[url] = known or Bucket(url, client, conditional=self._conditional)
            self._given.add(url)

    def has_given_client(self, path: str) -> bool:
        """Returns True if the caller has given the client for a path."""
        return any(path == url or path.startswith(f"{url}/") for url in self._given)

    # Reading

    def stat(self, path: str) -> Stat | None:
        bucket, key = self._find(path)
        if key:
            found = (self._listing_cache(bucket, key) or bucket).head(key)
            if found:
                return Stat("file", found.nbytes, found.modified, found.version)
        if _is_web(bucket):
            return None if key else Stat("folder", 0, 0, 0)
        objects, folders = self._list(bucket, key)
        if not objects and not folders and key:
            return None
        last = max((one.modified for one in objects), default=0.0)
        return Stat("folder", 0, last, (*sorted((one.key, one.version) for one in objects), *sorted(folders)))

    def list(self, path: str) -> "list[str]":
        objects, folders = self._list(*self._find(path))
        return sorted({*(one.key.rpartition("/")[2] for one in objects), *(one.rpartition("/")[2] for one in folders)})

    def open(self, path: str, *, expected: int = 0, into: memoryview | None = None) -> ObjectBlob:
        bucket, key = self._find(path)
        if not key:
            raise CorruptError(f"{path}: expected an object, found a bucket")
        cache = None if expected else self._listing_cache(bucket, key)
        try:
            return ObjectBlob(bucket, key, expected, cache, into)
        except ReplacedError:
            raise
        except FileNotFoundError:
            if expected:  # The caller knows that it is not a folder, so no further request is needed.
                raise
            found = self.stat(path)
            if found and found.is_folder:
                raise CorruptError(f"{path}: expected an object, found names that begin with this one") from None
            if found:  # another process has put it meanwhile
                return ObjectBlob(bucket, key, expected)
            raise

    @contextlib.contextmanager
    def glance(self, path: str) -> "Iterator[None]":
        bucket, key = self._find(path)
        if (seen := self._listing_cache(bucket, key)) and (seen.is_complete or seen.key == key or _is_web(bucket)):
            yield
            return
        found = None if _is_web(bucket) else bucket.list_at_most(key, _MAX_CACHED_OBJECTS)
        before = _listing_caches.set((*_listing_caches.get(), ListingCache(bucket, key, found)))
        try:
            yield
        finally:
            _listing_caches.reset(before)

    def _listing_cache(self, bucket: Bucket, key: str) -> ListingCache | None:
        """Returns a cache of the current `with` blocks that covers a key, preferably one with a complete listing."""
        covering = [one for one in _listing_caches.get() if one.covers(bucket, key)]
        return max(covering, key=lambda one: one.is_complete) if covering else None

    def _list(self, bucket: Bucket, key: str) -> "tuple[list[ObjectMeta], list[str]]":
        seen = self._listing_cache(bucket, key) or bucket
        if not _is_web(bucket):
            return seen.list(key)
        if seen.head(key):
            return [], []
        raise NotFoundError(f"{bucket.url}/{key}: expected a file, because web servers cannot be listed; found none")

    def is_local(self, path: str) -> bool:
        return False

    def is_link(self, path: str) -> bool:
        return False

    def real_path(self, path: str) -> str:
        return path

    def tensorstore(self, path: str, context: Any, *, writes: bool = False) -> dict[str, Any]:
        bucket, key = self._find(path)
        cache = None if writes else self._listing_cache(bucket, key)
        found = cache.list_all(key) if cache else bucket.list_all(key)
        if not writes:
            if loopback.is_reachable():
                return loopback.serve(bucket, key, found, context)
            _log.warning(
                "%s: all of it is read into memory, because `http_proxy` is set and `no_proxy` lacks 127.0.0.1; with "
                "127.0.0.1 in `no_proxy`, TensorStore reads only what it needs",
                path,
            )
        return load_into_memory(path, context, ((relative_key(key, one.key), self._read(bucket, one)) for one in found))

    def _read(self, bucket: Bucket, one: ObjectMeta) -> bytes:
        blob = ObjectBlob(bucket, one.key, one.nbytes)
        blob.check_is(one)
        return blob.read(0, blob.size)

    def written_by_tensorstore(self, path: str, context: Any, which: Callable[[str], bool]) -> None:
        bucket, key = self._find(path)
        drain_memory(
            path, context, which, lambda name, data: bucket.put(join_key(key, name), data, overwrite=True), IN_FLIGHT
        )

    # Writing

    def create(self, path: str, *, visible: bool = False, expected: int = 0) -> ObjectSink:
        bucket, key = self._find(path)
        self._check_writable(bucket)
        sink = ObjectSink(bucket, key, self._uploads, visible=visible, expected=expected)
        if sink.heartbeat:
            self._heartbeats[path] = sink.heartbeat
        return sink

    def share(self, old: FinishedFile, new: str) -> ObjectSink | None:
        bucket, key = self._find(new)
        self._check_writable(bucket)
        made = copy_version(bucket, old, key) if old.path.startswith(f"{bucket.url}/") else None
        return made and ObjectSink.copied(bucket, key, self._uploads, made)

    def delete(self, path: str) -> None:
        bucket, key = self._find(path)
        self._check_writable(bucket)
        if beat := self._heartbeats.pop(path, None):
            beat.stop(delete=True)
        else:
            self._uploads.wait_for(path)  # Else a running upload could create the object after the delete.
            bucket.delete([key])

    def delete_all(self, path: str, names: Iterable[str]) -> None:
        bucket, key = self._find(path)
        bucket.delete([join_key(key, name) for name in names])

    @contextlib.contextmanager
    def unused(self, path: str) -> "Iterator[Callable[[], None] | None]":
        bucket, key = self._find(path)
        if final_name(key.rpartition("/")[2]) is not None:
            yield temporary_folder.claim_abandoned(bucket, key)
        else:
            yield (lambda: bucket.delete([key])) if heartbeat.revoke(bucket, key) else None

    def make_folder(self, path: str) -> None:
        if self.stat(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def make_folders(self, path: str, made: "list[str]") -> None: ...

    def remove_folder(self, path: str) -> None:
        if self.stat(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    def settle(self, path: str) -> None:
        self._uploads.wait_for_folder(path)

    def move(self, old: str, new: str, *, last: str) -> None:
        bucket, key = self._find(old)
        other, target = self._find(new)
        if self.stat(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        names = [relative_key(key, one.key) for one in bucket.list_all(key)]
        if not names or other is not bucket:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        names.sort(key=lambda name: name == last)
        for name in names:
            bucket.copy(join_key(key, name), join_key(target, name))
        # Copying may have taken longer than the lease lasts, and a delete cannot be conditional.
        lease_registry.check(old)
        if names[-1] == last:  # removed first: without it, readers do not take the old folder for complete
            bucket.delete([join_key(key, names.pop())])
        bucket.delete([join_key(key, name) for name in names])

    @contextlib.contextmanager
    def new_file(self, path: str, *, overwrite: bool) -> "Iterator[Writer]":
        bucket, key = self._find(path)
        self._check_writable(bucket)
        check_free(self, path, overwrite=overwrite, folder=False)
        round_trip.check_neighbor(bucket, key)
        found = bucket.head(key) if overwrite else None
        stream = Stream(bucket, key)
        try:
            yield stream
            lease_registry.check(path)
            stream.put(replaces=found and found.version, overwrite=False)
        except ChangedError:
            raise ExistsError(f"{path}: another writer made it meanwhile; it is untouched") from None
        finally:
            stream.abort()

    @contextlib.contextmanager
    def new_folder(
        self,
        path: str,
        *,
        overwrite: bool,
        owned: Owned,
        names: Collection[str] = (),
        check_others: CheckOthers | None = None,
    ) -> "Iterator[str]":
        temporary_folder.check_has_parent(*self._find(path))
        check_free(self, path, overwrite=overwrite, folder=True)
        _check_replaceable(self, path, owned, names, check_others)
        with self._temporary_folder(path, replaces_target=True) as folder:
            yield folder.path
            self._uploads.wait_for_folder(folder.path)
            folder.check_exclusive(self._sibling_names(path))
            lease_registry.check(folder.path)
            check_free(self, path, overwrite=overwrite, folder=True)
            folder.put_in_place(_check_replaceable(self, path, owned, names, check_others))
        self._remove_abandoned(path)

    @contextlib.contextmanager
    def scratch_folder(self, path: str) -> "Iterator[str]":
        temporary_folder.check_has_parent(*self._find(path))
        with self._temporary_folder(path, replaces_target=False) as folder:
            yield folder.path
            lease_registry.check(folder.path)
        self._remove_abandoned(path)

    def _temporary_folder(
        self, path: str, *, replaces_target: bool
    ) -> contextlib.AbstractContextManager[TemporaryFolder]:
        bucket, key = self._find(path)
        self._check_writable(bucket)
        return TemporaryFolder(bucket, key, replaces_target=replaces_target).filled(self._uploads)

    def _sibling_names(self, path: str) -> "list[str]":
        """Returns the names in the folder of a path."""
        return self.list(path.rpartition("/")[0])

    def _remove_abandoned(self, path: str) -> None:
        """Removes what killed writers left for a path.

        Called once the path is complete: before, that may be the only copy.
        """
        bucket, key = self._find(path)
        for other in temporary_folder.folders_for(key, self._sibling_names(path)):
            if remove := temporary_folder.claim_abandoned(bucket, other):
                remove()

    def lease(self, run: str, busy: Callable[[], bool] = lambda: False) -> ObjectLease:
        bucket, key = self._find(run)
        return ObjectLease(bucket, key, busy)

    def _find(self, path: str) -> tuple[Bucket, str]:
        """Returns the bucket of a path, and the key in it."""
        if path.startswith(clients.WEB):
            if "?" in path or "#" in path:
                raise UnsupportedError(
                    f"{path}: expected a URL without a query and a fragment, found one; pass a URL that leads to the "
                    "file by itself or by redirects, or download the file"
                )
            path = urllib.parse.unquote(path)  # the client quotes it
        known = [url for url in list(self._buckets) if path == url or path.startswith(url + "/")]
        if known:
            url = max(known, key=len)
            return self._buckets[url], path[len(url) + 1 :].rstrip("/")
        scheme, _, rest = path.partition("://")
        place, _, key = rest.partition("/")
        url = f"{scheme}://{place}"
        made = self._make_bucket(url)
        with self._lock:
            return self._buckets.setdefault(url, made), key.rstrip("/")

    def _make_bucket(self, url: str) -> Bucket:
        return Bucket(url, self._make(url), self._make(url, clients.QUICK_SECONDS), conditional=self._conditional)

    def _check_writable(self, bucket: Bucket) -> None:
        if _is_web(bucket):
            raise UnsupportedError(f"{bucket.url}: web servers are only read; save to a path or a bucket")


def _is_web(bucket: Bucket) -> bool:
    """Returns True for a web server, whose files can only be read and not listed."""
    return bucket.url.startswith(clients.WEB)


def _check_replaceable(
    store: Store, path: str, owned: Owned, names: Collection[str], check_others: CheckOthers | None
) -> Collection[str]:
    """Returns the files that a new folder replaces; see `new_folder`.

    Raises `ExistsError` for other files in its way.
    """
    if not is_folder(store, path):
        return ()
    parts = owned(store, path)
    others = [name for name in files_in(store, path) if name not in parts]
    if wrong := [name for name in others if "/" in name or name in names]:
        raise ExistsError(
            f"{path}: expected a checkpoint to replace, found files that are not part of it, or whose names the "
            f"new one needs: {join_names(tuple(wrong))}; write to another path, or move them"
        )
    if check_others:
        check_others(store, path, others)
    return parts
