"""The run in a training loop: when to save, what to keep, where to go on."""

import datetime
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from . import _run, _save, stores
from ._catalogue import decode
from ._checkpoint import Checkpoint, open_checkpoint
from ._paths import absolute
from ._save import PendingSave
from .errors import CorruptError, ExistsError, MismatchError, NotFoundError, TreeringError
from .formats.treering import manifest
from .keep import Policy, Saved, rank
from .stores import local
from .stores.disk import read_file

_log = logging.getLogger("treering")

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
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        save_every: SaveEvery = 1,
        keep: Policy | None = None,
        metadata: Any = None,
        prefix: str = "step-",
    ):
        if isinstance(save_every, int) and save_every < 1:
            raise MismatchError(f"save_every={save_every}: expected a number from 1, a timedelta or a function")
        if keep is not None and not isinstance(keep, Policy):
            raise MismatchError(f"keep={keep!r}: expected a policy such as treering.keep.last(3)")
        if "/" in prefix or prefix[-1:].isdigit():
            raise MismatchError(f"prefix={prefix!r}: expected text without '/' that does not end in a digit")
        self._root = absolute(run)
        self._save_every, self._keep, self._metadata, self._prefix = save_every, keep, metadata, prefix
        self._pending: list[PendingSave] = []
        self._known: dict[int, Saved] = {}  # what was read from manifests, for the policy
        self._damaged: set[int] = set()
        self._restored: int | None = None
        self._saved_at = time.monotonic()
        self._cleaned = self._closed = False

    # Steps

    @property
    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(self._committed())

    @property
    def latest_step(self) -> int | None:
        """The newest committed step, None when there is none."""
        return max(self._committed(), default=None)

    @property
    def restored_step(self) -> int | None:
        """The step that was restored, None before that."""
        return self._restored

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The committed step that is best by a metric; None when none has it. NaN is never best."""
        ranked = rank(self._saved(), metric, mode)
        value = self._known[ranked[0]].metrics[metric] if ranked else float("nan")
        return ranked[0] if value == value else None

    def path(self, step: int) -> str:
        """The directory of a step, whether it exists or not."""
        step = _index(step)
        return os.path.join(self._root, self._committed().get(step) or _run.step_name(self._prefix, step))

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
        self._raise_failed()
        step = _index(step)
        if not (force or self._due(step)):
            return None
        if self._closed:
            raise MismatchError(f"{self._root}: this Checkpointer is closed; make another to go on saving")
        overwrite = on_exists == "overwrite"
        if on_exists not in ("error", "skip", "overwrite"):
            raise MismatchError(f"on_exists={on_exists!r}: expected 'error', 'skip' or 'overwrite'")
        path = self.path(step)
        if any(pending.step == step for pending in self._pending) or step in self._committed():
            if self._is_damaged(step):
                overwrite = True
            elif on_exists == "skip":
                return None
            elif on_exists == "error":
                raise ExistsError(
                    f"{path}: step {step} is saved already; pass on_exists='skip' or 'overwrite', "
                    "or continue from ckpts.latest_step"
                )
        info = _save.describe(step, metrics, self._metadata)
        if not self._cleaned:
            self._clean()
        pending = _save.start(
            path,
            tree,
            info,
            overwrite=overwrite,
            dtype=dtype,
            limit=memory_limit,
            background=True,
            then=lambda: self._committed_one(step),
        )
        self._pending.append(pending)
        self._saved_at = time.monotonic()
        return pending

    def wait(self) -> None:
        """Returns when every save is committed. Raises what a save failed with."""
        for pending in list(self._pending):
            pending._finished.wait()
        self._raise_failed()

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
        if step is None:
            return open_checkpoint(self._root)
        if _index(step) not in self._committed():
            raise NotFoundError(f"{self._root}: expected step {step}, found {_shown(self.steps)}")
        return open_checkpoint(self.path(step))

    def restore(self, like: Any = None, *, step: int | None = None, fallback: bool = True, **options: Any) -> Any:
        """Restores a step, by default the latest; `options` are those of `treering.restore`.

        When the latest step is damaged, that is logged and with `fallback` the one before it is taken, and so
        on; saving the damaged step again replaces it. Raises `NotFoundError` when there is no step, and
        `CorruptError` when all are damaged.
        """
        self.wait()
        wanted = [_index(step)] if step is not None else list(reversed(self._committed()))
        if step is not None and wanted[0] not in self._committed():
            raise NotFoundError(f"{self._root}: expected step {step}, found {_shown(self.steps)}")
        first: CorruptError | None = None
        for number in wanted:
            try:
                tree = open_checkpoint(self.path(number)).restore(like, **options)
            except CorruptError as error:
                self._damaged.add(number)
                if step is not None or not fallback:
                    raise
                _log.error("step %d is damaged, restoring an earlier one: %s", number, error)
                first = first or error
                continue
            self._restored = number
            return tree
        if first:
            raise first
        raise NotFoundError(f"{self._root}: expected a step to restore, found none")

    def restore_or_init(self, init: Callable[[], Any], *, sharding: Any = None, **options: Any) -> tuple[Any, int]:
        """The latest good step's tree and its number, or what `init()` returns and 0 when there is none.

        When there is a checkpoint, `init` is only traced: its result is the template. `sharding` says where the
        arrays go in either case; `options` are those of `restore`. A run whose steps are all damaged raises
        `CorruptError` rather than begin anew.
        """
        from . import _init

        self.wait()
        if self._committed():
            tree = self.restore(_init.abstract(init), sharding=sharding, **options)
            assert self._restored is not None
            return tree, self._restored
        return (init() if sharding is None else _init.sharded(init, sharding)), 0

    # Managing

    def pin(self, step: int) -> None:
        """Marks a step never to be deleted, for this and every later job."""
        local.pin(stores.DISK, self._existing(step), True)

    def unpin(self, step: int) -> None:
        """Takes the mark away."""
        local.pin(stores.DISK, self._existing(step), False)

    def delete(self, step: int) -> None:
        """Deletes a step. Raises `MismatchError` when it is pinned."""
        self.wait()
        path = self._existing(step)
        if local.pinned(stores.DISK, path):
            raise MismatchError(f"{path}: the step is pinned; unpin it first")
        self._delete(_index(step))

    # What the above is made of

    def _committed(self) -> dict[int, str]:
        return _run.committed(self._root, self._prefix)

    def _existing(self, step: int) -> str:
        step = _index(step)
        if step not in self._committed():
            raise NotFoundError(f"{self._root}: expected step {step}, found {_shown(self.steps)}")
        return self.path(step)

    def _due(self, step: int) -> bool:
        if isinstance(self._save_every, int):
            return step % self._save_every == 0
        if isinstance(self._save_every, datetime.timedelta):
            return time.monotonic() - self._saved_at >= self._save_every.total_seconds()
        return bool(self._save_every(step))

    def _raise_failed(self) -> None:
        for pending in list(self._pending):
            if pending.done():
                self._pending.remove(pending)
                pending.result()

    def _clean(self) -> None:
        for name in stores.DISK.list(self._root):
            if _run.parse(name, self._prefix) is not None:
                local.clean(stores.DISK, os.path.join(self._root, name), manifest.file_names)
        self._cleaned = True

    def _saved(self) -> list[Saved]:
        """The good steps, ascending; each manifest is read once."""
        for step in self._committed():
            if step not in self._known and step not in self._damaged:
                self._read(step)
        return [self._known[step] for step in self._committed() if step in self._known and step not in self._damaged]

    def _read(self, step: int) -> None:
        path = self.path(step)
        try:
            summary = manifest.summarize(read_file(stores.DISK, os.path.join(path, local.MANIFEST)), path)
            for file in summary.files:
                found = stores.DISK.stat(os.path.join(path, file.name))
                if found is None or found.st_size != file.size:
                    raise CorruptError(f"{path}: {file.name} is missing or cut short")
        except CorruptError as error:
            _log.warning("step %d is damaged and does not count: %s", step, error)
            self._damaged.add(step)
        except FileNotFoundError:
            pass  # deleted by somebody else since it was listed
        else:
            created = datetime.datetime.fromisoformat(summary.created).timestamp()
            self._known[step] = Saved(step, {n: decode("float", v) for n, v in summary.metrics.items()}, created)

    def _is_damaged(self, step: int) -> bool:
        if step in self._committed() and step not in self._known:
            self._read(step)
        return step in self._damaged

    def _committed_one(self, step: int) -> None:
        """After a commit, in the background: deletes what the policy does not want."""
        self._damaged.discard(step)
        self._known.pop(step, None)
        if self._keep is None:
            return
        try:
            saved = self._saved()
            wanted = self._keep.kept(saved) | {step, *(one.step for one in saved[-1:])}
            for one in saved:
                if one.step not in wanted and not local.pinned(stores.DISK, self.path(one.step)):
                    self._delete(one.step)
        except OSError:
            _log.exception("%s: deleting old steps failed; it is tried again after the next save", self._root)

    def _delete(self, step: int) -> None:
        local.delete(stores.DISK, self.path(step), manifest.file_names)
        self._known.pop(step, None)
        self._damaged.discard(step)


def _index(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise MismatchError(f"step={step!r}: expected an integer") from None
    if number < 0:
        raise MismatchError(f"step={number}: expected a number from 0")
    return number


def _shown(steps: list[int]) -> str:
    return ("… " if len(steps) > 5 else "") + (", ".join(map(str, steps[-5:])) or "no steps")
