"""Saves a pytree: the calls `save` and `save_async`, and their option `base`."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

from .. import stores
from .._core.tracebacks import hide_internal_frames
from .._core.views import View
from .._processes import coordinator
from .._restore.checkpoint import Checkpoint
from .._threads.reentry import refuse_reentry
from ..errors import MismatchError, NotFoundError
from ..formats.treering import summary
from ..rules import Rule
from .job import start_save
from .pending import PendingSave, SaveReport
from .save_reuse import Bases
from .source import PlainTree, SavedTree, save_view
from .target import FormatOptions, Info, SaveOptions, SaveTarget, encode_info, target_of
from .unchanged import UnchangedArrays

_log = logging.getLogger("treering")


@hide_internal_frames
def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    format: str | None = None,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    rules: Sequence[Rule] = (),
    dtype: Any = None,
    base: Checkpoint | str | os.PathLike[str] | None = None,
    processes: Literal["all", "this"] = "all",
    timeout: float = 30,
    memory_limit: int | None = 64 << 20,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> SaveReport:
    """Saves a pytree and returns when it is durable.

    >>> tr.save("checkpoints/a", {"params": params, "step": 7})

    path: a new directory. Treering makes missing parents. `overwrite` replaces an existing checkpoint in one step.
    tree: any pytree of arrays, numbers, text, bytes, None, PRNG keys and functions (recorded by name only); or a
        `Checkpoint` of any format, which Treering copies in bounded memory. Checkpoints and their arrays (`LazyArray`)
        may also be leaves, so that parts of several checkpoints become one tree.
    format: "treering" or a name from `treering.formats`. The default follows the path's suffix (`.safetensors`,
        `.msgpack`, `.eqx`), else it is "treering". `options` are the format's own: `max_shard_size` and
        `filename_pattern` of safetensors; `composite=True` of Orbax, which makes an item of each top-level key.
    step, metrics, metadata: recorded with the tree, as they are at the call. Metrics are real scalars by name. Metadata
        is any JSON value (also NaN and infinities), or a `ConfigDict`, dataclasses, paths and scalars, which become
        one. A `Checkpoint` keeps its own unless you pass others. Passing one that the format cannot store is an error.
        One that the `Checkpoint` has and the format cannot store is left out and logged.
    rules: changes of names, shapes and values, see `treering.rules`.
    dtype: the dtype to which floating-point arrays are cast, except those of quantized weights.
    base: a native checkpoint, or its path, on the same disk. Its array files whose bytes the new checkpoint has too get
        another name there (a hard link), and are not written. At least one array must have a megabyte, and the copies
        must fit the memory limit. Each checkpoint is complete, but damage to a shared file damages both.
    processes: with several processes (`jax.distributed`), every process makes the call and writes its part. "this"
        saves what this process has, as if it had no peers. Some saves only one process can write: formats of one file,
        rules that need parts of several processes, other formats in a bucket. All processes then save the tree next to
        `path` in the native format first, and process 0 makes the requested checkpoint from that.
    timeout: seconds without a sign of life after which Treering considers another process dead.
    memory_limit: bytes of copies held at a time, if arrays must be copied (from a device, or because they are not in C
        order). A single larger array passes alone. With rules and in other formats, arrays are then read while they
        are written, in parts of 16 MiB or as much as the format needs at a time.
    progress: shows a progress bar in a terminal or a notebook (a notebook needs `ipywidgets`).

    Raises `UnsupportedError` for leaves that cannot be saved, `ExistsError` for a path in use, `NotFoundError` if there
    is no base, and `MismatchError` if the processes do not have the same tree; nothing is written then. Raises
    `SaveError` if writing fails, after Treering has removed everything that it wrote. Raises `PeerError` if another
    process is gone or does not make the call.
    """
    pending = _start(
        path, tree, step, metrics, metadata, base, processes, timeout,
        SaveOptions(format, overwrite, rules, dtype, memory_limit, False, progress, options),
    )  # fmt: skip
    try:
        return pending.result()
    except BaseException as error:
        pending._cancel(error)  # After an interrupt too, the files of the unfinished save are removed first.
        raise


@hide_internal_frames
def save_async(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    format: str | None = None,
    overwrite: bool = False,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    metadata: Any = None,
    rules: Sequence[Rule] = (),
    dtype: Any = None,
    base: Checkpoint | str | os.PathLike[str] | None = None,
    processes: Literal["all", "this"] = "all",
    timeout: float = 30,
    memory_limit: int | None = None,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> PendingSave:
    """Saves a pytree in the background.

    The save has the values of the arrays at the call: you may change, delete or donate them as soon as this returns.
    Saves are written in the order of the calls. A program that ends finishes them first.

    Takes the arguments of `save`, and raises its errors. If the save fails after this has returned, `result` raises the
    error. Otherwise the next call of `save` or `save_async` raises it, or it is printed when the interpreter ends.

    With a `memory_limit`, the call blocks until all but that many bytes of copies are written. Without one, it blocks
    only if the copies would take more than a quarter of the available memory (256 MiB are always allowed) or half of
    what a limit of this process, such as ``ulimit -d``, leaves, or if the copies of all processes of a host would leave
    less than an eighth of its memory. Treering logs that.
    """
    pending = _start(
        path, tree, step, metrics, metadata, base, processes, timeout,
        SaveOptions(format, overwrite, rules, dtype, memory_limit, True, progress, options),
    )  # fmt: skip
    pending._wait_if_exiting()
    return pending


def _start(
    path: str | os.PathLike[str],
    tree: Any,
    step: int | None,
    metrics: Mapping[str, Any] | None,
    metadata: Any,
    base: Checkpoint | str | os.PathLike[str] | None,
    processes: str,
    timeout: float,
    options: SaveOptions,
) -> PendingSave:
    place = stores.absolute(path)
    what = f"save({place!r}{'' if step is None else f', step={step}'})"
    refuse_reentry(what)
    call = coordinator.begin_call(what, timeout=timeout, processes=processes)
    with coordinator.ending_call(call):
        given = {"step": step, "metrics": metrics, "metadata": metadata}
        options = options._replace(
            explicit_info=frozenset([name for name, value in given.items() if value is not None]),
            reuse=None if base is None else _sharing_files_of(base),
        )
        return start_save(call, place, tree, _encode_info_of(tree, step, metrics, metadata), options)


def _encode_info_of(tree: Any, step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> Info:
    """Returns the information to record with the tree. A copied checkpoint keeps what the caller does not give."""
    if isinstance(tree, Checkpoint):
        step = tree.step if step is None else step
        metrics = tree.metrics if metrics is None else metrics
        metadata = tree.metadata if metadata is None else metadata
    return encode_info(step, metrics, metadata)


def preview(
    path: str | os.PathLike[str], ckpt: Checkpoint, options: SaveOptions, step: int | None = None
) -> tuple[SaveTarget, View]:
    """Returns the target of a save of a checkpoint, and the view of its leaves, without saving.

    step: the step to record, by default that of the checkpoint.

    Raises the errors that `save` raises before it reads arrays.
    """
    place, info = stores.absolute(path), _encode_info_of(ckpt, step, None, None)
    call = coordinator.begin_call(f"save({place!r})", processes="this")
    target = target_of(call, place, info, options)
    view = save_view(ckpt, options.rules, options.dtype, info)
    target.check_info_kept(view)
    target.check_iterators(view)
    target.check_path_free()
    target.check_leaves(view)
    return target, view


def _sharing_files_of(base: Checkpoint | str | os.PathLike[str]) -> Callable[[SaveTarget, SavedTree], SavedTree]:
    """Returns the option `reuse` of a save that shares the files of a checkpoint.

    Raises `NotFoundError` if there is none in the native format.
    """
    path = base.path if isinstance(base, Checkpoint) else stores.absolute(base)
    store = stores.get(path)
    if summary.stat_manifest(store, path) is None:
        raise NotFoundError(
            f"base={path!r}: expected a checkpoint in the native format, found none; nothing was written"
        )
    arrays = UnchangedArrays(lambda info, nbytes: Bases([path], "", [path]))

    def reuse(target: SaveTarget, tree: SavedTree) -> SavedTree:
        if not isinstance(tree, PlainTree):
            raise MismatchError(
                f"base={path!r}: expected a tree of arrays for the native format, found rules, a checkpoint or another "
                "format; leave out base= or save the tree as it is; nothing was written"
            )
        if store is not target.store or store.sharing != "links":
            _log.warning("%s: all arrays are written, because it cannot share files with %s", target.path, path)
            return tree
        return arrays.of_save(target, tree)

    return reuse
