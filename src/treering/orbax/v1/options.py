"""The options of a `Context`; the namespace `options` of version 1."""

import contextvars
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from ..namespaces import lacks, lookup
from ..options import AtomicityMode as AtomicityMode
from .registry import local_registry

__getattr__ = lookup("v1.options")

frozen: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("treering_frozen_options", default=frozenset())


class Options:
    """The base of options, which cannot be changed while their `Context` is entered."""

    def __setattr__(self, name: str, value: Any) -> None:
        if id(self) in frozen.get():
            raise RuntimeError(f"{name}: expected options to be set before `with context:`, found a context in use")
        object.__setattr__(self, name, value)


@lacks("v0")
@dataclasses.dataclass(kw_only=True)
class AsyncOptions(Options):
    """`post_finalization_callback` is called after each commit, in the background. The others have no effect."""

    timeout_secs: int = 1200
    post_finalization_callback: Callable[[], None] | None = None
    create_directories_asynchronously: bool = True


@lacks("v0")
@dataclasses.dataclass(kw_only=True)
class MultiprocessingOptions(Options):
    """Says which processes save. Only the defaults are supported: all of them, and process 0 commits."""

    primary_host: int | None = 0
    active_processes: set[int] | None = None
    barrier_sync_key_prefix: str | None = None


@lacks("v0")
@dataclasses.dataclass(kw_only=True)
class FileOptions(Options):
    """`path_class` is the class of paths in results, by default that of etils if it is installed."""

    path_permission_mode: int | None = None
    path_class: Any = None
    skip_sync_file_validations: bool = False


@dataclasses.dataclass(kw_only=True)
class PyTreeMetadataOptions(Options):
    """Options without effect: Treering always records the classes of containers."""

    support_rich_types: bool = False


@dataclasses.dataclass(kw_only=True)
class PyTreeOptions(Options):
    """Options of trees. `loading.partial_load` leaves out what the abstract tree lacks."""

    @dataclasses.dataclass(kw_only=True)
    class Saving(Options):
        """Options of saves, without effect."""

        pytree_metadata_options: PyTreeMetadataOptions = dataclasses.field(default_factory=PyTreeMetadataOptions)

    @dataclasses.dataclass(kw_only=True)
    class Loading(Options):
        """Options of loads."""

        partial_load: bool = False

    saving: Saving = dataclasses.field(default_factory=Saving)
    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class ArrayOptions(Options):
    """Options of arrays, of which those described below are honored."""

    @dataclasses.dataclass(kw_only=True)
    class Saving(Options):
        """Options of saves. `scoped_storage_options_creator` is called with the path and the value of each leaf."""

        @dataclasses.dataclass(kw_only=True)
        class StorageOptions(Options):
            """`dtype` is the dtype to which arrays are cast. The others have no effect."""

            dtype: Any = None
            chunk_byte_size: int | None = None
            shard_axes: tuple[int, ...] | None = None

        storage_options: StorageOptions = dataclasses.field(default_factory=StorageOptions)
        use_ocdbt: bool = True
        use_zarr3: bool = True
        use_compression: bool = True
        ocdbt_target_data_file_size: int | None = None
        enable_pinned_host_transfer: bool | None = None
        enable_post_merge_validation: bool = True
        use_replica_parallel: bool | None = None
        min_slice_bytes_for_replica_parallel: int | None = None
        max_replicas_for_replica_parallel: int | None = None
        enable_replica_parallel_separate_folder: bool = False
        enable_write_sharding_file: bool = True
        array_metadata_store: Any = None
        scoped_storage_options_creator: Callable[[Any, Any], Any] | None = None

    @dataclasses.dataclass(kw_only=True)
    class Loading(Options):
        """`enable_padding_and_truncation` gives arrays the shapes of the abstract tree. The others have no effect."""

        @dataclasses.dataclass(kw_only=True)
        class LoadAndBroadcastOptions(Options):
            """Options without effect. Treering divides reads between processes by itself."""

            replica_axis_index: int | None = 0
            primary_replica_id: int | None = 0
            broadcast_memory_limit_bytes: int | None = None
            broadcast_memory_scaling_factor: float | None = 0.75

        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: LoadAndBroadcastOptions = dataclasses.field(default_factory=LoadAndBroadcastOptions)

    saving: Saving = dataclasses.field(default_factory=Saving)
    loading: Loading = dataclasses.field(default_factory=Loading)


@dataclasses.dataclass(kw_only=True)
class CheckpointablesOptions(Options):
    """`registry` has the handlers of your own; see `handlers.local_registry`."""

    registry: Any = dataclasses.field(default_factory=local_registry)


@dataclasses.dataclass(kw_only=True)
class PathwaysOptions(Options):
    """Options of Pathways, which is not supported."""

    checkpointing_impl: Any = None


@dataclasses.dataclass(kw_only=True)
class DeletionOptions(Options):
    """Options of deletions. Moving deleted steps away is not supported."""

    @dataclasses.dataclass(kw_only=True)
    class GcsDeletionOptions(Options):
        """Options of deletions in a bucket."""

        todelete_full_path: str | None = None

    gcs_deletion_options: GcsDeletionOptions = dataclasses.field(default_factory=GcsDeletionOptions)


@lacks("RegulatorOptions")
@dataclasses.dataclass(kw_only=True)
class MemoryOptions(Options):
    """`write_concurrent_bytes` limits the bytes of copies held at a time by a save. The others are not supported."""

    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: Any = None
    expected_surge_bytes: int | float | None = None
    is_prioritized_key_fn: Any = None
    serialization_status_callback: Any = None
    deepcopy_host_arrays: bool = True


@dataclasses.dataclass(kw_only=True)
class SafetensorsOptions(Options):
    """Options without effect."""

    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None


@lacks("v0")
@dataclasses.dataclass(kw_only=True)
class AtomicityOptions(Options):
    """Options without effect. Treering has one way to commit."""

    mode: AtomicityMode = AtomicityMode.AUTO
    allow_legacy_atomic_rename: bool = False


class CheckpointLayout(enum.Enum):
    """The format of a checkpoint: AUTO and ORBAX stand for all formats that Treering recognizes, its own first."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"
