"""Writes zarr arrays, from one process or from several."""

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box
from ..._core.calls import SINGLE_PROCESS, Call
from ...errors import SaveError
from ...stores.file_io import files_in
from ...stores.nfs import refresh_dir_cache, wait_until
from ...stores.store import Store
from . import metadata as zarr_metadata
from .chunks import Chunks
from .folder import (
    CONTEXT,
    DATABASE_OPTIONS,
    IN_FLIGHT,
    IN_PORTIONS,
    Driver,
    Folder,
    PendingReads,
    errors,
    key_prefix,
    part_of_database,
)


class ZarrWriter:
    """Writes arrays into a folder, as plain files or as an OCDBT database, with a limit of bytes in flight.

    The processes of a `call` write one folder together. Process 0 does not sync its files: the code that publishes
    the folder does. The files of its peers are durable after `close`.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        *,
        driver: Driver,
        ocdbt: bool,
        call: Call = SINGLE_PROCESS,
        limit: int = IN_FLIGHT,
    ):
        import tensorstore as ts

        self._path, self._call, self._driver = path, call, driver
        # Each process writes its own database, which process 0 merges
        self._merges_databases = ocdbt and call.count > 1
        own = part_of_database(path, call.index) if self._merges_databases else path
        context = ts.Context({**CONTEXT, "file_io_sync": call.index > 0})
        self._sends_early = store.object_bytes is not None  # a bucket's files pass through memory
        options = IN_PORTIONS if self._sends_early else DATABASE_OPTIONS
        self._folder = Folder(store, own, ocdbt=ocdbt, options=options, context=context)
        self._pending_writes = PendingReads(store, limit)
        self._unsent_bytes, self._limit = 0, limit
        self.count = 0  # keys that this process has written: chunks and metadata of arrays

    def __enter__(self) -> "ZarrWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the writer or, after an error, waits for pending writes, because the folder is then removed."""
        if kind is None:
            self.close()
        else:
            self._pending_writes.drain()

    @property
    def is_first(self) -> bool:
        """True in process 0, which writes everything that is not part of an array."""
        return self._call.index == 0

    def add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        read_box: Callable[[Box], np.ndarray],
        *,
        chunks: Chunks,
        compressor: Mapping[str, Any] | None,
    ) -> None:
        """Begins to write this process's chunks of an array, which `read_box` returns one by one.

        Chunks that equal the fill value are stored as well: a missing chunk always means damage. The arrays that
        `read_box` returns must not change until `close`.
        """
        with self._pending_writes.ended_on_errors():
            self._add(name, shape, dtype, read_box, chunks, compressor)

    def close(self) -> None:
        """Waits until everything is written."""
        with self._pending_writes.ended_on_errors():
            self._send(lambda name: True)

    def _send(self, which: Callable[[str], bool]) -> None:
        """Waits until everything is written, and the files that `which` accepts are in the store."""
        self._pending_writes.end()
        self._folder.store.written_by_tensorstore(self._folder.path, self._folder.context, which)
        self._unsent_bytes = 0

    def complete(self, count: int) -> None:
        """Checks that the keys of all processes exist, and merges the databases that single processes wrote.

        Process 0 calls this after all processes have closed. The data stays in place, as it does when several Orbax
        processes save. Raises `SaveError` if process 0 does not see what its peers wrote.
        """
        if self._call.count == 1:
            return
        store, found = self._folder.store, 0

        def look() -> bool:
            nonlocal found
            found = self._merge_databases() if self._merges_databases else sum(1 for _ in files_in(store, self._path))
            return found == count

        # A network file system may show the files of other hosts late.
        if not wait_until(look, lambda: refresh_dir_cache(store, self._path), self._call.timeout):
            raise SaveError(
                f"{self._path}: expected {count} chunks and metadata files of arrays, written by {self._call.count} "
                f"processes, found {found}; do all processes see the same file system?"
            )

    def _merge_databases(self) -> int:
        """Merges the databases of all processes into one, and returns the number of its keys."""
        import tensorstore as ts

        store, context = self._folder.store, self._folder.context  # with two contexts, TensorStore would copy all data
        with errors(store, self._path):
            together = ts.Transaction(atomic=True)
            merged = Folder(store, self._path, ocdbt=True, options=DATABASE_OPTIONS, context=context)
            target = merged.keys.with_transaction(together)
            for index in range(self._call.count):
                path = part_of_database(self._path, index)
                part = Folder(store, path, ocdbt=True, options=DATABASE_OPTIONS, context=context)
                part.keys.experimental_copy_range_to(target).result()
            together.commit_async().result()
            return len(merged.list())

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        read_box: Callable[[Box], np.ndarray],
        chunks: Chunks,
        compressor: Mapping[str, Any] | None,
    ) -> None:
        import tensorstore as ts

        metadata = zarr_metadata.new(self._driver, shape, dtype, chunks.shape, compressor)
        path, keys = posixpath.join(self._folder.path, name), self._folder.keys / key_prefix(name)
        if self.is_first:
            text = msgspec.json.encode(metadata)
            self._pending_writes.add(keys.write(zarr_metadata.FILES[self._driver], text), len(text), path)
            self.count += 1
        spec = {"driver": self._driver, "metadata": metadata, "store_data_equal_to_fill_value": True}
        with errors(self._folder.store, path):
            context = self._folder.context
            array = ts.open(spec, kvstore=keys, open=True, assume_metadata=True, context=context).result()
        nbytes = math.prod(chunks.shape) * dtypes.itemsize(dtype)
        for box in chunks.written(shape):
            self._pending_writes.make_room(nbytes)
            part = array[tuple(slice(*bounds) for bounds in box)]
            self._pending_writes.add(
                part.write(read_box(box), can_reference_source_data_indefinitely=True), nbytes, path
            )
            self.count += 1
            self._unsent_bytes += nbytes
            # In a bucket, written chunks stay in memory until they are sent.
            if self._sends_early and self._unsent_bytes >= self._limit // 2:
                self._send(lambda name: not self._folder.reads_again(name))
