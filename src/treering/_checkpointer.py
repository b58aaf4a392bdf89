"""The run in a training loop: when to save, what to keep, where to go on."""

import contextlib
import datetime
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

import numpy as np

from . import _processes, _run, _save, stores
from ._checkpoint import Checkpoint, index, latest_good, open_one
from ._history import History
from ._paths import absolute
from ._pending import PendingSave
from .errors import CorruptError, ExistsError, MismatchError, NotFoundError, TreeringError
from .formats.treering import manifest
from .formats.treering.read import ReplacedError
from .keep import Policy, rank
from .stores import local

_log = logging.getLogger("treering")

T = TypeVar("T")
_TRIES = 5  # at restoring one and the same checkpoint in all processes, while somebody replaces it
SaveEvery = int | datetime.timedelta | Callable[[int], bool]


class Checkpointer:
    """Saves the steps of a run in the background, keeps those that are wanted, and finds where to go on.

    >>> with tr.Checkpointer("runs/gpt", save_every=1000, keep=tr.keep.last(3)) as ckpts:
    ...     state, step = ckpts.restore_or_init(init)
    ...     for step in range(step + 1, n + 1):
    ...         state = train_step(state, next(data))
    ...         ckpts.save(step, state, force=step == n)

    run: a directory; it is made by the first save. Making a `Checkpointer` touches nothing.
    save_every: a number of steps (saved are its multiples), a `timedelta`, or a function of the step.
    keep: which steps to keep, see `treering.keep`; None keeps all.
    metadata: JSON-like configuration that goes into every checkpoint.
    prefix: what the names of the step directories begin with.
    timeout: seconds without a sign of life after which another process is taken for dead.

    With several processes every one makes the same calls of `save`, `restore`, `restore_or_init`, `wait`, `close`,
    `delete`, `pin` and `unpin`; what there is to decide, process 0 decides.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        save_every: SaveEvery = 1,
        keep: Policy | None = None,
        metadata: Any = None,
        prefix: str = "step-",
        timeout: float = 30,
    ):
        number = not isinstance(save_every, bool) and isinstance(save_every, int | np.integer) and save_every >= 1
        if not (number or isinstance(save_every, datetime.timedelta) or callable(save_every)):
            raise MismatchError(f"save_every={save_every!r}: expected a number from 1, a timedelta or a function")
        if keep is not None and not isinstance(keep, Policy):
            raise MismatchError(f"keep={keep!r}: expected a policy such as treering.keep.last(3)")
        if "/" in prefix or prefix[-1:].isdigit():
            raise MismatchError(f"prefix={prefix!r}: expected text without '/' that does not end in a digit")
        self._root = absolute(run)
        self._save_every = int(save_every) if isinstance(save_every, int | np.integer) else save_every
        self._keep, self._metadata, self._prefix, self._timeout = keep, metadata, prefix, timeout
        self._history = History(self._root, prefix)
        self._pending: list[PendingSave] = []
        self._restored: int | None = None
        self._set_aside: frozenset[int] = frozenset()  # steps after the one restored: of a branch that was left
        self._saved_at = time.monotonic()
        self._cleaned = self._closed = False

    # Steps

    @property
    def steps(self) -> list[int]:
        """The committed steps, ascending, with those that another library has left in the directory."""
        return list(_run.all_steps(self._root, self._prefix))

    @property
    def latest_step(self) -> int | None:
        """The newest committed step, None when there is none."""
        return max(_run.all_steps(self._root, self._prefix), default=None)

    @property
    def restored_step(self) -> int | None:
        """The step that was restored, None before that."""
        return self._restored

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The good step that is best by a metric; None when none has it. NaN is never best."""
        numbers = [one for one in self._history.good() if not math.isnan(one.metrics.get(metric, math.nan))]
        return next(iter(rank(numbers, metric, mode)), None)

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        step = index(step)
        return _run.all_steps(self._root, self._prefix).get(step) or self._own_path(step)

    # Saving

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        on_exists: Literal["error", "skip", "overwrite"] = "error",
        dtype: Any = None,
        memory_limit: int | None = None,
    ) -> PendingSave | None:
        """Saves the step in the background when `save_every` says so, or in any case with `force`.

        Returns None when nothing is saved. What a save in the background failed with is raised by the next
        call. `on_exists` says what to do when the step is committed already; a damaged one is always replaced.
        `tree`, `metrics`, `dtype` and `memory_limit` are as for `treering.save_async`.
        """
        step = index(step)
        if on_exists not in ("error", "skip", "overwrite"):
            raise MismatchError(f"on_exists={on_exists!r}: expected 'error', 'skip' or 'overwrite'")
        several = _processes.several()
        if not several:  # or else each process would find out at another step
            self._raise_failed(self._over())
        # What a clock or a function says, process 0 says for all.
        due = force or (several and not isinstance(self._save_every, int)) or self._due(step)
        if not due:
            return None
        if self._closed:
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to go on saving")
        with self._call(f"save({step})") as call:
            over, admitted = call.tell(lambda: self._admit(step, on_exists, force or not several or self._due(step)))
            self._raise_failed(over)
            if admitted is None:
                call.close()
                return None
            path, overwrite = admitted
            try:
                wish = _save.Wish("treering", overwrite, (), dtype, memory_limit, True, {})
                info = _save.describe(step, metrics, self._metadata)
                pending = _save.start(call, path, tree, info, wish, _Tidying(self._clean, self._retain))
            except BaseException as error:
                if several:  # all processes count the same saves
                    self._pending.append(PendingSave._of_failure(path, step, call, error))
                raise
        self._pending.append(pending)
        self._saved_at = time.monotonic()
        return pending

    def _admit(self, step: int, on_exists: str, due: bool) -> tuple[int, tuple[str, bool] | None]:
        """How many saves are over, and unless one failed: where to save and whether to overwrite; None to skip.

        Raises `ExistsError`.
        """
        over = self._over()
        if any(pending.failed for pending in self._pending[:over]) or not due:
            return over, None
        committed = self._history.committed()
        path = committed.get(step) or self._own_path(step)
        overwrite = on_exists == "overwrite"
        if any(pending.step == step for pending in self._pending[over:]) or step in committed:
            overwrite = overwrite or (step in committed and self._history.is_damaged(step, path))
            if overwrite and local.pinned(stores.DISK, path):
                raise ExistsError(f"{path}: step {step} is pinned; unpin it before it is overwritten")
            if not overwrite and on_exists == "skip":
                return over, None
            if not overwrite:
                raise ExistsError(
                    f"{path}: step {step} is saved already; pass on_exists='skip' or 'overwrite', "
                    "or continue from ckpts.latest_step"
                )
        return over, (path, overwrite)

    def wait(self) -> None:
        """Returns when every save is committed. Raises what a save failed with."""
        self._raise_failed(len(self._pending))

    def close(self) -> None:
        """Waits, and ends the saving; reading goes on working. Raises what a save failed with."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except TreeringError:
            if kind is None:
                raise
            _log.exception("a save in the background failed, too")

    # Restoring

    def open(self, step: int | None = None) -> Checkpoint:
        """Opens a step, by default the latest good one. Raises `NotFoundError` when there is none."""
        self.wait()
        if step is not None:
            return open_one(self._existing(step))
        return latest_good(self._root, self._newest_first(), lambda ckpt: ckpt)[1]

    def restore(self, like: Any = None, *, step: int | None = None, fallback: bool = True, **options: Any) -> Any:
        """Restores a step, by default the latest; `options` are those of `treering.restore`.

        When the latest step is damaged, that is logged and with `fallback` the one before it is taken, and so
        on; saving the damaged step again replaces it. Raises `NotFoundError` when there is no step, and
        `CorruptError` when all are damaged.

        After restoring an earlier step, the steps behind it neither count for `keep` nor are deleted, and what
        was restored is kept as well.
        """
        self.wait()
        with self._call(f"restore({'' if step is None else f'step={step}'})") as call:
            call.doing("restoring")
            places = call.tell(lambda: self._newest_first() if step is None else [(index(step), self._existing(step))])
            self._restored, (_, tree) = latest_good(
                self._root,
                places,
                lambda ckpt: (ckpt._reader.identity, ckpt.restore(like, **options)),
                fallback=fallback and step is None,
                damaged=lambda number: self._history.mark_damaged(number, dict(places)[number]),
                everywhere=lambda attempt: _everywhere(call, attempt),
            )
            call.close()
        self._set_aside = frozenset(number for number in self._history.committed() if number > self._restored)
        return tree

    def restore_or_init(self, init: Callable[[], Any], *, sharding: Any = None, **options: Any) -> tuple[Any, int]:
        """The latest good step's tree and its number, or what `init()` returns and 0 when there is none.

        When there is a checkpoint, `init` is only traced: its result is the template. `sharding` says where the
        arrays go in either case; `options` are those of `restore`. A run whose steps are all damaged raises
        `CorruptError` rather than begin anew.
        """
        from . import _init

        self.wait()
        with self._call("restore_or_init()") as call:
            found = call.tell(lambda: bool(_run.all_steps(self._root, self._prefix)))
            call.close()
        if found:
            tree = self.restore(_init.abstract(init), sharding=sharding, **options)
            assert self._restored is not None
            return tree, self._restored
        return (init() if sharding is None else _init.sharded(init, sharding)), 0

    # Managing

    def pin(self, step: int) -> None:
        """Marks a step never to be deleted, for this and every later job."""
        self._once(f"pin({step})", lambda: local.pin(stores.DISK, self._own(step), True))

    def unpin(self, step: int) -> None:
        """Takes the mark away."""
        self._once(f"unpin({step})", lambda: local.pin(stores.DISK, self._own(step), False))

    def delete(self, step: int) -> None:
        """Deletes a step. Raises `MismatchError` when it is pinned."""
        self.wait()
        self._once(f"delete({step})", lambda: self._delete(step))

    def _delete(self, step: int) -> None:
        path = self._own(step)
        if local.pinned(stores.DISK, path):
            raise MismatchError(f"{path}: the step is pinned; unpin it first")
        local.delete(stores.DISK, path, manifest.file_names)

    # What the above is made of

    @contextlib.contextmanager
    def _call(self, what: str) -> Iterator[_processes.Call]:
        """A call that every process makes; with an error it ends for all."""
        call = _processes.begin(f"Checkpointer({self._root!r}).{what}", timeout=self._timeout)
        with _save.ending(call):
            call.doing("deciding")
            yield call

    def _once(self, what: str, do: Callable[[], None]) -> None:
        """Does something in process 0; all return when it is done, or raise its error."""
        with self._call(what) as call:
            call.tell(do)
            call.close()

    def _own(self, step: int) -> str:
        """Where a step is that was saved by us; what others have left is not ours to change."""
        return self._existing(step, self._history.committed())

    def _own_path(self, step: int) -> str:
        return os.path.join(self._root, _run.step_name(self._prefix, step))

    def _newest_first(self) -> list[tuple[int, str]]:
        return list(reversed(_run.all_steps(self._root, self._prefix).items()))

    def _existing(self, step: int, committed: Mapping[int, str] | None = None) -> str:
        """Where a step is, among all or among the given ones. Raises `NotFoundError`."""
        committed = _run.all_steps(self._root, self._prefix) if committed is None else committed
        if (number := index(step)) not in committed:
            shown = ("… " if len(committed) > 5 else "") + (", ".join(map(str, list(committed)[-5:])) or "no steps")
            raise NotFoundError(f"{self._root}: expected step {number}, found {shown}")
        return committed[number]

    def _due(self, step: int) -> bool:
        if isinstance(self._save_every, int):
            return step % self._save_every == 0
        if isinstance(self._save_every, datetime.timedelta):
            return time.monotonic() - self._saved_at >= self._save_every.total_seconds()
        return bool(self._save_every(step))

    def _over(self) -> int:
        """How many of the saves are over. They end in the order in which they began."""
        return sum(pending.done() for pending in self._pending)

    def _raise_failed(self, over: int) -> None:
        """Waits for the first so many saves and forgets them; raises what the first of them that failed did."""
        ended, self._pending = self._pending[:over], self._pending[over:]
        for pending in ended:
            pending._wait()
        for n, pending in enumerate(ended):
            if pending.failed:
                self._pending = ended[n + 1 :] + self._pending
                pending.result()

    def _clean(self) -> None:
        """Before the first save, in the background: removes what killed jobs left behind."""
        if self._cleaned:
            return
        for name in stores.DISK.list(self._root):
            if _run.parse(name, self._prefix) is not None:
                local.clean(stores.DISK, os.path.join(self._root, name), manifest.file_names, remove_empty=True)
        self._cleaned = True

    def _retain(self, step: int) -> None:
        """After a commit, in the background: deletes what the policy does not want."""
        if self._keep is None:
            return
        self._set_aside -= {step}  # it belongs to this branch now
        saved = [one for one in self._history.good() if one.step not in self._set_aside]
        wanted = self._keep.kept(saved) | {step, self._restored, *(one.step for one in saved[-1:])}
        committed = self._history.committed()
        for one in saved:
            path = committed.get(one.step)
            if path and one.step not in wanted and not local.pinned(stores.DISK, path):
                local.delete(stores.DISK, path, manifest.file_names)


def _everywhere(call: _processes.Call, attempt: Callable[[], tuple[str, T]]) -> tuple[str, T]:
    """The result of an attempt that worked in every process, on one and the same checkpoint.

    Attempts return what identifies the checkpoint as well. Raises, in every process, the damage that any has found.
    """
    for _ in range(_TRIES):
        result: Any = None
        problem: TreeringError | None = None
        try:
            result = attempt()
        except (CorruptError, ReplacedError) as error:
            problem = error
        word = [isinstance(problem, CorruptError), str(problem)] if problem else result[0]
        found = call.agree(word, _first_problem)
        if found is None:
            return result
        if found:
            process, damaged, text = found
            kind = CorruptError if damaged else ReplacedError
            raise problem if isinstance(problem, kind) else kind(f"process {process}: {text}")
    raise ReplacedError("the checkpoint is replaced faster than all processes can read it")


def _first_problem(words: Sequence[Any]) -> list[Any] | None:
    """The first process with a problem, and which; nothing when the processes have read different checkpoints."""
    problem = next(([n, *word] for n, word in enumerate(words) if isinstance(word, list)), None)
    return problem or (None if len(set(words)) == 1 else [])


class _Tidying:
    """What happens around a save, as `_save.Manager`; none of it may fail the save."""

    def __init__(self, clean: Callable[[], None], retain: Callable[[int], None]):
        self._clean, self._retain = clean, retain

    def before(self) -> None:
        try:
            self._clean()
        except OSError:
            _log.exception("removing what earlier jobs left behind failed; it is tried again with the next save")

    def after(self, step: int | None) -> None:
        assert step is not None
        try:
            self._retain(step)
        except Exception:  # a policy may be anybody's code, and the checkpoint is committed
            _log.exception("deleting old steps failed; it is tried again after the next save")
