"""The small option objects of Orbax; the namespace `options`."""

import dataclasses
import enum
import importlib
from typing import Any


@dataclasses.dataclass
class MultiprocessingOptions:
    """Says which processes save. Only the defaults are supported: all of them, and process 0 commits."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Options of files. `path_permission_mode` has no effect, which is logged; the umask decides."""

    path_permission_mode: int | None = None


class AtomicityMode(enum.StrEnum):
    """The way of Orbax to commit. Treering has one of its own."""

    AUTO = "auto"
    ATOMIC_RENAME = "atomic_rename"
    COMMIT_FILE = "commit_file"


@dataclasses.dataclass(frozen=True)
class AtomicityOptions:
    """Options of commits, which have no effect, which is logged."""

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


@dataclasses.dataclass
class MemoryLimitOptions:
    """Options of memory, which have no effect, which is logged."""

    max_transfer_concurrent_gb: int | None = None


def __getattr__(name: str) -> Any:
    if name == "AsyncOptions":
        return importlib.import_module(".manager_options", __package__).AsyncOptions
    if name == "multihost":  # Orbax has the module here too.
        return importlib.import_module(".multihost", __package__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
