"""Saves a pytree: stages it, writes it and commits it, in the background or while the caller waits."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack

import jax
import msgspec
import numpy as np

from .. import formats, stores
from .._core.entries import step_number
from .._core.json_floats import floats_to_text
from .._core.tracebacks import hide_internal_frames
from .._core.views import View
from .._processes import coordinator
from .._processes.calls import Call
from .._pytree import devices
from .._pytree.metrics import encode_metrics
from .._restore.checkpoint import Checkpoint
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from .._threads.reentry import non_reentrant, refuse_reentry
from .._threads.thread import Thread
from .._version import __version__
from ..errors import MismatchError, SaveError, UnsupportedError
from ..formats import Format
from ..formats.treering import write as native
from ..formats.treering.commit import check_free
from ..rules import Rule
from . import pending as _pending
from . import pipeline
from .base import sharing_files_of
from .metadata import metadata_to_json
from .options import FormatOptions, SaveOptions
from .pending import PendingSave, SaveReport
from .save_source import save_view
from .save_target import SaveTarget, check_info_kept, check_iterators, check_path_free

_log = logging.getLogger("treering")
_WRITER_THREADS = 4  # threads of a save; while some wait for the disk, another copies and hashes


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
    what = _call_text(path, step)
    refuse_reentry(what)
    call = coordinator.begin_call(what, timeout=timeout, processes=processes)
    with coordinator.ending_call(call):
        requested = SaveOptions(
            format,
            overwrite,
            rules,
            dtype,
            memory_limit,
            False,
            progress,
            options,
            _explicit_info(step, metrics, metadata),
            reuse=None if base is None else sharing_files_of(base),
        )
        pending = start_save(call, path, tree, _encode_info_of(tree, step, metrics, metadata), requested)
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
    what = _call_text(path, step)
    refuse_reentry(what)
    call = coordinator.begin_call(what, timeout=timeout, processes=processes)
    with coordinator.ending_call(call):
        requested = SaveOptions(
            format,
            overwrite,
            rules,
            dtype,
            memory_limit,
            True,
            progress,
            options,
            _explicit_info(step, metrics, metadata),
            reuse=None if base is None else sharing_files_of(base),
        )
        return start_save(call, path, tree, _encode_info_of(tree, step, metrics, metadata), requested)


def _explicit_info(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> frozenset[str]:
    about = {"step": step, "metrics": metrics, "metadata": metadata}
    return frozenset(name for name, value in about.items() if value is not None)


def _encode_info_of(tree: Any, step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> native.Info:
    """Returns the information to record with the tree. A copied checkpoint keeps what the caller does not give."""
    if isinstance(tree, Checkpoint):
        step = tree.step if step is None else step
        metrics = tree.metrics if metrics is None else metrics
        metadata = tree.metadata if metadata is None else metadata
    return encode_info(step, metrics, metadata)


def _call_text(path: str | os.PathLike[str], step: int | None) -> str:
    return f"save({stores.absolute(path)!r}{'' if step is None else f', step={step}'})"


@devices.allow_transfers()
# A nested call would deadlock: the writing thread waits until this call has staged everything, and the nested save
# would wait for the writing thread.
@non_reentrant
def start_save(
    call: Call,
    path: str | os.PathLike[str],
    tree: Any,
    info: native.Info,
    options: SaveOptions,
    hooks: "SaveHooks | None" = None,
    begun: float | None = None,
    waited: float = 0.0,
    lease_seconds: float = 0.0,
) -> PendingSave:
    """Begins a save: stages the tree in the caller's thread, and starts the background thread that writes it.

    `hooks` are called around the save. The user's call began at `begun` (by default now), and has waited `waited`
    seconds since then for the previous save, and `lease_seconds` for the lease of its run. `call` ends with the save;
    if this function raises, its caller ends it.
    """
    begun = time.perf_counter() if begun is None else begun
    call.set_activity("copying the state")
    if hooks is None:
        _raise_failed(call)
    place = stores.absolute(path)
    format = _format_for(place, options)
    prepared = pipeline.prepare(call, place, tree, info, options, format)
    with _pending.as_save_error(place):
        if hooks and call.index == 0:
            lease_seconds += hooks.on_start()
        # In all other cases the background thread checks the path: process 0 checks it for all processes, and a request
        # to a bucket would block the caller too long.
        if call.count == 1 and format.name == "treering" and stores.get(place).has_folders:
            check_free(stores.get(place), place, overwrite=options.overwrite)
    pending = PendingSave(
        place,
        info.step,
        prepared.supply,
        call,
        managed=hooks is not None,
        blocking=not options.background,
        begun=begun,
        waited=waited,
        lease_seconds=lease_seconds,
    )

    def write(pool: ThreadPool) -> None:
        if hooks and call.index == 0:
            hooks.before_write()
        report = pending._make_report(prepared.write(pool))
        with contextlib.suppress(Exception):  # A log handler may raise. The checkpoint is committed all the same.
            _log.info("saved %s", report)
        if hooks:
            call.set_activity("tidying up")
            call.broadcast(functools.partial(hooks.after_commit, report))
            hooks.after_commit_all(report)

    previous = _pending.saves_finished
    pool = thread = None
    try:
        pool = ThreadPool(_WRITER_THREADS)
        thread = Thread(target=pending._run, args=(write, previous, pool), name="treering-save", daemon=False)
        pending._watch(thread, previous, pool)
        pool.start(thread)
        _pending.saves_finished = pending._all_finished
        with gc_paused() if options.memory_limit is None else contextlib.nullcontext():
            prepared.supply.run()
        pending._release_caller()
    except BaseException as error:
        pending._fail(error)
        if thread and thread.was_started:
            pending._cancel(error)
        elif pool:  # An interrupt came before the thread began. If it begins yet, it finds the failure at once.
            pool.close()
        raise
    return pending


def _raise_failed(call: Call) -> None:
    """Raises the error of an earlier background save, if no caller has got it yet.

    With several processes, process 0 chooses the save, because a peer may not know of the failure yet.
    """
    failed = [pending for pending in _pending.unreported if not pending._managed]
    if call.count == 1:
        if failed:
            failed[0].result()
        return
    first = call.broadcast(lambda: [failed[0]._call.name, str(failed[0]._error)] if failed else None)
    if first:
        for pending in _pending.live_saves():
            if pending._call.name == first[0]:
                pending.result()
        raise SaveError(first[1])  # This process no longer references the failed save, so it has only the text.


def preview(path: str | os.PathLike[str], ckpt: Checkpoint, options: SaveOptions) -> tuple[SaveTarget, View]:
    """Returns the target of a save of a checkpoint, and the view of its leaves, without saving.

    Raises the errors that `save` raises before it reads arrays. Only the real save finds leaves that the format cannot
    hold.
    """
    place, info = stores.absolute(path), _encode_info_of(ckpt, None, None, None)
    call = coordinator.begin_call(_call_text(path, None), processes="this")
    target = SaveTarget(call, stores.get(place), place, _format_for(place, options), info, options)
    view = save_view(ckpt, options.rules, options.dtype, info)
    if target.format.name != "treering":
        check_info_kept(target, view)
        check_iterators(target, view)
    check_path_free(target)
    return target, view


def _format_for(place: str, options: SaveOptions) -> Format:
    format = formats.for_path(place, options.format)
    if format.name == "treering" and options.format_options:
        raise MismatchError(f"{', '.join(options.format_options)}: the native format has no such option")
    return format


class SaveHooks(Protocol):
    """Functions that Treering calls around a save. With several processes, only process 0 calls the first three."""

    def on_start(self) -> float:
        """Runs in the caller's thread after the tree was checked. An error fails the call.

        Returns the seconds in which it waited for the lease of the run.
        """
        ...

    def before_write(self) -> None:
        """Runs in the background thread before anything is written. An error fails the save."""
        ...

    def after_commit(self, report: SaveReport) -> None:
        """Runs in the background thread after the commit. Must not raise."""
        ...

    def after_commit_all(self, report: SaveReport) -> None:
        """Runs after `after_commit`, in all processes. Must not raise."""
        ...


def encode_info(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> native.Info:
    """Encodes the information that is recorded with the tree, as it is now.

    Raises `MismatchError` for a bad step or metric, and `UnsupportedError` for metadata that is not JSON.
    """
    number = None if step is None else step_number(step)
    numbers = encode_metrics(metrics)
    metadata_floats: list[str] = []
    try:
        metadata = floats_to_text(metadata_to_json(metadata), "", metadata_floats)
        raw = None if metadata is None else msgspec.Raw(msgspec.json.encode(metadata))
        msgspec.json.encode(numbers)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UnsupportedError(f"metadata and the names of metrics must be valid Unicode and JSON: {error}") from None
    software = {"treering": __version__, "jax": jax.__version__, "numpy": np.__version__}
    return native.Info(number, numbers, raw, metadata_floats, software)
