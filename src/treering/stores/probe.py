"""Measures what a disk supports and how fast it is, and tells what the files there survive."""

import contextlib
import dataclasses
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from .filesystem import Filesystem
from .posix import UNSUPPORTED, Disk, is_in_memory
from .store import Store

NOTHING = "nothing"
PROCESS = "the process"
RESTART = "the process and a restart of the host"
ANY_HOST = "the loss of any one host"
ALL_HOSTS = "the loss of all hosts"


def is_memory_of_host(store: Store, path: str) -> bool:
    """Returns True if a directory takes the memory of this host until its files are removed; False if unknown."""
    return isinstance(store, Filesystem) and is_in_memory(path)


def survives(store: Store, path: str) -> str:
    """Returns what a file at a path survives: one of the constants. A disk of an unknown kind counts as local."""
    if not isinstance(store, Filesystem):
        return NOTHING if path.startswith("memory://") else ALL_HOSTS
    if is_in_memory(path):
        return PROCESS
    return ALL_HOSTS if mount_type(path)[1] else RESTART


_TIMED_CALLS = 9  # per measurement
_PAGE_BYTES = 4096  # bytes
_NETWORK_FS_PREFIXES = ("nfs", "cifs", "smb", "lustre", "ceph", "gpfs", "beegfs", "9p", "fuse.", "afs", "glusterfs")
_SLOW_SYNC_SECONDS = 0.02
_MIN_FREE_BYTES = 10 << 30
_NETWORK_ADVICE = "over a network; local= saves to a local disk first, and uploads in the background"
_NO_LOCKS = "files of killed saves are not removed, and two jobs may write one run; mount it with locks (Lustre: flock)"
BYTES_PER_SECOND = "bytes a second"  # the unit of a rate; part of the JSON that `treering doctor` prints


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact about a disk.

    unit: of a number: "seconds", "bytes" or `BYTES_PER_SECOND`. Empty for True, False and text.
    advice: what the user should do about it; empty if nothing.
    """

    name: str
    value: bool | float | str
    unit: str = ""
    advice: str = ""


def disk_findings(store: Store, folder: str) -> Iterator[Finding]:
    """Yields facts about the disk of an empty directory, and leaves files there. Yields nothing for other stores."""
    if not isinstance(store, Filesystem):
        return
    disk = store.disk
    kind, network = mount_type(folder)
    yield Finding("file system", kind, "", _NETWORK_ADVICE if network else "")
    free = shutil.disk_usage(folder).free
    yield Finding(
        "free", free, "bytes", "little space is left: prune, or keep fewer steps" if free < _MIN_FREE_BYTES else ""
    )
    a, b = os.path.join(folder, "a"), os.path.join(folder, "b")
    with _open_shared_file(disk, a) as fd:
        mapped = disk.is_local(fd)
        yield Finding(
            "mapped by default", mapped, "", "" if mapped else "arrays are copied on restore; mmap=True maps them"
        )
        locks = disk.lock(fd)
        yield Finding("locks", bool(locks), "", "" if locks else _NO_LOCKS)
    yield Finding("direct I/O", _has_direct_io(folder), "", "")
    yield Finding("hard links", _succeeds(lambda: disk.hard_link(a, b)), "", "")
    with _open_shared_file(disk, os.path.join(folder, "c")):
        exchanged = _succeeds(lambda: disk.exchange(a, os.path.join(folder, "c")))
    advice = (
        ""
        if exchanged
        else "a folder of another format is replaced in two renames: a crash may leave the old one under another name"
    )
    yield Finding("exchange of names", exchanged, "", advice)
    seconds = median_seconds(lambda: _write_durable_page(folder))
    slow = "a save of small leaves waits for the disk this long three times; local= saves to a faster one first"
    yield Finding("durable write of a page", seconds, "seconds", slow if seconds > _SLOW_SYNC_SECONDS else "")


def drop_page_cache(store: Store, path: str) -> None:
    """Asks the system to drop the files of a directory from its cache, so that the next read comes from the disk."""
    if isinstance(store, Filesystem) and hasattr(os, "posix_fadvise"):
        for name in os.listdir(path):
            with contextlib.suppress(OSError), open(os.path.join(path, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mount_type(folder: str) -> tuple[str, bool]:
    """Returns the type of a directory's file system, and whether it is on a network."""
    if sys.platform != "linux":
        return "unknown", False
    found, longest = "unknown", -1
    with contextlib.suppress(OSError), open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        real = os.path.realpath(folder)
        for line in mounts:
            _, point, kind, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:
                found, longest = kind, len(point)
    return found, found.startswith(_NETWORK_FS_PREFIXES)


@contextlib.contextmanager
def _open_shared_file(disk: Disk, path: str) -> Iterator[int]:
    fd = disk.open_shared(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _succeeds(do: Callable[[], object]) -> bool:
    try:
        return do() is not False
    except OSError:
        return False


def _has_direct_io(folder: str) -> bool:
    try:
        os.close(os.open(os.path.join(folder, "d"), os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except AttributeError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def _write_durable_page(folder: str) -> None:
    no_link = getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(os.path.join(folder, "page"), os.O_CREAT | os.O_RDWR | os.O_TRUNC | no_link)
    try:
        os.write(fd, b"x" * _PAGE_BYTES)
        os.fsync(fd)
    finally:
        os.close(fd)


def median_seconds(do: Callable[[], object]) -> float:
    """Returns the median time of a call, in seconds."""
    times: list[float] = []
    for _ in range(_TIMED_CALLS):
        begun = time.perf_counter()
        do()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
