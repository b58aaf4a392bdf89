"""Builds the tree of a checkpoint for people to read: nested, with total sizes, and similar layers as one node."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping

from .describe import describe_entry
from .entries import ArrayEntry, Entry, StatesEntry
from .leaf_paths import unescape

_MAX_LEVELS = 64
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


@dataclasses.dataclass
class OutlineNode:
    """A leaf or a container, or several siblings that differ only in a number.

    name: the key, or for several siblings a text such as ``0…23``.
    alike: the number of siblings.
    path, entry: those of the first sibling.
    leaves, nbytes, values: totals of all siblings. `values` counts elements of arrays.
    """

    name: str
    path: str
    entry: Entry | None = None
    children: "list[OutlineNode]" = dataclasses.field(default_factory=list)
    alike: int = 1
    leaves: int = 0
    nbytes: int = 0
    values: int = 0

    def walk(self, depth: int = 0) -> "Iterator[tuple[int, OutlineNode]]":
        """Yields all nodes below this one in order, each with its depth."""
        stack = [(depth, child) for child in reversed(self.children)]
        while stack:
            level, node = stack.pop()
            yield level, node
            stack += [(level + 1, child) for child in reversed(node.children)]


def outline(
    entries: Mapping[str, Entry], *, collapse: bool = True, about: Callable[[ArrayEntry], object] = lambda entry: None
) -> OutlineNode:
    """Returns the tree of leaves by path. With `collapse`, siblings that differ only in a number are one node.

    about: returns what is said of an array in addition to its dtype and shape. Arrays with another text are not alike.
    """
    root = OutlineNode("", "")
    places: dict[str, OutlineNode] = {"": root}
    for path, entry in entries.items():
        if path:
            _place(places, path).entry = entry
        else:
            root.children.append(OutlineNode("(root)", "", entry))
    _finish(root, about if collapse else None)
    return root


def _place(places: dict[str, OutlineNode], path: str) -> OutlineNode:
    """Returns the node of a path. Makes it, and the nodes above it that do not exist yet."""
    missing = [path]
    while (above := _above(missing[-1])) not in places:
        missing.append(above)
    node = places[above]
    for one in reversed(missing):
        child = OutlineNode(unescape(one.removeprefix(above + "/" if above else "")), one)
        node.children.append(child)
        places[one] = node = child
        above = one
    return node


def _above(path: str) -> str:
    """Returns the path of the container. Below `_MAX_LEVELS` levels the rest of a path is a single name."""
    above = path.rpartition("/")[0]
    return "/".join(path.split("/", _MAX_LEVELS)[:_MAX_LEVELS]) if above.count("/") >= _MAX_LEVELS else above


def _finish(root: OutlineNode, about: Callable[[ArrayEntry], object] | None) -> None:
    """Adds up sizes from the leaves to the root. With `about`, also joins siblings that are alike."""
    order = [root, *(node for _, node in root.walk())]
    kinds: dict[int, Hashable] = {}
    numbers: dict[Hashable, int] = {}  # kinds are large and compared often, so each gets a number
    for node in reversed(order):
        entry = node.entry
        own: Hashable = None
        if entry is not None:
            node.leaves = 1
            own = describe_entry(entry)
            if isinstance(entry, ArrayEntry):
                node.nbytes = entry.nbytes
                node.values = math.prod(entry.shape)
                own = (own, about and repr(about(entry)))
            elif isinstance(entry, StatesEntry):
                node.nbytes = entry.nbytes
                own = (own, entry.path)  # States are never alike, because comparing them would mean to read them.
            else:
                own = (own, repr(entry.value))
        for child in node.children:
            node.leaves += child.leaves
            node.nbytes += child.nbytes
            node.values += child.values
        kind = (own, tuple([(child.name, kinds[id(child)]) for child in node.children]))
        if about:
            node.children = _joined(node.children, kinds)
        kinds[id(node)] = numbers.setdefault(kind, len(numbers))


def _joined(children: list[OutlineNode], kinds: Mapping[int, Hashable]) -> list[OutlineNode]:
    """Returns the siblings, with those joined whose names differ only in a number and whose trees are equal.

    The joined node has the position of the first of them.
    """
    groups: dict[Hashable, list[OutlineNode]] = {}
    for child in children:
        match = _NUMBERED.fullmatch(child.name)
        key: Hashable = (match[1], match[3], kinds[id(child)]) if match else id(child)
        groups.setdefault(key, []).append(child)
    joined: list[OutlineNode] = []
    for group in groups.values():
        name = _joint_name([node.name for node in group]) if len(group) > 1 else None
        if name is None:
            joined += group
            continue
        totals = {total: sum(getattr(node, total) for node in group) for total in ("leaves", "nbytes", "values")}
        joined.append(dataclasses.replace(group[0], name=name, alike=len(group), **totals))
    return joined


def _joint_name(names: list[str]) -> str | None:
    """Returns one name for names that differ in a number, such as ``h0…3,7``, or None if it would be ambiguous."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    digits = [match[2] for match in matches]
    widths = {len(text) for text in digits}
    padded = any(text[0] == "0" and len(text) > 1 for text in digits)
    if (padded and len(widths) > 1) or len(set(digits)) < len(digits):
        return None
    width = widths.pop() if padded else 0
    return f"{matches[0][1]}{_ranges(sorted(map(int, digits)), width)}{matches[0][3]}"


def _ranges(numbers: list[int], width: int) -> str:
    """Returns numbers as people write them: ``0…3,5,7…9``. Of more than five parts, some in the middle are left out."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = parts if len(parts) <= 5 else [*parts[:3], *parts[-1:]]
    texts = [f"{a:0{width}}" if a == b else f"{a:0{width}}…{b:0{width}}" for a, b in shown]
    if len(parts) > 5:
        texts.insert(3, "…")
    return ",".join(texts)
