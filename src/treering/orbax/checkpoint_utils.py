"""Helpers that make the options of restores, and wait for steps; the namespace `checkpoint_utils` of Orbax."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .._run.follow import follow
from .._run.run_layout import steps
from ..errors import MismatchError
from .arguments import PLACEHOLDER, ArrayRestoreArgs, RestoreArgs, tree_in
from .errors import warn_unused
from .namespaces import lookup
from .tree_restore import real_sharding

__getattr__ = lookup("checkpoint_utils")


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Returns a tree of `RestoreArgs` that restores leaves of the kinds that a target has.

    target: arrays, `jax.ShapeDtypeStruct`, Python numbers, text, metadata of leaves, or `PLACEHOLDER`. A shape without
        a sharding becomes a NumPy array.
    sharding_tree: shardings with the structure of the target; by default its own.
    set_global_shape: True to expect the shapes of the target.
    support_layout: True to take the layouts of the target, too.

    Raises `MismatchError` for a leaf of another type.
    """

    def place(leaf: Any) -> Any:
        layout = getattr(leaf, "format", None) if support_layout else None
        return layout if layout is not None else getattr(leaf, "sharding", None)

    def args(leaf: Any, sharding: Any) -> Any:
        return _args(leaf, sharding, set_global_shape, strict)

    tree = tree_in(target)
    places = jax.tree.map(place, tree) if sharding_tree is None else tree_in(sharding_tree)
    if sharding_tree is None:  # None is no leaf for JAX, and most leaves on the host have no sharding.
        made = jax.tree.map(lambda leaf: args(leaf, place(leaf)), tree)
    else:
        made = jax.tree.map(args, tree, places)
    return made


def _args(leaf: Any, sharding: Any, set_shape: bool, strict: bool) -> Any:
    name = type(leaf).__name__
    if leaf is PLACEHOLDER:
        return RestoreArgs(restore_type=type(PLACEHOLDER))
    if isinstance(leaf, str | bytes) or name == "StringMetadata":
        return RestoreArgs(restore_type=str if name == "StringMetadata" else type(leaf))
    if name == "ScalarMetadata":
        return RestoreArgs(restore_type=type(np.dtype(leaf.dtype).type(0).item()), dtype=leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    if isinstance(leaf, jax.Array) or (isinstance(leaf, jax.ShapeDtypeStruct) or name == "ArrayMetadata"):
        sharding = real_sharding(sharding)
        if sharding is None and not isinstance(leaf, jax.Array):
            return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = tuple(leaf.shape) if set_shape and not key else None
        dtype = None if key else leaf.dtype
        return ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype, strict=strict)
    if isinstance(leaf, int | float | complex | np.generic):
        return RestoreArgs(restore_type=type(leaf))
    raise MismatchError(f"target: expected arrays, shapes, numbers, text or metadata, found a {type(leaf).__name__}")


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    **snapshots: Any,
) -> Iterator[int]:
    """Yields the newest step of a run whenever there is a new one. Steps that came in between are left out.

    timeout: seconds without a new step, after which the iterator ends; with a `timeout_fn` only if that returns True.
    seconds_to_sleep, step_prefix, step_format_fixed_length, step_name_format: not needed; Treering looks every half
        second, and finds the names of steps.

    snapshot_dir, set_immutable, ignore_snapshot_errors: have no effect, which is logged. An open step can be read even
        after it is deleted.
    """
    _warn_of_snapshots("checkpoints_iterator", snapshots)
    last: int | None = None
    while True:
        step = _next_step(checkpoint_dir, last, timeout)
        if step is None:
            if timeout_fn is not None and not timeout_fn():
                continue
            return
        begun = time.monotonic()
        yield step
        last = step
        time.sleep(max(0.0, min_interval_secs - (time.monotonic() - begun)))


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    seconds_to_sleep: float = 1,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    **snapshots: Any,
) -> Iterator[int]:
    """Waits for the first step, or for one from `until_step` on, and yields it; -1 after the timeout."""
    _warn_of_snapshots("wait_for_new_checkpoint", snapshots)
    after = None if until_step is None else until_step - 1
    while (step := _next_step(checkpoint_dir, after, timeout)) is None:
        if timeout_fn is None or timeout_fn():
            break
    yield -1 if step is None else step


def _next_step(run: str | os.PathLike[str], after: int | None, timeout: float | None) -> int | None:
    """Waits for a step later than `after`, and returns the newest; None after the timeout."""
    before_first = after is None or after < 0
    for ckpt in follow(run, after=None if before_first else after, timeout=timeout, newest=True):
        return max([*steps(run), *([] if ckpt.step is None else [ckpt.step])])
    return None


def _warn_of_snapshots(owner: str, options: dict[str, Any]) -> None:
    known = {"snapshot_dir": None, "set_immutable": None, "ignore_snapshot_errors": True}
    if unknown := options.keys() - known.keys():
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    warn_unused(owner, **{name: (value, known[name]) for name, value in options.items()})
