"""The public names of Orbax, and where this package has them: a table in place of modules that only forward or raise.

A program imports `treering.orbax.X` as it imports `orbax.checkpoint.X`, so each namespace of the table is a module in
`sys.modules`. A name is imported on first use: importing the package imports neither JAX nor NumPy.
"""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import UnsupportedNameError

T = TypeVar("T")

RELEASE = "0.12.8"  # the release of Orbax whose names are in the table
_ROOT = "treering.orbax"
_POLICIES_TO_KEEP = (
    "AnyPreservationPolicy BestN CustomSteps EveryNSeconds EveryNSteps EveryNStepsClosest LatestDuration LatestN "
    "PreservationContext PreservationPolicy PreserveAll"
)
_POLICIES_TO_SAVE = (
    "AnySavePolicy ContinuousCheckpointingPolicy DecisionContext FixedIntervalPolicy InitialSavePolicy "
    "PreemptionCheckpointingPolicy SaveDecisionPolicy SpecificStepsPolicy"
)

# By namespace ("" is the root), the names of each module. `a=b` is the name `a` for `b`. The names of "" are modules.
_NAMES: dict[str, dict[str, str]] = {
    "": {
        "": "args checkpoint_args checkpoint_manager checkpoint_managers checkpoint_utils checkpointers "
        "experimental future handlers metadata multihost options path pathways step test_utils type_handlers utils v1",
        "arguments": "ArrayRestoreArgs PLACEHOLDER RestoreArgs SaveArgs",
        "checkpointers": "AbstractCheckpointer=Checkpointer AsyncCheckpointer Checkpointer PyTreeCheckpointer "
        "StandardCheckpointer",
        "future": "Future",
        "handlers": "ArrayCheckpointHandler AsyncCheckpointHandler CheckpointHandler CompositeCheckpointHandler "
        "CompositeOptions JaxRandomKeyCheckpointHandler JsonCheckpointHandler NumpyRandomKeyCheckpointHandler "
        "PyTreeCheckpointHandler StandardCheckpointHandler",
        "manager": "CheckpointManager",
        "options": "AsyncOptions CheckpointManagerOptions",
        "registration": "CheckpointHandlerRegistry DefaultCheckpointHandlerRegistry",
    },
    "args": {
        "arguments": "ArrayRestore ArraySave Composite JaxRandomKeyRestore JaxRandomKeySave JsonRestore JsonSave "
        "NumpyRandomKeyRestore NumpyRandomKeySave PyTreeRestore PyTreeSave StandardRestore StandardSave",
        "registration": "CheckpointArgs get_registered_args_cls get_registered_handler_cls has_registered_args "
        "register_with_handler",
    },
    "checkpoint_args": {
        "handlers": "CheckpointHandler",
        "registration": "CheckpointArgs get_registered_args_cls get_registered_handler_cls has_registered_args "
        "register_with_handler",
    },
    "checkpoint_manager": {
        "checkpointers": "AbstractCheckpointer=Checkpointer AsyncCheckpointer Checkpointer",
        "errors": "StepAlreadyExistsError",
        "handlers": "CheckpointHandler CompositeCheckpointHandler JsonCheckpointHandler",
        "items": "DEFAULT_ITEM_NAME=DEFAULT_ITEM",
        "manager": "CheckpointManager",
        "manager_items": "RESERVED_ITEM_NAMES=RESERVED_NAMES",
        "metadata": "RootMetadata StepMetadata",
        "options": "AsyncOptions CheckpointManagerOptions FileOptions MultiprocessingOptions",
        "policies": "CheckpointInfo",
        "registration": "CheckpointArgs CheckpointHandlerRegistry",
    },
    "checkpoint_managers": {
        "": "preservation_policy=checkpoint_managers.preservation_policy "
        "save_decision_policy=checkpoint_managers.save_decision_policy",
        "manager": "CheckpointManager",
        "options": "CheckpointManagerOptions",
        "policies": f"{_POLICIES_TO_KEEP} {_POLICIES_TO_SAVE} PolicyCheckpointInfo=CheckpointInfo",
    },
    "checkpoint_managers.preservation_policy": {"policies": _POLICIES_TO_KEEP},
    "checkpoint_managers.save_decision_policy": {"policies": _POLICIES_TO_SAVE},
    "checkpointers": {"checkpointers": "AbstractCheckpointer=Checkpointer"},
    "experimental": {"": "v1"},  # Version 1 was here before; the attribute of the root is from 0.12.
    "checkpoint_utils": {"arguments": "PLACEHOLDER"},
    "handlers": {
        "": "handler_registration=registration",
        "registration": "CheckpointHandlerRegistry DefaultCheckpointHandlerRegistry create_default_handler_registry",
    },
    "options": {"": "multihost"},
    "path": {"": "step", "options": "AtomicityMode"},
    "pathways": {"options": "CheckpointingImpl"},
    "step": {"step": "is_checkpoint_finalized=is_path_finalized"},
    "test_utils": {"utils": "erase_and_create_empty"},
    "type_handlers": {"arguments": "ArrayRestoreArgs RestoreArgs SaveArgs"},
    "utils": {
        "": "multihost",
        "multihost": "broadcast_one_to_all is_pathways_backend is_primary_host reached_preemption "
        "sync_global_devices=sync_global_processes sync_global_processes",
        "step": "TMP_DIR_SUFFIX any_checkpoint_step checkpoint_steps checkpoint_steps_paths get_save_directory "
        "is_checkpoint_finalized=is_path_finalized step_from_checkpoint_name",
    },
    "v1": {
        "": "arrays=v1.arrays errors=v1.errors handlers=v1.handlers multihost=v1.multihost options=v1.options "
        "partial=v1.partial path=v1.path training=v1.training tree=v1.tree",
        "arguments": "PLACEHOLDER",
        "v1.context": "Context",
        "v1.loading": "checkpointables_metadata is_orbax_checkpoint load load_async load_checkpointables "
        "load_checkpointables_async load_pytree load_pytree_async metadata pytree_metadata",
        "v1.trees": "CheckpointMetadata PyTreeMetadata",
        "v1.registry": "AbstractCheckpointable Checkpointable CheckpointableHandler StatefulCheckpointable",
        "v1.saving": "AsyncResponse save save_async save_checkpointables save_checkpointables_async save_pytree "
        "save_pytree_async",
    },
    "v1.arrays": {
        "utils": "to_shape_dtype_struct",
        "v1.trees": "AbstractArray AbstractScalar AbstractShardedArray ArrayLike DType Scalar Shape",
    },
    "v1.errors": {
        "errors": "DeletionInProgressError DeletionRecoveryError InvalidLayoutError NoCheckpointableError NoEntryError"
    },
    "v1.handlers": {
        "v1.registry": "AbstractCheckpointable Checkpointable CheckpointableHandler CheckpointableHandlerRegistry "
        "StatefulCheckpointable global_registry local_registry register_handler",
        "v1.loading": "JsonHandler PyTreeHandler",
    },
    "v1.multihost": {
        "multihost": "is_pathways_backend is_primary_host process_count process_index "
        "sync_global_processes=await_global_processes",
    },
    "v1.options": {"options": "AtomicityMode"},
    "v1.partial": {},
    "v1.path": {"": "step=v1.path.step", "v1.registry": "Path PathAwaitingCreation=Directory PathLike"},
    "v1.path.step": {"step": "NameFormat standard_name_format"},
    "v1.training": {
        "": "errors=v1.training.errors preservation_policies=v1.training.preservation_policies "
        "save_decision_policies=v1.training.save_decision_policies",
        "v1.checkpointer": "Checkpointer",
        "v1.step_reader": "CheckpointMetadata RootMetadata",
    },
    "v1.training.errors": {"errors": "StepAlreadyExistsError StepNotFoundError"},
    "v1.training.preservation_policies": {"policies": _POLICIES_TO_KEEP},
    "v1.training.save_decision_policies": {"policies": _POLICIES_TO_SAVE},
    "v1.tree": {"v1.trees": "AbstractLeaf JsonType Leaf PyTree PyTreeKey PyTreeKeyPath PyTreeOf"},
}
_FILES = frozenset(  # the namespaces that are files of this package
    ("", "checkpoint_utils", "checkpointers", "handlers", "multihost", "options", "step", "utils", "v1", "v1.options")
)
# What to use instead of what this package does not have: names, names in a namespace, or all of a namespace (`step.`).
_MISSING = {
    "save the bytes of the message in a handler of your own": "ProtoCheckpointHandler ProtoHandler ProtoRestore "
    "ProtoRestoreArgs ProtoSave ProtoSaveArgs",
    "use PyTreeCheckpointHandler": "BasePyTreeCheckpointHandler",
    "use CheckpointManager": "AbstractCheckpointManager abstract_checkpoint_manager",
    "use the metadata() of a CheckpointManager": "deserialize_root_metadata serialize_root_metadata",
    "name items in args.Composite": "METADATA_ITEM_NAME METRIC_ITEM_NAME determine_default_item_mode_from_args",
    "use isinstance(…, AsyncCheckpointer)": "is_async_checkpointer",
    "Treering commits a step in one operation, and leaves nothing temporary": "ALLOWED_STEP_NAME_PATTERN "
    "TMP_DIR_STEP_PATTERN all_temporary_paths is_path_temporary is_tmp_checkpoint path.atomicity "
    "path.atomicity_defaults path.atomicity_types path.deleter tmp_checkpoints",
    "use treering.open, which says the format": "path.format_utils",
    "an open checkpoint can be read even after it is deleted": "get_snapshot_dir_from_step_dir",
    "leave the call out": "initialize_distributed_to_device_ids initialize_runtime_to_distributed_ids "
    "mark_pathways_colocated_runtime_active record_saved_duration",
    "use jax.process_index and jax.distributed": "EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_BARRIER "
    "EXPERIMENTAL_ORBAX_USE_DISTRIBUTED_PROCESS_ID distributed_to_device_ids get_jax_distributed_client "
    "is_distributed_to_device_ids_initialized is_runtime_to_distributed_ids_initialized runtime_to_distributed_ids "
    "runtime_to_distributed_process_id use_experimental_distributed_process_id",
    "use multihost.sync_global_processes": "BarrierSyncFn get_barrier_sync_fn",
    "use jax.experimental.multihost_utils.process_allgather": "global_max",
    "use multihost.is_pathways_backend": "is_cloud_pathways_persistence_enabled is_native_pathways_backend "
    "is_pathways_colocated_runtime_active is_pathways_controller is_proxy_pathways_backend",
    "use PLACEHOLDER": "all_leaves_are_placeholders leaf_is_placeholder leaf_placeholder name_from_leaf_placeholder",
    "use treering.open": "pytree_structure",
    "compare the beginning of the path with gs://": "is_gcs_path",
    "name the types that the program accepts itself": "STANDARD_ARRAY_TYPES",
    "use find_step of a format of names": "maybe_find_step_metadata step_metadata_of_checkpoint_path",
    "use isinstance(…, StandardNameFormat)": "is_standard_name_format",
    "leave it out: process 0 decides": "single_host_load_and_broadcast_name_format",
    "it serves Orbax's own tests": "test_utils.",
    "save such leaves as arrays, or as an item with a handler of your own": "PyTreeHandler type_handlers.",
    "small leaves need no special handler": "aggregate_handlers",
    "use treering.formats for files in MessagePack": "msgpack_utils",
    "use treering.save and treering.restore": "serialization",
    "use treering.open, whose leaves read parts of arrays": "arrays",
    "use treering.Checkpointer with local=, which has a local and a remote tier": "emergency",
    "use treering with jax.distributed": "pathways pathways.",
    "use the logger 'treering' of the standard library": "logging",
    "use rules= of treering.restore": "RestoreTransform Transform apply_transformations merge_trees transform_utils",
    "use jax.tree": "tree",
    "use the attributes of what metadata() returns": "metadata. metadata.tree metadata.value",
    "save the entire tree at once, or each part as a checkpointable": "partial.finalize partial.save "
    "partial.save_async",
    "delete the directory, or Checkpointer.delete(step)": "delete delete_async",
    "a save that has begun is finished; Checkpointer.delete(step) deletes it then": "cancel",
    "Treering names what is temporary itself": "create_temporary_path get_temporary_path metadata_from_temporary_paths",
    "use metadata": "structure",
    "leave the call out: the adapter needs no signals": "synchronize_next_awaitable_signal_operation_id",
    "pass the arguments to the save and the restore": "checkpoint_restore_args checkpoint_save_args post_restore",
    "use the metadata of a checkpoint": "from_deserialized_dict from_jax_sharding from_shape_dtype_struct "
    "to_serialized_string",
    "a save names every leaf that it refuses": "validate_abstract_leaves_handleable validate_leaves_handleable",
    "use treering.orbax.options": "AsyncOptions.v0 AtomicityOptions.v0 FileOptions.v0 MultiprocessingOptions.v0",
    "use write_concurrent_bytes": "MemoryOptions.RegulatorOptions",
    "use load": "load_async",
    "use load_checkpointables": "load_checkpointables_async",
    "merge the dicts before the save": "merge",
    "use standard_name_format": "composite_name_format",
}
_INSTEAD = {name: instead for instead, names in _MISSING.items() for name in names.split()}


def homes(namespace: str) -> dict[str, tuple[str, str]]:
    """Returns the names of a namespace, and for each the module that has it and the name there ("" for a module)."""
    found: dict[str, tuple[str, str]] = {}
    for module, names in _NAMES.get(namespace, {}).items():
        for name in names.split():
            public, _, own = name.partition("=")
            found[public] = (module, own or public) if module else (own or public, "")
    return found


def lookup(namespace: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a namespace.

    It raises `UnsupportedNameError`, which is an `AttributeError`, for a name that is neither in the table nor one that
    there is advice about, such as one of a later release of Orbax, and if the advice is about the entire namespace.
    """
    known = homes(namespace)
    place = f"{_ROOT}.{namespace}".rstrip(".")

    def find(name: str) -> Any:
        path = f"{namespace}.{name}".lstrip(".")
        if name in known:
            module, attribute = known[name]
            found = importlib.import_module(f"{_ROOT}.{module}")
            value = getattr(found, attribute) if attribute else found
        elif name.startswith("_"):
            raise AttributeError(f"module {place!r} has no attribute {name!r}")
        elif not advice(path):
            raise UnsupportedNameError(
                f"module {place!r} has no attribute {name!r}, and neither has Orbax {RELEASE}, whose names it has; "
                "docs/migrate/orbax.md lists the calls of Treering"
            )
        elif _advice_on_name(path):
            value = refused(path)
        else:
            raise unsupported_name(path)
        vars(sys.modules[place])[name] = value
        return value

    return find


def register() -> None:
    """Makes the namespaces of the table importable, as Orbax's are. Those with code of their own are files."""
    for namespace in _NAMES.keys() - _FILES:
        place = f"{_ROOT}.{namespace}"
        module = types.ModuleType(place, f"The namespace `{namespace}` of Orbax; see `treering.orbax.namespaces`.")
        names = sorted(homes(namespace))
        vars(module).update(__getattr__=lookup(namespace), __dir__=lambda names=names: names, __all__=names)
        module.__spec__ = importlib.machinery.ModuleSpec(place, None, is_package=True)
        module.__path__ = []  # Else `import treering.orbax.v1.path.step` fails.
        sys.modules[place] = module
    sys.modules[f"{_ROOT}.experimental.v1"] = importlib.import_module(f"{_ROOT}.v1")


class _Refused:
    """Raises an error as soon as the program uses it."""

    def __init__(self, name: str):
        self.__dict__["_name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise unsupported_name(self.__dict__["_name"])

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by `inspect`, `copy` and the like
            raise AttributeError(attribute)
        raise unsupported_name(f"{self.__dict__['_name']}.{attribute}")

    def __mro_entries__(self, bases: Any) -> Any:
        raise unsupported_name(self.__dict__["_name"])

    def __repr__(self) -> str:
        return f"<treering.orbax.{self.__dict__['_name']}, not supported>"


def advice(path: str) -> str:
    """Returns what to use instead of a name with its namespace; "" if nothing is known about it."""
    if found := _advice_on_name(path):
        return found
    place = path.rpartition(".")[0]
    # What is said about a name that is not supported counts for all of its attributes.
    return place and (_advice_on_name(f"{place}.") or (advice(place) if place not in _NAMES else ""))


def _advice_on_name(path: str) -> str:
    """Returns the same, without what is said about the namespaces that have the name."""
    parts = path.split(".")
    ends = (".".join(parts[first:]) for first in range(len(parts)))  # It may be missing in each namespace.
    return next((_INSTEAD[end] for end in ends if end in _INSTEAD), "")


def refused(path: str) -> Any:
    """Returns a stand-in for a name of Orbax. Using it raises `UnsupportedNameError`."""
    return _Refused(path)


class _MissingAttribute:
    """Raises an error as soon as the program reads this attribute."""

    def __init__(self, path: str):
        self._path = path

    def __get__(self, instance: Any, owner: type) -> Any:
        raise unsupported_name(self._path)


def lacks(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorates a class that lacks attributes of Orbax's class. Reading one raises `UnsupportedNameError`."""

    def decorate(owner: type[T]) -> type[T]:
        for name in names:
            setattr(owner, name, _MissingAttribute(f"{owner.__name__}.{name}"))
        return owner

    return decorate


def is_refused(value: Any) -> bool:
    """Returns True for a stand-in of a name that is not supported."""
    return isinstance(value, _Refused)


def unsupported_name(path: str) -> UnsupportedNameError:
    """Returns the error about a name that is not supported."""
    instead = advice(path)
    return UnsupportedNameError(f"treering.orbax.{path} is not supported{'; ' + instead if instead else ''}")
