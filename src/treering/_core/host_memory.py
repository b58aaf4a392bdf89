"""Says how much memory the host has, and how much of it copies may take if the caller sets no limit."""

import contextlib
import os
from collections.abc import Callable, Collection

_AVAILABLE_DIVISOR = 4  # copies may take one part in so many of the available memory
_PROCESS_DIVISOR = 2  # and one part in so many of what a limit of this process leaves, which no other process takes
_RESERVE_DIVISOR = 8  # one part in so many of all memory stays free, because other processes of a job may need it
# Bytes that copies may take even if less is available: with less a save would hardly progress
_MIN_LIMIT_BYTES = 256 << 20
_CGROUP, _PROCESS_CGROUPS = "/sys/fs/cgroup", "/proc/self/cgroup"
# The names of the limit, of the use, and of the page cache within the use, for control groups of version 2 and 1.
_NAMES: dict[str, tuple[str, str, Collection[str]]] = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def copy_limit(copies: int) -> int | None:
    """Returns the most bytes of copies to hold at a time: a quarter of the memory available to this process.

    copies: the bytes of all copies.

    Returns None if all of them fit, or if the system does not say how much is available.
    """
    found = available() if copies > _MIN_LIMIT_BYTES else None
    limits = [] if found is None else [max(found // _AVAILABLE_DIVISOR, _MIN_LIMIT_BYTES)]
    # Beyond a limit of the process an allocation fails, while a host swaps: there is no least number of bytes here.
    limits += [max(left // _PROCESS_DIVISOR, 1) for left, _ in _process_pools()]
    limit = min(limits, default=None)
    return None if limit is None or copies <= limit else limit


def host_memory_check(copies: int) -> Callable[[int], bool] | None:
    """Returns the function to ask before more is copied while other processes on this host copy too.

    copies: the bytes of all copies.

    Returns None if these are so few that there is no need to ask.
    """
    return host_memory_ok if copies > _MIN_LIMIT_BYTES else None


def host_memory_ok(nbytes: int) -> bool:
    """Returns True if an eighth of the memory of the host and of the container stays free when `nbytes` more are taken.

    Returns True if the system does not say.
    """
    return all(left - nbytes >= most // _RESERVE_DIVISOR for left, most in _memory_pools())


def available() -> int | None:
    """Returns the bytes of memory that this process can take from the host or its container without swapping.

    Returns None if the system does not say.
    """
    return min((left for left, _ in _memory_pools()), default=None)


def total() -> int | None:
    """Returns the bytes of memory that the host, or the container of this process, has; None if it does not say."""
    return min((most for _, most in _memory_pools()), default=None)


def _memory_pools() -> list[tuple[int, int]]:
    """Returns the free and the total bytes of the host's memory, and of the control groups that this process is in."""
    host: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = dict(line.split(":", 1) for line in _lines("/proc/meminfo"))
        left, most = (int(found[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
        host.append((left, most))
    if not host:
        # Systems without /proc say only how much is free. More is available, because caches can be dropped.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            page = os.sysconf("SC_PAGE_SIZE")
            host.append((os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page))
    return host + _cgroup_pools()


def _process_pools() -> list[tuple[int, int]]:
    """Returns the same for the limits of this process, as ``ulimit -d`` and ``ulimit -v`` set them."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    limits = {
        "VmData": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "VmSize": resource.getrlimit(resource.RLIMIT_AS)[0],
    }
    if not (finite := {name: most for name, most in limits.items() if most != resource.RLIM_INFINITY}):
        return []
    with contextlib.suppress(OSError, ValueError, KeyError):  # Systems without /proc do not say what is used.
        used = dict(line.split(":", 1) for line in _lines("/proc/self/status"))
        return [(max(most - (int(used[name].split()[0]) << 10), 0), most) for name, most in finite.items()]
    return []


def _cgroup_pools() -> list[tuple[int, int]]:
    """Returns the same for the control groups of this process that have a limit, of version 2 or 1.

    A group is also limited by the groups above it. Within a container, the path of a group may not exist.
    """
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in _lines(_PROCESS_CGROUPS):
            _, kinds, group = line.split(":", 2)
            if kinds in ("", "memory"):
                parts = group.strip("/").split("/")
                folders = (os.path.join(_CGROUP, kinds, *parts[:n]) for n in range(len(parts) + 1))
                found += [room for one in folders if (room := _cgroup_pool(one, *_NAMES[kinds])) is not None]
    return found


def _cgroup_pool(folder: str, limit: str, used: str, cached: Collection[str]) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError):
        numbers = (int(_lines(os.path.join(folder, name))[0]) for name in (limit, used))
        of_files = (line.split() for line in _lines(os.path.join(folder, "memory.stat")))
        cache = sum(int(value) for name, value in of_files if name in cached)  # the system drops it if memory is needed
        most, taken = numbers
        return max(most - taken + cache, 0), most
    return None


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()
