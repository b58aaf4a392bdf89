"""The handlers of Orbax: bases for your own, and constructors that say the kind of an item."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import MismatchError
from . import arguments, registration
from .errors import check_processes, warn_unused
from .namespaces import lacks, lookup, unsupported_name

__getattr__ = lookup("handlers")


class CheckpointHandler(abc.ABC):
    """The base of handlers. A handler of your own saves an item into a directory, and restores it from one."""

    @abc.abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves an item into an empty directory."""

    @abc.abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores the item in a directory."""

    def metadata(self, directory: Any) -> Any:
        """Returns information about the item in a directory, or None."""
        return None

    def finalize(self, directory: Any) -> None:  # noqa: B027
        """Runs after the save."""

    def close(self) -> None:  # noqa: B027
        """Releases what the handler holds."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the name of the class."""
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """The base of handlers that begin a save and return futures, whose `result` waits for it."""

    @abc.abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Begins to save an item into an empty directory, and returns a list of futures."""


class _ItemHandler(AsyncCheckpointHandler):
    """The base of the handlers below: an item saved by one of them is saved by Treering."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        from . import one_shot

        # The directory exists. Only Treering's own format can be written into it.
        one_shot.save_at(directory, self._built_in(), args, kwargs, force=True, write="treering")

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        self.save(directory, *args, **kwargs)
        return []

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        from . import one_shot

        return one_shot.restore_at(directory, self._built_in(), args, kwargs)

    def metadata(self, directory: Any) -> Any:
        from . import one_shot

        return one_shot.metadata_at(directory, self._built_in()).item_metadata

    def _built_in(self) -> Any:
        """Returns this handler without the methods of a subclass, which may call the methods here."""
        made = object.__new__(next(base for base in type(self).__mro__ if base in _PAIRS))
        made.__dict__.update(self.__dict__)
        return made


class StandardCheckpointHandler(_ItemHandler):
    """Saves trees of arrays and numbers. Its arguments tune Orbax's own format and have no effect, which is logged."""

    def __init__(
        self,
        *,
        save_concurrent_gb: int = 96,
        restore_concurrent_gb: int = 96,
        multiprocessing_options: Any = None,
        pytree_metadata_options: Any = None,
        use_ocdbt: bool = True,
    ):
        check_processes(multiprocessing_options)
        warn_unused(
            "StandardCheckpointHandler",
            save_concurrent_gb=(save_concurrent_gb, 96),
            restore_concurrent_gb=(restore_concurrent_gb, 96),
            pytree_metadata_options=(pytree_metadata_options, None),
            use_ocdbt=(use_ocdbt, True),
        )


class PyTreeCheckpointHandler(_ItemHandler):
    """Saves trees. Its arguments tune Orbax's own format and have no effect, which is logged."""

    def __init__(
        self,
        aggregate_filename: str | None = None,
        *,
        save_concurrent_gb: int | None = None,
        restore_concurrent_gb: int | None = None,
        save_device_host_concurrent_gb: int | str | None = None,
        memory_limit_options: Any = None,
        use_ocdbt: bool = True,
        use_zarr3: bool = False,
        use_compression: bool = True,
        multiprocessing_options: Any = None,
        type_handler_registry: Any = None,
        handler_impl: Any = None,
        pytree_metadata_options: Any = None,
        array_metadata_validator: Any = None,
        enable_pinned_host_transfer: bool | None = None,
        is_prioritized_key_fn: Any = None,
    ):
        check_processes(multiprocessing_options)
        if handler_impl is not None:
            raise unsupported_name("handlers.BasePyTreeCheckpointHandler")
        warn_unused(
            "PyTreeCheckpointHandler",
            aggregate_filename=(aggregate_filename, None),
            save_concurrent_gb=(save_concurrent_gb, None),
            restore_concurrent_gb=(restore_concurrent_gb, None),
            save_device_host_concurrent_gb=(save_device_host_concurrent_gb, None),
            memory_limit_options=(memory_limit_options, None),
            use_ocdbt=(use_ocdbt, True),
            use_zarr3=(use_zarr3, False),
            use_compression=(use_compression, True),
            type_handler_registry=(type_handler_registry, None),
            pytree_metadata_options=(pytree_metadata_options, None),
            array_metadata_validator=(array_metadata_validator, None),
            enable_pinned_host_transfer=(enable_pinned_host_transfer, None),
            is_prioritized_key_fn=(is_prioritized_key_fn, None),
        )


class JsonCheckpointHandler(_ItemHandler):
    """Saves values of JSON. A `filename` has no effect, which is logged."""

    def __init__(self, filename: str | None = None, *, multiprocessing_options: Any = None):
        check_processes(multiprocessing_options)
        warn_unused("JsonCheckpointHandler", filename=(filename, None))


class ArrayCheckpointHandler(_ItemHandler):
    """Saves one array or number. A `checkpoint_name` has no effect, which is logged."""

    def __init__(self, checkpoint_name: str | None = None):
        warn_unused("ArrayCheckpointHandler", checkpoint_name=(checkpoint_name, None))


@lacks("checkpoint_restore_args", "checkpoint_save_args", "post_restore")
class JaxRandomKeyCheckpointHandler(_ItemHandler):
    """Saves one PRNG key of JAX. A `key_name` has no effect, which is logged."""

    def __init__(self, key_name: str | None = None):
        warn_unused("JaxRandomKeyCheckpointHandler", key_name=(key_name, None))


@lacks("checkpoint_restore_args", "checkpoint_save_args", "post_restore")
class NumpyRandomKeyCheckpointHandler(_ItemHandler):
    """Saves the state of NumPy's generator. A `key_name` has no effect, which is logged."""

    def __init__(self, key_name: str | None = None):
        warn_unused("NumpyRandomKeyCheckpointHandler", key_name=(key_name, None))


@dataclasses.dataclass
class CompositeOptions:
    """Options of `CompositeCheckpointHandler`, which have no effect here, which is logged."""

    multiprocessing_options: Any = None
    temporary_path_class: Any = None
    file_options: Any = None
    atomicity_options: Any = None
    async_options: Any = None

    def __post_init__(self) -> None:
        check_processes(self.multiprocessing_options)
        others = {name: (value, None) for name, value in vars(self).items() if name != "multiprocessing_options"}
        warn_unused("CompositeOptions", **others)


@lacks("metadata_from_temporary_paths")
class CompositeCheckpointHandler(_ItemHandler):
    """Saves several items.

    item_names, items_and_handlers: the names of items, and the handlers of some of them. A name that is not listed is
        accepted, too.
    handler_registry: says the handlers instead.
    """

    def __init__(
        self,
        *item_names: str,
        composite_options: CompositeOptions | None = None,
        handler_registry: Any = None,
        **items_and_handlers: Any,
    ):
        if handler_registry is not None and (item_names or items_and_handlers):
            raise MismatchError("expected either handler_registry=, or item_names and items_and_handlers, found both")
        self.item_names = tuple(dict.fromkeys([*item_names, *items_and_handlers]))
        self.handlers: Any = (
            {name: one for name, one in items_and_handlers.items() if one is not None}
            if handler_registry is None
            else handler_registry
        )

    def close(self) -> None:
        named = self.handlers if isinstance(self.handlers, Mapping) else self.handlers.get_all_entries()
        for handler in named.values():
            handler.close()


_PAIRS: dict[type, tuple[type, type]] = {
    StandardCheckpointHandler: (arguments.StandardSave, arguments.StandardRestore),
    PyTreeCheckpointHandler: (arguments.PyTreeSave, arguments.PyTreeRestore),
    JsonCheckpointHandler: (arguments.JsonSave, arguments.JsonRestore),
    ArrayCheckpointHandler: (arguments.ArraySave, arguments.ArrayRestore),
    JaxRandomKeyCheckpointHandler: (arguments.JaxRandomKeySave, arguments.JaxRandomKeyRestore),
    NumpyRandomKeyCheckpointHandler: (arguments.NumpyRandomKeySave, arguments.NumpyRandomKeyRestore),
    CompositeCheckpointHandler: (arguments.Composite, arguments.Composite),
}
for _handler, (_save, _restore) in _PAIRS.items():
    registration.register_with_handler(_handler, for_save=True)(_save)
    registration.register_with_handler(_handler, for_restore=True)(_restore)

# Orbax has these names of the arguments here, too.
StandardSaveArgs, StandardRestoreArgs = _PAIRS[StandardCheckpointHandler]
PyTreeSaveArgs, PyTreeRestoreArgs = _PAIRS[PyTreeCheckpointHandler]
JsonSaveArgs, JsonRestoreArgs = _PAIRS[JsonCheckpointHandler]
ArraySaveArgs, ArrayRestoreArgs = _PAIRS[ArrayCheckpointHandler]
JaxRandomKeySaveArgs, JaxRandomKeyRestoreArgs = _PAIRS[JaxRandomKeyCheckpointHandler]
NumpyRandomKeySaveArgs, NumpyRandomKeyRestoreArgs = _PAIRS[NumpyRandomKeyCheckpointHandler]
CompositeArgs = CompositeResults = arguments.Composite
