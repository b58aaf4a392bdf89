"""The Checkpointer: saves the steps of a run in a training loop, keeps some of them, and resumes from them."""

import contextlib
import datetime
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from .. import stores
from .._core import migration_hints
from .._core.entries import step_number
from .._core.tracebacks import hide_internal_frames_of_methods
from .._processes import coordinator
from .._processes.preemption import Preemption, Signals
from .._restore import options as _options
from .._restore.checkpoint import Checkpoint
from .._restore.options import ReadOptions, RestoreOptions
from .._save.pending import PendingSave, SaveReport, wait_for_all_saves
from .._save.target import encode_info
from .._threads.reentry import non_reentrant, refuse_reentry
from .._threads.thread import Thread, start_threads
from ..errors import MismatchError, UnsupportedError
from ..keep import Policy
from ..rules import Rule
from . import arguments, removal, resume
from .closing import Closing
from .collective import CollectiveCalls
from .last_state import LastState, StepOptions
from .pending_saves import Failures, OnError, PendingSaves, log_failure
from .retention import Retention
from .run_layout import RunLayout
from .schedule import SaveEvery, Schedule
from .step_list import StepList
from .step_saver import StepSaver
from .tiers.tiered_run import late_metrics, make_directory

_log = logging.getLogger("treering")
T = TypeVar("T")

# Each `save` copies NumPy arrays up to this size, so that `close` can save them after a signal: some milliseconds.
_MAX_COPIED_BYTES = 16 << 20


@hide_internal_frames_of_methods
class Checkpointer(StepList):
    """Saves the steps of a run in the background, keeps those that are wanted, and finds where to continue.

    >>> with tr.Checkpointer("runs/gpt", save_every=1000, keep=tr.keep.last(3)) as ckpts:
    ...     state, step = ckpts.restore_or_init(init)
    ...     for step in range(step + 1, n + 1):
    ...         state = train_step(state, next(data))
    ...         ckpts.save(step, state, force=step == n)

    run: a directory, which the first save makes. Making a `Checkpointer` touches nothing. One Checkpointer at a time
        writes a run. Until it is closed or its process ends, saves of other processes raise `ExistsError`. In the same
        process, a newer one that saves acquires the run from an idle one, whose next save then raises.
    save_every: a number of steps (its multiples are saved), a `timedelta` since the run's last commit, also that of an
        earlier job, both as ``(steps, timedelta)`` for the earlier of the two, or a function of the step. "auto"
        chooses the interval that loses the least time, given the cost of a save to this loop and the expected rate of
        failures (Young, Daly), and logs it.
    mtbf: for "auto", the job's mean time between failures or preemptions; by default that of 50,000 device-hours.
    keep: the steps to keep, see `treering.keep`; None keeps all. Every save applies it. If metrics came late, `close`
        after a save, `restore_or_init` and `treering.record` in this process (also after `close`) apply it too. They
        need the lease of the run, and delete nothing while another job writes.
    metadata: configuration that goes into every checkpoint, see `treering.save`. `save` takes that of one step.
    prefix: the beginning of the names of the step directories.
    save_on_preemption: after a SIGTERM, `preempted` is true at once. Reading it, or `close`, saves the state that the
        newest call of `save` was given, as `save_on_error` does; NumPy arrays are copied up to 16 MiB. The next `save`
        saves in any case. A signal, or several, such as ``signal.SIGUSR1``, take the place of SIGTERM. Earlier handlers
        are called as well. If the program has not read `preempted` after a signal that would have ended it, `close`
        sends the signal again. With several processes, JAX's preemption service chooses the call, and `close` saves.
    save_on_error: an exception that leaves the ``with`` block, ctrl-C included, saves the state that the newest call of
        `save` was given. Its arrays must still exist, because only weak references to them are held. Every call copies
        NumPy arrays. With several processes, all must raise at the same step.
    reuse_unchanged: an array that is the same `jax.Array` object as in earlier steps is neither copied nor written
        again, and a new object with the same values is not written again, if another kept step has a second copy: the
        step's directory gets a hard link. On an accelerator, a new object is not copied either once a few saves have
        found it equal; its device makes a digest of 128 bits. In a bucket, the server copies objects with the same
        bytes as in the last step. It needs arrays of a megabyte or more. Memory that such an array shares with NumPy,
        as by `jax.device_put` on a CPU or by DLPack, must not change, because JAX arrays never do.
    when_busy: while a save is running, the next must "wait", so that only one state is staged, or "skip" unless forced.
    timeout: seconds without a sign of life after which a process considers another dead.
    on_save: process 0 calls it with the `SaveReport` of every save, in the background, and logs its errors.
    tensorboard: a directory of TensorBoard event files with metrics that were not given with a step, as
        ``{run}/{tag}``: the directory below this one, and the tag. Needs the extra `tensorboard`.
    on_error: with "raise", the next call raises the error of a failed background save. "log" logs the error, a function
        is called with it, and the loop continues: the next save tries again. `last_error` holds the error until a save
        succeeds. If the last save failed, `wait`, `close` and `finish` raise its error. The next save also calls a
        function with the error of a failed upload from `local`. A wrong call (a step that exists, leaves that cannot be
        saved) always raises.

    local: a directory on a local disk, the local tier. Steps are saved there and uploaded to `run`, the remote tier, in
        the background, the newest first. Restore tries the local copy first. `close` waits until all steps that `keep`
        keeps are uploaded; the next job with the same `local` uploads what a killed job did not. With several
        processes, all share the directory, or each host has its own disk. Then each host uploads its own files, and
        reads those that it lacks from the other hosts. A directory in memory, such as in `/dev/shm`, is emptied by
        `close` and `finish` when all steps are uploaded.
    keep_local: the steps to keep there, besides those that are not uploaded yet: a policy, or a number of bytes, as for
        `treering.keep.size`. None keeps all.
    upload_limit: the most bytes a second that an upload takes, for each disk.
    local_copies: with 2, and a disk on each host, each file of a step is put on the disks of two hosts, so that a lost
        host costs no step. Processes write what they hold in memory during the save. All else is sent once, after it.

    With several processes, every process makes the same calls of `save`, `restore`, `restore_or_init`, `wait`, `close`,
    `finish`, `delete`, `pin`, `unpin` and `rewind`. Process 0 decides for all.
    """

    _layout: RunLayout | None = None  # The Orbax adapter sets it: its runs name steps as Orbax does.

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        save_every: SaveEvery = 1,
        mtbf: datetime.timedelta | None = None,
        keep: Policy | None = None,
        metadata: Any = None,
        prefix: str = "step-",
        save_on_preemption: Signals = False,
        when_busy: Literal["wait", "skip"] = "wait",
        timeout: float = 30,
        on_save: Callable[[SaveReport], object] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        save_on_error: bool = False,
        reuse_unchanged: bool = True,
        on_error: OnError = "raise",
        local: str | os.PathLike[str] | None = None,
        keep_local: Policy | int | None = arguments.KEEP_LOCAL,
        upload_limit: float | None = None,
        local_copies: int = 1,
    ):
        arguments.check(
            keep=keep, prefix=prefix, when_busy=when_busy, timeout=timeout, on_save=on_save,
            local=local, keep_local=keep_local, upload_limit=upload_limit, local_copies=local_copies,
        )  # fmt: skip
        self._root = stores.absolute_run(run)
        encode_info(None, None, metadata)  # Raise now what every save would raise.
        failures = self._failures = Failures(on_error)
        pending_saves = self._pending_saves = PendingSaves(failures)
        schedule = Schedule(save_every, mtbf, lambda: not pending_saves.all_done())
        directory = self._directory = make_directory(
            self._root, local, layout=self._layout or RunLayout(prefix), tensorboard=tensorboard, keep=keep,
            upload_limit=upload_limit, failures=failures, pending_saves=pending_saves, timeout=timeout,
            local_copies=local_copies,
        )  # fmt: skip
        kept = keep if local is None else arguments.local_policy(keep_local)
        retention = Retention(directory, kept, on_save, schedule.on_commit)
        self._late_metrics = late_metrics(directory, retention, pending_saves)
        self._collective = CollectiveCalls(self._root, timeout, directory.uploads, pending_saves)
        preemption = None
        if save_on_preemption is not False:
            preemption = Preemption(save_on_preemption, self._root, self._secure_last_state)
            # If the user does not close this object, the signal must still end the process.
            weakref.finalize(self, _close_dropped, preemption).atexit = False
        self._save_on_error, self._preemption = save_on_error, preemption
        copied = None if save_on_error else _MAX_COPIED_BYTES
        self._last_state = LastState(enabled=save_on_error or preemption is not None, copy_limit=copied)
        self._saver = StepSaver(
            directory, self._collective, pending_saves, schedule, retention, failures, self._last_state, preemption,
            metadata=metadata, skip_if_busy=when_busy == "skip", reuse_unchanged=reuse_unchanged,
        )  # fmt: skip
        self._closing = Closing(directory, self._collective, pending_saves, retention, self._late_metrics, preemption)

    if not TYPE_CHECKING:  # Otherwise type checkers would accept every name.

        def __getattr__(self, name: str) -> Any:
            return migration_hints.attribute(self, name, migration_hints.RUN_CALLS)

    @property
    def directory(self) -> str:
        """The absolute path of the run."""
        return self._root

    @property
    def is_saving(self) -> bool:
        """True while a save is running."""
        return not self._pending_saves.all_done()

    def __repr__(self) -> str:
        """Shows what the Checkpointer is doing, without reading anything."""
        restored, uploads, closed = self.restored_step, self._directory.uploads, self._collective.closed
        copying = uploads and uploads.uploading_step
        state = [
            *([] if restored is None else [f"restored step {restored}"]),
            *[f"saving step {step}" for step in sorted(self._pending_saves.pending_steps())],
            *([] if copying is None else [f"uploading step {copying}"]),
            *(["preempted"] if self._preemption and self._preemption.is_known else []),
            *(["closed"] if closed else ["lost to another Checkpointer"] if self._directory.lost else []),
        ]
        return f"<Checkpointer {self._root}{': ' if state else ''}{', '.join(state)}>"

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            f"{self._root}: a Checkpointer cannot be copied or sent to another process; pass the path, and make one "
            "there, or read the run with treering.open"
        )

    # Saving

    @property
    def preempted(self) -> bool:
        """True once this job is about to be stopped: leave the loop.

        Reading it then begins to save the state that the newest call of `save` was given. With several processes, the
        next `save` or `close` saves one. If the loop has changed or donated the arrays since, this becomes true at the
        next call of `save`. With several processes, all must read it equally often.
        """
        return self._saver.preempted

    @property
    def last_error(self) -> BaseException | None:
        """The error of the newest ended save, if `on_error` is not "raise"; None if that save succeeded."""
        return self._failures.last_error

    @non_reentrant
    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        on_exists: Literal["error", "skip", "overwrite"] = "error",
        rules: Sequence[Rule] = (),
        dtype: Any = None,
        memory_limit: int | None = None,
    ) -> PendingSave | None:
        """Saves the step in the background if `save_every` says so, or in any case with `force`.

        Returns None if nothing is saved. The next call raises the error of a failed background save. `on_exists` says
        what to do if the step is already committed; a damaged step is always replaced. After `restore(step=…)` the
        later steps are archived first, as by `rewind`. `metadata` is that of this step: it replaces the run's, key by
        key if both are dicts. The other options are those of `treering.save_async`.
        """
        step = step_number(step)
        refuse_reentry(f"save({step})", self)
        options = StepOptions(metrics, metadata, on_exists, rules, dtype, memory_limit)
        return self._saver.save(step, tree, force, options)

    def wait(self) -> None:
        """Waits until every save is committed. Raises the error of a failed save, unless its result has raised it."""
        refuse_reentry("wait()", self)
        self._pending_saves.reap()

    def finish(self) -> None:
        """Closes the Checkpointer, and marks the run as finished: `treering.follow` expects no more steps.

        A later job that saves a step of the run removes the mark.
        """
        refuse_reentry("finish()", self)
        self._save_if_preempted()
        self._saver.log_left_out()
        self._finish()
        self._send_signal_again()

    def close(self) -> None:
        """Waits as `wait` does, and ends the saving. Reading still works. Raises the error of a failed save."""
        refuse_reentry("close()", self)
        try:
            self._save_if_preempted()
            self._saver.log_left_out()
            self._upload()
        finally:
            self._close()
        self._send_signal_again()

    def _save_if_preempted(self) -> None:
        """Saves the state of the newest `save`, if a signal came after it."""
        if self._preemption and self._preemption.is_due_at_close():
            self._save_last_state(self._preemption.names, raises=True)

    def _save_last_state(self, reason: str, *, raises: bool) -> None:
        self._last_state.save(self._root, reason, self._pending_saves, self.save, self.wait, raises=raises)

    @non_reentrant
    def _finish(self) -> None:
        self._closing.finish()
        self._closing.release()

    @non_reentrant
    def _upload(self) -> None:
        self._closing.upload()

    @non_reentrant
    def _close(self) -> None:
        self._closing.release()

    def _send_signal_again(self, error: BaseException | None = None) -> None:
        """Sends a signal again that the program has not seen. Logs an error that would be lost with the process."""

        def prepare() -> None:
            if error:
                _log.error("%s: a signal ends the process, after this error", self._root, exc_info=error)
            wait_for_all_saves()

        if self._preemption:
            self._preemption.send_again(prepare)

    def _secure_last_state(self) -> None:
        """Saves the state of the newest `save`, which the program may be about to drop, or holds it until `close`."""
        if threading.current_thread() is threading.main_thread() and not coordinator.is_multi_process():
            with contextlib.suppress(MismatchError):  # raised in the middle of another call
                refuse_reentry("preempted", self)
                assert self._preemption
                with self._preemption.staying_due():
                    self._last_state.begin_or_log(self._root, self._preemption.names, self.save)
                return
        self._last_state.keep_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            if self._save_on_error or (self._preemption and self._preemption.is_announced):
                self._save_last_state(kind.__name__, raises=False)
        finally:
            with log_failure():
                self._close()
        if isinstance(error, Exception):  # Others end the program anyway.
            self._send_signal_again(error)

    # Restoring

    def open(self, step: int | None = None) -> Checkpoint:
        """Opens a step, by default the latest valid one. Raises `NotFoundError` if there is none."""
        refuse_reentry("open()", self)
        self.wait()
        ckpt = resume.open_step(self._directory, step)
        if (
            self._directory.uploads and ckpt.step is not None
        ):  # A local copy may be deleted before the caller adds metrics.
            ckpt._find_copies = functools.partial(self.copies, ckpt.step)
        return ckpt

    @overload
    def restore(
        self,
        like: None = None,
        *,
        step: int | None = None,
        best: str | None = None,
        fallback: bool = True,
        **options: "Unpack[RestoreOptions]",
    ) -> Any: ...
    @overload
    def restore(
        self,
        like: T,
        *,
        step: int | None = None,
        best: str | None = None,
        fallback: bool = True,
        **options: "Unpack[RestoreOptions]",
    ) -> T: ...
    @non_reentrant
    def restore(
        self,
        like: Any = None,
        *,
        step: int | None = None,
        best: str | None = None,
        fallback: bool = True,
        **options: "Unpack[RestoreOptions]",
    ) -> Any:
        """Restores a step, by default the latest; `options` are those of `treering.restore`.

        best: restores the valid step with the highest metric of this name or, with ``"loss:min"``, the lowest.

        If the latest step is damaged, logs that, and with `fallback` tries the step before it, and so on. Saving the
        damaged step again replaces it. Raises `NotFoundError` if there is no step, `CorruptError` if all are damaged.

        After restoring an earlier step with `step=` or `best=`, the next save archives the later steps, as `rewind`
        does. Until then nothing changes. This job never deletes the step that it restored.
        """
        _options.check(options, "Checkpointer.restore()", ("like", "step", "best", "fallback"))
        if step is not None and best is not None:
            raise MismatchError(f"best={best!r}: expected step= or best=, found both")
        what = f"restore({f'best={best!r}' if best is not None else '' if step is None else f'step={step}'})"
        refuse_reentry(what, self)
        tree = resume.restore(what, self._collective, self._directory, like, step, best, fallback, options)
        self._saver.has_looked = True
        self._last_state.forget()
        return tree

    def restore_or_init(
        self, init: Callable[[], T], *, sharding: Any = None, fallback: bool = True, **options: "Unpack[ReadOptions]"
    ) -> tuple[T, int]:
        """Returns the latest valid step's tree and its number, or what `init()` returns and 0 if there is no step.

        A resumed job continues as if it had not been interrupted. Structure and functions come from `init`. Every leaf
        has the type, dtype, weak type, sharding, memory kind and layout that it was saved with. One JAX array in two
        leaves is one array again. Leaves saved with `dtype=` have the dtype of `init`. If the job has other devices and
        no mesh is set that replaces the old one, all arrays go where `init` places them; a warning says so. Foreign
        formats record no types: `init` decides.

        init: takes no arguments and returns the state. A resumed job only traces it. It calls `init` if tracing fails
            or leaves a tracer behind, which is undone first, and to see where it places arrays without a known
            placement. The first job calls and then traces it.
        sharding: replaces the saved sharding of JAX arrays; see `treering.restore`. Leaves without one (None in a tree,
            or as the result of a function) stay where they were saved. The first job makes arrays there.
        options: as for `restore`. `dtype="template"` takes the floating-point dtypes of `init`.

        Logs a warning if a run begins although similar steps exist (with another `prefix`, archived, or in a run around
        or within this one). Raises `MismatchError` if tracing `init` gives another tree than calling it, if a shape
        differs, and for a directory that is one checkpoint; `UnsupportedError` if tracing `init` leaves a tracer that
        cannot be undone; `CorruptError` if all steps are damaged.
        """
        from .._restore import initial

        # Also in the first job, which restores nothing.
        _options.check(options, "Checkpointer.restore_or_init()", ("init", "sharding", "fallback"))
        arguments.check_init(init)
        refuse_reentry("restore_or_init()", self)
        found = resume.has_begun_for_all(self._collective, self._directory)
        self._saver.has_looked = True
        if not found:
            return resume.begin(self._root, init, sharding, options), 0
        template: Any = initial.Initial(init)
        tree = self.restore(template, fallback=fallback, sharding=sharding, **options)
        assert self.restored_step is not None
        self._late_metrics.on_resume(self.restored_step)
        return tree, self.restored_step

    # Managing

    @non_reentrant
    def pin(self, step: int) -> None:
        """Marks a step never to be deleted, for this and every later job."""
        refuse_reentry(f"pin({step})", self)
        removal.pin(self._collective, self._directory, step, True)

    @non_reentrant
    def unpin(self, step: int) -> None:
        """Removes the mark that `pin` has set."""
        refuse_reentry(f"unpin({step})", self)
        removal.pin(self._collective, self._directory, step, False)

    @non_reentrant
    def delete(self, step: int) -> None:
        """Deletes a step. Raises `MismatchError` if it is pinned, is a link, or a link in the run leads to it."""
        refuse_reentry(f"delete({step})", self)
        removal.delete(self._collective, self._directory, step)
        if self._last_state.step == step:
            self._last_state.forget()

    @non_reentrant
    def rewind(self, step: int | None) -> None:
        """Goes back to a step: archives all later steps, pinned ones too. `restore` then finds this step.

        The archived run ``rewound-1`` (``-2``, …) within the run has them. Nothing is deleted.

        step: None, or 0 in a run that has not saved step 0, archives all steps, so that the run starts over.

        Raises `NotFoundError` if there is no such step, and `UnsupportedError` if a later one is another library's.
        """
        number = None if step is None else step_number(step)
        refuse_reentry(f"rewind({step})", self)
        with self._pending_saves.changing_run():
            removal.rewind(self._collective, self._directory, number)
        self._saver.has_looked = True
        self._last_state.forget()


def _close_dropped(preemption: Preemption) -> None:
    """Follows a Checkpointer that was dropped without `close`."""
    preemption.close()
    if preemption.swallows:
        # Garbage may be collected in a thread that saves, which must not wait for itself.
        send_again = functools.partial(preemption.send_again, wait_for_all_saves)
        start_threads(Thread(target=send_again, name="treering-signal", daemon=True))
