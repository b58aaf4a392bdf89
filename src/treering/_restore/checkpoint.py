"""Defines `Checkpoint`, a checkpoint that is open: its names and shapes are known, its contents are read on request.

A pickle of it, for workers of data loaders, Ray or Dask, has its path and no bytes. Where that is read, the checkpoint
is opened again, which runs no more than `treering.open` does.
"""

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast, overload

from .. import formats, stores
from .._core import dtypes, expansion, migration_hints
from .._core import skeleton as _skeleton
from .._core.entries import Entry, LostEntry, ValueEntry, check_readable, glob_fits, is_unreadable_tree
from .._core.lazy import LazyArray
from .._core.leaf_paths import Globs, closest, find_globs, find_path, glob_hint, globs_of, join_names, relative_to
from .._core.source import Source, check_not_left_out, full_source, subtree_of, subtree_path
from .._core.tracebacks import hide_internal_frames_of_methods
from ..errors import MismatchError, NotFoundError, TreeringError, UnsupportedError
from ..stores.read_errors import ReplacedError, reading

if TYPE_CHECKING:
    from .._core.calls import Call
    from ..rules import Rule
    from .options import RestoreOptions

T = TypeVar("T")

_log = logging.getLogger("treering")
_MAX_SHOWN_LEAVES = 40  # leaves that a `repr` names


@hide_internal_frames_of_methods
class Checkpoint(Mapping[str, LazyArray | Any]):
    """A checkpoint, or a part of one, as a mapping from path to leaf. `treering.open` makes it.

    An array is a `LazyArray`, any other leaf is its value. Print a checkpoint to see every name and shape.

    A pickle of it, or of one of its arrays, has the path and no bytes: another process opens the checkpoint again, and
    raises `NotFoundError` if that is gone or was replaced.
    """

    def __init__(self, source: Source, calls: tuple[tuple[str, Any], ...] = ()):
        self._source = source
        self._calls = calls  # the methods that have chosen this part or view, and their arguments
        self._find_copies: Callable[[], Sequence[str]] | None = None  # returns the paths of all copies in several tiers

    @property
    def path(self) -> str:
        """The absolute path of the checkpoint."""
        return self._source.path

    @property
    def format(self) -> str:
        """The name of the checkpoint's format."""
        return self._source.format

    @property
    def step(self) -> int | None:
        """The step that the checkpoint was saved with, or None if it was saved without a step."""
        return self._source.step

    def _numbered(self, step: int | None) -> "Checkpoint":
        """Sets the step that a run knows this checkpoint by, and returns the checkpoint.

        In a run the name of a directory says its step, even if the directory was copied from another step.
        """
        with contextlib.suppress(AttributeError):  # Some sources have a `step` that cannot be set.
            cast(Any, self._source).step = step
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were saved with the checkpoint."""
        return dict(self._source.metrics)

    def _copies(self) -> Iterator[str]:
        """Yields the paths of the copies of the checkpoint, the one that lasts longest first."""
        if self._find_copies:
            with contextlib.suppress(NotFoundError):
                yield from reversed(self._find_copies())
        yield self.path

    def record(self, metrics: Mapping[str, Any]) -> bool:
        """Adds metrics durably to this checkpoint, such as those of an evaluation. See `treering.record`.

        They never become metrics of another checkpoint with this step. Returns False, and logs a warning, if this one
        was deleted, archived or replaced meanwhile. The properties of this object stay as they are. Raises
        `MismatchError` for a value that is not a real scalar, `UnsupportedError` for a checkpoint that another library
        wrote, and `SaveError` if writing fails.
        """
        from .. import stores
        from .._pytree.devices import encode_metrics
        from ..formats.treering import summary

        numbers = encode_metrics(metrics)
        if self.format != "treering":
            raise UnsupportedError(f"{self.path}: it was written by another library; metrics are not added to it")
        identity = self._source.identity
        is_added = any(
            summary.add_metrics(stores.get(path), path, self.step, numbers, of=identity) for path in self._copies()
        )
        if not is_added:
            _log.warning(
                "%s: the metrics %s are not recorded, because the checkpoint that they were measured on was deleted, "
                "archived or replaced", self.path, numbers,
            )  # fmt: skip
        return is_added

    @property
    def metadata(self) -> Any:
        """The value that was passed to the save as `metadata=`. Tuples have become lists."""
        return self._source.metadata

    @property
    def created(self) -> datetime.datetime | None:
        """The time of the commit, in UTC, or None if the format does not record it."""
        return self._source.created

    @property
    def nbytes(self) -> int:
        """The size of the entire checkpoint on disk, in bytes, even if this is a part of it."""
        return self._source.nbytes

    if not TYPE_CHECKING:  # Otherwise type checkers would accept every name.

        def __getattr__(self, name: str) -> Any:
            known = {} if name.startswith("_") else self._source.entries  # The source is not set yet in a copy.
            part = next((path for path in known if relative_to(path, name) is not None), None)
            calls = {} if part is None else {name: f"ckpt[{name!r}]" if part == name else f"ckpt.at({name!r})"}
            return migration_hints.attribute(self, name, calls)

    def __getitem__(self, path: str) -> LazyArray | Any:
        if not isinstance(path, str):
            example = "".join(f", such as {one!r}" for one in [*self._source.entries][:1])
            raise KeyError(f"{self.path}: there is no leaf {path!r:.100}; a path is text{example}")
        entry = self._source.entries.get(path) or self._source.entries.get(find_path(path, self._source.entries))
        if entry is None:
            check_readable(self._lost_above(path))
            similar = closest(path, list(self._source.entries))
            inside = sum(relative_to(name, path) is not None for name in self._source.entries)
            hint = f"; it is a container of {inside} leaves, see .at()" if inside else ""
            hint = hint or (f"; the closest name is {similar}" if similar else "")
            raise KeyError(f"{self.path}: there is no leaf {path!r}{hint}")
        if isinstance(entry, LostEntry):
            check_readable([entry])
        return entry.decode() if isinstance(entry, ValueEntry) else LazyArray(self._source, entry, (self, path))

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.entries)

    def __len__(self) -> int:
        return len(self._source.entries)

    def _lost_above(self, path: str) -> Iterator[Entry]:
        """Yields the damaged parts that a path may be in; the names of their leaves are not known."""
        return (
            entry
            for name, entry in self._source.entries.items()
            if is_unreadable_tree(entry) and relative_to(path, name) is not None
        )

    def _part(self, source: Source, method: str, argument: Any) -> "Checkpoint":
        """Returns the part, or the view, that a method with an argument chooses."""
        part = Checkpoint(source, (*self._calls, (method, argument)))
        part._find_copies = self._find_copies
        return part

    def at(self, path: str) -> "Checkpoint":
        """Returns the part of the checkpoint below a path. Its paths are relative to that path.

        Raises `NotFoundError` if the checkpoint has no such part, and `MismatchError` if `path` is not text.
        """
        if not isinstance(path, str):
            raise MismatchError(f"at={path!r:.100}: expected a path within the checkpoint, as text")
        if not path:
            return self
        entries = {
            rest: entry for name, entry in self._source.entries.items() if (rest := relative_to(name, path)) is not None
        }
        skeleton = None if self._source.skeleton is None else _skeleton.subtree(self._source.skeleton, path)
        if not entries and skeleton is None:
            if (known := find_path(path, _skeleton.places(self._source.entries))) != path:
                return self.at(known)
            check_readable(self._lost_above(path))
            level = getattr(self._source, "level", "")
            if level and (rest := relative_to(path, level)) is not None:
                return self.at(rest)
            places = dict.fromkeys(name[:i] for name in self._source.entries for i, c in enumerate(name) if c == "/")
            similar = closest(path, [*places, *self._source.entries])
            parents = (path[:i] for i in range(len(path), 0, -1) if path[i : i + 1] == "/")
            parent = next((one for one in parents if one in places), "")
            inside = (relative_to(name, parent) for name in self._source.entries)
            names = tuple(dict.fromkeys(rest.partition("/")[0] for rest in inside if rest))
            found = f"; {parent} has {join_names(names, 8)}" if parent else f"; there are {join_names(names, 8)}"
            hint = f"; closest: {similar}" if similar and similar != parent else found if names else ""
            if self._source.positional:
                hint = (
                    "; its leaves have only numbers; restore into a template of the entire tree and take the part of "
                    "it, or choose leaves: tr.open(path).select(['4', '5']).restore(part)"
                )
            raise NotFoundError(f"{self.path}: nothing is at {path!r}{hint}")
        return self._part(subtree_of(self._source, entries, skeleton, path), "at", path)

    def select(self, glob: str | Iterable[str]) -> "Checkpoint":
        """Returns the leaves whose paths match a glob, or one of several globs.

        ``*`` matches within one name of a path, ``**`` matches any number of names. The names of the leaves in a
        damaged part may be unknown; such a part is selected if a glob could match a leaf in it. If only some of the
        globs match nothing, they are logged.

        Raises `NotFoundError` if no leaf matches, and `MismatchError` if `glob` is neither text nor a list of it.
        """
        given = globs_of(glob, "select")
        globs = find_globs(given, self._source.entries)
        entries = {path: entry for path, entry in self._source.entries.items() if glob_fits(path, entry, globs)}
        idle = [
            one
            for one in globs
            if one not in entries and not any(glob_fits(path, entry, Globs((one,))) for path, entry in entries.items())
        ]
        if idle or not entries:
            names = tuple(self._source.entries)
            problem = f"{self.path}: none of {len(self)} leaves fits {join_names(tuple(idle))!r}, found "
            problem += join_names(names) + (glob_hint(idle[0], names) if idle else "")
            if not entries:
                raise NotFoundError(problem)
            _log.warning("%s", problem)
        return self._part(subtree_of(self._source, entries, None), "select", given)

    def apply(self, rules: "Sequence[Rule]") -> "Checkpoint":
        """Returns the leaves as `treering.rules` change them. Print the result to see every name and shape.

        The rules change names and shapes now, and contents when a leaf is read.

        Raises `MismatchError` for a rule that matches no leaf, or that cannot change the leaves that it matches.
        """
        from .._core import views
        from .._rules.base import apply

        leaves = apply(rules, views.plain_leaves(self._source.entries), full_source(self._source))
        # Leaves without names are matched by their order, until rules name or reorder them.
        numbered = self._source.positional and [path for path in self._source.entries if path in leaves] == list(leaves)
        view = views.View(full_source(self._source), leaves, positional=numbered)
        if self._source.ambiguous_dtypes:
            _check_dtypes_known(view, full_source(self._source).ambiguous_dtypes, self.path)
        same = list(leaves) == list(self._source.entries)
        skeleton = self._source.skeleton if same else None
        source = subtree_of(view, view.entries, skeleton, subtree_path(self._source))
        return self._part(source, "apply", list(rules))

    def abstract(self) -> Any:
        """Returns nested containers of `jax.ShapeDtypeStruct` and of values, as a template. Reads no array.

        Some arrays have a dtype that JAX lacks: 64 bits while `jax_enable_x64` is off, dates, and texts. In their
        place the template has NumPy arrays that take no memory, so they are restored as NumPy arrays.
        """
        import jax
        import numpy as np

        from .leaf_targets import is_jax_dtype

        def shape(entry: Entry) -> Any:
            if isinstance(entry, ValueEntry):
                return entry.decode()
            if entry.type == "key":
                from .read_groups import as_key

                return jax.eval_shape(lambda d: as_key(d, entry), jax.ShapeDtypeStruct(entry.shape, "uint32"))
            dtype = dtypes.to_numpy(entry.dtype)
            if not is_jax_dtype(dtype):
                return np.broadcast_to(np.zeros((), dtype), entry.shape)
            return jax.ShapeDtypeStruct(entry.shape, dtype, weak_type=entry.type == "jax-weak")

        check_readable(self._source.entries.values())
        values = [shape(entry) for entry in self._source.entries.values()]
        return (
            _skeleton.nest_by_path(self, values)
            if self._source.skeleton is None
            else _skeleton.build(self._source.skeleton, values)
        )

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
        grow: Iterable[str] = (),
        sharding: Any = None,
        verify: bool = True,
        mmap: bool | None = None,
        memory_limit: int | None = None,
        progress: bool = False,
        read: Literal["each", "once"] | None = None,
        max_expansion: float = expansion.MAX_RATIO,
    ) -> Any:
        """Returns the tree, shaped like `like`. `treering.restore` describes the arguments."""
        options: RestoreOptions = {
            "at": at,
            "rules": rules,
            "missing": missing,
            "extra": extra,
            "dtype": dtype,
            "grow": grow,
            "sharding": sharding,
            "verify": verify,
            "mmap": mmap,
            "memory_limit": memory_limit,
            "progress": progress,
            "read": read,
            "max_expansion": max_expansion,
        }
        if read != "once":
            return self._restore(like, None, **options)
        from .._processes import consistency, coordinator

        with coordinator.collective_call(f"restore({self.path!r})", "restoring") as call:
            attempt = lambda: (self._source.identity, self._restore(like, call, **options))  # noqa: E731
            return consistency.attempt_on_all_processes(call, attempt)[1]

    def _restore(
        self,
        like: Any,
        call: "Call | None",
        *,
        at: str = "",
        rules: "Sequence[Rule]" = (),
        missing: str | Iterable[str] = "error",
        extra: str | Iterable[str] = "error",
        dtype: Any = None,
        grow: Iterable[str] = (),
        **options: Any,
    ) -> Any:
        """The tree; with a `call`, every process of the job makes it."""
        from . import restore as _restore
        from .policy import Policy

        check_not_left_out(self._source)
        view = self if at == "" else self.at(at)
        view = view.apply(rules) if rules else view
        policy = Policy(missing, extra, dtype, cast("Sequence[str]", grow), at, bool(rules))
        return _restore.restore(view._source, like, policy, call=call, **options)

    def __reduce__(self) -> Any:

        return Checkpoint._reopened, (*_identify(self._source), self.step, self._calls)

    @classmethod
    def _reopened(
        cls, path: str, format: str, marks: list[Any], step: int | None, calls: Sequence[tuple[str, Any]]
    ) -> "Checkpoint":
        """Opens a checkpoint that was pickled, and chooses the same part of it."""

        ckpt = cls(_open_again(path, format, marks))
        if ckpt.step != step:
            ckpt._numbered(step)
        for name, argument in calls:
            ckpt = getattr(ckpt, name)(argument)
        return ckpt

    def __copy__(self) -> "Checkpoint":
        return self  # It does not change.

    def __deepcopy__(self, memo: Any) -> "Checkpoint":
        return self

    def _repr_html_(self) -> str:
        from .._core.printing import checkpoint_page

        return checkpoint_page(self._source)

    def __repr__(self) -> str:
        from .._core.printing import checkpoint_text

        return checkpoint_text(self._source, _MAX_SHOWN_LEAVES)

    def __str__(self) -> str:
        from .._core.printing import checkpoint_text

        return checkpoint_text(self._source, len(self))


def _check_dtypes_known(view: Any, ambiguous: frozenset[str], name: str) -> None:
    """Raises `MismatchError` for a leaf that rules make of bytes whose dtype the format does not record."""
    from .._core.boxes import full_box

    for path, leaf in view.leaves.items():
        if leaf.plan is None or leaf.plain:
            continue
        needs = leaf.plan_of(full_box(leaf.array.shape)).needs
        if unknown := next((entry.path for entry, _ in needs if entry.path in ambiguous), None):
            raise MismatchError(
                f"{name}: {path}: expected rules for arrays of a known dtype, found {unknown}, whose dtype the file "
                "does not record (float8, int4 or others); restore it without these rules into a template with the "
                "dtype that was saved, save that, and apply them to the copy"
            )


def _identify(source: Source) -> tuple[str, str, list[Any]]:
    """Returns the path and the format of a checkpoint, and its marks, which differ once another has replaced it.

    Raises `UnsupportedError` if other processes cannot open the checkpoint by its path.
    """
    if reason := stores.why_private(source.path):
        raise UnsupportedError(
            f"{source.path}: expected a checkpoint that other processes can open by its path, found one {reason}; "
            "open it in the worker"
        )
    return source.path, source.format, _marks(source)


def _marks(source: Source) -> list[Any]:
    marks: list[Any] = [source.identity, source.nbytes]
    if source.format != "treering":  # The identities of other formats do not cover the values.
        with contextlib.suppress(OSError, TreeringError):
            found = stores.get(source.path).stat(source.path)
            marks += [found.modified] if found and found.is_file else []
    return marks


def _open_again(path: str, format: str, marks: list[Any]) -> Source:
    """Opens a checkpoint that was pickled.

    Raises `NotFoundError` if it is gone, or if another checkpoint has replaced it.
    """
    place = stores.absolute(path)
    store, what = stores.get(place), "expected the checkpoint that was open when it was pickled, found"
    try:
        with reading(place), store.glance(place):
            source = formats.get(format).open(store, place)
            source.check_present()
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{place}: {what} nothing; was it deleted, or is it on the disk of another host?"
        ) from error
    if _marks(source) != marks:
        raise ReplacedError(f"{place}: {what} another one, which has replaced it; open it again")
    return source
