"""Writes the hints of errors about data iterators, so that no hint proposes to lose the position of one.

For any other leaf a hint may say how to restore without it. An iterator that keeps the template's state would start
its data from the beginning, and the job would not notice.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._core.describe import ABSENT, rename_code
from .._core.entries import Entry, is_absent
from .._core.leaf_paths import join_names, relative_to
from .._core.source import Source, full_source, left_out, subtree_path
from .._pytree import state_methods
from .._pytree.walk import FlatTree
from ..errors import Difference
from .policy import Policy

_ALL = re.compile(r"(?:missing='template'|extra='ignore') or ")


class OutsideState(NamedTuple):
    """What a checkpoint has outside the part that is restored.

    iterators: the paths of iterators.
    left_out: descriptions of what cannot be read here.
    at: the path of the part that is restored.
    """

    iterators: Sequence[str] = ()
    left_out: Sequence[str] = ()
    at: str = ""

    @classmethod
    def of(cls, source: Source) -> "OutsideState":
        """Returns what the checkpoint has outside a source, which may be a part of it."""
        chosen = {entry.path for entry in source.entries.values()}
        rest = [path for path in iterator_paths(full_source(source).entries) if path not in chosen]
        return cls(rest, left_out(source), subtree_path(source))


def iterator_paths(entries: Mapping[str, Entry]) -> list[str]:
    """Returns the paths of the iterators among entries."""
    return [path for path, entry in entries.items() if entry.type == "iterator"]


def _in_template(flat_tree: FlatTree) -> dict[str, Any]:
    """Returns the iterators of a template, by path."""
    leaves = zip(flat_tree.paths, flat_tree.leaves, strict=True)
    return {path: leaf for path, leaf in leaves if state_methods.is_iterator(type(leaf))}


def with_hints(
    differences: Sequence[Difference], flat_tree: FlatTree, entries: Mapping[str, Entry], elsewhere: OutsideState
) -> list[Difference]:
    """Returns the differences, with hints of their own for iterators that only one side has.

    If there is such an iterator, no hint about another leaf names an argument that means all leaves: the user would
    lose the position with it.
    """
    wanted = _in_template(flat_tree)
    free = [path for path in iterator_paths(entries) if path not in wanted]
    absent = {one.path: wanted[one.path] for one in differences if one.found in ABSENT and one.path in wanted}
    if not absent and not any(one.expected in ABSENT and one.path in free for one in differences):
        return list(differences)
    hinted: list[Difference] = []
    for one in differences:
        holder = next((path for path in absent if one.expected in ABSENT and relative_to(one.path, path)), None)
        if one.path in absent:
            hint = _missing(one.path, absent, free, entries, elsewhere)
        elif one.expected in ABSENT and one.path in free:
            hint = "put the iterator in this place of the template: it continues from its saved position"
        elif holder is not None:
            hint = f"it may be a part of the state of the iterator at {holder!r}"
        else:
            hint = _ALL.sub("", one.hint)
        hinted.append(one._replace(hint=hint))
    return hinted


def _missing(
    path: str, absent: Mapping[str, Any], free: Sequence[str], entries: Mapping[str, Entry], elsewhere: OutsideState
) -> str:
    """Returns the hint about an iterator of the template that the checkpoint does not have at this path.

    absent: all iterators of the template that the checkpoint does not have at their paths.
    free: the paths of the checkpoint's iterators that the template does not have.
    """
    leaf, at = absent[path], f"{elsewhere.at}/{path}".strip("/")
    if free:
        hint = f"the checkpoint has the state of an iterator at {join_names(tuple(map(repr, free)))}"
        rule = f"rules=[{rename_code(free[0], path)}] restores it"
        return f"{hint}: {rule if len(free) == len(absent) == 1 else 'put the iterator there'}"
    if elsewhere.iterators:
        listed = join_names(tuple(map(repr, elsewhere.iterators)))
        return f"the checkpoint has the state of an iterator outside of the part that is restored, at {listed}"
    if inside := [one for one in entries if relative_to(one, path) is not None]:
        put = next((name for name in ("set_state", "load_state_dict") if hasattr(leaf, name)), "restore")
        count = f"{len(inside)} leaf" if len(inside) == 1 else f"{len(inside)} leaves"
        return (
            f"the checkpoint has {count} below it, which may be its state: put `...` in its place, and set it with "
            f"{put}(tr.restore(path, at={at!r}))"
        )
    if elsewhere.left_out:
        return (
            f"the checkpoint has data that cannot be read here, {', '.join(elsewhere.left_out)}: if that is the "
            "iterator's position, restore it with the library that wrote it, and put `...` in its place"
        )
    what = "its random numbers start" if state_methods.is_generator(type(leaf)) else "the data starts"
    return f"missing='template' or missing=[{path!r}] keeps the template's, and then {what} over"


def loses_position(flat_tree: FlatTree, entries: Mapping[str, Entry], given: Policy, proposed: Policy) -> bool:
    """Returns True if a policy loses a position: it skips an iterator of one side, and the given policy does not."""
    wanted = _in_template(flat_tree)
    absent = [path for path in wanted if is_absent(entries.get(path))]
    if any(proposed.allows("missing", path) and not given.allows("missing", path) for path in absent):
        return True
    taken = [*wanted, *(path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is ...)]
    free = [path for path in iterator_paths(entries) if all(relative_to(path, at) is None for at in taken)]
    return any(
        proposed.allows("extra", path, entries[path]) and not given.allows("extra", path, entries[path])
        for path in free
    )
