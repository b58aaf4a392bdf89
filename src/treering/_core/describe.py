"""Describes leaves and differences as text for people. Similar ones are one line, so that they fit on a screen."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..errors import Difference, MismatchError
from .entries import NO_ARRAY, Entry, LostEntry, StatesEntry, ValueEntry, visible_shape
from .leaf_paths import closest, matches
from .units import nbytes

NOTHING = "nothing"
NONE, FUNCTION = "None", "a function"
ABSENT = (NOTHING, NONE, FUNCTION)  # texts in a difference for a leaf that has no data
_MAX_LINES = 20  # lines
_NUMBER = re.compile(r"\d+")


def describe_entry(entry: Entry) -> str:
    """Returns an entry in a few characters: ``float32[2,3]``, ``int``, ``key<threefry2x32>[]``."""
    if isinstance(entry, LostEntry):
        return "lost"
    if isinstance(entry, ValueEntry):
        return entry.type
    dtype = f"key<{entry.impl}>" if entry.type == "key" else entry.dtype
    return f"{dtype}[{','.join(map(str, visible_shape(entry)))}]"


def describe_leaf(entry: Entry) -> str:
    """Returns an entry in words, with the value of a leaf that is no array: ``float32[2,3]``, ``int 5``, ``none``."""
    about = describe_entry(entry)
    return f"{about} {value_text(entry)}" if isinstance(entry, ValueEntry) and entry.type not in NO_ARRAY else about


def value_text(entry: ValueEntry) -> str:
    """Returns the value of a leaf for people to read. For states in array files it is their size: nothing is read."""
    return nbytes(entry.nbytes) if isinstance(entry, StatesEntry) else shorten(entry.decode())


def shorten(value: Any) -> str:
    """Returns a value for people to read, in at most 60 characters. Python refuses to print very long integers."""
    if type(value) is int and abs(value) >> 200:
        return f"({value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def rename_code(old: str, new: str) -> str:
    """Returns the rule that gives one leaf another path, as the user would write it."""
    values = f"^{re.escape(old)}$", new.replace("\\", "\\\\")
    return f"tr.rules.rename({', '.join(map(repr, values))})"


def drop_code(path: str) -> str:
    """Returns the advice to leave one leaf out, with the rule as the user would write it."""
    return "drop it by a rule" + (f": tr.rules.drop({path!r})" if path else "")


def reshape_hint(path: str, found: tuple[int, ...], wanted: tuple[int, ...], *, has_value: bool) -> str:
    """Returns the hint for an array of shape `found` where the template has the shape `wanted`.

    It names a rule that makes one shape of the other, if there is one, and how to keep the template's array.
    """
    change = ""
    if sorted(found) == sorted(wanted):
        rest, axes = list(range(len(found))), list[int]()
        for size in wanted:
            axes.append(next(axis for axis in rest if found[axis] == size))
            rest.remove(axes[-1])
        change = f"tr.rules.transpose({path!r}, {tuple(axes)}) turns it, "
    elif math.prod(found) == math.prod(wanted):
        change = f"tr.rules.reshape({path!r}, {wanted}) keeps its values in their order, "
    elif found[1:] == wanted:
        change = f"tr.rules.take({path!r}, 0) takes the first of {found[0]}, "
    elif len(found) == len(wanted) and all(a <= b for a, b in zip(found, wanted, strict=True)):
        widths = tuple((0, b - a) for a, b in zip(found, wanted, strict=True))
        change = f"tr.rules.pad({path!r}, {widths}) fills it up with zeros, "
    if not path:  # Without its only leaf, nothing of the checkpoint would be left.
        return f"shapes must be equal; {change}".removesuffix("; ").removesuffix(", ")
    own = f"tr.rules.drop({path!r}) with missing=[{path!r}] takes the template's"
    if not has_value:
        own += ", if it has an array and not only a shape, as init() has"
    return f"shapes must be equal; {change}{own}"


def mismatch_error(
    name: str,
    differences: Sequence[Difference],
    template: Sequence[str],
    found: Iterable[str],
    likely: str = "",
    what: str = "does not fit the template",
) -> MismatchError:
    """Returns the error about the differences between a checkpoint and a template. `likely` is their likely cause."""
    known, wanted = list(found), set(template)
    everything = {*wanted, *known}
    unused = [path for path in known if path not in wanted] or known  # A leaf with another name is one of these.
    differences = [_without_shared_glob(one, everything) for one in differences]
    count = f"{len(differences):,} difference{'s' if len(differences) > 1 else ''}"
    lines = [f"{name}: the checkpoint {what}: {count}"]
    if likely:
        lines.append(f"  likely: {likely}")
    groups = list(_grouped(differences)) if len(differences) > _MAX_LINES else [[one] for one in differences]
    lines += [f"  {_line(group, unused, everything)}" for group in groups[:_MAX_LINES]]
    if rest := sum(map(len, groups[_MAX_LINES:])):
        lines.append(f"  and {rest:,} more; the error's `differences` has all of them")
    error = MismatchError("\n".join(lines))
    error.differences = tuple(differences)
    return error


def _without_shared_glob(one: Difference, everything: Iterable[str]) -> Difference:
    """Returns a difference without the rules in its hint if its path, as a glob, would also match other paths."""
    if repr(one.path) not in one.hint or not {*"*?"} & {*one.path}:
        return one
    if not any(path != one.path and matches(path, one.path) for path in everything):
        return one
    return one._replace(hint="the * or ? in its name is a wildcard, so no rule changes this leaf alone; rename it")


def _grouped(differences: Iterable[Difference]) -> Iterator[list[Difference]]:
    """Yields groups of differences that say the same, of paths that differ only in their numbers."""
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for one in differences:
        hint = one.hint.replace(repr(one.path), "")
        groups.setdefault((_NUMBER.sub("#", one.path), one.expected, one.found, hint), []).append(one)
    yield from groups.values()


def _line(group: Sequence[Difference], known: Sequence[str], everything: Iterable[str]) -> str:
    first = group[0]
    if len(group) == 1:
        similar = closest(first.path, known) if first.found == NOTHING else None
        return str(first._replace(found=f"{NOTHING} (closest: {similar})") if similar else first)
    glob = _glob([one.path for one in group])
    paths = {one.path for one in group}
    exact = all(path in paths for path in everything if matches(path, glob))
    hint = first.hint.replace(repr(first.path), repr(glob)) if exact else first.hint
    others = "" if exact else f", of which {first.path} is one"
    return f"{glob} ×{len(group):,}{others}: expected {first.expected}, found {first.found}; {hint}"


def _glob(paths: Sequence[str]) -> str:
    """Returns a glob for paths that differ in numbers: a ``*`` replaces each number that is not the same in all."""
    numbers = [_NUMBER.findall(path) for path in paths]
    same = iter([len(set(column)) == 1 for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda found: found[0] if next(same) else "*", paths[0])
