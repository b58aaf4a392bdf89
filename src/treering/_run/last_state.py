"""The newest state that a loop passed to `save`. `save_on_error` saves it when the loop raises."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._core.values import decode_float
from .._pytree import flax, iterators, state_methods
from .._pytree.devices import encode_metrics
from .._save.pending import PendingSave
from .._save.target import metadata_to_json
from ..errors import UnsupportedError
from ..rules import Rule
from .pending_saves import log_failure

_log = logging.getLogger("treering")


class StepOptions(NamedTuple):
    """The arguments of `Checkpointer.save` other than step, tree and `force`."""

    metrics: Mapping[str, Any] | None
    metadata: Any
    on_exists: Literal["error", "skip", "overwrite"]
    rules: Sequence[Rule]
    dtype: Any
    memory_limit: int | None


class _SaveCall(NamedTuple):
    """A call of `save`, and a function that returns the tree as it was then, if its arrays still exist."""

    step: int
    options: StepOptions
    pending: PendingSave | None  # the save that this call began, if it began one
    omissions: list[str]  # metrics and metadata, and why they cannot be saved
    build: Callable[[], Any]


class LastState:
    """The step, tree and options of the newest call of `save`, as they were at that call.

    JAX arrays never change, so only weak references to them are held: device memory is not used longer than the loop
    uses it. Leaves that the loop may change in place are copied, if they have at most `copy_limit` bytes; None copies
    all. Unless `enabled`, nothing is noted.
    """

    def __init__(self, *, enabled: bool, copy_limit: int | None = None) -> None:
        self._enabled, self._copy_limit = enabled, copy_limit
        self._last_call: _SaveCall | None = None
        self._held: Any = None  # the tree, if it must not vanish

    def forget(self) -> None:
        """Forgets the noted call, because the loop continues from another state."""
        self._last_call = self._held = None

    def remember(self, step: int, tree: Any, options: StepOptions, pending: PendingSave | None) -> None:
        """Notes a call in place of the one before. If the tree cannot be saved, `get` raises later."""
        if self._enabled:
            self._held = None
            try:
                self._last_call = _snapshot(step, tree, options, pending, self._copy_limit)
            except Exception as error:  # Containers and iterators are the user's code.
                # A traceback would keep the tree alive.
                self._last_call = _SaveCall(step, options, pending, [], _fail(str(error) or type(error).__name__))

    @property
    def step(self) -> int | None:
        """The step of the noted call; None if there is none."""
        return self._last_call and self._last_call.step

    @property
    def is_saved(self) -> bool:
        """True if the noted call itself saved its tree. Read it only while no save is running."""
        pending = self._last_call and self._last_call.pending
        return pending is not None and not pending.failed

    @property
    def is_available(self) -> bool:
        """True if nothing would be lost if the loop ended now: the noted tree is saved, or `save` can save it."""
        if self._last_call is None or self.is_saved:
            return True
        try:
            self._last_call.build()
        except Exception:  # Containers are the user's code.
            return False
        return True

    def keep_alive(self) -> None:
        """Keeps the tree of the noted call alive until the next call. The loop may still donate its arrays."""
        if self._last_call is not None and not self.is_saved:
            with contextlib.suppress(Exception):  # It is gone.
                self._held = self._last_call.build()

    def get(self) -> tuple[Any, StepOptions, list[str]]:
        """Returns the tree and the options of the noted call, and the reasons why metrics or metadata are left out.

        Raises `UnsupportedError` if the tree cannot be saved, or its arrays no longer exist.
        """
        assert self._last_call
        _, options, _, omissions, build = self._last_call
        tree = build()
        metrics = options.metrics and _snapshot_metrics(options.metrics, omissions, wait=True)
        return tree, options._replace(metrics=metrics), omissions

    def save(
        self,
        root: str,
        reason: str,
        pending_saves: Sized,
        save: Callable[..., PendingSave | None],
        wait: Callable[[], None],
        *,
        raises: bool,
    ) -> None:
        """Waits for running saves, then saves the tree of the noted call, unless that call saved it.

        Logs if the tree is gone. `save` and `wait` are methods of the Checkpointer of the run at `root`. `reason` names
        what ended the loop. Raises at last the first error of these methods, or only logs their errors.
        """
        if self.step is None:
            return
        errors: list[Exception] = []
        while len(pending_saves):
            with _collected(errors) if raises else log_failure():
                wait()
        if raises:
            with _collected(errors):
                self.begin(root, reason, save, wait)
        else:
            self.begin_or_log(root, reason, save, wait)
        if errors:
            raise errors[0]

    def begin_or_log(
        self, root: str, reason: str, save: Callable[..., PendingSave | None], wait: Callable[[], None] = lambda: None
    ) -> None:
        """Calls `begin`, and logs its errors."""
        try:
            self.begin(root, reason, save, wait)
        except Exception as error:
            _log.error("%s: step %s is not saved, though %s ended the loop: %s", root, self.step, reason, error)

    def begin(
        self, root: str, reason: str, save: Callable[..., PendingSave | None], wait: Callable[[], None] = lambda: None
    ) -> None:
        """Begins to save the tree of the noted call, unless that call saved it. See `save`."""
        if self.step is None or self.is_saved:
            return
        about = f"{root}: step {self.step}"
        try:
            tree, options, omissions = self.get()
        except UnsupportedError as error:
            _log.error("%s is not saved, though %s ended the loop: %s", about, reason, error)
            return
        is_saved = save(self.step, tree, force=True, **options._asdict())
        wait()
        if is_saved is None:
            _log.warning("%s is not saved, though %s ended the loop: it exists, and on_exists='skip'", about, reason)
            return
        for problem in omissions:
            _log.warning("%s: %s", about, problem)
        _log.warning("%s is saved, because %s ended the loop", about, reason)


@contextlib.contextmanager
def _collected(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)


def _snapshot_metrics(metrics: Mapping[str, Any], omissions: list[str], *, wait: bool) -> dict[str, Any]:
    """Returns the metrics as they are now. Adds to `omissions` why some cannot be saved: the state matters more.

    Without `wait`, JAX scalars are not converted: they never change, and reading one would hold up the loop.
    """
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            is_immutable = not wait and isinstance(value, jax.Array) and value.shape == ()
            numbers[name] = value if is_immutable else decode_float(encode_metrics({name: value})[name])
        except Exception as error:  # A JAX scalar may be deleted, or its computation may have failed.
            omissions.append(f"the metric {name!r} is left out: {error}")
    return numbers


def _snapshot(
    step: int, tree: Any, options: StepOptions, pending: PendingSave | None, copy_limit: int | None
) -> _SaveCall:
    omissions: list[str] = []
    metrics = options.metrics and _snapshot_metrics(options.metrics, omissions, wait=False)
    try:
        metadata = metadata_to_json(options.metadata)
    except UnsupportedError as error:  # Save the state nevertheless.
        metadata = None
        omissions.append(f"its metadata is left out: {error}")
    options = options._replace(metrics=metrics, metadata=metadata, rules=tuple(options.rules))
    return _SaveCall(step, options, pending, omissions, _note_tree(tree, copy_limit))


def _fail(problem: str) -> Callable[[], Any]:
    def build() -> Any:
        raise UnsupportedError(f"it cannot be saved: {problem}")

    return build


def _note_tree(tree: Any, copy_limit: int | None) -> Callable[[], Any]:
    """Returns a function that returns the tree as it is now. It raises `UnsupportedError` if that is gone."""
    leaves, structure, numbers, variables = flax.outline(tree)
    objects = {n: get for n in numbers if (get := _note_object(leaves[n]))}
    if variables or len(objects) < len(numbers):
        leaves, structure = jax.tree.flatten(flax.split(tree).tree)
        objects = {}
    held: list[Callable[[], Any]] = []
    types = set(map(type, leaves))
    is_array = {kind: issubclass(kind, jax.Array) for kind in types}
    if all(is_array.values()):
        held += map(weakref.ref, leaves)
    else:
        if copy_limit is not None:
            _check_size(leaves, copy_limit)
        copies: dict[int, Any] = {}
        for n, leaf in enumerate(leaves):
            try:
                held.append(objects.get(n) or (weakref.ref(leaf) if is_array[type(leaf)] else _note_leaf(leaf, copies)))
            except UnsupportedError as error:
                path, _ = jax.tree_util.tree_flatten_with_path(structure.unflatten(leaves))[0][n]
                raise UnsupportedError(f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {error}") from error

    def build() -> Any:
        found = [get() for get in held]
        arrays = [leaf for leaf, get in zip(found, held, strict=True) if type(get) is weakref.ref]
        if gone := sum(array is None or array.is_deleted() for array in arrays):
            raise UnsupportedError(
                f"{gone} of its {len(arrays)} arrays are gone: the loop has donated, deleted or dropped them"
            )
        return structure.unflatten(found)

    return build


def _check_size(leaves: list[Any], copy_limit: int) -> None:
    size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
    if size > copy_limit:
        raise UnsupportedError(f"NumPy arrays of {size:,} bytes are not copied in each step, only up to {copy_limit:,}")


def _note_object(node: Any) -> Callable[[], Any] | None:
    """Returns a function that returns an NNX object as long as it has not changed, or None if that cannot be seen.

    To split the object, as a save does, would take ten times as long.
    """
    leaves, structure = jax.tree.flatten(node)
    if not all(isinstance(leaf, jax.Array | np.generic | int | float | complex | str | bytes) for leaf in leaves):
        return None  # Its leaves may change in place.
    noted = weakref.ref(node)
    held = [weakref.ref(leaf) if isinstance(leaf, jax.Array) else lambda leaf=leaf: leaf for leaf in leaves]

    def get() -> Any:
        found = noted()
        now, as_noted = jax.tree.flatten(found)
        if (
            found is None
            or as_noted != structure
            or any(get() is not leaf for get, leaf in zip(held, now, strict=True))
        ):
            raise UnsupportedError("the loop has changed or dropped its NNX objects since")
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in now):
            raise UnsupportedError("the loop has donated or deleted arrays of its NNX objects")
        return found

    return get


def _note_leaf(leaf: Any, copies: dict[int, Any]) -> Callable[[], Any]:
    """Returns a function that returns a leaf as it is now. `copies` of one tree keep a shared array shared."""
    if isinstance(leaf, np.ndarray):
        leaf = copies.setdefault(id(leaf), leaf.copy("K"))
    elif state_methods.is_iterator(type(leaf)):
        leaf = iterators.freeze(leaf)
    return lambda: leaf
