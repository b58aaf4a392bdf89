"""Starts a save. This is the only place that knows the order of its stages.

| stage | thread | file |
| --- | --- | --- |
| describe the tree | the caller's | `source` |
| choose the files of earlier steps that may be shared | the caller's | `unchanged` |
| plan who writes which bytes | the caller's | `plan` |
| stage the arrays | the caller's, while the next one waits | `_pytree.staged_supply` |
| write and commit | a background thread | `write` |
"""

import contextlib
import functools
import logging
import time
from typing import Any, Protocol

from .._core.calls import Call
from .._pytree import devices
from .._rules.base import check_list
from .._threads.pool import ThreadPool
from .._threads.python_gc import gc_paused
from .._threads.reentry import non_reentrant
from .._threads.thread import Thread
from ..errors import SaveError
from . import pending as _pending
from .array_files import CHUNK_BYTES
from .pending import PendingSave, SaveReport
from .plan import Plan, plan_save
from .source import describe
from .target import Info, SaveOptions, SaveTarget, target_of
from .write import write as write_plan

_log = logging.getLogger("treering")
_WRITER_THREADS = 4  # threads of a save; while some wait for the disk, another copies and hashes


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


@devices.allow_transfers()
# A nested call would deadlock: the writing thread waits until this call has staged everything, and the nested save
# would wait for the writing thread.
@non_reentrant
def start_save(
    call: Call,
    place: str,
    tree: Any,
    info: Info,
    options: SaveOptions,
    hooks: SaveHooks | None = None,
    begun: float | None = None,
    waited: float = 0.0,
    lease_seconds: float = 0.0,
) -> PendingSave:
    """Begins a save: stages the tree in the caller's thread, and starts the background thread that writes it.

    place: an absolute path.
    hooks: called around the save.
    begun: when the user's call began, by default now. It has waited `waited` seconds since then for the previous save,
        and `lease_seconds` for the lease of its run.

    `call` ends with the save; if this function raises, its caller ends it.
    """
    begun = time.perf_counter() if begun is None else begun
    call.set_activity("copying the state")
    if hooks is None:
        _raise_failed(call)
    target = target_of(call, place, info, options)
    plan = prepare(target, tree)
    with _pending.as_save_error(place):
        if hooks and call.index == 0:
            lease_seconds += hooks.on_start()
        target.check_at_once()
    pending = PendingSave(
        place,
        info.step,
        plan.caller,
        call,
        managed=hooks is not None,
        blocking=not options.background,
        begun=begun,
        waited=waited,
        lease_seconds=lease_seconds,
    )
    plans = [plan]  # A list, so that nothing refers to the plan and its arrays any more once they are written.

    def write(pool: ThreadPool) -> None:
        if hooks and call.index == 0:
            hooks.before_write()
        report = pending._make_report(write_plan(plans.pop(), pool))
        with contextlib.suppress(Exception):  # A log handler may raise. The checkpoint is committed all the same.
            _log.info("saved %s", report)
        if hooks:
            call.set_activity("tidying up")
            call.broadcast(functools.partial(hooks.after_commit, report))
            hooks.after_commit_all(report)

    previous = _pending.saves_finished
    pool = thread = None
    try:
        # Less than one chunk for each thread would keep that thread idle.
        pool = ThreadPool(max(1, min(_WRITER_THREADS, -(-plan.caller.nbytes // CHUNK_BYTES))))
        thread = Thread(target=pending._run, args=(write, previous, pool), name="treering-save", daemon=False)
        pending._watch(thread, previous, pool)
        pool.start(thread)
        _pending.saves_finished = pending._all_finished
        with gc_paused() if options.memory_limit is None else contextlib.nullcontext():
            plan.caller.run()
        pending._release_caller()
    except BaseException as error:
        pending._fail(error)
        if thread and thread.was_started:
            pending._cancel(error)
        elif pool:  # An interrupt came before the thread began. If it begins yet, it finds the failure at once.
            pool.close()
        raise
    return pending


def prepare(target: SaveTarget, tree: Any) -> Plan:
    """Describes the tree and plans what this process writes.

    Raises the errors that `treering.save` raises before it writes anything.
    """
    if target.options.rules != ():
        check_list(target.options.rules)
    described = describe(target, tree)
    if target.options.reuse:
        described = target.options.reuse(target, described)
    return plan_save(target, described)


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
