"""The options of Orbax, each honored, or an error or a warning says what happens instead; the namespace `options`."""

import dataclasses
import datetime
import enum
import logging
import os
import re
import stat
from collections.abc import Callable, Container
from typing import Any

from .. import stores
from ..errors import UnsupportedError
from .namespaces import lookup, unsupported_name
from .policies import (
    AnyPreservationPolicy,
    AnySavePolicy,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    FixedIntervalPolicy,
    InitialSavePolicy,
    LatestN,
    PreemptionCheckpointingPolicy,
    PreservationPolicy,
    SaveDecisionPolicy,
    ShouldSaveFnPolicy,
    SpecificStepsPolicy,
)

_log = logging.getLogger("treering")
_FOLDER_NAME = re.compile(r"[^/\0]*[^/\0.0-9][^/\0]*")
__getattr__ = lookup("options")


@dataclasses.dataclass
class MultiprocessingOptions:
    """Says which processes save. Only the defaults are supported: all of them, and process 0 commits."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Options of files.

    path_permission_mode: what others may do with the directory of a checkpoint, such as 0o750, and with that of a run
        that the manager makes. As in Orbax, it adds no right that the umask takes away. A directory gets its mode right
        after its commit; the files in it have that of the umask. In a bucket it has no effect, which is logged.

    The other option has no effect, which is logged: Treering checks each sync.
    """

    path_permission_mode: int | None = None
    skip_sync_file_validations: bool = False


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


class CheckpointingImpl(enum.Enum):
    """The way to save with Pathways. A `Context` takes only the one without it, NO_DISPATCHER."""

    COLOCATED_PYTHON = enum.auto()
    PERSISTENCE = enum.auto()
    NO_DISPATCHER = enum.auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> "CheckpointingImpl":
        """Returns NO_DISPATCHER. Raises `UnsupportedNameError` if an option is True."""
        if use_colocated_python or use_persistence_array_handler:
            name = "use_colocated_python" if use_colocated_python else "use_persistence_array_handler"
            raise unsupported_name(f"pathways.CheckpointingImpl.from_options({name}=True)")
        return cls.NO_DISPATCHER


@dataclasses.dataclass
class AsyncOptions:
    """Options of background saves. Process 0 calls `post_finalization_callback` after each commit, in the
    background.

    `timeout_secs` and `barrier_sync_fn` have no effect: Treering waits as long as all processes live, and raises
    `PeerError` 30 seconds after one has ended. A warning says so.
    """

    timeout_secs: int = 1200
    barrier_sync_fn: Callable[..., None] | None = None
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


_READ_ONLY: dict[str, Any] = {  # A manager that only reads has these values, whatever the caller gave.
    "save_interval_steps": 0,
    "max_to_keep": None,
    "keep_time_interval": None,
    "keep_period": None,
    "create": False,
    "cleanup_tmp_directories": False,
    "save_on_steps": None,
    "todelete_subdir": None,
    "todelete_full_path": None,
    "should_save_fn": None,
}
_REFUSED = {
    "todelete_full_path": "a deleted step is gone; `treering prune --to DIR` moves steps away instead",
    "enable_per_process_directory_creation": "Treering decides who makes a directory; leave the option out",
}
_WITHOUT_EFFECT = {
    "num_deletion_threads": "Treering deletes in one background thread",
    "atomicity_options": "Treering always commits a step in one operation",
    "temporary_path_class": "Treering always commits a step in one operation",
}


@dataclasses.dataclass
class CheckpointManagerOptions:
    """Options of a `CheckpointManager`, with the names, defaults and meanings of Orbax.

    Treering always removes the leftovers of its own killed saves; `cleanup_tmp_directories` also removes those of
    Orbax, at the first save. It always deletes in the background (`enable_background_delete`), reads no metadata when a
    manager is made (`lightweight_initialize`), and lets process 0 decide (`single_host_load_and_broadcast`).

    Raises `UnsupportedError` for an option that cannot be honored, and `ValueError` for a wrong value.
    """

    save_interval_steps: int = 1
    max_to_keep: int | None = None
    keep_time_interval: datetime.timedelta | None = None
    keep_period: int | None = None
    best_fn: Callable[[Any], float] | None = None
    best_mode: str = "max"
    keep_checkpoints_without_metrics: bool = True
    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    step_name_format: Any = None
    create: bool = True
    cleanup_tmp_directories: bool = False
    save_on_steps: Container[int] | None = None
    single_host_load_and_broadcast: bool = False
    todelete_subdir: str | None = None
    todelete_full_path: str | None = None
    enable_background_delete: bool = False
    num_deletion_threads: int | None = None
    read_only: bool = False
    enable_async_checkpointing: bool = True
    async_options: Any = None
    multiprocessing_options: Any = dataclasses.field(default_factory=MultiprocessingOptions)
    should_save_fn: Callable[[int, int | None], bool] | None = None
    file_options: Any = dataclasses.field(default_factory=FileOptions)
    atomicity_options: Any = None
    save_root_metadata: bool = True
    temporary_path_class: Any = None
    save_decision_policy: SaveDecisionPolicy | None = None
    preservation_policy: PreservationPolicy | None = None
    prevent_write_metrics: bool = False
    enable_should_save_is_saving_in_progress_check: bool = True
    enable_per_process_directory_creation: bool = False
    lightweight_initialize: bool = False

    def __post_init__(self) -> None:
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={self.best_mode!r}: expected 'min' or 'max'")
        if self.preservation_policy is None and self.max_to_keep is not None and self.max_to_keep < 0:
            raise ValueError(f"max_to_keep={self.max_to_keep!r}: expected None or a number that is not negative")
        by_format = bool(getattr(self.step_name_format, "single_host_load_and_broadcast", False))
        if self.step_name_format is not None and by_format != self.single_host_load_and_broadcast:
            raise ValueError(
                f"single_host_load_and_broadcast={self.single_host_load_and_broadcast}: expected the same value in "
                f"step_name_format, found {by_format}"
            )
        if self.read_only:
            for name, value in _READ_ONLY.items():
                if getattr(self, name) not in (value, None, frozenset()):
                    setattr(self, name, value)
                    if name not in ("save_interval_steps", "create"):
                        _log.warning("CheckpointManagerOptions: read_only=True, so %s is ignored", name)
        self.save_on_steps = frozenset(self.save_on_steps or ())  # type: ignore[arg-type]
        self._check()

    def _check(self) -> None:
        for name, advice in _REFUSED.items():
            if getattr(self, name):
                raise UnsupportedError(f"CheckpointManagerOptions({name}={getattr(self, name)!r}): {advice}")
        for name, reason in _WITHOUT_EFFECT.items():
            if getattr(self, name) is not None:
                _log.warning("CheckpointManagerOptions: %s has no effect: %s", name, reason)
        if self.todelete_subdir is not None and not _FOLDER_NAME.fullmatch(self.todelete_subdir):
            raise UnsupportedError(
                f"todelete_subdir={self.todelete_subdir!r}: expected the name of a directory that is not that of a step"
            )
        if self.prevent_write_metrics and self.best_fn is not None:
            raise UnsupportedError("prevent_write_metrics: best_fn needs the metrics that it would leave out")
        several = self.multiprocessing_options
        if (getattr(several, "primary_host", 0), getattr(several, "active_processes", None)) != (0, None):
            raise UnsupportedError(
                f"multiprocessing_options={several!r:.200}: expected primary_host=0 and active_processes=None, because "
                "all processes of a job save together; for a disk on each host see docs/how-to/local-tier.md"
            )
        if getattr(self.file_options, "skip_sync_file_validations", False):
            _log.warning("file_options: skip_sync_file_validations has no effect: Treering checks each sync")
        waits = self.async_options
        if waits is not None and (getattr(waits, "barrier_sync_fn", None) or waits.timeout_secs != 1200):
            _log.warning(
                "async_options: timeout_secs and barrier_sync_fn have no effect; Treering waits as long as all "
                "processes live"
            )


def restrict(directory: str | os.PathLike[str], file_options: Any) -> None:
    """Takes the rights to a directory that `path_permission_mode` lacks; its owner keeps all."""
    if (mode := getattr(file_options, "path_permission_mode", None)) is None:
        return
    path = stores.absolute(directory)
    disk = getattr(stores.get(path), "disk", None)
    if disk is None:
        _log.warning("%s: path_permission_mode has no effect: only directories on a disk have a mode", path)
    elif (found := disk.stat(path)) is not None:
        disk.set_mode(path, stat.S_IMODE(found.st_mode) & (mode | ~0o077))


def save_policy(options: CheckpointManagerOptions) -> SaveDecisionPolicy:
    """Returns the policy that says which steps are saved."""
    if options.save_decision_policy is not None:
        return options.save_decision_policy
    if options.should_save_fn is not None:
        return AnySavePolicy([ShouldSaveFnPolicy(options.should_save_fn), PreemptionCheckpointingPolicy()])
    return AnySavePolicy(
        [
            FixedIntervalPolicy(options.save_interval_steps or 0),
            SpecificStepsPolicy(options.save_on_steps or ()),
            PreemptionCheckpointingPolicy(),
            InitialSavePolicy(),
        ]
    )


def best_of(options: CheckpointManagerOptions) -> BestN | None:
    """Returns the policy that ranks steps by `best_fn`; None without one."""
    if options.best_fn is None:
        return None
    return BestN(
        get_metric_fn=options.best_fn,
        reverse=options.best_mode == "min",
        n=options.max_to_keep,
        keep_checkpoints_without_metrics=options.keep_checkpoints_without_metrics,
    )


def preservation_policy(options: CheckpointManagerOptions) -> PreservationPolicy:
    """Returns the policy that says which steps stay."""
    if options.preservation_policy is not None:
        return options.preservation_policy
    policies: list[PreservationPolicy] = [best_of(options) or LatestN(options.max_to_keep)]
    if options.keep_period is not None:
        policies.append(EveryNSteps(options.keep_period))
    if options.keep_time_interval is not None:
        policies.append(EveryNSeconds(options.keep_time_interval.total_seconds()))
    return AnyPreservationPolicy(policies)
