"""Saving: snapshot, write, commit; in the background or not."""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Unpack

import jax
import msgspec
import numpy as np

from .. import formats, stores
from .._core.entries import step_number
from .._core.json_floats import as_text
from .._core.tracebacks import at_the_caller
from .._core.views import View
from .._processes import coordinator
from .._processes.calls import Call
from .._pytree import devices
from .._restore.checkpoint import Checkpoint
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from .._threads.reentry import alone, refuse_within
from .._version import __version__
from ..errors import MismatchError, SaveError, UnsupportedError
from ..formats import Format
from ..formats.treering import write as native
from ..formats.treering.commit import check_free
from ..rules import Rule
from . import pending as _pending
from . import pipeline
from .inputs import view_of
from .metadata import plain
from .metrics import encoded
from .options import FormatOptions, SaveOptions
from .pending import PendingSave, SaveReport
from .target import Target, check_free_for_all, check_kept, check_no_iterators

_log = logging.getLogger("treering")
_WRITERS = 4  # threads of a save: while some wait for the disk, another copies and hashes


@at_the_caller
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
    processes: Literal["all", "this"] = "all",
    timeout: float = 30,
    memory_limit: int | None = 64 << 20,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> SaveReport:
    """Saves a pytree and returns when it is durable.

    >>> tr.save("checkpoints/a", {"params": params, "step": 7})

    path: a new directory; parents are made. `overwrite` replaces a checkpoint that is there, in one step.
    tree: any pytree of arrays, numbers, text, bytes, None, PRNG keys and functions (recorded by name alone); or a
        `Checkpoint` of any format, which is copied in bounded memory. Checkpoints and their arrays (`LazyArray`) may
        also be leaves: parts of several checkpoints become one tree.
    format: "treering" and those that `treering.formats` has; by default what the path's suffix says (`.safetensors`,
        `.msgpack`, `.eqx`), else "treering". `options` are those of the format: `max_shard_size` and
        `filename_pattern` of safetensors; `composite=True` of Orbax, which makes an item of each key at the top.
    step, metrics, metadata: kept beside the tree, as they are now; metrics are real scalars by name, metadata any JSON
        value (also NaN and infinities), or a `ConfigDict`, dataclasses, paths and scalars, which become one. Those of a
        `Checkpoint` are its own unless others are given. A format without a place for one that is given refuses it; one
        that a `Checkpoint` has is then left out, which is logged.
    rules: changes of names, shapes and values, see `treering.rules`.
    dtype: what floating-point arrays are cast to.
    processes: with several processes (`jax.distributed`), every one makes the call and writes its part; "this"
        saves what this process has, as if there were no others. For a save that only one process can write (formats of
        one file, rules that need parts of several processes, other formats in a bucket) all save the tree beside `path`
        first, in the native format, and process 0 makes the requested checkpoint of that.
    timeout: seconds without a sign of life after which another process is taken for dead.
    memory_limit: bytes of copies held at a time, where arrays must be copied (from a device, or because they
        are not laid out in C order); one larger array passes alone. With rules and in other formats they are then read
        while they are written, in parts of 16 MiB or what the format needs at a time.
    progress: shows a bar, in a terminal or a notebook (there with `ipywidgets`).

    Raises `UnsupportedError` for leaves that cannot be saved, `ExistsError` for a path in use, and `MismatchError`
    when processes do not have the same tree, before anything is written; `SaveError` when writing fails, after
    everything that it wrote is removed; `PeerError` when another process is gone or does not make the call.
    """
    what = _what(path, step)
    refuse_within(what)
    call = coordinator.begin(what, timeout=timeout, processes=processes)
    with coordinator.ending(call):
        requested = SaveOptions(
            format, overwrite, rules, dtype, memory_limit, False, progress, options, _given(step, metrics, metadata)
        )
        pending = start(call, path, tree, _describe_with(tree, step, metrics, metadata), requested)
    try:
        return pending.result()
    except BaseException as error:
        pending._cancel(error)  # an interrupt: remove what is half written before going on
        raise


@at_the_caller
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
    processes: Literal["all", "this"] = "all",
    timeout: float = 30,
    memory_limit: int | None = None,
    progress: bool = False,
    **options: "Unpack[FormatOptions]",
) -> PendingSave:
    """Saves a pytree in the background.

    The arrays are saved as they are now: they may be changed, deleted or donated as soon as this
    returns. Saves are written in the order of the calls, and a program that ends still finishes them.

    Takes and raises what `save` does; a failure after this returned is raised by the result, or else by the
    next call of `save` or `save_async`, or else printed when the interpreter ends. With a `memory_limit` the
    call holds its caller up until all but that many bytes of copies are written; without one, only where the copies
    would take more than a quarter of the memory that is available here (but 256 MiB in any case), or where those of all
    processes of a host leave less than an eighth of its memory. That is logged.
    """
    what = _what(path, step)
    refuse_within(what)
    call = coordinator.begin(what, timeout=timeout, processes=processes)
    with coordinator.ending(call):
        requested = SaveOptions(
            format, overwrite, rules, dtype, memory_limit, True, progress, options, _given(step, metrics, metadata)
        )
        return start(call, path, tree, _describe_with(tree, step, metrics, metadata), requested)


def _given(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> frozenset[str]:
    about = {"step": step, "metrics": metrics, "metadata": metadata}
    return frozenset(name for name, value in about.items() if value is not None)


def _describe_with(tree: Any, step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> native.Info:
    """The information recorded beside the tree; of a checkpoint that is copied, its own unless others are given."""
    if isinstance(tree, Checkpoint):
        step = tree.step if step is None else step
        metrics = tree.metrics if metrics is None else metrics
        metadata = tree.metadata if metadata is None else metadata
    return describe(step, metrics, metadata)


def _what(path: str | os.PathLike[str], step: int | None) -> str:
    return f"save({stores.absolute(path)!r}{'' if step is None else f', step={step}'})"


@devices.explicit()
@alone  # the thread that writes waits until everything is handed over, and who saves next for that thread
def start(
    call: Call,
    path: str | os.PathLike[str],
    tree: Any,
    info: native.Info,
    options: SaveOptions,
    hooks: "SaveHooks | None" = None,
    begun: float | None = None,
    waited: float = 0.0,
) -> PendingSave:
    """Begins a save: stages the tree in the caller's thread and starts the thread that saves, which calls `hooks`.

    The caller was called at `begun` (by default now), and has waited `waited` seconds since for the save before.
    `call` ends with the save; when this function raises, its caller ends `call`.
    """
    begun = time.perf_counter() if begun is None else begun
    call.doing("copying the state")
    if hooks is None:
        _raise_failed(call)
    place = stores.absolute(path)
    format = _format_for(place, options)
    prepared = pipeline.prepare(call, place, tree, info, options, format)
    with _pending.as_save_error(place):
        if hooks and call.index == 0:
            hooks.enter()
        # Or else it is checked in the background: by process 0 for all, and where a look takes longer than a stall may.
        if call.count == 1 and format.name == "treering" and stores.of(place).has_folders:
            check_free(stores.of(place), place, overwrite=options.overwrite)
    pending = PendingSave(
        place,
        info.step,
        prepared.supply,
        call,
        managed=hooks is not None,
        blocking=not options.background,
        begun=begun,
        waited=waited,
    )

    def write(pool: ThreadPool) -> None:
        if hooks and call.index == 0:
            hooks.before()
        report = pending._committed(prepared.write(pool))
        with contextlib.suppress(Exception):  # the error of a log handler
            _log.info("saved %s", report)
        if hooks:
            call.doing("tidying up")
            call.broadcast(functools.partial(hooks.after, report))
            hooks.after_in_all(report)

    previous = _pending.last
    pool = thread = None
    try:
        pool = ThreadPool(_WRITERS)
        thread = threading.Thread(target=pending._run, args=(write, previous, pool), name="treering-save", daemon=False)
        pool.start(thread)
        _pending.last = pending._finished
        with gc_paused() if options.memory_limit is None else contextlib.nullcontext():
            prepared.supply.run()
        pending._returns()
    except BaseException as error:
        pending._fail(error)
        if thread and thread.ident is not None:
            pending._cancel(error)
        elif pool:  # or an interrupt came before the thread began; if it ever does, it finds the failure at once
            pool.close()
        raise
    return pending


def _raise_failed(call: Call) -> None:
    """Raises the failure of an earlier background save that no caller has been given.

    With several processes, process 0 chooses the save: another process may not know of the failure yet.
    """
    failed = [pending for pending in _pending.unseen if not pending._managed]
    if call.count == 1:
        if failed:
            failed[0].result()
        return
    first = call.broadcast(lambda: [failed[0]._call.name, str(failed[0]._error)] if failed else None)
    if first:
        for pending in _pending.alive():
            if pending._call.name == first[0]:
                pending.result()
        raise SaveError(first[1])  # this process holds no reference to the failed save


def preview(path: str | os.PathLike[str], ckpt: Checkpoint, options: SaveOptions) -> tuple[Target, View]:
    """Returns where and as what a checkpoint would be saved, and the leaves. Raises what `save` raises before it reads.

    Whether the format can hold every leaf is only known when it is written.
    """
    place, info = stores.absolute(path), _describe_with(ckpt, None, None, None)
    call = coordinator.begin(_what(path, None), processes="this")
    target = Target(call, stores.of(place), place, _format_for(place, options), info, options)
    view = view_of(ckpt, options.rules, options.dtype, info)
    if target.format.name != "treering":
        check_kept(target, view)
        check_no_iterators(place, view)
    check_free_for_all(target)
    return target, view


def _format_for(place: str, options: SaveOptions) -> Format:
    format = formats.for_path(place, options.format)
    if format.name == "treering" and options.of_format:
        raise MismatchError(f"{', '.join(options.of_format)}: the native format has no such option")
    return format


class SaveHooks(Protocol):
    """Functions that are called around a save; with several processes all but the last in process 0 alone."""

    def enter(self) -> None:
        """Called in the caller's thread when the tree is known to be good; what it raises fails the call."""
        ...

    def before(self) -> None:
        """Called by the thread that saves before anything is written; what it raises fails the save."""
        ...

    def after(self, report: SaveReport) -> None:
        """Called by the thread that saves after the commit; must not raise."""
        ...

    def after_in_all(self, report: SaveReport) -> None:
        """Called after that in all processes; must not raise."""
        ...


def describe(step: int | None, metrics: Mapping[str, Any] | None, metadata: Any) -> native.Info:
    """Encodes the information recorded beside the tree, as it is now. Raises `MismatchError` and `UnsupportedError`."""
    number = None if step is None else step_number(step)
    numbers = encoded(metrics)
    metadata_floats: list[str] = []
    try:
        metadata = as_text(plain(metadata), "", metadata_floats)
        raw = None if metadata is None else msgspec.Raw(msgspec.json.encode(metadata))
        msgspec.json.encode(numbers)
    except (UnicodeEncodeError, OverflowError) as error:
        raise UnsupportedError(f"metadata and the names of metrics must be valid Unicode and JSON: {error}") from None
    software = {"treering": __version__, "jax": jax.__version__, "numpy": np.__version__}
    return native.Info(number, numbers, raw, metadata_floats, software)
