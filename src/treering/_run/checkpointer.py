"""The run in a training loop: when to save, what to keep, where to go on."""

import contextlib
import datetime
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from .. import stores
from .._core import habits
from .._core.entries import step_number
from .._core.leaf_paths import few
from .._core.tracebacks import methods_at_the_caller
from .._processes import coordinator
from .._processes.calls import Call
from .._processes.preemption import Preemption
from .._restore import options as _options
from .._restore.checkpoint import Checkpoint
from .._restore.options import ReadOptions, RestoreOptions
from .._save import save as _save
from .._save.metadata import plain
from .._save.options import SaveOptions
from .._save.pending import PendingSave, SaveReport, as_save_error, wait_for_all_in
from .._threads.reentry import alone, refuse_within
from ..errors import MismatchError, SaveError, TreeringError, UnsupportedError
from ..keep import Policy, last, rank
from ..rules import Rule
from . import resume
from .collective import Collective
from .directory import Directory
from .failures import Failures, OnError
from .last_state import LastState, StepOptions
from .late_metrics import LateMetrics
from .latest_good import latest_good, listed_again
from .retention import Retention
from .run import BEFORE_ALL
from .saves_under_way import UnderWay, Verdict
from .schedule import SaveEvery, Schedule
from .steps import Steps
from .two_places import TwoPlaces

T = TypeVar("T")

_log = logging.getLogger("treering")
_LAST = last(1)


@methods_at_the_caller
class Checkpointer:
    """Saves the steps of a run in the background, keeps those that are wanted, and finds where to go on.

    >>> with tr.Checkpointer("runs/gpt", save_every=1000, keep=tr.keep.last(3)) as ckpts:
    ...     state, step = ckpts.restore_or_init(init)
    ...     for step in range(step + 1, n + 1):
    ...         state = train_step(state, next(data))
    ...         ckpts.save(step, state, force=step == n)

    run: a directory; it is made by the first save. Making a `Checkpointer` touches nothing. Only one at a time writes
        a run: until it is closed, or its process ends, another process's saves are refused with `ExistsError`. Within
        a process the newest that saves takes the run over from one that is idle, whose next save is refused then.
    save_every: a number of steps (saved are its multiples), a `timedelta`, both as ``(steps, timedelta)`` for whichever
        comes first, or a function of the step. "auto": as often as loses least time, by what a save costs this loop and
        how often it is to fail (Young, Daly); the interval is logged.
    mtbf: the mean time between failures of the whole job, preemptions included, for "auto"; by default that of 50,000
        device-hours.
    keep: which steps to keep, see `treering.keep`; None keeps all. It is applied after every save. Where metrics came
        late it is also applied by `close` after a save, by `restore_or_init`, and by `treering.record` in this process,
        after `close` as well; then it needs the lock of the run, and deletes nothing while another job writes.
    metadata: configuration that goes into every checkpoint, see `treering.save`; and `save` for that of one step.
    prefix: what the names of the step directories begin with.
    save_on_preemption: whether the first `save` after a SIGTERM saves in any case and sets `preempted`. Handlers that
        were there before are called as well. With several processes JAX's preemption service says at which call.
    save_on_error: whether an exception that leaves the ``with`` block, ctrl-C included, saves the state that the newest
        call of `save` was given, if its arrays are still there: only weak references to them are held. NumPy arrays
        are copied at every call. With several processes all must raise at the same step.
    when_busy: what `save` does while the save before it is still under way: "wait" for it, so that no more than one
        state is held, or "skip" this one unless it is forced.
    timeout: seconds without a sign of life after which another process is taken for dead.
    on_save: called with the `SaveReport` of every save, in the background, by process 0; errors are logged.
    tensorboard: a directory of TensorBoard event files, in which metrics are looked up that were not given with a
        step, as ``{run}/{tag}``: the directory below this one, and the tag. Needs the extra `tensorboard`.
    on_error: what becomes of a save that fails: "raise" raises it, for one in the background by the next call; "log"
        logs it, and a function is called with it, and the loop goes on: the next save tries again. `last_error` has it
        until one is good; when the last save of all failed, `wait`, `close` and `finish` raise it. A function is also
        called, by the next save, with what copying steps from `local` fails with. What is wrong with
        the call (a step that is there, leaves that cannot be saved) is raised in any case.

    local: a directory on a local disk, to which steps are saved; from there they are copied to `run` in the background,
        the newest first. What restores takes the nearest good copy. `close` waits until all that `keep` wants is
        copied; what a killed job has not copied the next one copies that has the same `local`. With several processes
        a directory that all of them share, or one on a disk of each host: then each host copies what is on its own,
        and what is not copied yet is copied before it is restored.
    keep_local: which steps to keep there, beside those that are not copied yet; None keeps all.
    upload_limit: the most bytes a second that copying takes, for each disk.

    With several processes every one makes the same calls of `save`, `restore`, `restore_or_init`, `wait`, `close`,
    `finish`, `delete`, `pin`, `unpin` and `rewind`; process 0 decides for all.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        save_every: SaveEvery = 1,
        mtbf: datetime.timedelta | None = None,
        keep: Policy | None = None,
        metadata: Any = None,
        prefix: str = "step-",
        save_on_preemption: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        timeout: float = 30,
        on_save: Callable[[SaveReport], object] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        save_on_error: bool = False,
        on_error: OnError = "raise",
        local: str | os.PathLike[str] | None = None,
        keep_local: Policy | None = _LAST,
        upload_limit: float | None = None,
    ):
        if local is None and keep_local is not _LAST:
            raise MismatchError(f"keep_local={keep_local!r}: expected local=, whose steps it is about")
        for name, policy in (("keep", keep), ("keep_local", keep_local)):
            if policy is not None and not isinstance(policy, Policy):
                raise MismatchError(f"{name}={policy!r}: expected a policy such as treering.keep.last(3)")
        if "/" in prefix or prefix[-1:].isdigit() or not prefix.isprintable():
            raise MismatchError(f"prefix={prefix!r}: expected printable text without '/' that does not end in a digit")
        if when_busy not in ("wait", "skip"):
            raise MismatchError(f"when_busy={when_busy!r}: expected 'wait' or 'skip'")
        if on_save is not None and not callable(on_save):
            raise MismatchError(f"on_save={on_save!r}: expected a function of a SaveReport")
        if local is None and upload_limit is not None:
            raise MismatchError(f"upload_limit={upload_limit!r}: expected local=, from where steps are copied")
        coordinator.check_timeout(timeout)
        self._root = stores.absolute_run(run)
        _save.describe(None, None, metadata)  # raises now what every save would
        self._metadata, self._when_busy = metadata, when_busy
        self._failures = Failures(on_error)
        self._under_way = UnderWay(self._failures)
        self._two_places = local is not None
        under_way = self._under_way
        self._schedule = Schedule(save_every, mtbf, lambda: not under_way.all_over())
        places: list[Directory | TwoPlaces] = []

        def busy() -> bool:  # without `self`: a Checkpointer that is let go of gives SIGTERM back at once
            return under_way.busy() or any(one.busy for one in places)

        def directory_at(root: str) -> Directory:
            return Directory(Steps(stores.of(root), root, prefix, tensorboard), busy)

        far = directory_at(self._root)
        if local is None:
            self._directory: Directory | TwoPlaces = far
        else:
            near = directory_at(stores.absolute(local))
            self._directory = TwoPlaces(near, far, keep, upload_limit, self._failures.tell, timeout)
        places.append(self._directory)
        self._retention = Retention(
            self._directory, keep if local is None else keep_local, on_save, self._schedule.committed
        )
        if isinstance(self._directory, TwoPlaces):
            places_apart = self._directory
            self._late = LateMetrics(far, places_apart.far_retention, under_way, places_apart.begin_copying)
        else:
            self._late = LateMetrics(far, self._retention, under_way, None)
        self._collective = Collective(self._root, timeout, self._directory.meet)
        self._restored: int | None = None
        self._last = LastState(wanted=save_on_error)
        self._preempted = self._closed = False
        self._looked = False  # whether there are steps, and if not, at what else may have been meant
        self._preemption = Preemption() if save_on_preemption else None
        if self._preemption:  # after one that the user did not close, SIGTERM must still end the process
            weakref.finalize(self, self._preemption.close).atexit = False

    if not TYPE_CHECKING:  # or else no name would be wrong for type checkers

        def __getattr__(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)  # Python's own error, and that within a property
            except AttributeError as error:
                if error.name != name or name not in habits.OF_RUN:
                    raise
                message = habits.answer(str(error), habits.OF_RUN[name])
                raise AttributeError(message, name=name, obj=self) from None

    @property
    def directory(self) -> str:
        """The absolute path of the run."""
        return self._root

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return not self._under_way.all_over()

    def __repr__(self) -> str:
        """Shows what the Checkpointer is doing, without reading anything."""
        saving = [f"saving step {step}" for step in sorted(self._under_way.pending_steps())]
        state = [
            *([] if self._restored is None else [f"restored step {self._restored}"]),
            *saving,
            *([] if self._directory.copying is None else [f"copying step {self._directory.copying}"]),
            *(["preempted"] if self._preempted else []),
            *(["closed"] if self._closed else ["taken over by another"] if self._directory.lost else []),
        ]
        return f"<Checkpointer {self._root}{': ' if state else ''}{', '.join(state)}>"

    # Steps

    @property
    def steps(self) -> list[int]:
        """The steps of the run, ascending: those committed, and those that this `Checkpointer` is saving.

        These are the steps that `save` refuses to save again. A save that fails takes its step away again.
        """
        return sorted({*self._under_way.pending_steps(), *self._directory.all_steps()})

    @property
    def committed_steps(self) -> list[int]:
        """The committed steps, ascending, with those that another library has left in the directory."""
        return list(self._directory.all_steps())

    @property
    def latest_step(self) -> int | None:
        """The newest of `steps`, or None if there is none."""
        return max(self.steps, default=None)

    @property
    def restored_step(self) -> int | None:
        """The step that was restored, from which the loop continues; None before that."""
        return self._restored

    @property
    def preempted(self) -> bool:
        """Whether this job is about to be stopped, and the state at that step is saved or being saved."""
        return self._preempted

    @property
    def last_error(self) -> BaseException | None:
        """The failure of the newest save that is over, with an `on_error` that raises none; None when it is good."""
        return self._failures.last

    @property
    def pinned(self) -> list[int]:
        """The steps that are never deleted, ascending."""
        return self._directory.pinned()

    @property
    def disk_usage(self) -> dict[int, int]:
        """The good steps and how many bytes each takes on the disk."""
        return {one.step: one.nbytes for one in self._directory.good()}

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The good step that is best by a metric; None when there are no metrics yet. NaN is never best.

        Raises `MismatchError` for a metric that no step has, where steps have others.
        """
        good = self._directory.good(foreign=True)
        known = sorted({name for one in good for name in one.metrics})
        if known and metric not in known:
            raise MismatchError(f"metric={metric!r}: expected one that a step has, found {few(tuple(known))}")
        numbers = [one for one in good if not math.isnan(one.metrics.get(metric, math.nan))]
        return next(iter(rank(numbers, metric, mode)), None)

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        return self._directory.path(step_number(step))

    def copies(self, step: int) -> list[str]:
        """The paths of all copies of a step, the nearest first. Raises `NotFoundError` when there is none."""
        return [place.path for place in self._directory.candidates(step)]

    @property
    def uncopied(self) -> list[int]:
        """The steps that are only in `local`, or not known to be elsewhere, ascending; none without a `local`."""
        return self._directory.uncopied()

    # Saving

    @alone
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
        """Saves the step in the background when `save_every` says so, or in any case with `force`.

        Returns None when nothing is saved. The next call raises the failure of a save in the background.
        `on_exists` says what to do when the step is committed already; a damaged one is always replaced.
        After `restore(step=…)` the steps behind that one are set aside first, as `rewind` does it.
        `metadata` is that of this step: it replaces the run's, key by key if both are dicts.
        `tree`, `metrics`, `rules`, `dtype` and `memory_limit` are as for `treering.save_async`.
        """
        begun = time.perf_counter()
        step = step_number(step)
        refuse_within(f"save({step})", self)
        if on_exists not in ("error", "skip", "overwrite"):
            raise MismatchError(f"on_exists={on_exists!r}: expected 'error', 'skip' or 'overwrite'")
        options = StepOptions(metrics, metadata, on_exists, rules, dtype, memory_limit)
        pending = None
        try:
            with self._under_way.writing():
                pending = self._save_if_wanted(begun, step, tree, force, options)
            return pending
        except SaveError as error:
            if self._failures.raises:
                raise
            self._failures.report(error)
            return None
        finally:
            self._last.note(step, tree, options, pending)

    def _save_if_wanted(
        self, begun: float, step: int, tree: Any, force: bool, options: StepOptions
    ) -> PendingSave | None:
        several = coordinator.several()
        if not several:  # with several, each process would raise a failure at another step
            self._under_way.settle(self._under_way.verdict())
        preempted = bool(self._preemption) and not self._preempted and self._preemption.reached()
        force = force or preempted
        # Process 0 asks the clock or the user's function, for all processes.
        if not (force or (several and not self._schedule.by_number) or self._schedule.due(step)):
            return None
        self._check_open()
        with self._collective.call(f"save({step})") as call:
            said, admitted, word = call.broadcast(lambda: self._admit(step, options.on_exists, force, several))
            verdict = Verdict(*said)
            self._under_way.settle(verdict)
            if admitted is None:
                call.close()
                self._preempted = self._preempted or preempted
                return None
            deciding = time.perf_counter()
            if verdict.calls:
                self._settle(call)
            waited = time.perf_counter() - deciding
            path, overwrite = admitted
            together = self._directory.together
            try:
                if together:
                    path = together.prepare(path, word, self._directory.back_to)
                requested = SaveOptions(
                    "treering", overwrite, options.rules, options.dtype, options.memory_limit, True, False, {},
                    own_disks=together is not None,
                )  # fmt: skip
                info = _save.describe(step, options.metrics, _combined(self._metadata, options.metadata))
                pending = _save.start(call, path, tree, info, requested, self._retention, begun, waited)
            except BaseException as error:
                if several:  # all processes count the same saves
                    self._under_way.add(PendingSave._of_failure(path, step, call, error))
                raise
        self._directory.back_to = None
        self._under_way.add(pending)
        self._schedule.begun()
        pending._warn_of_stall()
        self._preempted = self._preempted or preempted
        return pending

    def _admit(
        self, step: int, on_exists: str, force: bool, several: bool
    ) -> tuple[Verdict, tuple[str, bool] | None, Any]:
        """The verdict on earlier saves; unless one failed, the path and whether to overwrite, None to skip; and a word.

        Called in process 0. Raises `ExistsError`.
        """
        verdict = self._under_way.verdict()
        if verdict.raises:
            return verdict, None, None
        if not force and (several and not self._schedule.due(step)):
            return verdict, None, None
        if not force and self._when_busy == "skip" and verdict.calls:
            return verdict, None, None
        with as_save_error(self._root):
            if not (self._looked or self._two_places) and self._directory.steps.store.has_folders:  # no request is made
                with contextlib.suppress(MismatchError, UnsupportedError):  # which restore_or_init raises
                    resume.has_begun(self._directory)
                self._looked = True
            place = self._directory.place_for(step, on_exists, self._under_way.steps(verdict.calls))
            together = self._directory.together
            return verdict, place, together and together.word()

    def _settle(self, call: Call) -> None:
        """Returns when every save is over; all processes raise a failure that process 0 has not raised yet."""
        self._under_way.settle(Verdict(*call.broadcast(self._under_way.after_all)))

    def wait(self) -> None:
        """Returns when every save is committed. Raises the failure of a save, unless its result has raised it."""
        refuse_within("wait()", self)
        self._under_way.settle()

    @alone
    def finish(self) -> None:
        """Closes, and marks the run as finished, by which `treering.follow` knows that no step comes any more.

        A job that saves a step of the run later removes the mark.
        """
        refuse_within("finish()", self)
        self._under_way.settle()
        self._check_open()
        with self._under_way.writing():
            directory = self._directory

            def first(call: Call) -> None:
                if together := directory.together:
                    together.copy_last(call, directory.claim)

            self._collective.once("finish()", directory.finish, first=first)
        self._close()

    @alone
    def close(self) -> None:
        """Waits, and ends the saving; reading goes on working. Raises the failure of a save, as `wait` does."""
        refuse_within("close()", self)
        try:
            if self._two_places and not self._closed:
                # All wait for the process that copies: a job of which some have ended is not left alone for long.
                def last(call: Call) -> None:
                    self._settle(call)
                    if together := self._directory.together:
                        together.copy_last(call, self._directory.claim_for_copying)

                self._collective.once("close()", self._directory.copy_all, first=last)
        finally:
            self._close()

    @alone
    def _close(self) -> None:
        self._closed = self._late.closed = True
        try:
            self._under_way.settle()
        finally:
            try:
                if self._under_way.all_over():
                    self._retention.close()
                else:  # an interrupt ended the wait, and a save goes on
                    self._retention.close_after(self._under_way.last())
            finally:
                if self._preemption:
                    self._preemption.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            if self._last.step is not None:
                self._save_last(self._last.step, kind.__name__)
        finally:
            with _logged():
                self._close()

    def _save_last(self, step: int, reason: str) -> None:
        """Saves the newest state that the loop passed to `save`, unless it is saved; logs why if that fails."""
        while len(self._under_way):
            with _logged():
                self.wait()
        if self._last.saved:
            return
        about = f"{self._root}: step {step}"
        try:
            tree, options, left_out = self._last.get()
            saved = self.save(step, tree, force=True, **options._asdict())
            self.wait()
        except Exception as error:
            _log.error("%s is not saved, though %s ended the loop: %s", about, reason, error)
            return
        if saved is None:
            _log.warning("%s is not saved, though %s ended the loop: there is one, and on_exists='skip'", about, reason)
            return
        for problem in left_out:
            _log.warning("%s: %s", about, problem)
        _log.warning("%s is saved, for %s ended the loop", about, reason)

    # Restoring

    def open(self, step: int | None = None) -> Checkpoint:
        """Opens a step, by default the latest good one. Raises `NotFoundError` when there is none."""
        refuse_within("open()", self)
        self.wait()
        wait_for_all_in(self._directory.steps.root)

        def attempt() -> Checkpoint:
            places = self._directory.to_read(step)
            return latest_good(self._root, places, lambda ckpt: ckpt, fallback=step is None)[1]

        return attempt() if step is not None else listed_again(attempt)

    @overload
    def restore(
        self, like: None = None, *, step: int | None = None, fallback: bool = True, **options: "Unpack[RestoreOptions]"
    ) -> Any: ...
    @overload
    def restore(
        self, like: T, *, step: int | None = None, fallback: bool = True, **options: "Unpack[RestoreOptions]"
    ) -> T: ...
    @alone
    def restore(
        self, like: Any = None, *, step: int | None = None, fallback: bool = True, **options: "Unpack[RestoreOptions]"
    ) -> Any:
        """Restores a step, by default the latest; `options` are those of `treering.restore`.

        When the latest step is damaged, that is logged and with `fallback` the one before it is taken, and so
        on; saving the damaged step again replaces it. Raises `NotFoundError` when there is no step, and
        `CorruptError` when all are damaged.

        After restoring an earlier step with `step=`, the next save sets the steps behind it aside, as `rewind` does
        it; until then nothing changes. This job never deletes the step that it restored.
        """
        _options.check(options, "restore()")
        what = f"restore({'' if step is None else f'step={step}'})"
        refuse_within(what, self)
        wait_for_all_in(self._directory.steps.root)
        with self._collective.call(what) as call:
            self._settle(call)
            call.doing("restoring")
            if together := self._directory.together:
                together.copy_before(call, step)
            self._restored, tree = resume.restore(call, self._directory, like, step, fallback, options)
            call.close()
        self._looked = True
        self._directory.restored = self._restored
        self._directory.back_to = None if step is None else self._restored
        self._last.forget()
        return tree

    def restore_or_init(
        self, init: Callable[[], T], *, sharding: Any = None, fallback: bool = True, **options: "Unpack[ReadOptions]"
    ) -> tuple[T, int]:
        """Returns the latest valid step's tree and its number, or what `init()` returns and 0 if there is no step.

        A resumed job is the interrupted job. Structure and functions come from `init`. Every leaf has the type, dtype,
        weak type, sharding, memory kind and layout that it was saved with, and one JAX array in two leaves is one
        again. Leaves that were saved with `dtype=` have the dtype of `init`. Arrays that cannot go where they were,
        because the job has other devices, go where `init` places them; a warning names them. Foreign formats do not
        record types, so there `init` decides, as a template does.

        init: takes no arguments and returns the state. A resumed job only traces it. It calls `init` if tracing fails,
            if tracing would leave a tracer behind, and to see where it places arrays whose place is not known. The
            first job calls and then traces it, and calls it again if tracing left a tracer behind.
        sharding: goes before the saved sharding of JAX arrays; see `treering.restore`. Leaves for which it says nothing
            (None in a tree, or as the result of a function) stay where they were saved. In the first job, arrays are
            made there.
        options: as for `restore`. `dtype="template"` takes the floating-point dtypes of `init`.

        A run that begins although steps are near by (under another `prefix`, set aside, in a run around or within it)
        logs a warning that names them.

        Raises `MismatchError` if tracing `init` gives another tree than calling it, if a shape differs, and for a
        directory that is one checkpoint; `CorruptError` if all steps are damaged.
        """
        from .._restore import initial

        _options.check(options, "restore_or_init()")  # in the first job as well
        refuse_within("restore_or_init()", self)
        wait_for_all_in(self._directory.steps.root)
        with self._collective.call("restore_or_init()") as call:
            self._settle(call)
            found = call.broadcast(lambda: resume.has_begun(self._directory))
            call.close()
        self._looked = True
        if found:
            template: Any = initial.Initial(init)
            tree = self.restore(template, fallback=fallback, sharding=sharding, **options)
            assert self._restored is not None
            self._late.resumed(self._restored)
            return tree, self._restored
        _log.info("%s: there is no step, so the run begins with init()", self._root)
        resume.check(options)  # in the first job, not only when there is something to restore
        if isinstance(sharding, str) and sharding == "saved":  # nothing is saved yet
            sharding = None
        return initial.first(init, sharding), 0

    # Managing

    @alone
    def pin(self, step: int) -> None:
        """Marks a step never to be deleted, for this and every later job."""
        refuse_within(f"pin({step})", self)
        self._once(f"pin({step})", lambda: self._directory.pin(step, True))

    @alone
    def unpin(self, step: int) -> None:
        """Removes the mark that `pin` has set."""
        refuse_within(f"unpin({step})", self)
        self._once(f"unpin({step})", lambda: self._directory.pin(step, False))

    @alone
    def delete(self, step: int) -> None:
        """Deletes a step. Raises `MismatchError` when it is pinned, is a link, or a link in the run leads to it."""
        refuse_within(f"delete({step})", self)
        self._once(f"delete({step})", lambda: self._directory.delete(step))
        if together := self._directory.together:
            together.deleted(step_number(step))
        if self._last.step == step:
            self._last.forget()

    @alone
    def rewind(self, step: int | None) -> None:
        """Goes back to a step: those behind it are set aside and no longer count; `restore` then finds this one.

        They lie in ``rewound-1`` (``-2``, …) within the run, a run of its own, pinned ones too; nothing is deleted.

        step: None goes back to before the first step, so that all are set aside and the run starts over. So does 0 in a
            run that has not saved it.

        Raises `NotFoundError` when there is no such step, and `UnsupportedError` when a later one is another library's.
        """
        number = BEFORE_ALL if step is None else step_number(step)
        what = f"rewind({step})"
        refuse_within(what, self)
        self._check_open()
        with self._under_way.writing():
            self._once(what, lambda: self._directory.rewind(number))
        if together := self._directory.together:
            together.rewound(number)
        self._looked = True
        self._directory.back_to = None
        self._last.forget()

    # Helpers

    def _once(self, what: str, do: Callable[[], object]) -> None:
        """Calls `do` in process 0 when every save is over and all have come to this call: what they read is there."""

        def meet(call: Call) -> None:
            call.gather_and_decide(None, lambda _: None)
            self._settle(call)

        self._collective.once(what, do, first=meet)

    def _check_open(self) -> None:
        if self._closed:
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to go on saving")


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Logs the failure of a save in the background, so that it does not hide the error that is being raised."""
    try:
        yield
    except TreeringError:
        _log.exception("a save in the background failed, too")


def _combined(of_run: Any, of_step: Any) -> Any:
    """The metadata of one step, from that of the run and that given with the step."""
    of_run, of_step = plain(of_run), plain(of_step)
    if isinstance(of_run, dict) and isinstance(of_step, dict):
        return {**of_run, **of_step}
    return of_run if of_step is None else of_step
