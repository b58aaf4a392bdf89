"""Stands in for the names of Orbax that this package does not support."""

from typing import Any

from .errors import UnsupportedNameError

_INSTEAD = {
    "ProtoSave": "save the bytes of the message in a handler of your own",
    "ProtoRestore": "restore the bytes of the message in a handler of your own",
    "ProtoCheckpointHandler": "save the bytes of the message in a handler of your own",
    "BasePyTreeCheckpointHandler": "use PyTreeCheckpointHandler",
    "type_handlers": "save such leaves as arrays, or as an item with a handler of your own",
    "aggregate_handlers": "small leaves need no special handler",
    "msgpack_utils": "use treering.formats for files in MessagePack",
    "serialization": "use treering.save and treering.restore",
    "arrays": "use treering.open, whose leaves read parts of arrays",
    "emergency": "use treering.Checkpointer with local=, which has a local and a remote tier",
    "pathways": "use treering with jax.distributed",
    "logging": "use the logger 'treering' of the standard library",
    "transform_utils": "use rules= of treering.restore",
    "apply_transformations": "use rules= of treering.restore",
    "merge_trees": "use rules= of treering.restore",
    "Transform": "use rules= of treering.restore",
    "RestoreTransform": "use rules= of treering.restore",
    "tree": "use jax.tree",
    "AbstractCheckpointManager": "use CheckpointManager",
    "partial": "save the entire tree at once, or each part as a checkpointable",
    "delete": "delete the directory, or Checkpointer.delete(step)",
    "delete_async": "delete the directory, or Checkpointer.delete(step)",
    "cancel": "a save that has begun is finished; Checkpointer.delete(step) deletes it then",
    "load_async": "use load",
    "load_checkpointables_async": "use load_checkpointables",
    "merge": "merge the dicts before the save",
    "composite_name_format": "use standard_name_format",
    "ProtoHandler": "save the bytes of the message in a handler of your own",
    "PyTreeHandler": "save such leaves as arrays, or as an object with a handler of your own",
}


class _Refused:
    """Raises an error as soon as the program uses it."""

    def __init__(self, name: str):
        self.__dict__["_name"] = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise error(self.__dict__["_name"])

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked by `inspect`, `copy` and the like
            raise AttributeError(attribute)
        raise error(f"{self.__dict__['_name']}.{attribute}")

    def __mro_entries__(self, bases: Any) -> Any:
        raise error(self.__dict__["_name"])

    def __repr__(self) -> str:
        return f"<treering.orbax.{self.__dict__['_name']}, not supported>"


def is_refused(name: str) -> bool:
    """Returns True for a name of Orbax that exists here only to raise an error when it is used."""
    return name in _INSTEAD


def advice(name: str) -> str:
    """Returns what to use instead of a name for which `is_refused` is True."""
    return _INSTEAD[name]


def refused(name: str) -> Any:
    """Returns a stand-in for a name of Orbax. Using it raises `UnsupportedNameError`."""
    return _Refused(name)


def error(name: str) -> UnsupportedNameError:
    """Returns the error about a name that is not supported."""
    instead = next((_INSTEAD[part] for part in reversed(name.split(".")) if part in _INSTEAD), "")
    return UnsupportedNameError(f"treering.orbax.{name} is not supported{'; ' + instead if instead else ''}")
