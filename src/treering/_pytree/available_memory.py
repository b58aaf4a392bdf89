"""How much of the host's memory copies may take where nobody has said so."""

import contextlib
import os
from collections.abc import Collection

_SHARE = 4  # of what is available; other processes of a job may be on this host
_LEAST = 256 << 20  # bytes, however little is available: a save that holds less would hardly move
_CGROUP, _OWN_GROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"
_NAMES: dict[str, tuple[str, str, Collection[str]]] = {  # by version: of limit, use, and what of that is the page cache
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def ceiling(copies: int) -> int | None:
    """The most bytes of copies to hold at a time, of so many in all: a quarter of what is available to this process.

    None when all of them fit, or where the system does not say what is available.
    """
    found = available() if copies > _LEAST else None
    limit = None if found is None else max(found // _SHARE, _LEAST)
    return None if limit is None or copies <= limit else limit


def available() -> int | None:
    """Bytes of memory that this process can take without swapping: of the host, or of its container."""
    host: int | None = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = _lines("/proc/meminfo")
        host = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if host is None:
        with contextlib.suppress(AttributeError, ValueError, OSError):  # what is free is less than what is available
            host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = _of_container()
    return min((one for one in (host, container) if one is not None), default=None)


def _of_container() -> int | None:
    """What is left to the control groups that this process is in, of version 2 or 1; None without a limit.

    A group has no more than those above it. Within a container the host's path of a group may lead nowhere.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for line in _lines(_OWN_GROUPS):
            _, kinds, group = line.split(":", 2)
            if kinds in ("", "memory"):
                parts = group.strip("/").split("/")
                folders = (os.path.join(_CGROUP, kinds, *parts[:n]) for n in range(len(parts) + 1))
                found += [left for one in folders if (left := _left(one, *_NAMES[kinds])) is not None]
    return min(found, default=None)


def _left(folder: str, limit: str, used: str, cached: Collection[str]) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        numbers = (int(_lines(os.path.join(folder, name))[0]) for name in (limit, used))
        of_files = (line.split() for line in _lines(os.path.join(folder, "memory.stat")))
        cache = sum(int(value) for name, value in of_files if name in cached)  # the system lets go of it when asked
        most, taken = numbers
        return max(most - taken + cache, 0)
    return None


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()
