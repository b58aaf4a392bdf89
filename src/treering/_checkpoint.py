"""An open checkpoint: names and shapes at once, contents on request."""

import contextlib
import datetime
import functools
import itertools
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from . import _dtypes, _processes, _tree, formats, stores
from ._catalogue import ArrayEntry, Entry, ValueEntry, check_whole, fits, is_lost_tree, step_number
from ._lazy import LazyArray
from ._paths import absolute, all_meant, below, closest, few, meant
from ._run import all_steps
from ._tracebacks import at_the_caller, methods_at_the_caller
from .errors import CorruptError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from .formats import Reader
from .stores.local import MANIFEST
from .stores.reading import ReplacedError, reading

if TYPE_CHECKING:
    from ._options import RestoreOptions
    from .rules import Rule

T = TypeVar("T")

_log = logging.getLogger("treering")
_SHOWN = 40  # leaves that a `repr` names
_TRIES = 5  # a checkpoint that is overwritten while it is read is read again


@methods_at_the_caller
class Checkpoint(Mapping[str, LazyArray | Any]):
    """A checkpoint, or a part of one, as a mapping from path to leaf. Made by `treering.open`.

    Arrays come as `LazyArray`, other leaves as their values. Print one to see every name and shape.
    """

    def __init__(self, reader: Reader, entries: Mapping[str, Entry], skeleton: _tree.Skeleton | None, part: str = ""):
        self._reader, self._entries, self._skeleton, self._part = reader, entries, skeleton, part

    @property
    def path(self) -> str:
        """Where it lies, absolute."""
        return self._reader.path

    @property
    def format(self) -> str:
        """The name of its format."""
        return self._reader.format

    @property
    def step(self) -> int | None:
        """The step it was saved with, None when it was saved without."""
        return self._reader.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics saved with it."""
        return dict(self._reader.metrics)

    @property
    def metadata(self) -> Any:
        """What was passed as `metadata=`; tuples have become lists."""
        return self._reader.metadata

    @property
    def created(self) -> datetime.datetime | None:
        """When it was committed, in UTC; None where the format has no word about it."""
        return self._reader.created

    @property
    def nbytes(self) -> int:
        """Bytes on the disk, of the whole checkpoint."""
        return self._reader.nbytes

    def __getitem__(self, path: str) -> LazyArray | Any:
        entry = self._entries.get(path) or self._entries.get(meant(path, self._entries))
        if entry is None:
            check_whole(self._lost_above(path))
            near = closest(path, list(self._entries))
            inside = sum(below(name, path) is not None for name in self._entries)
            hint = f"; it is a container of {inside} leaves, see .at()" if inside else ""
            hint = hint or (f"; the closest name is {near}" if near else "")
            raise KeyError(f"{self.path}: there is no leaf {path!r}{hint}")
        check_whole([entry])
        return entry.decode() if isinstance(entry, ValueEntry) else LazyArray(self._reader, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _lost_above(self, path: str) -> Iterator[Entry]:
        """The lost tree that a path may belong to."""
        return (entry for name, entry in self._entries.items() if is_lost_tree(entry) and below(path, name) is not None)

    def at(self, path: str) -> "Checkpoint":
        """The part below a path, with paths relative to it. Raises `NotFoundError` when there is none."""
        if not path:
            return self
        entries = {rest: entry for name, entry in self._entries.items() if (rest := below(name, path)) is not None}
        skeleton = None if self._skeleton is None else _tree.subtree(self._skeleton, path)
        if not entries and skeleton is None:
            if (known := meant(path, _tree.places(self._entries))) != path:
                return self.at(known)
            check_whole(self._lost_above(path))
            level = getattr(self._reader, "level", "")
            if level and not self._part and (rest := below(path, level)) is not None:
                return self.at(rest)
            places = dict.fromkeys(name[:i] for name in self._entries for i, c in enumerate(name) if c == "/")
            near = closest(path, [*places, *self._entries])
            hint = f"; closest: {near}" if near else ""
            if self._reader.positional:
                hint = (
                    "; its leaves have only numbers; restore into a template of the whole and take the part of it, or "
                    "choose leaves: tr.open(path).select(['4', '5']).restore(part)"
                )
            raise NotFoundError(f"{self.path}: nothing lies at {path!r}{hint}")
        return Checkpoint(self._reader, entries, skeleton, f"{self._part}/{path}".lstrip("/"))

    def select(self, glob: str | Iterable[str]) -> "Checkpoint":
        """The leaves whose paths fit: ``*`` within a component, ``**`` over any number of them.

        What is damaged, so that the names of its leaves are not known, is among them where any of these could fit.
        Raises `NotFoundError` when there are none; of several globs, one that fits nothing is logged.
        """
        globs = all_meant(glob, self._entries)
        entries = {path: entry for path, entry in self._entries.items() if fits(path, entry, globs)}
        idle = [one for one in globs if not any(fits(path, entry, one) for path, entry in entries.items())]
        if idle or not entries:
            near = closest(idle[0], list(self._entries)) if idle else None
            shown = few(tuple(self._entries)) + (f"; the closest name is {near}" if near else "")
            problem = f"{self.path}: none of {len(self)} leaves fits {few(tuple(idle))!r}, found {shown}"
            if not entries:
                raise NotFoundError(problem)
            _log.warning("%s", problem)
        return Checkpoint(self._reader, entries, None, self._part)

    def apply(self, rules: "Sequence[Rule]") -> "Checkpoint":
        """The leaves as `treering.rules` change them, when they are read. Print it to see every name and shape.

        Raises `MismatchError` for a rule that fits nothing, or not what it finds.
        """
        from . import _views
        from ._rules import apply

        leaves = apply(rules, _views.leaves_of(self._entries))
        # What has no names goes by its order, unless rules give it names, or change bytes of an unknown dtype.
        numbered = self._reader.positional and [path for path in self._entries if path in leaves] == list(leaves)
        known = all(leaf.plain for path, leaf in leaves.items() if path in self._reader.untold)
        view = _views.View(self._reader, leaves, positional=numbered and known)
        same = list(leaves) == list(self._entries)
        return Checkpoint(view, view.entries, self._skeleton if same else None, self._part)

    def abstract(self) -> Any:
        """Nested containers of `jax.ShapeDtypeStruct` (and values): a template without reading an array.

        Arrays of a dtype that JAX has not (64 bits while `jax_enable_x64` is off; dates and texts) are NumPy's: they
        take no memory, and come back as NumPy's.
        """
        import jax
        import numpy as np

        from ._targets import is_of_jax

        def shape(entry: Entry) -> Any:
            if isinstance(entry, ValueEntry):
                return entry.decode()
            if entry.type == "key":
                from ._restore import as_key

                return jax.eval_shape(lambda d: as_key(d, entry), jax.ShapeDtypeStruct(entry.shape, "uint32"))
            dtype = _dtypes.to_numpy(entry.dtype)
            if not is_of_jax(dtype):
                return np.broadcast_to(np.zeros((), dtype), entry.shape)
            return jax.ShapeDtypeStruct(entry.shape, dtype, weak_type=entry.type == "jax-weak")

        check_whole(self._entries.values())
        values = [shape(entry) for entry in self._entries.values()]
        return _tree.nest(self, values) if self._skeleton is None else _tree.build(self._skeleton, values)

    @overload
    def restore(self, like: None = None, **options: "Unpack[RestoreOptions]") -> Any: ...
    @overload
    def restore(self, like: T, **options: "Unpack[RestoreOptions]") -> T: ...
    def restore(
        self,
        like: Any = None,
        *,
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
        """The tree, shaped like `like`. See `treering.restore`."""
        from . import _match, _restore

        view = self.at(at).apply(rules) if rules else self.at(at)
        name = self.path + (f", at {view._part}" if view._part else "")
        return _restore.restore(
            view._reader,
            view._entries,
            view._skeleton,
            like,
            _match.Policy(missing, extra, dtype, at, bool(rules)),
            name=name,
            sharding=sharding,
            verify=verify,
            mmap=mmap,
            memory_limit=memory_limit,
            progress=progress,
        )

    def __repr__(self) -> str:
        return self._text(_SHOWN)

    def __str__(self) -> str:
        return self._text(len(self))

    def _text(self, most: int) -> str:
        """The names and shapes of so many leaves."""
        from ._differences import describe, shorten

        step = "" if self.step is None else f", step {self.step}"
        part = f", at {self._part}" if self._part else ""
        head = f"Checkpoint {self.path}{part} ({self.format}{step}, {len(self)} leaves)"
        shown = dict(itertools.islice(self._entries.items(), most))
        width = max(map(len, shown), default=0)
        lines = []
        for path, entry in shown.items():
            value = "" if isinstance(entry, ArrayEntry) else f" {shorten(entry.decode())}"
            if entry.type == "function":  # of which the name is recorded, as text of the file's
                value = f" {entry.value:.60}" if isinstance(entry.value, str) and entry.value.isprintable() else ""
            lines.append(f"  {path or '(root)':{min(width, 60)}}  {describe(entry)}{value}")
        if more := len(self) - len(shown):
            lines.append(f"  and {more} more; print() shows all")
        return "\n".join([head, *lines])


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
        if step is None and ckpt.path != place:  # or else it is asked for by name, whatever is left of it
            check_whole(ckpt._entries.values())
        return ckpt

    return _use(place, step, use, fallback=step is None)


def open_one(path: str) -> Checkpoint:
    """Opens a checkpoint of any format. Raises `ReplacedError` when there is none any more."""
    try:
        format = formats.detect(stores.DISK, path)
    except UnsupportedError:  # it was there when it was looked for
        format = formats.get("treering")
    try:
        with reading(path):
            reader = format.open(stores.DISK, path)
            reader.check_present()
    except FileNotFoundError as error:
        if isinstance(error, TreeringError):
            raise
        raise ReplacedError(f"{path}: deleted or replaced while it was opened; open it again") from error
    return Checkpoint(reader, reader.entries, reader.skeleton)


def _places(place: str, step: int | None) -> list[tuple[int, str]] | None:
    """The steps that may be meant and where they are, newest first; None when the path is one checkpoint."""
    found = {} if stores.DISK.stat(os.path.join(place, MANIFEST)) else all_steps(place)
    if not found:
        check_known(place)
        if step is not None:
            raise MismatchError(f"{place}: step={step} was asked for, but this is one checkpoint, not a run")
        return None
    if step is None:
        return list(reversed(found.items()))
    number = step_number(step)
    if number not in found:
        raise NotFoundError(f"{place}: expected step {number}, found {', '.join(map(str, list(found)[-5:]))}")
    return [(number, found[number])]


def check_known(place: str) -> None:
    """Raises `NotFoundError`, or `UnsupportedError` for a file, when there is no checkpoint of any format."""
    try:
        formats.detect(stores.DISK, place)  # first: a path may be the beginning of the names of several files
    except UnsupportedError as error:
        there = stores.DISK.stat(place)
        if there is None:
            raise NotFoundError(f"{place}: expected a checkpoint or a run, found nothing") from None
        if stat.S_ISDIR(there.st_mode):
            raise NotFoundError(str(error)) from None
        raise


def latest_good(
    run: str,
    places: Iterable[tuple[int, str]],
    use: Callable[[Checkpoint], T],
    *,
    fallback: bool = True,
    damaged: Callable[[int], None] = lambda step: None,
    everywhere: Callable[[Callable[[], T]], T] = lambda attempt: attempt(),
) -> tuple[int, T]:
    """The first step that opens, and what `use` makes of it; damaged ones are logged and told to `damaged`.

    `everywhere` makes an attempt, in whatever other processes have to succeed as well.

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
            return step, everywhere(functools.partial(_use_current, path, step, use))
        except CorruptError as error:
            damaged(step)
            if not fallback:
                raise
            _log.error("step %d is damaged: %s", step, error)
            first = first or error
        except ReplacedError:
            if not fallback or stores.DISK.stat(os.path.join(path, MANIFEST)):
                raise
            _log.warning("step %d was deleted meanwhile", step)
            deleted += 1
    if deleted and not first:
        raise ReplacedError(f"{run}: expected a step, found none; all that were there have been deleted meanwhile")
    raise first or NotFoundError(f"{run}: expected a step, found none")


def _use_current(path: str, step: int | None, use: Callable[[Checkpoint], T]) -> T:
    """Opens a checkpoint, that of a step if one is given, and uses it; begins again when it is overwritten meanwhile.

    Raises `ReplacedError` when it was deleted, or is overwritten faster than it can be read.
    """
    for _ in range(_TRIES - 1):
        with contextlib.suppress(ReplacedError):
            return use(_open_step(path, step))
    return use(_open_step(path, step))


def _open_step(path: str, step: int | None) -> Checkpoint:
    ckpt = open_one(path)
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

    Raises `MismatchError`, which says what is likely the matter and has every difference, `CorruptError` and
    `NotFoundError`.
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

    # Processes that fell back by themselves could each end with another step in one array.
    fallback = step is None and not _processes.several()
    return _use(place, step, use, fallback=fallback)


def _use(place: str, step: int | None, use: Callable[[Checkpoint], T], *, fallback: bool) -> T:
    """What `use` makes of a checkpoint, or of a run's step."""

    def attempt() -> T:
        with reading(place):
            steps = _places(place, step)
        return _use_current(place, None, use) if steps is None else latest_good(place, steps, use, fallback=fallback)[1]

    return attempt() if step is not None else listed_again(attempt)


def listed_again(attempt: Callable[[], T]) -> T:
    """The result of an attempt that lists a run; again where newer steps have taken the place of all it knew of."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(ReplacedError):
            return attempt()
    return attempt()
