"""Saves trees and checkpointables, each checkpoint at a path."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ..._pytree import state_methods
from ..._save.pending import PendingSave
from ..._save.save import save as save_now
from ..._save.save import save_async as save_in_background
from ..._threads.thread import Thread, start_threads
from ...errors import ExistsError, MismatchError
from .. import items, nodes
from ..errors import CheckpointExistsError, NoEntryError, UnsupportedValueError
from ..one_shot import restrict_later
from . import registry
from .context import Context, get_context
from .options import CheckpointLayout
from .registry import StatefulCheckpointable
from .trees import tree_to_save, unsupported_leaf

T = TypeVar("T")


class AsyncResponse(Generic[T]):
    """Waits for a call that continues in the background. A program that ends finishes the call first."""

    def __init__(self, wait: Callable[[float | None], T]):
        self._wait = wait

    def result(self, timeout: float | None = None) -> T:
        """Waits, at most `timeout` seconds, and returns the result.

        Raises the error of the call, and `TimeoutError` if the call is not over yet; it then continues.
        """
        return self._wait(timeout)

    def on_complete(self, callback: Callable[[T], Any]) -> None:
        """Calls `callback` with the result, in another thread, once the call has succeeded."""
        start_threads(Thread(target=lambda: callback(self._wait(None)), name="treering-on-complete", daemon=True))


STATE = "state"  # Orbax's name of a tree that the program does not name
RESERVED = ("metrics", "AUTO", "_CHECKPOINT_DELETION")  # Orbax uses these names itself

Path = str | os.PathLike[str]


def save(
    path: Path, state: Any, *, checkpointable_name: str = STATE, overwrite: bool = False, custom_metadata: Any = None
) -> None:
    """Saves a tree at a path, and returns when it is durable.

    state: any tree that `treering.save` takes.
    checkpointable_name: with another name than the default, the tree becomes the only child of a `Composite`.
    overwrite: replaces an existing checkpoint, which stays until the new one is durable.
    custom_metadata: JSON, recorded with the checkpoint.

    Raises `CheckpointExistsError`, which is a `ValueError`, and the errors of `treering.save`.
    """
    _start(path, {checkpointable_name: state}, overwrite, custom_metadata, wait=True)


def save_async(
    path: Path, state: Any, *, checkpointable_name: str = STATE, overwrite: bool = False, custom_metadata: Any = None
) -> AsyncResponse[None]:
    """Saves a tree in the background, with the values at the call. See `save`; `result` raises later errors."""
    return _start(path, {checkpointable_name: state}, overwrite, custom_metadata, wait=False)


def save_checkpointables(
    path: Path, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> None:
    """Saves checkpointables as one checkpoint, and returns when it is durable.

    checkpointables: trees, iterators and objects of your own, by name.

    Raises `MismatchError`, which is a `ValueError`, for reserved names, `NoEntryError`, which is a `KeyError`, for an
    object without a handler, and the errors of `save`.
    """
    _start(path, check_names(checkpointables), overwrite, custom_metadata, wait=True)


def save_checkpointables_async(
    path: Path, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> AsyncResponse[None]:
    """Saves checkpointables in the background; see `save_checkpointables`. Handlers of your own run before."""
    return _start(path, check_names(checkpointables), overwrite, custom_metadata, wait=False)


def save_pytree(*args: Any, **kwargs: Any) -> None:
    """Does what `save` does. Deprecated."""
    deprecated("save")
    save(*args, **kwargs)


def save_pytree_async(*args: Any, **kwargs: Any) -> AsyncResponse[None]:
    """Does what `save_async` does. Deprecated."""
    deprecated("save_async")
    return save_async(*args, **kwargs)


def deprecated(name: str) -> None:
    """Warns that a function is replaced by the named one."""
    warnings.warn(f"Use `{name}` instead.", DeprecationWarning, stacklevel=3)


def save_tree_at(path: Any, tree: Any, context: Context | None = None) -> None:
    """Saves a tree into a directory that exists, for the handler of trees. Only Treering's own format can do that."""
    save_now(path, tree_to_save(tree, context or get_context()), overwrite=True)


def _start(
    path: Path, checkpointables: Mapping[str, Any], overwrite: bool, metadata: Any, *, wait: bool
) -> AsyncResponse[None]:
    context = get_context().check()
    if context.checkpoint_layout is CheckpointLayout.SAFETENSORS:
        raise UnsupportedValueError(f"{path}: checkpoint_layout=SAFETENSORS is for loads; use treering.save")
    for_orbax = items.format_options(context.write, several=True)["format"] == "orbax"
    tree = tree_of(checkpointables, context, for_orbax=for_orbax)
    options = items.format_options(context.write, several=isinstance(tree, nodes.ItemsTree))
    callback = context.asynchronous.post_finalization_callback
    if (limit := context.memory.write_concurrent_bytes) is not None:
        options["memory_limit"] = limit
    try:
        begin = save_now if wait else save_in_background
        pending = begin(path, tree, overwrite=overwrite, metadata=metadata, **options)
    except ExistsError as error:
        raise CheckpointExistsError(*error.args) from error
    background = pending if isinstance(pending, PendingSave) else None
    restricted = restrict_later(background, path, context.file)
    if background is None:
        restricted()
    response: AsyncResponse[None] = AsyncResponse(lambda timeout: _result(background, restricted, timeout))
    if callback is not None:
        response.on_complete(lambda _: callback())
    return response


def _result(pending: PendingSave | None, restricted: Callable[[], None], timeout: float | None) -> None:
    if pending is None:
        return
    try:
        pending.result(timeout)
        restricted()
    except ExistsError as error:
        raise CheckpointExistsError(*error.args) from error


def check_names(checkpointables: Any) -> dict[str, Any]:
    """Returns checkpointables. Raises `MismatchError`, which is a `ValueError`, if they are none."""
    if not isinstance(checkpointables, dict) or not checkpointables:
        raise MismatchError(f"checkpointables: expected a dict with at least one name, found {checkpointables!r:.100}")
    if wrong := [name for name in checkpointables if not isinstance(name, str) or not name or name in RESERVED]:
        raise MismatchError(f"checkpointables: {wrong[0]!r}: Orbax uses this name itself; choose another")
    return checkpointables


def tree_of(checkpointables: Mapping[str, Any], context: Context, *, for_orbax: bool) -> Any:
    """Returns the tree that has checkpointables: a `Composite`, or the tree `state` itself if that is the only one.

    for_orbax: the tree is saved in the format of Orbax, which has the states of iterators as files, and finds a tree by
        its name only.

    Raises `NoEntryError` for an object that nothing can save.
    """
    if wrong := [name for name, value in checkpointables.items() if value is None]:
        raise MismatchError(f"{wrong[0]}: expected an object to save, found None")
    made = {name: _part(name, value, context, for_orbax) for name, value in checkpointables.items()}
    if for_orbax:
        return nodes.composite(made, version_1=True)
    only = made.get(STATE)
    is_one_tree = len(made) == 1 and STATE in made and not isinstance(only, nodes.HandlerFiles)
    return only if is_one_tree else nodes.composite(made)


def _part(name: str, value: Any, context: Context, for_orbax: bool) -> Any:
    handler = registry.handler_to_save(context.checkpointables.registry, name, value)
    if handler is not None:
        return registry.save_files(value, handler)
    is_iterator = state_methods.is_iterator(type(value))
    if isinstance(value, StatefulCheckpointable) and (for_orbax or not is_iterator):
        return registry.save_files(value, None)
    if is_iterator:
        return value
    if name != STATE and (reason := unsupported_leaf(value)):
        raise NoEntryError(
            f"{name}: expected a tree, an iterator, or an object with a registered handler, found {reason}; see "
            "handlers.register_handler"
        )
    return tree_to_save(value, context)
