"""Defines the skeleton: a tree without the contents of its leaves.

It is a list of nodes in pre-order, in which a leaf is 0. The list is flat, so that no deep tree and no hostile file can
exhaust a recursive parser.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ..errors import CorruptError, UnsupportedError
from .leaf_paths import join, key_text, split
from .values import MAX_EXACT_INT, decode, encode

LEAF = 0
_TEXT = {str}
_KEY_BITS = 12_000  # of an integer key, 3,000 hexadecimal digits; Python refuses to write one of 4,300 decimal digits
_log = logging.getLogger("treering")


class Node(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A container. `keys` are its keys, or the number of its children if these are numbered."""

    kind: Literal["dict", "list", "tuple", "namedtuple", "object", "positional"]
    name: str
    keys: list[Any] | Annotated[int, msgspec.Meta(ge=0)]

    def count(self) -> int:
        """Returns the number of children."""
        return self.keys if isinstance(self.keys, int) else len(self.keys)

    def names(self) -> Sequence[Any]:
        """Returns the keys as they are written, or none if the children are numbered."""
        return () if isinstance(self.keys, int) else self.keys

    def children(self) -> Sequence[Any]:
        """Returns the keys as Python values."""
        if isinstance(self.keys, int):
            return range(self.keys)
        return self.keys if {*map(type, self.keys)} <= _TEXT else [_decode_key(key) for key in self.keys]


Skeleton = Sequence[Node | int]


def encode_key(key: Any) -> Any:
    """Returns a key as it is written in `Node.keys`. Raises `UnsupportedError` for a key that cannot be written."""
    if type(key) is str:
        return key
    if type(key) is int and key.bit_length() > _KEY_BITS:
        raise UnsupportedError(f"a key is an int of {key.bit_length()} bits; expected at most {_KEY_BITS}")
    key_text(key)  # raises the error for other types
    if type(key) is tuple:
        return ["tuple", [encode_key(part) for part in key]]
    kind, value = encode(key)
    return value if kind == "bool" or type(value) is int else [kind, value]


def _decode_key(key: Any, kinds: Collection[str] = ("int", "float", "bytes", "tuple")) -> Any:
    if isinstance(key, str | bool) or (isinstance(key, int) and abs(key) <= MAX_EXACT_INT):
        return key
    if isinstance(key, list) and len(key) == 2 and key[0] in kinds:
        if key[0] == "tuple" and isinstance(key[1], list):
            return tuple(_decode_key(part, ("int", "float")) for part in key[1])
        found = decode(*key)
        # A key may be written in one way only. Floats are an exception, because JSON writers may write 1.0 as 1.
        if key[0] == "float" or encode_key(found) == key:
            return found
    raise CorruptError(f"manifest: {key!r:.100} is not a key")


def containers(skeleton: Skeleton) -> Iterator[tuple[int, str, Node | int]]:
    """Yields every node of the skeleton, including leaves, with its position and path."""
    stack: list[tuple[str, bool]] = [("", True)]
    for position, node in enumerate(skeleton):
        if not stack:
            raise CorruptError("manifest: the tree has more nodes than places for them")
        path, root = stack.pop()
        yield position, path, node
        if isinstance(node, Node):
            stack += [(join(path, key_text(key), root=root), False) for key in reversed(node.children())]


def positions(skeleton: Skeleton) -> dict[str, int]:
    """Returns the positions of all nodes by their paths."""
    return {path: position for position, path, _ in containers(skeleton)}


def subtree(skeleton: Skeleton, at: str, known: Mapping[str, int] | None = None) -> Skeleton | None:
    """Returns the part of the skeleton at the path `at`, or None if the skeleton does not have this path.

    known: the `positions` of the skeleton, for a caller that asks for many parts.
    """
    if known is None:
        known = {path: position for position, path, _ in containers(skeleton) if path == at}
    return skeleton[known[at] : subtree_end(skeleton, known[at])] if at in known else None


def subtree_end(skeleton: Skeleton, begin: int) -> int:
    """Returns the position after the tree that begins at a position."""
    open_places, end = 1, begin
    while open_places:
        node = skeleton[end]
        open_places += node.count() - 1 if isinstance(node, Node) else -1
        end += 1
    return end


def build(skeleton: Skeleton, values: Iterable[Any]) -> Any:
    """Returns nested dicts, lists and tuples around the values. Named tuples and objects become dicts.

    Raises `CorruptError` if the skeleton is not a tree or has another number of leaves.
    """
    rest = list(values)
    stack: list[Any] = []
    # There may be as many containers as leaves, so this loop makes few calls.
    for node in reversed(skeleton):
        if isinstance(node, int):
            if not rest:
                raise CorruptError("manifest: the tree has more leaves than are listed")
            stack.append(rest.pop())
            continue
        keys = node.keys
        if type(keys) is list:
            count = len(keys)
            # Most small containers have one child, so they have a faster way.
            if count == 1 and stack and type(keys[0]) is str and node.kind in ("dict", "object", "namedtuple"):
                stack[-1] = {keys[0]: stack[-1]}
                continue
        else:
            count = node.count()
        if not 0 <= count <= len(stack):
            raise CorruptError("manifest: a container of the tree has fewer children than it says")
        children = stack[: -count - 1 : -1]
        del stack[len(stack) - count :]
        if node.kind == "tuple":
            stack.append(tuple(children))
        elif node.kind in ("list", "positional"):
            stack.append(children)
        else:
            made = dict(zip(node.children(), children, strict=True))
            if len(made) != count:
                raise CorruptError("manifest: a container of the tree has one key twice")
            stack.append(made)
    if len(stack) != 1 or rest:
        raise CorruptError("manifest: the tree and the list of leaves do not fit together")
    return stack[0]


# for the path of a container and the names in it: its node, and the names in order
Describe = Callable[[str, list[str]], tuple[Node, list[str]]]


def assemble(
    paths: Iterable[str], describe: Describe, bare: Callable[[str], Skeleton] = lambda path: ()
) -> tuple[list[str], list[Node | int]]:
    """Returns the tree that has leaves at these paths: the paths in the order of the tree, and its skeleton.

    describe: returns the node of a container and its children in order, for its path and the names in it. Names are
        escaped, as in paths.
    bare: returns the skeleton of a child that `describe` named and that has no leaves, such as an empty container.

    Raises `UnsupportedError` if one path is a leaf and a container.
    """
    given = list(paths)
    if given == [""]:
        return given, [LEAF]
    root: dict[str, Any] = {}
    places: dict[str, Any] = {}  # containers by path; siblings follow each other, so most paths are found here
    for path in given:
        parent, inside, last = path.rpartition("/")
        place = places.get(parent) if inside else root
        if place is None:
            place = root
            for name in parent.split("/"):
                place = place.setdefault(name, {})
                if not isinstance(place, dict):
                    break
            places[parent] = place
        if not isinstance(place, dict) or last in place:
            raise UnsupportedError(
                f"{path}: a leaf and a part of the path of another leaf, so there is no tree of both; restore with a "
                "template, or rename one by a rule"
            )
        place[last] = path
    order: list[str] = []
    skeleton: list[Node | int] = []
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        at, value = stack.pop()
        if isinstance(value, str):
            order.append(value)
            skeleton.append(LEAF)
        elif value is None:
            skeleton += bare(at)
        else:
            node, names = describe(at, list(value))
            skeleton.append(node)
            inside = [value.get(name) for name in names]
            if set(map(type, inside)) == {str}:  # only leaves, as in most containers
                order += inside
                skeleton += [LEAF] * len(inside)
            else:
                stack += [
                    (f"{at}/{name}" if at else name, one) for name, one in zip(names[::-1], inside[::-1], strict=True)
                ]
    return order, skeleton


def infer_container(at: str, names: list[str], *, lists: bool = True, sort: bool = True) -> tuple[Node, list[str]]:
    """Returns the node of a container of which only the names are known, and these names in its order.

    With `lists`, it is a list if the names are the numbers from 0. Otherwise it is a dict. Its keys are in the order of
    their numbers if all are numbers, and else sorted as JAX sorts them.
    """
    numbers = bool(names) and all(map(_is_number, names))
    plain = not any("~" in name for name in names)
    if numbers and (sort or lists):
        names = sorted(names, key=int)
    elif sort:
        names = sorted(names, key=None if plain else lambda name: split(name)[0])
    if lists and numbers and int(names[-1]) == len(names) - 1:
        return Node("list", "", len(names)), names
    return Node("dict", "", list(names) if plain else [split(name)[0] for name in names]), names


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and (name[0] != "0" or name == "0")


def nest_by_path(paths: Iterable[str], values: Iterable[Any]) -> Any:
    """Returns nested dicts and lists that are inferred from paths alone; see `infer_container`.

    This is for selected leaves and for formats that record no tree.
    """
    given = dict(zip(paths, values, strict=True))
    order, skeleton = assemble(given, infer_container)
    return build(skeleton, [given[path] for path in order])


def places(paths: Iterable[str]) -> set[str]:
    """Returns the paths and those of all containers around them, except the root."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return found


def rebuild_tree(
    sources: Mapping[str, str], skeleton: Skeleton | None, *, keep_empty: bool
) -> tuple[list[str], Skeleton, tuple[str, ...]]:
    """Returns the leaves in the order of their tree, its skeleton, and the containers whose order is only inferred.

    sources: for each path, the path of the leaf that it is or is made of in the old tree, in the order of that tree.
    skeleton: the old tree.

    If all leaves of a container come from one old container, it is that container: it has the same kind, the same keys
    and, with `keep_empty`, the same empty containers. If some of its leaves are gone, the rest keep their order.
    """
    known: dict[str, Node] = {}
    leaves: list[str] = []
    begins: dict[str, int] = {}
    for position, path, node in containers(skeleton or ()):
        begins[path] = position
        if isinstance(node, Node):
            known[path] = node
        else:
            leaves.append(path)
    with_leaves = {*places(leaves), *(path.partition("/")[0] for path in leaves)}  # An empty name has the root's path.
    origins = _origins(sources)
    guessed: list[str] = []
    empty: dict[str, str] = {}  # old paths of empty containers by their new paths

    def log_lost_keys(at: str) -> None:
        before = known.get(at)
        if before is not None and before.kind == "dict" and any(not isinstance(key, str) for key in before.children()):
            _log.warning(
                "%s: some of its keys were not text; because rules add names to it, all its keys become text",
                at or "(root)",
            )

    def describe(at: str, names: list[str]) -> tuple[Node, list[str]]:
        origin = origins.get(at)
        node = None if origin is None else known.get(origin)
        if node is None or origin is None:
            found, order = infer_container(at, names)
            if found.kind != "list" and len(names) > 1:
                guessed.append(at)
            log_lost_keys(at)
            return found, order
        was, now = [key_text(key) for key in node.children()], set(names)
        places_of = {name: join(origin, name, root=not origin) for name in was}
        bare = [name for name in was if places_of[name] in known and places_of[name] not in with_leaves and keep_empty]
        empty.update({join(at, name, root=not at): places_of[name] for name in bare})
        now.update(bare)
        left = [name for name in was if name in now]
        new = [name for name in names if name not in places_of]
        if not new and left == was:
            return node, was
        if not new and node.kind in ("list", "tuple", "positional") and left == was[: len(left)]:
            return Node(node.kind, node.name, len(left)), left
        found, order = infer_container(at, [*left, *new])
        if not new and node.kind not in (
            "list",
            "tuple",
            "positional",
        ):  # The keys of such a container may not be text.
            keys = dict(zip(was, node.names(), strict=True))
            kind = "dict" if node.kind == "dict" else "object"
            return Node(kind, node.name, [keys[name] for name in left]), left
        if new and (node.kind != "dict" or node.name):  # A class has an order of its own, which new names do not have.
            guessed.append(at)
        log_lost_keys(at)
        return found, order

    order, found = assemble(sources, describe, lambda path: subtree(skeleton or (), empty[path], begins) or ())
    return order, found, tuple(guessed)


def _origins(sources: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the old path of each container, or None if its leaves come from several containers.

    A leaf says the old path of a container if it has the same number of names below it as before.
    """
    found: dict[str, str | None] = {}
    for path, source in sources.items():
        parts, was = path.split("/"), source.split("/")
        for level in range(len(parts)):
            at, below = "/".join(parts[:level]), len(parts) - level
            origin = "/".join(was[:-below]) if below <= len(was) else None
            if found.setdefault(at, origin) != origin:
                found[at] = None
    return found
