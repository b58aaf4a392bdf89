"""The tree of a checkpoint for people: nested, sizes added up, and layers that are alike as one."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping

from .describe import describe
from .entries import ArrayEntry, Entry, StatesEntry
from .leaf_paths import written

_MAX_LEVELS = 64
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)


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


def outline(
    entries: Mapping[str, Entry], *, collapse: bool = True, about: Callable[[ArrayEntry], object] = lambda entry: None
) -> Node:
    """The tree of leaves by path. With `collapse`, siblings that differ in a number alone are one node.

    about: what is said of an array beside its dtype and shape; arrays of which other things are said are not alike.
    """
    root = Node("", "")
    places: dict[str, Node] = {"": root}
    for path, entry in entries.items():
        if path:
            _place(places, path).entry = entry
        else:
            root.children.append(Node("(root)", "", entry))
    _finish(root, about if collapse else None)
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


def _finish(root: Node, about: Callable[[ArrayEntry], object] | None) -> None:
    """Adds sizes up from below, and joins what is alike if `about` says what that is."""
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
                own = (own, about and repr(about(entry)))
            elif isinstance(entry, StatesEntry):
                node.nbytes = entry.nbytes
                own = (own, entry.path)  # they are not compared
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


def _joined(children: list[Node], kinds: Mapping[int, Hashable]) -> list[Node]:
    """Siblings whose names differ in a number and whose trees are the same, joined where the first of them stood."""
    groups: dict[Hashable, list[Node]] = {}
    for child in children:
        match = _NUMBERED.fullmatch(child.name)
        key: Hashable = (match[1], match[3], kinds[id(child)]) if match else id(child)
        groups.setdefault(key, []).append(child)
    joined: list[Node] = []
    for group in groups.values():
        name = _joint_name([node.name for node in group]) if len(group) > 1 else None
        if name is None:
            joined += group
            continue
        totals = {total: sum(getattr(node, total) for node in group) for total in ("leaves", "nbytes", "values")}
        joined.append(dataclasses.replace(group[0], name=name, alike=len(group), **totals))
    return joined


def _joint_name(names: list[str]) -> str | None:
    """One name for names that differ in a number: ``h0…3,7``. None where it would not say which they are."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    digits = [match[2] for match in matches]
    widths = {len(text) for text in digits}
    padded = any(text[0] == "0" and len(text) > 1 for text in digits)
    if (padded and len(widths) > 1) or len(set(digits)) < len(digits):
        return None
    width = widths.pop() if padded else 0
    return f"{matches[0][1]}{_ranges(sorted(map(int, digits)), width)}{matches[0][3]}"


def _ranges(numbers: list[int], width: int) -> str:
    """Numbers as people write them: ``0…3,5,7…9``; of many parts the first and the last."""
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
