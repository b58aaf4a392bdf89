"""The state that a loop has shown last, for a last save when the loop raises."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .._core.values import decode_float
from .._pytree import flax, iterators
from .._save.metadata import plain
from .._save.metrics import encoded
from .._save.pending import PendingSave
from ..errors import UnsupportedError
from ..rules import Rule


class StepOptions(NamedTuple):
    """What a call of `Checkpointer.save` says besides the tree, but for `force`."""

    metrics: Mapping[str, Any] | None
    metadata: Any
    on_exists: Literal["error", "skip", "overwrite"]
    rules: Sequence[Rule]
    dtype: Any
    memory_limit: int | None


class _Noted(NamedTuple):
    """One call: its leaves, as functions that return them, and what makes a tree of them."""

    step: int
    options: StepOptions
    pending: PendingSave | None  # of the call itself, when it was due
    left_out: list[str]  # metrics and metadata, and why they cannot be saved
    leaves: Sequence[Callable[[], Any]]
    build: Callable[[list[Any]], Any]
    problem: str = ""


class LastState:
    """The step, tree and options of the newest call of `save`, as they were at that call.

    JAX arrays never change, and only weak references to them are held: no memory of a device is in use longer than
    the loop uses it. What the loop may change in place is copied. Unless `wanted`, nothing is noted.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._noted: _Noted | None = None

    def forget(self) -> None:
        """The loop goes on from elsewhere."""
        self._noted = None

    def note(self, step: int, tree: Any, options: StepOptions, pending: PendingSave | None) -> None:
        """Takes the place of what was noted before, at once. What cannot be saved is raised by `get`."""
        if self._wanted:
            try:
                self._noted = _note(step, tree, options, pending)
            except Exception as error:  # of containers and iterators that are anybody's code
                problem = str(error) or type(error).__name__  # and not its traceback, which holds the tree
                self._noted = _Noted(step, options, pending, [], (), list, problem)

    @property
    def step(self) -> int | None:
        """The step of that call, None before it."""
        return self._noted and self._noted.step

    @property
    def saved(self) -> bool:
        """Whether that call itself saved it; asked when no save is under way."""
        pending = self._noted and self._noted.pending
        return pending is not None and not pending.failed

    def get(self) -> tuple[Any, StepOptions, list[str]]:
        """The tree and the options of that call, and why metrics or metadata are left out.

        Raises `UnsupportedError` when the tree is not there any more.
        """
        assert self._noted
        _, options, _, left_out, held, build, problem = self._noted
        if problem:
            raise UnsupportedError(f"it cannot be saved: {problem}")
        leaves = [leaf() for leaf in held]
        arrays = [leaf for leaf, own in zip(leaves, held, strict=True) if isinstance(own, weakref.ref)]
        if gone := sum(array is None or array.is_deleted() for array in arrays):
            raise UnsupportedError(
                f"{gone} of its {len(arrays)} arrays are gone: donated, deleted or let go by the loop"
            )
        metrics = options.metrics and _numbers(options.metrics, left_out, wait=True)
        return build(leaves), options._replace(metrics=metrics), left_out


def _numbers(metrics: Mapping[str, Any], left_out: list[str], *, wait: bool) -> dict[str, Any]:
    """The metrics as they are now; why some cannot be saved is added to `left_out`: the state counts for more.

    Unless told to `wait`, JAX scalars stay what they are: they never change, and asking for one holds up the loop.
    """
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        try:
            lasting = not wait and isinstance(value, jax.Array) and value.shape == ()
            numbers[name] = value if lasting else decode_float(encoded({name: value})[name])
        except Exception as error:  # of a JAX scalar that was deleted, or whose computation failed
            left_out.append(f"the metric {name!r} is left out: {error}")
    return numbers


def _note(step: int, tree: Any, options: StepOptions, pending: PendingSave | None) -> _Noted:
    left_out: list[str] = []
    metrics = options.metrics and _numbers(options.metrics, left_out, wait=False)
    try:
        metadata = plain(options.metadata)
    except UnsupportedError as error:  # the state counts for more
        metadata = None
        left_out.append(f"its metadata is left out: {error}")
    options = options._replace(metrics=metrics, metadata=metadata, rules=tuple(options.rules))
    leaves, structure = jax.tree.flatten(flax.split(tree)[0])
    copies: dict[int, Any] = {}
    return _Noted(step, options, pending, left_out, [_held(leaf, copies) for leaf in leaves], structure.unflatten)


def _held(leaf: Any, copies: dict[int, Any]) -> Callable[[], Any]:
    """A leaf as it is now; `copies` are those of this tree, so that what is one array stays one."""
    if isinstance(leaf, jax.Array):
        return weakref.ref(leaf)
    if isinstance(leaf, np.ndarray):
        leaf = copies.setdefault(id(leaf), leaf.copy("K"))
    elif iterators.is_iterator(type(leaf)):
        leaf = iterators.frozen(leaf)
    return lambda: leaf
