"""Translates the calls of a `CheckpointManager`: decides whether it has one item or several, and which handlers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .._processes import coordinator
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError
from . import arguments, items, nodes, registration
from .arguments import Composite
from .nodes import CallArgs

T = TypeVar("T")
RESERVED_NAMES = ("metrics", "descriptor")  # Orbax has these items itself

_OLD_STYLE: dict[str, tuple[type, type]] = {
    "standard": (arguments.StandardSave, arguments.StandardRestore),
    "pytree": (arguments.PyTreeSave, arguments.PyTreeRestore),
    "json": (arguments.JsonSave, arguments.JsonRestore),
}


class ManagerItems:
    """The items of a manager, and their handlers.

    `several` is True if each save has several items with names, False if it has one, None until the first save or
    restore decides. `is_synchronous` is True for a checkpointer of the old style that saves while the caller waits.
    """

    def __init__(self, checkpointers: Any, names: Sequence[str] | None, handlers: Any, registry: Any):
        self.several: bool | None = None
        self.is_synchronous = False
        self._registry = registry
        self._handlers: dict[str, Any] = {}
        if checkpointers is not None:
            if names is not None or handlers is not None or registry is not None:
                raise MismatchError(
                    "CheckpointManager: expected either checkpointers (the old style), or item_names, item_handlers "
                    "and handler_registry"
                )
            all_of_them = checkpointers.values() if isinstance(checkpointers, Mapping) else [checkpointers]
            self.is_synchronous = not any(_saves_in_background(one) for one in all_of_them)
            handlers = (
                {name: one.handler for name, one in checkpointers.items()}
                if isinstance(checkpointers, Mapping)
                else checkpointers.handler
            )
        elif handlers is not None and registry is not None:
            raise MismatchError("CheckpointManager: expected item_handlers or handler_registry, found both")
        if isinstance(handlers, Mapping):
            self.several, self._handlers = True, dict(handlers)
        elif handlers is not None:
            if names is not None:
                raise MismatchError("CheckpointManager: expected a dict of handlers for item_names, found one handler")
            self.several, self._handlers = False, {items.DEFAULT_ITEM: handlers}
        self._names = tuple(names or (self._handlers if self.several else ()))
        if names is not None:
            self.several = True
            if refused := [name for name in names if name in RESERVED_NAMES]:
                raise MismatchError(f"item_names: {', '.join(refused)}: Orbax uses this name itself; choose another")

    # Saving

    def to_save(self, given: Any, save_kwargs: Any, args: Any) -> Any:
        """Returns the arguments of a save: a `Composite` for several items.

        Raises `MismatchError`, which is a `ValueError`, if they do not fit this manager.
        """
        if given is None and args is None:
            raise MismatchError("save: expected args=, such as args=ocp.args.StandardSave(tree), found nothing")
        made: Any = self._old_style(given, save_kwargs, for_save=True) if args is None else args
        self._check(made)
        self._decide(made)
        names = list(made) if self.several else []
        if refused := [name for name in names if name in RESERVED_NAMES]:
            raise MismatchError(f"args: {', '.join(refused)}: Orbax uses this name itself; rename the item")
        if self._names and (unknown := [name for name in names if name not in self._names]):
            raise MismatchError(
                f"args: {', '.join(unknown)} does not match with any registered handler; expected the items "
                f"{', '.join(self._names)}"
            )
        return made

    def tree(self, args: Any, *, for_orbax: bool) -> Any:
        """Returns the tree to save. A single item is the entire tree, and in the format of Orbax the item `default`."""
        if self.several:
            return items.save_items(args, self._known_handlers())
        tree = items.save_tree(args, self._handler(items.DEFAULT_ITEM, args))
        return nodes.composite({items.DEFAULT_ITEM: tree}) if for_orbax else tree

    # Restoring

    def restored(self, ckpt: Checkpoint, given: Any, restore_kwargs: Any, args: Any) -> Any:
        """Returns the item of a checkpoint, or the items that the arguments name."""
        if args is None and (given is not None or restore_kwargs is not None):
            args = self._old_style(given, restore_kwargs, for_save=False)
        if args is not None:
            self._check(args)
        self._decide(args, ckpt)
        if self.several:
            return items.restore_items(ckpt, args, self._known_handlers())
        return items.restore_item(ckpt, None, args, self._handler(items.DEFAULT_ITEM, args))

    def metadata(self, ckpt: Checkpoint) -> Any:
        """Returns the metadata of the item of a checkpoint, or of all items by name."""
        self._decide(None, ckpt)
        if not self.several:
            return items.item_metadata(ckpt)
        return Composite(**{name: items.item_metadata(ckpt, name) for name in items.item_names(ckpt) or ()})

    def _check(self, args: Any) -> None:
        if not (isinstance(args, CallArgs) or registration.is_args_class(type(args))):
            raise MismatchError(
                f"args: expected arguments such as ocp.args.StandardSave(tree), found a {type(args).__name__}"
            )

    def _decide(self, args: Any, ckpt: Checkpoint | None = None) -> None:
        """Decides between one item and several, once. Raises `MismatchError` for arguments of the other mode."""
        is_composite = registration.args_kind(args) == "composite" if args is not None else None
        if self.several is None:
            if is_composite is None:
                assert ckpt is not None
                is_composite = items.item_names(ckpt) is not None
            self.several = is_composite
        elif is_composite is not None and is_composite != self.several:
            expected, found = ("a Composite", "those of one item")[:: 1 if self.several else -1]
            raise MismatchError(
                f"args: expected {expected}, because this manager has "
                f"{'several items' if self.several else 'one item without a name'}, found {found}"
            )

    def _old_style(self, given: Any, kwargs: Any, *, for_save: bool) -> Any:
        """Returns the arguments of a call without `args=`: a tree or a dict of them, and keyword arguments."""
        if registration.is_args_class(type(given)):
            raise MismatchError(f"expected {type(given).__name__}(…) as args=, found it as the second argument")
        if not self._handlers:
            raise MismatchError(
                "expected args=, because this manager was made without a checkpointer or item_handlers, which the old "
                "style of calls needs"
            )
        if not self.several:
            return self._old_item(items.DEFAULT_ITEM, given, kwargs, for_save)
        by_name = {**dict.fromkeys(kwargs or ()), **(given or {})}
        made = {name: self._old_item(name, by_name[name], (kwargs or {}).get(name), for_save) for name in by_name}
        return Composite(**made)

    def _old_item(self, name: str, given: Any, kwargs: Any, for_save: bool) -> Any:
        if name not in self._handlers:
            raise MismatchError(f"{name}: expected one of the items {', '.join(self._handlers)}")
        handler = self._handlers[name]
        if (kind := registration.handler_kind(handler)) in _OLD_STYLE:  # Its class may be one that the program derived.
            return _OLD_STYLE[kind][0 if for_save else 1](given, **(kwargs or {}))
        if not registration.has_registered_args(handler):
            return CallArgs((given,) if given is not None or for_save else (), kwargs or {})
        save, restore = registration.get_registered_args_cls(handler)
        return (save if for_save else restore)(given, **(kwargs or {}))

    def _known_handlers(self) -> Any:
        return self._registry if self._registry is not None else self._handlers or None

    def _handler(self, name: str, args: Any) -> Any:
        return items.handler_of(name, args, self._known_handlers())


def _saves_in_background(checkpointer: Any) -> bool:
    """Returns True for a checkpointer of this package or of Orbax that saves in the background."""
    return any(base.__name__ == "AsyncCheckpointer" for base in type(checkpointer).__mro__)


def agree(what: str, decide: Callable[[], T]) -> T:
    """Returns the decision of process 0 in all processes. `what` names it."""
    if not coordinator.is_multi_process():
        return decide()
    with coordinator.collective_call(what, "deciding") as call:
        return call.broadcast(decide)
