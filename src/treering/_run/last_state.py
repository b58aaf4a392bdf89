"""The newest state that a loop passed to `save`. `save_on_error` saves it when the loop raises."""

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._core.values import decode_float
from .._pytree import flax, iterators, state_methods
from .._save.metadata import metadata_to_json
from .._save.metrics import encode_metrics
from .._save.pending import PendingSave
from ..errors import UnsupportedError
from ..rules import Rule
from .failures import log_failure

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
    """A call of `save`: functions that return its leaves, and the function that builds the tree from them."""

    step: int
    options: StepOptions
    pending: PendingSave | None  # the save that this call began, if it began one
    omissions: list[str]  # metrics and metadata, and why they cannot be saved
    leaves: Sequence[Callable[[], Any]]
    build: Callable[[list[Any]], Any]
    problem: str = ""


class LastState:
    """The step, tree and options of the newest call of `save`, as they were at that call.

    JAX arrays never change, so only weak references to them are held: device memory is not used longer than the loop
    uses it. Leaves that the loop may change in place are copied. Unless `enabled`, nothing is noted.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._last_call: _SaveCall | None = None

    def forget(self) -> None:
        """Forgets the noted call, because the loop continues from another state."""
        self._last_call = None

    def remember(self, step: int, tree: Any, options: StepOptions, pending: PendingSave | None) -> None:
        """Notes a call in place of the one before. If the tree cannot be saved, `get` raises later."""
        if self._enabled:
            try:
                self._last_call = _snapshot(step, tree, options, pending)
            except Exception as error:  # Containers and iterators are the user's code.
                problem = str(error) or type(error).__name__  # A traceback would keep the tree alive.
                self._last_call = _SaveCall(step, options, pending, [], (), list, problem)

    @property
    def step(self) -> int | None:
        """The step of the noted call; None if there is none."""
        return self._last_call and self._last_call.step

    @property
    def is_saved(self) -> bool:
        """True if the noted call itself saved its tree. Read it only while no save is running."""
        pending = self._last_call and self._last_call.pending
        return pending is not None and not pending.failed

    def get(self) -> tuple[Any, StepOptions, list[str]]:
        """Returns the tree and the options of the noted call, and the reasons why metrics or metadata are left out.

        Raises `UnsupportedError` if the tree cannot be saved, or its arrays no longer exist.
        """
        assert self._last_call
        _, options, _, omissions, held, build, problem = self._last_call
        if problem:
            raise UnsupportedError(f"it cannot be saved: {problem}")
        leaves = [leaf() for leaf in held]
        arrays = [leaf for leaf, own in zip(leaves, held, strict=True) if isinstance(own, weakref.ref)]
        if gone := sum(array is None or array.is_deleted() for array in arrays):
            raise UnsupportedError(
                f"{gone} of its {len(arrays)} arrays are gone: the loop has donated, deleted or dropped them"
            )
        metrics = options.metrics and _snapshot_metrics(options.metrics, omissions, wait=True)
        return build(leaves), options._replace(metrics=metrics), omissions

    def save(
        self,
        root: str,
        reason: str,
        pending_saves: Sized,
        save: Callable[..., PendingSave | None],
        wait: Callable[[], None],
    ) -> None:
        """Waits for running saves, then saves the tree of the noted call, unless that call saved it.

        Logs every failure. `save` and `wait` are methods of the Checkpointer of the run at `root`. `reason` names the
        error that ended the loop.
        """
        if self.step is None:
            return
        while len(pending_saves):
            with log_failure():
                wait()
        if self.is_saved:
            return
        about = f"{root}: step {self.step}"
        try:
            tree, options, omissions = self.get()
            is_saved = save(self.step, tree, force=True, **options._asdict())
            wait()
        except Exception as error:
            _log.error("%s is not saved, though %s ended the loop: %s", about, reason, error)
            return
        if is_saved is None:
            _log.warning("%s is not saved, though %s ended the loop: it exists, and on_exists='skip'", about, reason)
            return
        for problem in omissions:
            _log.warning("%s: %s", about, problem)
        _log.warning("%s is saved, because %s ended the loop", about, reason)


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


def _snapshot(step: int, tree: Any, options: StepOptions, pending: PendingSave | None) -> _SaveCall:
    omissions: list[str] = []
    metrics = options.metrics and _snapshot_metrics(options.metrics, omissions, wait=False)
    try:
        metadata = metadata_to_json(options.metadata)
    except UnsupportedError as error:  # Save the state nevertheless.
        metadata = None
        omissions.append(f"its metadata is left out: {error}")
    options = options._replace(metrics=metrics, metadata=metadata, rules=tuple(options.rules))
    plain = flax.split(tree).tree
    leaves, structure = jax.tree.flatten(plain)
    copies: dict[int, Any] = {}
    getters: list[Callable[[], Any]] = []
    for leaf in leaves:
        try:
            getters.append(_leaf_getter(leaf, copies))
        except UnsupportedError as error:
            path, _ = jax.tree_util.tree_flatten_with_path(plain)[0][len(getters)]
            raise UnsupportedError(f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {error}") from error
    return _SaveCall(step, options, pending, omissions, getters, structure.unflatten)


def _leaf_getter(leaf: Any, copies: dict[int, Any]) -> Callable[[], Any]:
    """Returns a function that returns a leaf as it is now. `copies` of one tree keep a shared array shared."""
    if isinstance(leaf, jax.Array):
        return weakref.ref(leaf)
    if isinstance(leaf, np.ndarray):
        leaf = copies.setdefault(id(leaf), leaf.copy("K"))
    elif state_methods.is_iterator(type(leaf)):
        leaf = iterators.freeze(leaf)
    return lambda: leaf
