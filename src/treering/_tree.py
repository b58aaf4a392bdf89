"""A pytree as paths and leaves, and its skeleton: what is left when the leaves are taken away.

The skeleton is a list of nodes in pre-order, flat so that neither depth nor a hostile file can exhaust
a recursive parser. A leaf is 0 in it.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from . import _flax
from ._catalogue import EXACT, decode, encode
from ._paths import join, key_text, key_texts, split
from ._reentry import calls_back
from .errors import CorruptError, UnsupportedError

LEAF = 0
_KEY_BITS = 12_000  # of an integer: 3,000 hexadecimal digits; beyond 4,300 decimal ones Python writes none into a path


class Node(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A container. `keys` are its keys, or how many children it has where these are simply numbered."""

    kind: Literal["dict", "list", "tuple", "namedtuple", "object", "positional"]
    name: str
    keys: list[Any] | Annotated[int, msgspec.Meta(ge=0)]

    def count(self) -> int:
        """How many children there are."""
        return self.keys if isinstance(self.keys, int) else len(self.keys)

    def names(self) -> Sequence[Any]:
        """The keys as they are written; none where children are numbered."""
        return () if isinstance(self.keys, int) else self.keys

    def children(self) -> Sequence[Any]:
        """The keys as Python values."""
        return (
            range(self.keys)
            if isinstance(self.keys, int)
            else [k if type(k) is str else _decode_key(k) for k in self.keys]
        )


Skeleton = Sequence[Node | int]


class Walk(NamedTuple):
    """A flattened tree: `paths` and `leaves` side by side, in the order of `flatten`.

    `boxes` are those that do not show in the paths, by the path of what is in them, from the outside in: of which kind
    each is, and what it calls its child.
    """

    paths: Sequence[str]
    leaves: Sequence[Any]
    skeleton: Skeleton
    boxes: Mapping[str, Sequence[tuple[str, str]]]


class _Names(NamedTuple):
    """What follows from a treedef; `nones` are the places of None, which JAX takes for containers.

    Treedefs with the keys 1, 1.0 and True are equal to one another; `text`, where there are such keys, is not.
    """

    paths: Sequence[str]
    skeleton: Skeleton
    boxes: Mapping[str, Sequence[tuple[str, str]]]
    nones: frozenset[int]
    text: str | None


_known: dict[Any, _Names] = {}
_knowing = threading.Lock()


@calls_back
def walk(tree: Any) -> Walk:
    """Flattens a pytree. None is a leaf here: it keeps its place.

    Paths and skeleton follow from JAX's treedef, so a training loop that saves the same structure again and
    again gets those of the last time. Raises `UnsupportedError` for keys that no path can name and for two
    leaves with one path.
    """
    import jax

    try:
        leaves, treedef = jax.tree.flatten(tree)
        names = _known.get(treedef)
    except (RecursionError, SystemError):  # which JAX makes of the former somewhere below
        raise UnsupportedError("this tree is nested deeper than JAX can flatten") from None
    except (TypeError, ValueError):  # keys that cannot be sorted (named below), or contents that do not compare
        return _walk(tree)
    if names is None or (names.text is not None and names.text != str(treedef)):
        walked = _walk(tree)
        nones = frozenset(n for n, leaf in enumerate(walked.leaves) if leaf is None)
        if len(walked.leaves) - len(nones) != len(leaves):
            raise UnsupportedError("a container of this tree flattens differently with and without key paths")
        only_text = all(type(key) is str for node in walked.skeleton if isinstance(node, Node) for key in node.names())
        text = None if only_text else str(treedef)
        names = _Names(walked.paths, walked.skeleton, walked.boxes, nones, text)
        with _knowing:
            if len(_known) >= 4:
                del _known[next(iter(_known))]
            _known.pop(treedef, None)  # or an equal one would stay as the key
            _known[treedef] = names
    if names.nones:
        rest = iter(leaves)
        leaves = [None if n in names.nones else next(rest) for n in range(len(names.paths))]
    return Walk(names.paths, leaves, names.skeleton, names.boxes)


@calls_back
def _walk(tree: Any) -> Walk:
    import jax

    registry = getattr(jax.tree_util, "default_registry", None)  # it is not documented, and takes a quarter of the time
    flatten_one = getattr(registry, "flatten_one_level_with_keys", _flatten_one)
    kinds = _flax.box_types()
    types = tuple(kinds.values())
    boxes: dict[str, list[tuple[str, str]]] = {}
    paths: list[str] = []
    leaves: list[Any] = []
    skeleton: list[Node | int] = []
    problems: list[str] = []
    stack: list[tuple[str, Any, bool]] = [("", tree, True)]
    while stack:
        path, value, root = stack.pop()
        try:
            flat = None if value is None else flatten_one(value)
            if flat is None:
                paths.append(path)
                leaves.append(value)
                skeleton.append(LEAF)
                continue
            pairs = list(flat[0])
            if types and len(pairs) == 1 and isinstance(value, types):
                kind = next(kind for kind, one in kinds.items() if isinstance(value, one))
                boxes.setdefault(path, []).append((kind, key_text(_plain_key(pairs[0][0]))))
                stack.append((path, pairs[0][1], root))
                continue
            node, names = _describe(value, [key for key, _ in pairs])
            if not isinstance(node.keys, int) and len(set(node.children())) != len(pairs):
                raise UnsupportedError(f"two children of this {type(value).__name__} have one key: {node.keys!r:.200}")
            skeleton.append(node)
            for (_, child), name in zip(reversed(pairs), reversed(names), strict=True):
                stack.append((join(path, name, root=root), child, False))
        except UnsupportedError as error:
            problems.append(f"  {path or '(root)'}: {error}")
        except (TypeError, ValueError) as error:  # dict keys of several types cannot be sorted
            problems.append(f"  {path or '(root)'}: JAX cannot flatten this {type(value).__name__}: {error}")
    if len(set(paths)) != len(paths):
        seen: set[str] = set()
        twice = {p for p in paths if p in seen or seen.add(p)}
        problems += [f"  {path or '(root)'}: two leaves have this path; rename one of them" for path in sorted(twice)]
    if problems:
        raise UnsupportedError("these leaves cannot be named:\n" + "\n".join(problems))
    return Walk(paths, leaves, skeleton, boxes)


def _flatten_one(value: Any) -> tuple[list[tuple[Any, Any]], Any] | None:
    """The children of a container with their keys; None for a leaf."""
    import jax

    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if pairs and not pairs[0][0]:
        return None
    return [(path[0], child) for path, child in pairs], treedef


@calls_back
def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten` with None as a leaf: the order of `walk`."""
    import jax

    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)


def _describe(value: Any, keys: list[Any]) -> tuple[Node, Sequence[str]]:
    """A container's node and the path components of its children."""
    from jax.tree_util import DictKey, FlattenedIndexKey, SequenceKey

    kind = type(value)
    if kind is list or kind is tuple:
        return Node("list" if kind is list else "tuple", "", len(keys)), [str(i) for i in range(len(keys))]
    name = "" if kind is dict else kind.__name__
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple) and fields is not None and _are_fields(keys, fields):
        return Node("namedtuple", name, list(fields)), key_texts(fields)
    if keys and all(isinstance(key, FlattenedIndexKey | SequenceKey) for key in keys):
        return Node("positional", name, len(keys)), [str(i) for i in range(len(keys))]
    plain = [_plain_key(key) for key in keys]
    of_dict = kind is dict or (keys and isinstance(keys[0], DictKey))
    return Node("dict" if of_dict else "object", name, [encode_key(k) for k in plain]), [key_text(k) for k in plain]


def _are_fields(keys: Sequence[Any], fields: Sequence[str]) -> bool:
    """Whether children are the fields of a named tuple, which may be registered with children of its own."""
    from jax.tree_util import GetAttrKey

    if len(keys) != len(fields) or not all(isinstance(key, GetAttrKey) for key in keys):
        return False
    names = [key.name for key in keys]
    # The registry (jaxlib 0.10) repeats the first field's name for all.
    return names == list(fields) or names == list(fields[:1]) * len(fields)


def _plain_key(key: Any) -> Any:
    """What a key object of JAX holds. Other registrations may use bare names."""
    from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

    if isinstance(key, DictKey | FlattenedIndexKey):
        return key.key
    return key.name if isinstance(key, GetAttrKey) else key.idx if isinstance(key, SequenceKey) else key


def encode_key(key: Any) -> Any:
    """A key as `Node.keys` has it."""
    if type(key) is str:
        return key
    if type(key) is int and key.bit_length() > _KEY_BITS:
        raise UnsupportedError(f"a key is an int of {key.bit_length()} bits; expected at most {_KEY_BITS}")
    key_text(key)  # refuses other types by name
    if type(key) is tuple:
        return ["tuple", [encode_key(part) for part in key]]
    kind, value = encode(key)
    return value if kind == "bool" or type(value) is int else [kind, value]


def _decode_key(key: Any, kinds: Collection[str] = ("int", "float", "bytes", "tuple")) -> Any:
    if isinstance(key, str | bool) or (isinstance(key, int) and abs(key) <= EXACT):
        return key
    if isinstance(key, list) and len(key) == 2 and key[0] in kinds:
        if key[0] == "tuple" and isinstance(key[1], list):
            return tuple(_decode_key(part, ("int", "float")) for part in key[1])
        found = decode(*key)
        if key[0] == "float" or encode_key(found) == key:  # one way to write each, but 1 is as good as 1.0
            return found
    raise CorruptError(f"manifest: {key!r:.100} is not a key")


def containers(skeleton: Skeleton) -> Iterator[tuple[int, str, Node | int]]:
    """Every place of the skeleton, leaves included, with its position and path."""
    stack: list[tuple[str, bool]] = [("", True)]
    for position, node in enumerate(skeleton):
        if not stack:
            raise CorruptError("manifest: the tree has more nodes than places for them")
        path, root = stack.pop()
        yield position, path, node
        if isinstance(node, Node):
            stack += [(join(path, key_text(key), root=root), False) for key in reversed(node.children())]


def subtree(skeleton: Skeleton, at: str) -> Skeleton | None:
    """The part of the skeleton below the path `at`, or None where there is no such place."""
    begin = next((position for position, path, _ in containers(skeleton) if path == at), None)
    if begin is None:
        return None
    open_places, end = 1, begin
    while open_places:
        node = skeleton[end]
        open_places += node.count() - 1 if isinstance(node, Node) else -1
        end += 1
    return skeleton[begin:end]


def build(skeleton: Skeleton, values: Iterable[Any]) -> Any:
    """Nested dicts, lists and tuples around the values; named tuples and objects become dicts."""
    rest = list(values)
    stack: list[Any] = []
    for node in reversed(skeleton):
        if not isinstance(node, Node):
            if not rest:
                raise CorruptError("manifest: the tree has more leaves than are listed")
            stack.append(rest.pop())
            continue
        if not 0 <= node.count() <= len(stack):
            raise CorruptError("manifest: a container of the tree has fewer children than it says")
        children = [stack.pop() for _ in range(node.count())]
        if node.kind == "tuple":
            stack.append(tuple(children))
        elif node.kind in ("list", "positional"):
            stack.append(children)
        else:
            stack.append(dict(zip(node.children(), children, strict=True)))
            if len(stack[-1]) != len(children):
                raise CorruptError("manifest: a container of the tree has one key twice")
    if len(stack) != 1 or rest:
        raise CorruptError("manifest: the tree and the list of leaves do not fit together")
    return stack[0]


Describe = Callable[[str, list[str]], tuple[Node, list[str]]]  # a container by its path and the names in it


def assemble(
    paths: Iterable[str], describe: Describe, bare: Callable[[str], Skeleton] = lambda path: ()
) -> tuple[list[str], list[Node | int]]:
    """The tree of leaves at paths: them in its order, and its skeleton.

    `describe` makes the node of each container, and says in which order its children are; those in which there are no
    leaves are as `bare` has them. Names are as in paths, escaped. Raises `UnsupportedError` for a leaf that is a
    container.
    """
    given = list(paths)
    if given == [""]:
        return given, [LEAF]
    root: dict[str, Any] = {}
    places: dict[str, Any] = {}  # containers by path, for siblings follow one another
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
            stack += [(f"{at}/{name}" if at else name, value.get(name)) for name in reversed(names)]
    return order, skeleton


def inferred(at: str, names: list[str], *, lists: bool = True, sort: bool = True) -> tuple[Node, list[str]]:
    """A container of which nothing is known but the names in it.

    It is a list where they are the numbers from 0 (unless there are to be no lists), else a dict, whose keys are in the
    order of their numbers where all are numbers, and else sorted, as JAX does.
    """
    numbers = bool(names) and all(map(_is_number, names))
    if numbers and (sort or lists):
        names = sorted(names, key=int)
    elif sort:
        names = sorted(names, key=lambda name: split(name)[0])
    if lists and numbers and int(names[-1]) == len(names) - 1:
        return Node("list", "", len(names)), names
    return Node("dict", "", [split(name)[0] for name in names]), names


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and (name[0] != "0" or name == "0")


def nest(paths: Iterable[str], values: Iterable[Any]) -> Any:
    """Nested dicts and lists from paths alone, for selections and for formats that record no tree; see `inferred`."""
    given = dict(zip(paths, values, strict=True))
    order, skeleton = assemble(given, inferred)
    return build(skeleton, [given[path] for path in order])


def places(paths: Iterable[str]) -> set[str]:
    """The paths and those of all containers around them."""
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return found
