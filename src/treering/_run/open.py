"""Opens or restores the checkpoint at a path: a checkpoint itself, or a step of a run."""

import contextlib
import functools
import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from .. import formats, stores
from .._core import expansion
from .._core.entries import check_readable, metric_and_mode
from .._core.source import Wanted, wanted_leaves
from .._core.tracebacks import hide_internal_frames
from .._processes import coordinator
from .._restore.checkpoint import Checkpoint
from ..errors import MismatchError, NotFoundError
from ..stores.read_errors import ReplacedError, reading
from . import run_layout
from .step_catalog import StepCatalog
from .step_fallback import OneCheckpoint, StepCopy, find_step_copies, open_in_store, use_valid

if TYPE_CHECKING:
    from .._restore.options import RestoreOptions
    from ..rules import Rule

T = TypeVar("T")

_log = logging.getLogger("treering")
_MANIFEST_PREFETCH_BYTES = 1 << 20  # bytes of a manifest that the first request reads


@hide_internal_frames
def open_checkpoint(
    path: str | os.PathLike[str], *, step: int | None = None, best: str | None = None, format: str | None = None
) -> Checkpoint:
    """Opens a checkpoint, or a run's latest valid step (or the given one), without reading arrays.

    >>> ckpt = tr.open("runs/gpt", step=1000)

    best: opens the valid step with the highest metric of this name or, with ``"loss:min"``, the lowest.
    format: the name of the format to read it in, instead of detecting the format from the files. In a run, steps of
        other formats are ignored.

    A step is valid if its manifest is undamaged and its array files exist in full size. Raises `NotFoundError` if
    there is none, `CorruptError` if it is damaged (for a run without `step`: if all steps are), and
    `UnsupportedError` if a later release wrote it.
    """
    return open_prefixed(path, None, step=_chosen_step(path, step, best), format=format)


def _chosen_step(path: str | os.PathLike[str], step: int | None, best: str | None) -> int | None:
    """Returns `step`, or the best step of a run. Raises `MismatchError` for both, and for a metric that no step has."""
    if best is None:
        return step
    if step is not None:
        raise MismatchError(f"best={best!r}: expected step= or best=, found both")
    from . import metrics  # It imports NumPy, which opening a checkpoint does not need.

    metric, mode = metric_and_mode(best)
    place = stores.absolute(path)
    store = stores.get(place)
    with store.glance(place):
        layout = run_layout.RunLayout(run_layout.find_prefix(store, place))
        saved = StepCatalog(store, place, layout).valid_steps(foreign=True)
    found = metrics.best(saved, metric, mode)
    if found is None:
        raise NotFoundError(f"{place}: expected a step with the metric {metric!r}, found no metrics")
    _log.info("%s: step %d has the best %s", place, found, metric)
    return found


def open_prefixed(
    path: str | os.PathLike[str], prefix: str | None, *, step: int | None, format: str | None = None
) -> Checkpoint:
    """Opens a checkpoint as `open_checkpoint` does. With a prefix, opens a step of a run whose names begin with it."""
    place = stores.absolute(path)

    def use(ckpt: Checkpoint) -> Checkpoint:
        if step is None and ckpt.path != place:  # A named checkpoint may lack leaves.
            check_readable(ckpt._source.entries.values())
        return ckpt

    return _open_and_use(place, step, use, format, fallback=step is None, prefix=prefix)


@overload
def restore(
    path: str | os.PathLike[str],
    like: None = None,
    *,
    step: int | None = None,
    best: str | None = None,
    format: str | None = None,
    **options: "Unpack[RestoreOptions]",
) -> Any: ...
@overload
def restore(
    path: str | os.PathLike[str],
    like: T,
    *,
    step: int | None = None,
    best: str | None = None,
    format: str | None = None,
    **options: "Unpack[RestoreOptions]",
) -> T: ...
@hide_internal_frames
def restore(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    step: int | None = None,
    best: str | None = None,
    format: str | None = None,
    at: str = "",
    rules: "Sequence[Rule]" = (),
    missing: str | Iterable[str] = "error",
    extra: str | Iterable[str] = "error",
    dtype: Any = None,
    grow: Iterable[str] = (),
    sharding: Any = None,
    verify: bool = True,
    mmap: bool | None = None,
    memory_limit: int | None = None,
    progress: bool = False,
    read: Literal["each", "once"] | None = None,
    max_expansion: float = expansion.MAX_RATIO,
) -> Any:
    """Restores a checkpoint, or a run's latest valid step. A damaged step is logged, and the step before it taken.

    In a job of several processes, each process takes the latest step, valid or not, because it cannot agree with its
    peers on another one. A `Checkpointer` and `read="once"` can.

    >>> state = tr.restore("runs/gpt", like=state)

    like: the template. Its leaves decide the types of the result: a `jax.Array` or `ShapeDtypeStruct` becomes a
        `jax.Array`, a NumPy array a writable NumPy array, a Python scalar that type, a typed key a typed key; ``...``
        skips everything below. Without a template the result is nested dicts, lists and tuples of NumPy arrays.
    step: the step of a run; the latest valid one by default.
    best: restores the valid step with the highest metric of this name or, with ``"loss:min"``, the lowest.
    format: the name of the format to read it in, instead of detecting the format from the files. In a run, steps of
        other formats are ignored.
    at: restores (and reads) only the leaves below this path; `like` is their template.
    rules: changes of names, shapes and values, see `treering.rules`; their paths are relative to `at`.
    missing: for leaves of the template that the checkpoint lacks: "error", "template" (take its value), or globs of
        the paths whose values to take from the template.
    extra: for leaves of the checkpoint that the template lacks: "error", "ignore", or globs of paths to leave out.
    dtype: "template" narrows floats to the template's dtypes; a floating-point dtype casts all floats to it, except
        those of quantized weights. Their codes never become floats without a rule.
    grow: globs of the lists, tuples, dicts, arrays and `None` in the template that take the entries, shape or contents
        that the checkpoint has. What the template lacks in them comes back as the kind that was saved.
    sharding: replaces the template's sharding: a sharding, a `PartitionSpec` for the mesh that is set, a `Format` (a
        layout with a sharding), a function of (path, shape, dtype) that returns one of these, or a pytree of those that
        is a prefix of the template. NumPy leaves that it places become JAX arrays. "saved" places JAX arrays
        as they were: on the mesh that is set, else on one like that of the save, or on the same device, in the same
        memory. NumPy arrays then stay NumPy arrays.
    verify: checks the checksum of every byte that is used, before anything is returned.
    mmap: adopts mapped files instead of copying; by default those of Treering on file systems that are known to be safe
        for it. Other programs may write into their files in place. Mapped arrays then change, or end the process.
    memory_limit: bytes of host memory in use at a time for arrays that must pass through it; 256 MiB by default.
    progress: shows a bar, in a terminal or a notebook (there with `ipywidgets`).
    read: with several processes, "once" has each process read a share of the bytes that several need, and send it to
        its peers from device to device; all must make the call. "each" has every process read all that it needs. By
        default processes do not wait for one another here. A `Checkpointer` reads once unless the run is on a local
        disk.
    max_expansion: raises an error, before reading, if a stored byte stands for more bytes of arrays than this (from
        64 MiB on). Use `math.inf` for a checkpoint that you trust and that compresses better, such as one of zeros.

    Raises `MismatchError`, which names the likely cause and every difference, `CorruptError` and `NotFoundError`.
    """
    place, step = stores.absolute(path), _chosen_step(path, step, best)
    options: RestoreOptions = {
        "at": at,
        "rules": rules,
        "missing": missing,
        "extra": extra,
        "dtype": dtype,
        "grow": grow,
        "sharding": sharding,
        "verify": verify,
        "mmap": mmap,
        "memory_limit": memory_limit,
        "progress": progress,
        "read": read,
        "max_expansion": max_expansion,
    }
    if read == "once" and coordinator.is_multi_process():
        return _restore_collectively(place, step, format, like, options)

    def use(ckpt: Checkpoint) -> Any:
        return ckpt._restore(like, None, **options)

    if step is None and format is None and (ckpt := _open_native_in_bucket(place)):
        with contextlib.suppress(ReplacedError):  # It was replaced meanwhile: open it again below.
            return use(ckpt)
    # Processes that fell back by themselves could end with parts of different steps in one array.
    fallback = step is None and not coordinator.is_multi_process()
    open_and_use = functools.partial(_open_and_use, place, step, use, format, fallback=fallback)
    if extra != "ignore" or like is None or at or rules:
        return open_and_use()
    from .._pytree import flax, walk  # They import JAX, which opening a checkpoint does not need.

    wanted = Wanted(lambda: walk.flatten_split(flax.split(like)).paths)
    token = wanted_leaves.set(wanted)
    try:
        return open_and_use()
    except MismatchError:
        if not wanted.is_used:
            raise
    finally:
        wanted_leaves.reset(token)
    return open_and_use()  # The error names what the other files have.


def _open_native_in_bucket(place: str) -> Checkpoint | None:
    """Opens a native checkpoint in a bucket without listing first, which saves a request. None if there is none.

    The restore itself finds out if files are missing.
    """
    store = stores.get(place)
    # A path with a suffix is usually another library's file: trying it first would only take time.
    if store.object_bytes is None or posixpath.splitext(place)[1]:
        return None
    from ..formats.treering.read import Reader

    with contextlib.suppress(ReplacedError), reading(place):
        return Checkpoint(Reader(store, place, expected=_MANIFEST_PREFETCH_BYTES))
    return None


def _restore_collectively(
    place: str, step: int | None, format: str | None, like: Any, options: "RestoreOptions"
) -> Any:
    """Restores, in all processes of the job, the step that process 0 finds."""
    from .._processes import consistency

    store, only = stores.get(place), None if format is None else formats.get(format)

    def listed() -> list[tuple[int, str, str | None]] | str | None:
        with reading(place), store.glance(place):
            found = find_step_copies(store, place, step, only)
        if isinstance(found, OneCheckpoint):
            return found.format
        return [(one.step, one.path, one.format) for one in found]

    with coordinator.collective_call(
        f"restore({place!r}{'' if step is None else f', step={step}'})", "restoring"
    ) as call:
        on_all = functools.partial(consistency.attempt_on_all_processes, call)
        use = lambda ckpt: (ckpt._source.identity, ckpt._restore(like, call, **options))  # noqa: E731

        def find() -> list[StepCopy] | OneCheckpoint:
            found = call.broadcast(listed)
            if isinstance(found, str):
                return OneCheckpoint(store, place, found)
            return [StepCopy(number, store, path, name) for number, path, name in found]

        return use_valid(place, find, use, fallback=step is None, on_all_processes=on_all)[1][1]


def _open_and_use(
    place: str,
    step: int | None,
    use: Callable[[Checkpoint], T],
    format: str | None,
    *,
    fallback: bool,
    prefix: str | None = None,
) -> T:
    """Returns the result of `use` for a checkpoint, or for a step of a run."""
    store, only = stores.get(place), None if format is None else formats.get(format)

    def find() -> Iterator[StepCopy] | OneCheckpoint:
        with reading(place), store.glance(place):
            found = find_step_copies(store, place, step, only, prefix)
            if not isinstance(found, OneCheckpoint):
                return found
            with contextlib.suppress(ReplacedError):  # It was replaced meanwhile: `use_valid` opens it again.
                return found._replace(format=format, opened=open_in_store(store, place, found.format))
        return found._replace(format=format)

    return use_valid(place, find, use, fallback=fallback)[1]
