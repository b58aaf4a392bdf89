"""Contains what all rules share: their protocol, and functions that find, check and replace leaves.

In this package `text` is the rule as the user would write it, for errors.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .._core.describe import describe_entry
from .._core.entries import ArrayEntry, check_readable, glob_fits, is_absent, is_unreadable_tree, lost_entry
from .._core.leaf_paths import canonical, find_globs, globs_of, join_names
from .._core.source import Source
from .._core.views import Leaf
from ..errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

Leaves = dict[str, Leaf]


class Rule(Protocol):
    """A change of leaves by path."""

    def apply(self, leaves: Leaves) -> Leaves:
        """Returns the leaves after the change. Raises `MismatchError` if they do not fit the rule."""
        ...


@dataclasses.dataclass(frozen=True)
class TextFields:
    """Checks that the fields of a rule that are declared as text are text. Raises `MismatchError` otherwise."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is str and not isinstance(value := getattr(self, field.name), str):
                rule = type(self).__name__.lower()
                raise MismatchError(f"{rule}: expected text as {field.name}, found {value!r:.100}")


def check_list(rules: Any) -> None:
    """Raises `MismatchError` for anything but a list of rules, such as a single rule."""
    if hasattr(rules, "apply"):
        raise MismatchError(f"rules: expected a list, found one rule, {rules!r}; put it in brackets")
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise MismatchError(f"rules: expected a list of rules, found {rules!r:.100}")


@runtime_checkable
class InformedRule(Protocol):
    """A rule that also asks the checkpoint about what its arrays do not say."""

    def apply_to(self, leaves: Leaves, source: Source | None) -> Leaves:
        """Returns the leaves after the change, as `Rule.apply` does. `source` is None if there is only a catalogue."""
        ...


def apply(rules: Sequence[Rule], leaves: Leaves, source: Source | None = None) -> Leaves:
    """Applies rules in order to leaves of a source. Raises a `MismatchError` that says which rule failed."""
    check_list(rules)
    for rule in rules:
        if not hasattr(rule, "apply"):
            raise MismatchError(f"rules: expected rules made by treering.rules, found {rule!r}")
        leaves = rule.apply_to(leaves, source) if isinstance(rule, InformedRule) else rule.apply(leaves)
    return leaves


def replace_groups(
    text: str, leaves: Leaves, members: Mapping[str, str], made: Mapping[str, list[tuple[str, Leaf]]]
) -> Leaves:
    """Returns the leaves with each group replaced by the leaves made of it, at the position of its first member.

    members: the name of the group, by the path of a leaf that is in one.
    made: the new leaves with their paths, by the name of the group.
    """
    out: list[tuple[str, Leaf]] = []
    done: set[str] = set()
    for path, leaf in leaves.items():
        if path not in members:
            out.append((path, leaf))
        elif members[path] not in done:
            done.add(members[path])
            out += made[members[path]]
    return collect_leaves(text, out)


def collect_leaves(text: str, pairs: Sequence[tuple[str, Leaf]]) -> Leaves:
    """Returns leaves by their new paths. Raises `MismatchError` if two leaves have one path."""
    out: Leaves = {}
    for path, leaf in pairs:
        path = canonical(path)
        if path in out:
            raise MismatchError(
                f"{text}: two leaves would be called {path!r}: {out[path].entry.path}, {leaf.entry.path}"
            )
        out[path] = leaf.at(path)
    return out


def check_any(found: Any, optional: bool, text: str, leaves: Leaves) -> None:
    """Raises `MismatchError` if a rule that is not optional has found nothing. The message helps to correct a glob."""
    if not found and not optional:
        shown = ", ".join(list(leaves)[:5]) + (", …" if len(leaves) > 5 else "")
        escapes = " (in a key, / is written ~1 and ~ is written ~0)" if any("~" in path for path in leaves) else ""
        meant = re.search(r"'([^'*?]+)'", text)
        below = [path for path in leaves if meant and path.startswith(f"{meant[1]}/")]
        if meant and below:
            raise MismatchError(
                f"{text}: no leaf is {meant[1]!r} itself; {meant[1] + '/**'!r} matches {join_names(tuple(below))}"
            )
        raise MismatchError(
            f"{text}: matches none of the {len(leaves)} leaves ({shown}){escapes}; pass optional=True if it may"
        )


def matching_paths(leaves: Leaves, glob: str, text: str) -> list[str]:
    """Returns the paths that a glob matches, and the paths of damaged parts in which it could match a leaf."""
    globs = find_globs(glob, leaves, text)
    return [path for path, leaf in leaves.items() if glob_fits(path, leaf.entry, globs)]


def check_known(leaves: Leaves, text: str, glob: str = "**") -> None:
    """Raises `CorruptError` if a rule may change leaves of a damaged part, because their names are not known."""
    globs = globs_of(glob, text)
    for path, leaf in leaves.items():
        if is_unreadable_tree(entry := leaf.entry) and glob_fits(path, entry, globs):
            within = f"{path}/**" if path else "**"
            without = f"tr.rules.drop({within!r}) leaves them out"
            why = f"{text}: it may change leaves of {within}, which cannot be read; {without}"
            check_readable([lost_entry(path, why, *entry.why)])


def first_if_no_arrays(leaves: Iterable[Leaf]) -> Leaf | None:
    """Returns the first leaf if all of them are None or functions. Rules skip such leaves, as they have no data."""
    found = list(leaves)
    return found[0] if all(is_absent(leaf.entry) for leaf in found) else None


def require_array(leaf: Leaf, text: str, *, or_keys: bool = False) -> Leaf:
    """Returns the leaf, which must be an array.

    Raises `MismatchError` for any other leaf, also for typed keys unless `or_keys`, and `CorruptError` for a leaf that
    cannot be read.
    """
    check_readable([leaf.entry])
    if not isinstance(leaf.entry, ArrayEntry):
        what = "None" if leaf.entry.type == "none" else f"a {leaf.entry.type}"
        raise MismatchError(f"{text}: {leaf.entry.path} is not an array but {what}; choose a narrower pattern")
    if leaf.entry.type == "key" and not or_keys:
        raise MismatchError(
            f"{text}: {leaf.entry.path} is an array of PRNG keys, and this rule changes values; choose "
            "a narrower pattern"
        )
    return leaf


def check_alike(leaves: Sequence[Leaf], text: str, but: int | None = None) -> None:
    """Raises `MismatchError` unless all have the dtype and shape of the first, except along axis `but`.

    Typed keys must have the same implementation.
    """
    first = leaves[0].array
    for leaf in leaves[1:]:
        shapes = [[n for axis, n in enumerate(one.shape) if axis != but] for one in (first, leaf.array)]
        if (leaf.array.dtype, leaf.array.impl) != (first.dtype, first.impl) or shapes[0] != shapes[1]:
            shown = [f"{one.path} {describe_entry(one)}" for one in (first, leaf.array)]
            raise MismatchError(f"{text}: expected arrays of one shape and dtype, found {' and '.join(shown)}")


def level_of(glob: str, text: str) -> int:
    """Returns the position of the first ``*`` among the names of a glob. Raises `MismatchError` if it is not clear."""
    parts = glob.split("/")
    if "*" not in parts or "**" in parts[: parts.index("*")]:
        raise MismatchError(f"{text}: expected a '*' at the place of the numbers, with no '**' before it")
    return parts.index("*")


def axis_of(axis: int, rank: int, text: str) -> int:
    """Returns the axis counted from 0. Raises `MismatchError` for one that an array of `rank` axes does not have."""
    if not -rank <= axis < rank:
        raise MismatchError(f"{text}: axis {axis} of {rank}")
    return axis % rank


def dtype_text(dtype: Any, text: str) -> str:
    """Returns the name of the dtype that a rule makes. Raises `MismatchError` for a dtype that cannot be stored."""
    import ml_dtypes  # noqa: F401  # Importing it teaches NumPy names such as bfloat16.
    import numpy as np

    from .._core.dtypes import to_text

    try:
        return to_text(np.dtype(dtype))
    except UnsupportedError as error:
        raise MismatchError(f"{text}: {error}") from None
    except TypeError:
        raise MismatchError(f"{text}: expected a dtype, such as bfloat16 or int8, found {dtype!r}") from None


def require_texts(given: Any, text: str) -> tuple[str, ...]:
    """Returns the texts of a list as a tuple.

    Raises `MismatchError` for a single text, which would otherwise be a list of its letters, and for a set, which has
    no order.
    """
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes | Set) else ()
    if not found or not all(isinstance(one, str) for one in found):
        hint = f"; pass [{given!r}]" if isinstance(given, str) else ""
        raise MismatchError(f"{text}: expected a list of texts, found {given!r:.100}{hint}")
    return found


def require_integers(given: Any, shape: tuple[int, ...], least: int | None, text: str) -> Any:
    """Returns the integers given for each axis as tuples: one integer per axis, or an array of `shape` per axis.

    Raises `MismatchError` for anything else, and for a number below `least`.
    """
    import numpy as np

    try:
        found = np.asarray(given)
    except (TypeError, ValueError):  # a tracer, or rows of several lengths
        found = np.asarray(None)
    if found.shape == (0,):
        return ()
    if (
        found.dtype.kind not in "iu"
        or found.shape[1:] != shape
        or not found.ndim
        or (least is not None and (found < least).any())
    ):
        what = "a pair of integers" if shape else "an integer"
        limit = "" if least is None else f", at least {least}"
        raise MismatchError(f"{text}: expected {what} for each axis{limit}")
    return tuple(tuple(row) for row in found.tolist()) if shape else tuple(found.tolist())


def fill_value(value: Any, leaf: Leaf, text: str) -> "np.ndarray":
    """Returns a value in a leaf's dtype, as a 0-d array. Raises `MismatchError` if it cannot be held exactly."""
    import numpy as np

    from .._core import dtypes

    dtype = dtypes.to_numpy(leaf.array.dtype)
    found, shown = None, "cannot be"
    try:
        given = np.asarray(value)
    except (TypeError, ValueError):  # a tracer, or lists of several lengths
        given = np.asarray([None])
    if not given.ndim and (given.dtype.kind != "c" or dtype.kind == "c"):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            found = dtypes.convert(given, dtype)
            shown = f"would be {_scalar(found)!r}"
    if found is None or not _same(_scalar(found), _scalar(given)):
        raise MismatchError(f"{text}: {leaf.entry.path} is {leaf.array.dtype}, in which {value!r} {shown}")
    return found


def _scalar(value: "np.ndarray") -> Any:
    from .._core import dtypes

    kind = int if dtypes.is_integer(value.dtype) else float if dtypes.is_float(value.dtype) else None
    return kind(value[()]) if kind else value.item()


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))  # two NaNs count as the same


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises `MismatchError` if it is not one."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise MismatchError(f"{pattern!r} is not a regular expression: {error}") from None


def expand_pattern(expand: Callable[[], str], new: str) -> str:
    """Returns what `expand` makes of a replacement. Raises `MismatchError` if `new` names a group that is not there."""
    try:
        return expand()
    except (re.error, IndexError) as error:
        raise MismatchError(f"{new!r} does not fit the pattern: {error}") from None
