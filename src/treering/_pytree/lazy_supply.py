"""Supplies shards that the writer threads read themselves, from a checkpoint or from arrays that do not change."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .._core import dtypes
from .._core.boxes import Box
from .._core.source import Source
from .._threads.pool import Task
from .._threads.reentry import non_reentrant
from .._threads.thread import Latch, Thread, if_free
from . import devices
from .leaves import SLICE_BYTES, LocalShard
from .staged_supply import Bytes, StagedSupply


class _Group:
    """Shards that are read with one call.

    remaining_bytes: the number of bytes that writers still need.
    """

    def __init__(self, first: int, last: int, remaining_bytes: int):
        self.first, self.last, self.remaining_bytes = first, last, remaining_bytes
        self.lock = threading.RLock()  # held while they are read, so that other writers that need them wait
        self.arrays: list[Any] | None = None
        self.job: Task | None = None  # reads them before a writer asks for them


class LazySupply:
    """The shards of a source. The first writer that needs a shard reads it, once. See `StagedSupply` for the methods.

    The writers work on consecutive chunks, together at most `SLICE_BYTES` at a time. So with the default `group_bytes`
    they hold about two groups in memory, and `prefetch_groups` more.

    parallel: False if only one group may be read at a time, because reading it takes much more memory than it has
        bytes, such as to decode chunks.
    prefetch_groups: how many more groups are read before a writer needs them. This helps if each read has to wait long.
    block_caller: True if `run` waits until all shards are read or `release_caller` is called. Used for a live tree,
        which must not change until `run` returns.
    before_read: is called before more is read. It raises if the save has failed elsewhere.
    """

    writers_needed = Latch()  # always set, so all supplies share it: only the writers read, so they begin at once
    writers_needed.set()

    def __init__(
        self,
        source: Source,
        shards: Sequence[LocalShard],
        group_bytes: int = SLICE_BYTES,
        *,
        parallel: bool = True,
        prefetch_groups: int = 0,
        block_caller: bool = False,
        before_read: Callable[[], None] = lambda: None,
    ):
        self.shards = shards
        # Called with the number of bytes that were written
        self.on_progress: Callable[[int], None] = lambda nbytes: None
        self._source: Source | None = source
        self._entries: list[Any] | None = list(source.entries.values())
        self._prefetch_groups, self._block_caller, self._before_read = prefetch_groups, block_caller, before_read
        self._groups = list(self._make_groups(group_bytes))
        self._group_of_shard = [n for n, group in enumerate(self._groups) for _ in range(group.first, group.last)]
        self._unread_groups = sum(group.remaining_bytes > 0 for group in self._groups)
        self._lock = threading.Lock()
        self._read_lock = contextlib.nullcontext() if parallel else threading.Lock()  # held while one group is read
        self._caller_may_continue = Latch()  # set when all shards are read, or the writers have stopped
        self._error: BaseException | None = None

    def watch(self, writer: Thread) -> None:
        """Lets `run` return once the thread that saves has ended."""
        self._caller_may_continue.is_lost = lambda: writer.has_ended

    def run(self) -> None:
        """Waits until the caller may continue."""
        if self._block_caller:
            self._caller_may_continue.wait()

    def take(self, numbers: Sequence[int]) -> list[Bytes]:
        """Returns the bytes of some shards, and reads them unless another writer has read them."""
        return [self._take(n) for n in numbers]

    def _take(self, n: int) -> Bytes:
        number = self._group_of_shard[n]
        group = self._groups[number]
        with group.lock:
            arrays = group.arrays
            if arrays is None:
                self.check()
                for other in self._groups[number + 1 : number + 1 + self._prefetch_groups]:
                    self._begin(other)
                job, group.job = group.job, None
                arrays = group.arrays = job.result() if job else self._read_group(group)
                self._count_read()
            return arrays[n - group.first]

    def _begin(self, group: _Group) -> None:
        """Starts to read a group in a thread, unless a writer reads it already or none needs it."""

        def begin() -> bool:
            if group.arrays is None and group.job is None and group.remaining_bytes:
                group.job = Task(functools.partial(self._read_group, group))
            return True

        if_free(group.lock, begin)

    def _read_group(self, group: _Group) -> list[Bytes]:
        with self._read_lock:
            return self._read(self.shards[group.first : group.last])

    def _read(self, shards: Sequence[LocalShard]) -> list[Bytes]:
        assert self._source is not None and self._entries is not None  # Both stay until all groups are read.
        return _read_boxes(self._source, [(self._entries[shard.leaf], shard.box) for shard in shards])

    def peek(self, n: int) -> Bytes:
        """Reads and returns the bytes of shard `n`, and keeps none of them."""
        self.check()
        (array,) = self._read([self.shards[n]])
        return array

    def plan_reads(self, order: Sequence[int], nbytes: Sequence[int]) -> None:
        """Sets how many bytes of each shard the writers will take. It is called before any `take`."""
        with self._lock:
            for group in self._groups:
                group.remaining_bytes = 0
            for n, size in zip(order, nbytes, strict=True):
                self._groups[self._group_of_shard[n]].remaining_bytes += size
            self._unread_groups = sum(group.remaining_bytes > 0 for group in self._groups)
            if not self._unread_groups:
                self._caller_may_continue.set()

    @property
    def nbytes(self) -> int:
        """The total number of bytes of all shards."""
        return sum([shard.nbytes for shard in self.shards])

    def release_bytes(self, numbers: Sequence[int], nbytes: Sequence[int]) -> None:
        """Notes that so many bytes of some shards are no longer needed, and frees groups that are finished."""
        with self._lock:
            for n, size in zip(numbers, nbytes, strict=True):
                group = self._groups[self._group_of_shard[n]]
                group.remaining_bytes -= size
                if not group.remaining_bytes:
                    group.arrays = None

    def release_caller(self) -> None:
        """Lets the caller continue, even if some shards are not read yet."""
        self._caller_may_continue.set()

    def fail(self, error: BaseException) -> None:
        """Stops the reading, and lets the caller continue."""
        self._error = self._error or error
        self._caller_may_continue.set()

    @property
    def failed(self) -> bool:
        """True if `fail` was called."""
        return self._error is not None

    def check(self) -> None:
        """Raises the error that `fail` was given, or that of `before_read`."""
        if self._error:
            raise self._error
        self._before_read()

    def clear(self) -> None:
        """Releases all bytes and the source."""
        for group in self._groups:
            if job := group.job:  # After an error no writer has taken its result, and it may still be reading.
                job.wait()
        self._source = self._entries = None
        for group in self._groups:
            group.arrays = group.job = None

    def _make_groups(self, group_bytes: int) -> Iterator[_Group]:
        first = size = 0
        for n, shard in enumerate(self.shards):
            if n > first and size + shard.nbytes > group_bytes:
                yield _Group(first, n, size)
                first, size = n, 0
            size += shard.nbytes
        if self.shards:
            yield _Group(first, len(self.shards), size)

    def _count_read(self) -> None:
        with self._lock:
            self._unread_groups -= 1
            if not self._unread_groups:
                # Otherwise the arrays of a live tree would stay in memory until everything is written.
                self._source = self._entries = None
                self._caller_may_continue.set()


ShardSupply = StagedSupply | LazySupply


@devices.allow_transfers()
@non_reentrant
def _read_boxes(source: Source, wanted: Sequence[tuple[Any, Box]]) -> list[Bytes]:
    """Reads the bytes of boxes.

    Not reentrant: a rule that this call runs must not save, because that save would wait for this one, and this one for
    the rule. Files are not mapped, because everything read of a mapped file would stay in memory until the last group
    is freed.
    """
    return list(map(_as_bytes, source.read(wanted, mmap=False)))


def _as_bytes(array: np.ndarray) -> Bytes:
    return dtypes.defined_bytes(np.ascontiguousarray(array)).reshape(-1).view(np.uint8)
