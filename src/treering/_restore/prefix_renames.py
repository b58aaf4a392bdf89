"""Finds few `rename` rules for many leaves, each for the beginning of their paths.

The rules have an order in which no rule changes a path that an earlier one has made.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from .path_likeness import differing_heads, names_of

_TEMPORARY = "moved:"  # before new paths, while other leaves still have these paths


def renames(
    moves: Mapping[str, str], everything: Iterable[str], stay: Collection[str], taken: Collection[str], most: int
) -> list[tuple[str, str, bool]] | None:
    """Returns the renames for `moves`, or None if they are more than `most`.

    moves: the new path of each leaf that moves, by its path in the checkpoint.
    everything: all paths of the checkpoint.
    stay: paths of leaves that must not be renamed.
    taken: paths that no other leaf may be renamed to.

    Each rename is an old and a new beginning, and True if they are entire paths. A beginning is as short as possible:
    it must not match a leaf that moves elsewhere or stays, nor rename one to a path that is taken.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for there, path in moves.items():
        groups.setdefault(differing_heads(there, path), {})[there] = path
    todo, done = list(groups.items()), list[tuple[str, str, bool]]()
    while todo:
        if len(todo) + len(done) > most:  # Each group becomes at least one rename.
            return None
        (old, new), members = todo.pop(0)
        others = [path for path in everything if path.startswith(old) and path not in members]
        if not any(path in stay or new + path[len(old) :] in taken for path in others):
            is_entire_path = len(members) == 1 and old in members
            done.append((old, new, is_entire_path))
            continue
        narrower: dict[tuple[str, str], dict[str, str]] = {}
        for there, path in members.items():
            name = names_of(there[len(old) :])[:1]
            heads = (old + name[0], new + name[0]) if name else (there, path)
            narrower.setdefault(heads, {})[there] = path
        if list(narrower) == [(old, new)]:  # The path of this leaf is the beginning of another leaf's path.
            done.append((old, new, True))
        else:
            todo += narrower.items()
    return done


def ordered(renames: Sequence[tuple[str, str, bool]]) -> list[tuple[str, str]]:
    """Returns patterns and replacements, in an order in which no rule renames a leaf that another rule has moved."""

    def written(old: str, is_entire_path: bool) -> str:
        return f"^{re.escape(old)}" + ("$" if is_entire_path else "")

    def quoted(new: str) -> str:
        return new.replace("\\", r"\\")

    left, done = list(renames), list[tuple[str, str]]()
    while left:
        free = [one for one in left if not any(other is not one and _takes(other, one) for other in left)]
        if not free:  # They change places, so all of them get temporary names first.
            moved = [(written(old, is_entire), _TEMPORARY + quoted(new)) for old, new, is_entire in left]
            return [*done, *moved, (f"^{_TEMPORARY}", "")]
        done += [(written(old, is_entire), quoted(new)) for old, new, is_entire in free[:1]]
        left.remove(free[0])
    return done


def _takes(other: tuple[str, str, bool], one: tuple[str, str, bool]) -> bool:
    """Returns True if `other` would rename the leaves that `one` has made, or if `one` would overwrite its leaves."""
    return other[0].startswith(one[1]) or one[1].startswith(other[0])
