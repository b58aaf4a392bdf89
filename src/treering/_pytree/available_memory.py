"""How much of the host's memory copies may take where nobody has said so."""

import contextlib
import os
from collections.abc import Callable, Collection

_SHARE = 4  # of what is available
_LEFT = 8  # of all memory: other processes of a job may take theirs on this host at the same time
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


def shared_room(copies: int) -> Callable[[int], bool] | None:
    """What to ask before more is copied, of so many bytes in all, while other processes on this host do the same.

    None where all of them are few.
    """
    return has_room if copies > _LEAST else None


def has_room(nbytes: int) -> bool:
    """Whether an eighth of all memory is left, of the host and of the container, when so many bytes more are taken.

    True where the system does not say.
    """
    return all(left - nbytes >= most // _LEFT for left, most in _rooms())


def available() -> int | None:
    """Bytes of memory that this process can take without swapping: of the host, or of its container."""
    return min((left for left, _ in _rooms()), default=None)


def _rooms() -> list[tuple[int, int]]:
    """What is left of the memory of the host, and of the groups that this process is in, and what they have in all."""
    host: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = dict(line.split(":", 1) for line in _lines("/proc/meminfo"))
        left, most = (int(found[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
        host.append((left, most))
    if not host:
        with contextlib.suppress(AttributeError, ValueError, OSError):  # what is free is less than what is available
            page = os.sysconf("SC_PAGE_SIZE")
            host.append((os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page))
    return host + _of_container()


def _of_container() -> list[tuple[int, int]]:
    """The same of the control groups that this process is in, of version 2 or 1; those without a limit left out.

    A group has no more than those above it. Within a container the host's path of a group may lead nowhere.
    """
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in _lines(_OWN_GROUPS):
            _, kinds, group = line.split(":", 2)
            if kinds in ("", "memory"):
                parts = group.strip("/").split("/")
                folders = (os.path.join(_CGROUP, kinds, *parts[:n]) for n in range(len(parts) + 1))
                found += [room for one in folders if (room := _room(one, *_NAMES[kinds])) is not None]
    return found


def _room(folder: str, limit: str, used: str, cached: Collection[str]) -> tuple[int, int] | None:
    with contextlib.suppress(OSError, ValueError):
        numbers = (int(_lines(os.path.join(folder, name))[0]) for name in (limit, used))
        of_files = (line.split() for line in _lines(os.path.join(folder, "memory.stat")))
        cache = sum(int(value) for name, value in of_files if name in cached)  # the system lets go of it when asked
        most, taken = numbers
        return max(most - taken + cache, 0), most
    return None


def _lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()
