"""Suggests a cause when all differences are in one part of the tree, such as a new head or another optimizer."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from .._core.describe import ABSENT
from .._core.entries import Entry
from .._core.leaf_paths import matches, relative_to
from .._pytree.walk import FlatTree
from ..errors import Difference
from .suggestion import RuleCall, Suggestion, is_plain


def find_own_subtree(
    flat_tree: FlatTree, entries: Mapping[str, Entry], differences: Sequence[Difference]
) -> Iterator[Suggestion]:
    """Yields causes for a part of the tree that contains all differences, such as a new head or another optimizer."""
    if len(differences) < 2:
        return
    paths = [one.path for one in differences]
    everything = {*flat_tree.paths, *entries}
    leaves = [one for one in differences if one.path in everything]  # not the containers of another class
    fitting = {
        path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is not None
    }.difference(paths)
    for place, glob in _globs(paths, everything):
        inside = [path for path in everything if matches(path, glob)]
        if len(inside) == len(everything):
            continue
        text = f"all differences are below {place!r}, where the template can keep its own"
        if all(one.found in ABSENT for one in leaves):
            part = "a part of " if any(path in entries for path in inside) else ""
            yield Suggestion(f"the checkpoint lacks {part}{place!r}", missing=(glob,))
        elif all(one.expected in ABSENT for one in leaves):
            part = "a part of " if any(matches(path, glob) for path in flat_tree.paths) else ""
            yield Suggestion(f"the template lacks {part}{place!r}", extra=(glob,))
        # Dropping the checkpoint's part would also lose leaves in it that match, so it is suggested only without any.
        differs_entirely = len(leaves) < len(differences) or not fitting.intersection(inside)
        if differs_entirely and all(is_plain(path, entries) for path in inside):
            there = any(matches(path, glob) for path in flat_tree.paths)
            reason = text if there else f"the template lacks {place!r}"
            yield Suggestion(reason, rules=(RuleCall.of("drop", glob),), missing=(glob,) if there else ())
        if all(one.found in ABSENT or one.expected in ABSENT for one in leaves):
            yield Suggestion(text, missing=(glob,), extra=(glob,))
    if all(one.expected in ABSENT for one in leaves):
        yield Suggestion("the template is a part of what the checkpoint has", extra="ignore")


def _globs(paths: Sequence[str], everything: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the containers that all these paths are in, and a glob for each."""
    parts = [path.split("/") for path in paths]
    head: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        head.append(names[0])
    while head and head[-1].isdecimal() and _is_all("/".join(head), "/".join(head[:-1]), everything):
        head.pop()
    common = set(parts[0]).intersection(*parts[1:]).difference(head)
    if head:
        yield "/".join(head), "/".join([*head, "**"])
    for name in sorted(common, key=parts[0].index, reverse=True):
        if not name.isdecimal():
            yield name, f"**/{name}/**"


def _is_all(place: str, around: str, everything: Collection[str]) -> bool:
    """Returns True if everything in the container `around` is in the container `place`."""
    return all(relative_to(path, place) is not None for path in everything if relative_to(path, around) is not None)
