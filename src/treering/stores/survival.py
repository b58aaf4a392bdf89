"""Tells what the files in a place survive: the end of their process, a restart of their host, or the loss of hosts."""

from .filesystem import Filesystem
from .posix import is_in_memory
from .probe import mount_type
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
