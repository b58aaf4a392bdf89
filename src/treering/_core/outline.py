"""The tree of a checkpoint for people: nested, sizes added up, and layers that are alike as one."""

import dataclasses
import math
import re
from collections.abc import Hashable, Iterator, Mapping

from .describe import describe
from .entries import ArrayEntry, Entry
from .leaf_paths import written

_MAX_LEVELS = 64
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)


@dataclasses.dataclass
class Node:
    """A leaf or a container. `name` is its key, ``0…23`` for `alike` siblings that are the same but for a number.

    `leaves` and `nbytes` count those of all of them; `path` and `entry` are those of the first.
    """

    name: str
    path: str
    entry: Entry | None = None
    children: "list[Node]" = dataclasses.field(default_factory=list)
    alike: int = 1
    leaves: int = 0
    nbytes: int = 0
    values: int = 0  # elements of arrays

    def walk(self, depth: int = 0) -> "Iterator[tuple[int, Node]]":
        """All nodes below this one in order, and how deep they lie."""
        stack = [(depth, child) for child in reversed(self.children)]
        while stack:
            level, node = stack.pop()
            yield level, node
            stack += [(level + 1, child) for child in reversed(node.children)]


def outline(entries: Mapping[str, Entry], *, collapse: bool = True) -> Node:
    """The tree of leaves by path. With `collapse`, siblings that differ in a number alone are one node."""
    root = Node("", "")
    places: dict[str, Node] = {"": root}
    for path, entry in entries.items():
        if path:
            _place(places, path).entry = entry
        else:
            root.children.append(Node("(root)", "", entry))
    _finish(root, collapse)
    return root


def _place(places: dict[str, Node], path: str) -> Node:
    """The node of a path, made with all above it."""
    missing = [path]
    while (above := _above(missing[-1])) not in places:
        missing.append(above)
    node = places[above]
    for one in reversed(missing):
        child = Node(written(one.removeprefix(above + "/" if above else "")), one)
        node.children.append(child)
        places[one] = node = child
        above = one
    return node


def _above(path: str) -> str:
    """The path above; from so many levels on, names are not taken apart."""
    above = path.rpartition("/")[0]
    return "/".join(path.split("/", _MAX_LEVELS)[:_MAX_LEVELS]) if above.count("/") >= _MAX_LEVELS else above


def _finish(root: Node, collapse: bool) -> None:
    """Adds sizes up from below, and joins what is alike."""
    order = [root, *(node for _, node in root.walk())]
    kinds: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}  # a kind is compared often: a number stands for it
    for node in reversed(order):
        entry = node.entry
        own: Hashable = None
        if entry is not None:
            node.leaves = 1
            own = describe(entry)
            if isinstance(entry, ArrayEntry):
                node.nbytes = entry.nbytes
                node.values = math.prod(entry.shape)
                own = (own, entry.type)
            else:
                own = (own, repr(entry.value))
        for child in node.children:
            node.leaves += child.leaves
            node.nbytes += child.nbytes
            node.values += child.values
        kind = (own, tuple([(child.name, kinds[id(child)]) for child in node.children]))
        if collapse:
            node.children = _joined(node.children, kinds)
        kinds[id(node)] = numbers.setdefault(kind, len(numbers))


def _joined(children: list[Node], kinds: Mapping[int, Hashable]) -> list[Node]:
    """Siblings whose names differ in a number and whose trees are the same, joined where the first of them stood."""
    groups: dict[Hashable, list[tuple[int, Node]]] = {}
    for child in children:
        match = _NUMBERED.fullmatch(child.name)
        key: Hashable = (match[1], match[3], kinds[id(child)]) if match else id(child)
        groups.setdefault(key, []).append((int(match[2]) if match else 0, child))
    joined: list[Node] = []
    for group in groups.values():
        first = group[0][1]
        if len(group) > 1:
            numbers = sorted(number for number, _ in group)
            match = _NUMBERED.fullmatch(first.name)
            assert match
            first = dataclasses.replace(
                first,
                name=f"{match[1]}{_ranges(numbers)}{match[3]}",
                alike=len(group),
                leaves=sum(node.leaves for _, node in group),
                nbytes=sum(node.nbytes for _, node in group),
                values=sum(node.values for _, node in group),
            )
        joined.append(first)
    return joined


def _ranges(numbers: list[int]) -> str:
    """Numbers as people write them: ``0…3,5,7…9``; of many parts the first and the last."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = parts if len(parts) <= 5 else [*parts[:3], *parts[-1:]]
    texts = [str(a) if a == b else f"{a}…{b}" for a, b in shown]
    if len(parts) > 5:
        texts.insert(3, "…")
    return ",".join(texts)
