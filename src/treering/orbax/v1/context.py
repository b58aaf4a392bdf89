"""`Context`: the options of the saves and loads in a `with` block."""

import contextvars
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Self

from ..errors import UnsupportedValueError, warn_unused
from ..items import format_options
from ..run import as_path
from . import options

# the contexts that are entered, the innermost last, each with the options that were frozen before; apart by thread
_entered: contextvars.ContextVar[tuple[tuple["Context", frozenset[int]], ...]] = contextvars.ContextVar(
    "treering_orbax_contexts", default=()
)
_KINDS = {  # the attributes of a context, and the classes of their options
    "pytree": options.PyTreeOptions,
    "array": options.ArrayOptions,
    "asynchronous": options.AsyncOptions,
    "multiprocessing": options.MultiprocessingOptions,
    "file": options.FileOptions,
    "checkpointables": options.CheckpointablesOptions,
    "pathways": options.PathwaysOptions,
    "deletion": options.DeletionOptions,
    "memory": options.MemoryOptions,
    "safetensors": options.SafetensorsOptions,
    "atomicity": options.AtomicityOptions,
}
_HONORED = frozenset(
    (
        "pytree.loading.partial_load",
        "array.loading.enable_padding_and_truncation",
        "array.saving.storage_options.dtype",
        "array.saving.scoped_storage_options_creator",
        "asynchronous.post_finalization_callback",
        "file.path_class",
        "file.path_permission_mode",
        "checkpointables.registry",
        "memory.write_concurrent_bytes",
    )
)
_REFUSED = {
    "multiprocessing.primary_host": "expected 0, because process 0 commits",
    "multiprocessing.active_processes": "expected None, because all processes save; see treering.save(processes=)",
    "deletion.gcs_deletion_options.todelete_full_path": "`treering prune --to DIR` moves steps away instead",
    "pathways.checkpointing_impl": "use treering with jax.distributed",
    "memory.is_prioritized_key_fn": "a save always has the values at the call; leave the option out",
    "memory.serialization_status_callback": "leave the option out",
}


def _kind_of(name: str) -> str:
    """Returns the name of an attribute that had another name before, such as `array_options`."""
    return "asynchronous" if name == "async_options" else name.removesuffix("_options")


class Context:
    """Holds the options of saves and loads. They apply within `with context:`.

    context: a context whose options are copied; by default all options have their defaults.
    write: "treering" or "orbax", the format that is written. The environment variable `TREERING_ORBAX_WRITE` has the
        default. Both are read.
    *_options, checkpoint_layout: the initial values of the attributes.

    A save or load raises `UnsupportedValueError` for an option that cannot be honored, and logs one without effect.
    """

    pytree: options.PyTreeOptions
    array: options.ArrayOptions
    asynchronous: options.AsyncOptions
    multiprocessing: options.MultiprocessingOptions
    file: options.FileOptions
    checkpointables: options.CheckpointablesOptions
    pathways: options.PathwaysOptions
    deletion: options.DeletionOptions
    memory: options.MemoryOptions
    safetensors: options.SafetensorsOptions
    atomicity: options.AtomicityOptions
    checkpoint_layout: options.CheckpointLayout
    write: str | None

    def __init__(
        self,
        context: "Context | None" = None,
        *,
        checkpoint_layout: options.CheckpointLayout | str | None = None,
        write: str | None = None,
        **given: Any,
    ):
        names = {"asynchronous": "async_options"} | {
            name: f"{name}_options" for name in _KINDS if name != "asynchronous"
        }
        if unknown := set(given) - set(names.values()):
            raise TypeError(f"Context: expected one of {', '.join(names.values())}, found {', '.join(sorted(unknown))}")
        for name, kind in _KINDS.items():
            base = given.get(names[name])
            base = getattr(context, name) if base is None and context is not None else base
            self.__dict__[name] = kind() if base is None else _copied(base)
        layout = checkpoint_layout or (options.CheckpointLayout.ORBAX if context is None else context.checkpoint_layout)
        self.checkpoint_layout = layout  # type: ignore[assignment]
        self.write = write if write is not None or context is None else context.write
        format_options(self.write, several=False)  # An unknown format fails here.

    def __setattr__(self, name: str, value: Any) -> None:
        if _kind_of(name) in _KINDS:
            raise AttributeError(f"{name}: expected its options to be set one by one, found an assignment")
        if name not in ("checkpoint_layout", "write"):
            known = ", ".join([*_KINDS, "checkpoint_layout", "write"])
            raise AttributeError(f"{name}: expected one of the options {known}")
        if id(self) in options.frozen.get():
            raise RuntimeError(f"{name}: expected options to be set before `with context:`, found a context in use")
        self.__dict__[name] = _layout(value) if name == "checkpoint_layout" else value

    def __getattr__(self, name: str) -> Any:
        kind = _kind_of(name)
        if kind == name or kind not in _KINDS or kind not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[kind]

    def __enter__(self) -> Self:
        before = options.frozen.get()
        _entered.set((*_entered.get(), (self, before)))
        options.frozen.set(before | {id(self), *(id(owner) for _, owner in _owners(self))})
        return self

    def __exit__(self, *error: object) -> None:
        *outer, (_, before) = _entered.get()
        _entered.set(tuple(outer))
        options.frozen.set(before)

    def path(self, path: Any) -> Any:
        """Returns a path of the class that the options say."""
        return as_path(str(path)) if self.file.path_class is None else self.file.path_class(path)

    def check(self) -> Self:
        """Logs options without effect. Raises `UnsupportedValueError` for those that cannot be honored."""
        default = _defaults()
        for name, value in _walk(self):
            if name in _HONORED or value is default[name] or value == default[name]:
                continue
            if name == "pathways.checkpointing_impl" and getattr(value, "name", "") == "NO_DISPATCHER":
                continue  # MaxText sets it in the context of each run without Pathways.
            if name in _REFUSED:
                if name != "multiprocessing.primary_host" or value is not None:
                    raise UnsupportedValueError(f"context.{name}={value!r:.100}: {_REFUSED[name]}")
                continue
            warn_unused("Context", **{name: (value, default[name])})
        return self


def get_context(default: Context | None = None) -> Context:
    """Returns the context that is entered, or else `default`, or one with the default options."""
    entered = _entered.get()
    return entered[-1][0] if entered else default or Context()


def _copied(given: Any) -> Any:
    """Returns a copy of options, but the same registry and other values in them."""
    made = copy.copy(given)
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if dataclasses.is_dataclass(value) and isinstance(value, options.Options):
            object.__setattr__(made, field.name, _copied(value))
    return made


def _layout(value: Any) -> options.CheckpointLayout:
    return options.CheckpointLayout(getattr(value, "value", value))


def _owners(context: Context) -> list[tuple[str, Any]]:
    """Returns the objects that have the options, with their dotted names."""
    found = [(name, getattr(context, name)) for name in _KINDS]
    for name, owner in found:  # It grows.
        parts = [(f"{name}.{field.name}", getattr(owner, field.name)) for field in dataclasses.fields(owner)]
        found += [(name, part) for name, part in parts if isinstance(part, options.Options)]
    return found


def _walk(context: Context) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each option."""
    for name, owner in _owners(context):
        for field in dataclasses.fields(owner):
            if not isinstance(value := getattr(owner, field.name), options.Options):
                yield f"{name}.{field.name}", value


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(_walk(Context()))
