"""Few `rename` rules for many leaves: by the beginnings of their paths, in an order in which none undoes another."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from .path_likeness import differing_heads, names_of

_ASIDE = "moved:"  # before new paths, as long as other leaves have these


def renames(
    moves: Mapping[str, str], everything: Iterable[str], stay: Collection[str], taken: Collection[str], most: int
) -> list[tuple[str, str, bool]] | None:
    """Returns old and new beginnings of the paths that move, and whether they are whole paths; None for more than most.

    Each is as short as it can be without the beginning of a leaf that moves elsewhere or stays, or that would take the
    place of another.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for there, path in moves.items():
        groups.setdefault(differing_heads(there, path), {})[there] = path
    todo, done = list(groups.items()), list[tuple[str, str, bool]]()
    while todo:
        if len(todo) + len(done) > most:  # each is one rename at least
            return None
        (old, new), members = todo.pop(0)
        others = [path for path in everything if path.startswith(old) and path not in members]
        if not any(path in stay or new + path[len(old) :] in taken for path in others):
            whole = len(members) == 1 and old in members
            done.append((old, new, whole))
            continue
        narrower: dict[tuple[str, str], dict[str, str]] = {}
        for there, path in members.items():
            name = names_of(there[len(old) :])[:1]
            heads = (old + name[0], new + name[0]) if name else (there, path)
            narrower.setdefault(heads, {})[there] = path
        if list(narrower) == [(old, new)]:  # a leaf of which the path is the beginning of another's
            done.append((old, new, True))
        else:
            todo += narrower.items()
    return done


def ordered(renames: Sequence[tuple[str, str, bool]]) -> list[tuple[str, str]]:
    """The patterns and what they become, in an order in which none takes what another has made."""

    def written(old: str, whole: bool) -> str:
        return f"^{re.escape(old)}" + ("$" if whole else "")

    def quoted(new: str) -> str:
        return new.replace("\\", r"\\")

    left, done = list(renames), list[tuple[str, str]]()
    while left:
        free = [one for one in left if not any(other is not one and _takes(other, one) for other in left)]
        if not free:  # they change places
            aside = [(written(old, whole), _ASIDE + quoted(new)) for old, new, whole in left]
            return [*done, *aside, (f"^{_ASIDE}", "")]
        done += [(written(old, whole), quoted(new)) for old, new, whole in free[:1]]
        left.remove(free[0])
    return done


def _takes(other: tuple[str, str, bool], one: tuple[str, str, bool]) -> bool:
    """Whether a rename would take what another has made, or has a leaf in its place."""
    return other[0].startswith(one[1]) or one[1].startswith(other[0])
