"""Checks the rules for a well-formed manifest. `docs/format.md` specifies them, so that all readers agree.

A broken rule raises a `ValueError`, a `msgspec.ValidationError` or a `TreeringError` that names the rule. It is not
damage: the checksum is right, so the program that wrote the manifest broke the rule.
"""

import collections
import datetime
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ..._core import dtypes
from ..._core.boxes import Cells
from ..._core.entries import ArrayEntry, ValueEntry
from ..._core.leaf_paths import key_texts
from ..._core.skeleton import LEAF, Node
from ..._core.values import MAX_EXACT_INT, decode, is_shape
from ..._threads.preload_decoders import preload_decoders
from ...errors import CorruptError
from ..safetensors.header import MAX_HEADER_BYTES
from .manifest_fields import ArrayRow, DeltaPlace, File, Layout, Manifest, Placement, Summary
from .schema import MANIFEST

_MAX_NAME_BYTES = 255  # of a file's name
_CHECKSUM = re.compile("[0-9a-f]{16}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)
# `_repeats` does not compare larger subtrees with the nodes after them. Otherwise it would compare the nodes of a deep
# tree once for every container around them.
_MAX_REPEATED_NODES = 500
_MAX_DEPTH = 200  # levels of objects and lists in fields where users may write anything
_row_kind = operator.attrgetter("type", "dtype", "shape", "impl")
_row_location = operator.attrgetter("where")


_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXACT_INT)]


class _Sharding(msgspec.Struct, frozen=True):
    mesh: dict[str, Annotated[int, msgspec.Meta(ge=1, le=MAX_EXACT_INT)]]
    spec: list[str | list[str] | None]


class _Place(msgspec.Struct, frozen=True):
    """A place of arrays. Unknown fields are ignored; known fields must have their type."""

    mesh: dict[str, Annotated[int, msgspec.Meta(ge=1, le=MAX_EXACT_INT)]] | msgspec.UnsetType = msgspec.UNSET
    spec: list[str | list[str] | None] | msgspec.UnsetType = msgspec.UNSET
    reduced: list[str] | msgspec.UnsetType = msgspec.UNSET
    axis_types: list[Literal["auto", "explicit", "manual"]] | msgspec.UnsetType = msgspec.UNSET
    devices: list[_Natural] | msgspec.UnsetType = msgspec.UNSET
    job_devices: _Natural | msgspec.UnsetType = msgspec.UNSET
    local: bool | msgspec.UnsetType = msgspec.UNSET
    device: _Natural | msgspec.UnsetType = msgspec.UNSET
    committed: bool | msgspec.UnsetType = msgspec.UNSET
    platform: str | msgspec.UnsetType = msgspec.UNSET
    memory_kind: str | msgspec.UnsetType = msgspec.UNSET
    layout: list[_Natural] | msgspec.UnsetType = msgspec.UNSET
    cast: bool | msgspec.UnsetType = msgspec.UNSET
    unrecorded: str | msgspec.UnsetType = msgspec.UNSET


preload_decoders(_Sharding, _Place)


def check(manifest: Manifest, top: dict[str, Any]) -> None:
    """Checks everything that needs no array files. `top` has all fields of the JSON, also those unknown here."""
    optional = [("step", top), ("placement", top), ("base", top)]
    optional += [("sharding", layout) for layout in top.get("layouts", ())]
    if nulls := [name for name, fields in optional if fields.get(name, ...) is None]:
        raise ValueError(f"{nulls[0]} is null; a field without a value must be left out")
    check_summary(manifest)
    _check_depth("the metadata", manifest.metadata, integers=True)
    # What is recorded about iterators and boxes is ignored where it is not as it should be, like an unknown field.
    for name in top.keys() - ({*manifest.__struct_fields__, "xxh3"} - {"iterators", "boxes"}):
        _check_depth(f"the field {name!r:.100}", top[name], integers=False)
    shapes = [_check_layout(layout, n, manifest.holders) for n, layout in enumerate(manifest.layouts)]
    for n, listed in enumerate(manifest.holders):
        if not listed or not all(listed):
            raise ValueError(f"holders {n} are empty or have a cell without a file")
        if any(not 0 <= file < len(manifest.files) for own in listed for file in own):
            raise ValueError(f"holders {n} have a number that is not that of a file")
    paths = [row.path for row in manifest.leaves]
    if len(set(paths)) != len(paths):
        twice = collections.Counter(paths).most_common(1)[0][0]
        raise ValueError(f"two leaves have the path {twice!r:.100}")
    if leaf_paths(manifest.tree, len(paths)) != paths:
        raise ValueError("the leaves are not those of the tree, in its order")
    _check_leaves(manifest, shapes)
    if manifest.placement is not None:
        _check_placement(manifest.placement, len(paths))
    _check_depth("the static values", manifest.static, integers=True)


def _check_placement(placement: Placement, leaves: int) -> None:
    for number, place in enumerate(placement.places):
        found = msgspec.convert(place, _Place)
        if (found.mesh is msgspec.UNSET) != (found.spec is msgspec.UNSET):
            raise ValueError(f"place {number} has only one of mesh and spec")
        if isinstance(found.mesh, dict):
            size = 1
            for length in found.mesh.values():  # Capped, because the product of many axes could become huge.
                size = min(size * length, MAX_EXACT_INT + 1)
            if isinstance(found.devices, list) and (len(found.devices) != size or len(set(found.devices)) != size):
                raise ValueError(f"place {number} does not list the {size} devices of its mesh")
            if isinstance(found.axis_types, list) and len(found.axis_types) != len(found.mesh):
                raise ValueError(f"place {number} does not have one type for each axis of its mesh")
    if any(count < 1 or not -1 <= number < len(placement.places) for count, number in placement.leaves):
        raise ValueError("the placement has an empty run of leaves, or a place that is not listed")
    if sum(count for count, _ in placement.leaves) != leaves:
        raise ValueError(f"the placement is not that of the {leaves} leaves")


def _check_leaves(manifest: Manifest, layouts: Sequence[tuple[int, ...]]) -> None:
    """Checks each row of the leaves. `layouts` has the shape of the array that each layout divides.

    A manifest may have a million rows, so rows of the same kind are checked once.
    """
    arrays: list[Any] = manifest.leaves
    if any(issubclass(kind, ValueEntry) for kind in set(map(type, arrays))):
        arrays = [row for row in arrays if not isinstance(row, ValueEntry)]
        for row in manifest.leaves:
            if isinstance(row, ValueEntry):
                row.decode()
    for row in dict(zip(map(_row_kind, arrays), arrays, strict=True)).values():  # One row of each kind.
        _check_array(row)
    locations = set(map(_row_location, arrays))
    made: list[DeltaPlace] = []
    if not all(isinstance(where, int | tuple | str) for where in locations):
        # The `where` of iterator states and of deltas is an object around the location of bytes, which is checked here.
        made = [delta for row in arrays if (delta := row.of_delta())]
        if manifest.base is None and made:
            raise ValueError("an array is the difference to one of another checkpoint, and `base` names none")
        arrays = [row.stored() for row in arrays]
        locations = set(map(_row_location, arrays))
    for where in locations:
        if type(where) is int and not 0 <= where < len(manifest.files):
            row = next(row for row in arrays if row.where == where)
            raise ValueError(f"{row.path!r:.100} is in file {where}, which is not listed")
    elsewhere = [row for row in arrays if type(row.where) is not int] if set(map(type, locations)) != {int} else []
    for row in elsewhere:
        _check_location(row, layouts)
    for delta in made:
        number: Any = delta.stored.where
        if delta.is_parted and len(delta.parts) != len(Cells(manifest.layouts[number[0]].cuts)):
            raise ValueError(f"{delta.stored.path!r:.100} does not have one part for each piece")
    ties = [row for row in elsewhere if isinstance(row.where, str)]
    numbers = {row.path: n for n, row in enumerate(manifest.leaves)} if ties else {}
    for row in ties:
        first = numbers.get(row.where, len(numbers))
        target: Any = manifest.leaves[first] if first < numbers[row.path] else None
        same = type(target) is type(row) and target.at(row.path) == row.at(row.path)
        if not same or isinstance(target.where, str) or target.of_states():
            raise ValueError(
                f"{row.path!r:.100} is the same array as {row.where!r:.100}: that must be an earlier leaf with the "
                "same type, dtype, shape and impl, and with bytes of its own"
            )


def _check_location(row: ArrayRow, layouts: Sequence[tuple[int, ...]]) -> None:
    """Checks the `where` of a row that is not a file number."""
    where = row.where
    if isinstance(where, tuple):
        if not 0 <= where[0] < len(layouts) or not 0 <= where[1] <= MAX_EXACT_INT or layouts[where[0]] != row.shape:
            raise ValueError(f"{row.path!r:.100} has the layout and turn {list(where)}, which do not fit its shape")
    elif not isinstance(where, str | int) and not where.requires:
        raise ValueError(f"{row.path!r:.100} has a where whose list `requires` is empty")


def check_summary(summary: Manifest | Summary) -> None:
    """Checks the fields of a manifest that managing a run needs."""
    if summary.step is not None and not 0 <= summary.step <= MAX_EXACT_INT:
        raise ValueError(f"the step is {summary.step}")
    metrics(summary.metrics)
    if summary.base:
        _check_name(summary.base.name)
    if not _TIME.fullmatch(summary.created):
        raise ValueError(f"{summary.created!r:.100} is not a time with its offset, such as 2026-01-31T12:00:00Z")
    if not 1970 <= datetime.datetime.fromisoformat(summary.created).year < datetime.MAXYEAR:
        raise ValueError(f"{summary.created!r} is a time that not every reader can represent")
    for file in summary.files:
        _check_file(file)
    if len({file.name for file in summary.files}) != len(summary.files):
        raise ValueError("one array file is listed twice")


def metrics(found: Mapping[str, float | str]) -> dict[str, float]:
    """Returns the values of metrics. Raises `ValueError` for a value that is not a number."""
    try:
        return {name: decode("float", value) for name, value in found.items()}
    except CorruptError as error:
        raise ValueError(f"a metric: {error}") from None


def _check_name(name: str) -> None:
    if name in ("", ".", "..", MANIFEST) or set(name) & set("/\\\0") or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{name!r:.100} is not the name of a file next to the manifest or to its folder")


def _check_file(file: File) -> None:
    _check_name(file.name)
    known = 8 <= file.header <= min(file.size, MAX_HEADER_BYTES + 8) and _CHECKSUM.fullmatch(file.xxh3)
    if not file.requires and not known:
        about = f"a header of {file.header} bytes and the checksum {file.xxh3!r:.40}"
        raise ValueError(f"the file {file.name!r:.100} has {about}")


def _check_layout(layout: Layout, number: int, holders: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Checks a layout and returns the shape that it cuts."""
    cells = Cells(layout.cuts)
    if not _is_shape(cells.shape, 1):
        raise ValueError(f"layout {number} has cuts for the shape {list(cells.shape)!r:.100}, which no array can have")
    if layout.sharding is not None:
        msgspec.convert(layout.sharding, _Sharding)
    if not 0 <= layout.holders < len(holders) or len(holders[layout.holders]) != len(cells):
        raise ValueError(f"layout {number} does not have one list of files for each cell")
    return cells.shape


def _check_array(row: ArrayEntry) -> None:
    is_key = row.type == "key"
    if not _is_shape(row.shape, dtypes.itemsize(row.dtype)) or (row.type == "numpy-scalar" and row.shape):
        raise ValueError(f"{row.path!r:.100} cannot have the shape {list(row.shape)!r:.100}")
    if bool(row.impl) != is_key or (is_key and (row.dtype != "uint32" or not row.shape)):
        raise ValueError(
            f"{row.path!r:.100} is a {row.type} of {len(row.shape)} axes, with {row.dtype} and impl {row.impl!r:.40}; "
            "a key has uint32, at least one axis and an impl, and no other array has an impl"
        )


def leaf_paths(tree: list[Node | int], leaves: int) -> list[str]:
    """Returns the paths of the tree's leaves, in its order. Raises `ValueError` for nodes that do not form a tree.

    Time and memory are proportional to the nodes and the paths of the leaves, however deep the tree is. Recursion would
    fail for a deep tree. Repeated subtrees, such as layers, are recognized and not walked again.
    """
    found: list[str] = []
    rest: list[list[str]] = [[""]]  # for each container around the current node, its remaining children, in reverse
    above: list[str] = []  # the names of these containers
    begun: list[tuple[int, int]] = []  # for each of them, its index in the tree and that of its first leaf in `found`
    prefix: str | None = ""  # the path of the current container; None until it is needed
    known: dict[tuple[str, ...], list[str]] = {}  # names by kind and keys, because most layers have the same
    at = 0
    while True:
        while rest and not rest[-1]:
            rest.pop()
            prefix = None
            if above:
                name = above.pop()
                first, leaf = begun.pop()
                if count := _repeats(tree, first, at, len(rest[-1])):
                    siblings = [rest[-1].pop() for _ in range(count)]
                    at += count * (at - first)
                    if len(found) > leaf:
                        prefix = "".join(f"{one}/" for one in above[1:])
                        inside = [path[len(prefix) + len(name) :] for path in found[leaf:]]
                        found += [prefix + sibling + one for sibling in siblings for one in inside]
        if at == len(tree):
            break
        node = tree[at]
        at += 1
        if not rest:
            raise ValueError("the tree has more nodes than places for them")
        name = rest[-1].pop()
        if prefix is None and (node == LEAF or tree[at : at + 1] == [LEAF]):
            prefix = "".join(f"{name}/" for name in above[1:])
        if isinstance(node, Node):
            if (count := node.count()) > len(tree) - at:
                raise ValueError("a container of the tree has fewer children than it says")
            names = _names(node, known)
            begun.append((at - 1, len(found)))
            if count and tree[at] == LEAF and tree[at : at + count] == [LEAF] * count:  # Most containers: only leaves.
                inside = f"{prefix}{name}/" if above else ""
                found += [inside + one for one in names]
                at += count
                names = []
            rest.append(names[::-1])
            above.append(name)
            prefix = None
        elif node == LEAF:
            assert prefix is not None
            found.append(prefix + name)
        else:
            raise ValueError(f"the tree has a node {node!r:.40}")
    if any(rest):
        raise ValueError("a container of the tree has fewer children than it says")
    if len(found) != leaves:
        raise ValueError("the tree does not have the leaves that are listed")
    return found


def _repeats(tree: list[Node | int], first: int, end: int, limit: int) -> int:
    """Returns how many times in a row, up to `limit`, the nodes [first, end) are repeated from `end` on."""
    if not limit or end - first > _MAX_REPEATED_NODES or tree[end : end + 1] != tree[first : first + 1]:
        return 0
    block = tree[first:end]
    if tree[end : end + len(block)] != block:
        return 0
    if not all(isinstance(node, int) or _has_plain_keys(node) for node in block):
        return 0  # 1, 1.0 and True compare equal, but are different keys.
    # Comparing twice as many copies each time needs few comparisons of slices; after a difference, half as many.
    count = more = 1
    while more := min(more, limit - count):
        begin = end + count * len(block)
        if tree[begin : begin + more * len(block)] == block * more:
            count += more
            more *= 2
        else:
            more //= 2
    return count


def _has_plain_keys(node: Node) -> bool:
    return isinstance(node.keys, int) or set(map(type, node.keys)) == {str}


def _names(node: Node, known: dict[tuple[str, ...], list[str]]) -> list[str]:
    """Returns the path components of a container's children. `known` caches those of containers whose keys are text."""
    if isinstance(node.keys, list) and _has_plain_keys(node):
        key = (node.kind, *node.keys)
        if key not in known:
            known[key] = _checked_names(node)
        return known[key]
    return _checked_names(node)


def _checked_names(node: Node) -> list[str]:
    counted = isinstance(node.keys, int)
    if counted != (node.kind in ("list", "tuple", "positional")):
        raise ValueError(f"a {node.kind} cannot have the keys {node.keys!r:.100}")
    keys = node.children()
    if node.kind == "namedtuple" and not all(isinstance(key, str) for key in keys):
        raise ValueError("a named tuple has a field whose name is no text")
    if not counted and len(set(keys)) != len(keys):
        raise ValueError("a container of the tree has one key twice")
    return key_texts(keys) if keys else []


def _check_depth(name: str, value: Any, *, integers: bool) -> None:
    """Raises `ValueError` for JSON that is nested too deep and, with `integers`, for integers beyond 64 bits."""
    level = [value]
    for depth in range(_MAX_DEPTH + 1):
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, dict | list):
                if depth == _MAX_DEPTH:
                    raise ValueError(f"{name} is nested more than {_MAX_DEPTH} deep")
                deeper += part.values() if isinstance(part, dict) else part
            elif integers and type(part) is int and not -(1 << 63) <= part < 1 << 64:
                raise ValueError(f"{name} has an integer of {part.bit_length()} bits")
        level = deeper


def _is_shape(shape: Sequence[int], itemsize: int) -> bool:
    return is_shape(shape, itemsize) and max(shape, default=0) <= MAX_EXACT_INT
