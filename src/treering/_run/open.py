"""Opens or restores the checkpoint at a path: a checkpoint itself, or a step of a run."""

import contextlib
import functools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from .. import formats, stores
from .._core.entries import check_whole, step_number
from .._core.paths import absolute
from .._core.tracebacks import at_the_caller
from .._processes import coordinator
from .._restore.checkpoint import Checkpoint
from ..errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..formats.treering import glance
from ..stores.posix import Disk
from ..stores.reading import ReplacedError, reading
from .run import all_steps

if TYPE_CHECKING:
    from .._restore.options import RestoreOptions
    from ..rules import Rule

T = TypeVar("T")

_log = logging.getLogger("treering")
_OPEN_ATTEMPTS = 5  # a checkpoint that is overwritten while it is read is read again


@at_the_caller
def open_checkpoint(path: str | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Opens a checkpoint, or a run's latest good step (or the given one), without reading arrays.

    >>> ckpt = tr.open("runs/gpt", step=1000)

    Good means here that the manifest is undamaged and the array files are there in their full size. Raises
    `NotFoundError` when there is none, `CorruptError` when it is damaged (of a run without `step`: when all steps
    are), `UnsupportedError` when a later release wrote it.
    """
    place = absolute(path)

    def use(ckpt: Checkpoint) -> Checkpoint:
        if step is None and ckpt.path != place:  # one that is asked for by name may lack leaves
            check_whole(ckpt._entries.values())
        return ckpt

    return _use(place, step, use, fallback=step is None)


def open_one(disk: Disk, path: str) -> Checkpoint:
    """Opens a checkpoint of any format. Raises `ReplacedError` when there is none any more."""
    try:
        format = formats.detect(disk, path)
    except UnsupportedError:  # it was there when it was listed
        format = formats.get("treering")
    try:
        with reading(path):
            reader = format.open(disk, path)
            reader.check_present()
    except FileNotFoundError as error:
        if isinstance(error, TreeringError):
            raise
        raise ReplacedError(f"{path}: deleted or replaced while it was opened; open it again") from error
    return Checkpoint(reader, reader.entries, reader.skeleton)


def _places(disk: Disk, place: str, step: int | None) -> list[tuple[int, str]] | None:
    """The steps that may be meant and their paths, newest first; None when the path is one checkpoint."""
    found = {} if glance.look(disk, place) else all_steps(disk, place)
    if not found:
        check_known(disk, place)
        if step is not None:
            raise MismatchError(f"{place}: step={step} was asked for, but this is one checkpoint, not a run")
        return None
    if step is None:
        return list(reversed(found.items()))
    number = step_number(step)
    if number not in found:
        raise NotFoundError(f"{place}: expected step {number}, found {', '.join(map(str, list(found)[-5:]))}")
    return [(number, found[number])]


def check_known(disk: Disk, place: str) -> None:
    """Raises `NotFoundError`, or `UnsupportedError` for a file, when there is no checkpoint of any format."""
    try:
        formats.detect(disk, place)  # first: a path may be the beginning of the names of several files
    except UnsupportedError as error:
        there = disk.stat(place)
        if there is None:
            raise NotFoundError(f"{place}: expected a checkpoint or a run, found nothing") from None
        if stat.S_ISDIR(there.st_mode):
            raise NotFoundError(str(error)) from None
        raise


def latest_good(
    disk: Disk,
    run: str,
    places: Iterable[tuple[int, str]],
    use: Callable[[Checkpoint], T],
    *,
    fallback: bool = True,
    damaged: Callable[[int], None] = lambda step: None,
    on_all_processes: Callable[[Callable[[], T]], T] = lambda attempt: attempt(),
) -> tuple[int, T]:
    """The first step that opens, and the result of `use` for it; damaged ones are logged and passed to `damaged`.

    `on_all_processes` makes an attempt in which all processes have to succeed.

    Raises the first `CorruptError` when all are damaged, or when `fallback` is off; a step that is deleted
    meanwhile is passed over.
    """
    first: CorruptError | None = None
    deleted = 0
    passed: int | None = None
    for step, path in places:
        if passed is not None:
            _log.warning("taking step %d, the one before step %d", step, passed)
        passed = step
        try:
            return step, on_all_processes(functools.partial(_use_current, disk, path, step, use))
        except CorruptError as error:
            damaged(step)
            if not fallback:
                raise
            _log.error("step %d is damaged: %s", step, error)
            first = first or error
        except ReplacedError:
            if not fallback or glance.look(disk, path):
                raise
            _log.warning("step %d was deleted meanwhile", step)
            deleted += 1
    if deleted and not first:
        raise ReplacedError(f"{run}: expected a step, found none; all that were there have been deleted meanwhile")
    raise first or NotFoundError(f"{run}: expected a step, found none")


def _use_current(disk: Disk, path: str, step: int | None, use: Callable[[Checkpoint], T]) -> T:
    """Opens a checkpoint, that of a step if one is given, and uses it; begins again when it is overwritten meanwhile.

    Raises `ReplacedError` when it was deleted, or is overwritten faster than it can be read.
    """
    for _ in range(_OPEN_ATTEMPTS - 1):
        with contextlib.suppress(ReplacedError):
            return use(_open_step(disk, path, step))
    return use(_open_step(disk, path, step))


def _open_step(disk: Disk, path: str, step: int | None) -> Checkpoint:
    ckpt = open_one(disk, path)
    if ckpt.format == "treering" and step is not None and ckpt.step not in (None, step):
        _log.warning("%s counts as step %d, as its name says, but was saved as step %d", path, step, ckpt.step)
    return ckpt


@overload
def restore(
    path: str | os.PathLike[str],
    like: None = None,
    *,
    step: int | None = None,
    **options: "Unpack[RestoreOptions]",
) -> Any: ...
@overload
def restore(
    path: str | os.PathLike[str], like: T, *, step: int | None = None, **options: "Unpack[RestoreOptions]"
) -> T: ...
@at_the_caller
def restore(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    step: int | None = None,
    at: str = "",
    rules: "Sequence[Rule]" = (),
    missing: str | Iterable[str] = "error",
    extra: str | Iterable[str] = "error",
    dtype: Any = None,
    sharding: Any = None,
    verify: bool = True,
    mmap: bool | None = None,
    memory_limit: int | None = None,
    progress: bool = False,
) -> Any:
    """Restores a checkpoint, or a run's latest good step: a damaged one is logged, and the one before it taken.

    In a job of several processes it is the latest step, good or not: only a `Checkpointer` can agree on another.

    >>> state = tr.restore("runs/gpt", like=state)

    like: the template. What its leaves are decides what comes back: a `jax.Array` or `ShapeDtypeStruct` becomes a
        `jax.Array`, a NumPy array a writable NumPy array, a Python scalar that type, a typed key a typed key; ``...``
        skips everything below. Without a template: nested dicts, lists and tuples of NumPy arrays.
    step: of a run; the latest good one by default.
    at: only what lies below this path is restored (and read), and `like` is the template of that.
    rules: changes of names, shapes and values, see `treering.rules`; their paths are relative to `at`.
    missing: what to do about leaves of the template that the checkpoint lacks: "error", "template" (take its value),
        or globs of the paths for which to take it.
    extra: what to do about the opposite: "error", "ignore", or globs of what may be left out.
    dtype: "template" narrows floats to the template's dtypes; a floating-point dtype casts all floats to it.
    sharding: wins over the template's: a sharding, a `PartitionSpec` for the mesh that is set, a function of (path,
        shape, dtype), or a pytree of those that is a prefix of the template. "saved": as it was recorded, on the mesh
        that is set, else on one like that of the save; without a template NumPy's arrays stay NumPy's then.
    verify: checks the checksum of every byte that is used before anything is returned.
    mmap: adopt mapped files instead of copying; by default where the file system is known to be safe for it.
    memory_limit: bytes of host memory in use at a time where arrays must pass through it; 256 MiB by default.
    progress: shows a bar, in a terminal or a notebook (there with `ipywidgets`).

    Raises `MismatchError`, which names the likely cause and every difference, `CorruptError` and `NotFoundError`.
    """
    place = absolute(path)

    def use(ckpt: Checkpoint) -> Any:
        return ckpt.restore(
            like,
            at=at,
            rules=rules,
            missing=missing,
            extra=extra,
            dtype=dtype,
            sharding=sharding,
            verify=verify,
            mmap=mmap,
            memory_limit=memory_limit,
            progress=progress,
        )

    # Processes that fell back by themselves could end with parts of different steps in one array.
    fallback = step is None and not coordinator.several()
    return _use(place, step, use, fallback=fallback)


def _use(place: str, step: int | None, use: Callable[[Checkpoint], T], *, fallback: bool) -> T:
    """The result of `use` for a checkpoint, or for a run's step."""

    disk = stores.of(place)

    def attempt() -> T:
        with reading(place):
            steps = _places(disk, place, step)
        if steps is None:
            return _use_current(disk, place, None, use)
        return latest_good(disk, place, steps, use, fallback=fallback)[1]

    return attempt() if step is not None else listed_again(attempt)


def listed_again(attempt: Callable[[], T]) -> T:
    """The result of an attempt that lists a run; made again when newer steps have replaced all that were listed."""
    for _ in range(_OPEN_ATTEMPTS - 1):
        with contextlib.suppress(ReplacedError):
            return attempt()
    return attempt()
