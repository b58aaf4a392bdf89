"""Converts between paths without and with a level for each box of Flax.

Such a box wraps one value. Treering's paths do not show it, but other libraries write it as a level. Orbax writes
``a/kernel/value`` for the Variable ``a/kernel`` of an NNX state; Orbax and Flax do so for a Linen parameter with
partitioning. Only a tree says where boxes are: the template of a restore, or the tree that is saved.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import TypeVar

from .._core.skeleton import Node, Skeleton, containers
from .._core.source import Boxes
from .walk import FlatTree

_T = TypeVar("_T")

LEVEL_KINDS = (("variable", "axis-metadata"), ("axis-metadata",))  # kinds of boxes that are levels in some format


def path_with_levels(path: str, boxes: Boxes, kinds: Collection[str]) -> str:
    """Returns a path with levels for boxes of these kinds."""
    parts = _names("", boxes, kinds)
    place = ""
    for n, part in enumerate(path.split("/") if path else ()):
        place = f"{place}/{part}" if n else part
        parts += [part, *_names(place, boxes, kinds)]
    return "/".join(parts)


def skeleton_with_levels(skeleton: Skeleton, boxes: Boxes, kinds: Collection[str]) -> Skeleton:
    """Returns the skeleton of a tree in which boxes of these kinds are levels."""
    found: list[Node | int] = []
    for _, path, node in containers(skeleton):
        found += [Node("object", "", [name]) for name in _names(path, boxes, kinds)]
        found.append(node)
    return found


def rename_to_tree(flat_tree: FlatTree, entries: Mapping[str, _T]) -> Mapping[str, _T]:
    """Returns the leaves of a checkpoint under the paths that a tree has for them, without levels for its boxes."""
    names = {there: path for path, there in find_levels(flat_tree.paths, flat_tree.boxes, entries).items()}
    return {names.get(path, path): entry for path, entry in entries.items()} if names else entries


def find_levels(paths: Iterable[str], boxes: Boxes, names: Container[str]) -> dict[str, str]:
    """Returns the paths of a tree whose path with levels for boxes is among `names`, each with that name.

    Returns {} unless more paths are found that way than without levels. All paths are decided together, because a tree
    in a box may have a key with the same name as the box's level.
    """
    best: dict[str, str] = {}
    if boxes:
        listed = list(paths)
        most = sum(path in names for path in listed)
        for kinds in LEVEL_KINDS:
            candidates = {path: path_with_levels(path, boxes, kinds) for path in listed}
            found = {path: name for path, name in candidates.items() if name in names}
            if len(found) > most:
                most, best = len(found), {path: name for path, name in found.items() if name != path}
    return best


def _names(path: str, boxes: Boxes, kinds: Collection[str]) -> list[str]:
    return [name for kind, name in boxes.get(path, ()) if kind in kinds]
