"""Finds the leaves of what PyTorch has pickled."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..._core import dtypes
from ..._core.boxes import Box, full_box
from ..._core.entries import ArrayEntry, Entry, ValueEntry, lost_entry
from ..._core.leaf_paths import key_text
from ..._core.skeleton import LEAF, Node, Skeleton, encode_key
from ..._core.values import encode
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.read_errors import ReplacedError, raise_if_momentary
from .._shared.extents import check_shape
from .._shared.npy import DTYPE
from .._shared.pickles import Global, Made, Persistent
from .._shared.reader import ForeignReader, Stored
from .archive import Archive, Placed, TorchTensor, sizes

_SAVE_STATE = (
    "if you trust it, save its tensors where that program is, and open the new file: "
    "torch.save(torch.load(path, weights_only=False).state_dict(), 'model.pt')"
)
_RENAME_KEY = "rename it where PyTorch is, save the dict again by torch.save, and open the new file"
_MAX_NODE_CHARACTERS = 64 << 20  # of all paths together; each node also counts as `_NODE_CHARACTERS`
_NODE_CHARACTERS = 64
_COMPLEX = (("builtins", "complex"), ("__builtin__", "complex"))
_SCALARS = (str, int, float, bool, complex, bytes, type(None))


class Inside(NamedTuple):
    """A value of another archive than the one around it."""

    archive: Archive
    value: Any


class Branch(dict[Any, Any]):
    """A container of which only the keys of its children are known. It is a list if they are the numbers from 0."""


class _Container(NamedTuple):
    node: Node
    names: Sequence[str]
    children: Sequence[Any]


class _LeftOut(NamedTuple):
    what: str


class TorchLeaves:
    """The leaves of a tree, in order. `left_out` describes objects that only their own program can make."""

    def __init__(self, tree: Any, archive: Archive | None, where: str):
        self.entries: list[Entry] = []
        self.arrays: dict[str, Stored] = {}
        self.checks: dict[str, Callable[[Box], None]] = {}
        self.has_checksums = True
        self.left_out: list[str] = []
        self.skeleton: Skeleton = []
        self._where, self._room = where, _MAX_NODE_CHARACTERS
        self._large: set[int] = set()  # the ids of plain values that take memory
        nodes: list[Node | int] = []
        root = self._converted("", tree, archive)
        if isinstance(root[0], _LeftOut):
            raise UnsupportedError(
                f"{where}: expected tensors in dicts and lists, found an object of {root[0].what}, which only its own "
                f"program can make; {_SAVE_STATE}"
            )
        # A stack of iterators replaces recursion, because a tree may be deeper than Python's recursion limit.
        pending: list[Iterator[tuple[str, tuple[Any, Archive | None]]]] = [iter([("", root)])]
        while pending:
            for path, (value, inside) in pending[-1]:
                if isinstance(value, _Container):
                    node, children = self._children(f"{path}/" if nodes else "", value, inside)
                    nodes.append(node)
                    pending.append(iter(children))
                    break
                nodes.append(LEAF)
                self._add(path, value)
            else:
                pending.pop()
        self.skeleton = nodes

    def _add(self, path: str, value: Any) -> None:
        if isinstance(value, CorruptError):
            self.entries.append(lost_entry(path, str(value), tree=True))
        elif isinstance(value, TorchTensor | Placed):
            self.entries.append(ArrayEntry(path, value.type, value.dtype, value.shape))
            self.arrays[path], self.checks[path] = value.stored, value.check
            self.has_checksums &= not isinstance(value, TorchTensor) or value.storage.has_checksum
            self.left_out += [f"{path or '(root)'}.{name} (an attribute)" for name in value.attributes]
        else:
            self.entries.append(ValueEntry(path, *value))

    def _children(
        self, prefix: str, container: _Container, archive: Archive | None
    ) -> tuple[Node, list[tuple[str, tuple[Any, Archive | None]]]]:
        """Returns the node of a container and its children, without those that are left out."""
        found: list[tuple[str, tuple[Any, Archive | None]]] = []
        kept: list[int] = []
        for n, (name, child) in enumerate(zip(container.names, container.children, strict=True)):
            place = prefix + name
            self._room -= len(place) + _NODE_CHARACTERS
            if self._room < 0:
                raise UnsafeError(f"{self._where}: expected fewer leaves or shorter paths; objects contain each other")
            value = self._converted(place, child, archive)
            if isinstance(value[0], _LeftOut):
                self.left_out.append(f"{place} ({value[0].what})")
                continue
            kept.append(n)
            found.append((place, value))
        node = container.node
        if len(kept) < len(container.names):  # A list that lacks an item becomes a dict with its numbers.
            keys = range(node.keys) if isinstance(node.keys, int) else node.keys
            node = Node("dict", "", [keys[n] for n in kept])
        return node, found

    def _converted(self, path: str, value: Any, archive: Archive | None) -> tuple[Any, Archive | None]:
        if type(value) is Inside:
            archive, value = value
        if type(value) in _SCALARS and (nbytes := sys.getsizeof(value)) > _NODE_CHARACTERS:
            if id(value) in self._large:  # A few bytes of a pickle can repeat a text of megabytes.
                self._room -= nbytes
            self._large.add(id(value))
        try:
            return _convert(value, archive), archive
        except TreeringError as error:
            text = str(error).removeprefix(f"{self._where}: ")
            raise type(error)(f"{self._where}: {path[:200] or '(root)'}: {text}") from None


def _convert(value: Any, archive: Archive | None) -> Any:
    """Returns what a value of a tree is: a container, a tensor, the type and JSON of a plain value, or left out."""
    if type(value) is Made:
        if archive is not None and (tensor := archive.tensor(value)) is not None:
            return tensor
        if (array := array_of(value)) is not None:
            return array
        value = _plain(value)
    if type(value) in _SCALARS:
        try:
            return encode(value)
        except UnsupportedError as error:
            return _LeftOut(str(error))
    if type(value) in (dict, Branch):
        return _dict(value)
    if type(value) in (list, tuple):
        return _numbered("tuple" if type(value) is tuple else "list", value)
    if isinstance(value, TorchTensor | Placed | CorruptError):
        return value
    if isinstance(value, Persistent):
        return _LeftOut("a storage without a tensor")
    what = value.what if type(value) is Made else value
    return _LeftOut(str(what)[:200] if type(what) is Global else type(what).__name__)


def _plain(made: Made) -> Any:
    """Returns the plain value that an object of a few well-known names stands for, or the object itself."""
    what, arguments = made.what, made.arguments
    if what == ("torch", "Size"):
        return sizes(made)
    if what in _COMPLEX and len(arguments) == 2 and {*map(type, arguments)} == {float}:
        return complex(*arguments)
    if what == ("collections", "Counter") and len(arguments) == 1 and type(arguments[0]) is dict:
        return arguments[0]
    if what == ("collections", "defaultdict"):
        return made.pairs or {}
    return made


def _dict(value: dict[Any, Any]) -> _Container:
    keys = list(value)
    if type(value) is Branch and {*map(type, keys)} == {int} and sorted(keys) == list(range(len(keys))):
        return _numbered("list", [value[n] for n in range(len(keys))])
    names: list[str] = []
    for key in keys:
        try:
            names.append(key_text(key))
        except UnsupportedError:
            shown = key.what if type(key) is Made else key if type(key) is Global else repr(key)
            why = f"a dict with the key {shown!s:.100}, which no path can have"
            raise UnsupportedError(f"{why}; {_RENAME_KEY}") from None
    places = dict(zip(names, keys, strict=True))
    for name, key in zip(names, keys, strict=True) if len(places) < len(names) else ():
        if (other := places[name]) is not key:
            why = f"a dict with the keys {key!r:.100} and {other!r:.100}, which read the same"
            raise UnsupportedError(f"{why}; {_RENAME_KEY}")
    return _Container(Node("dict", "", [encode_key(key) for key in keys]), names, list(value.values()))


def _numbered(kind: Any, items: Sequence[Any]) -> _Container:
    return _Container(Node(kind, "", len(items)), [str(n) for n in range(len(items))], items)


class TorchReader(ForeignReader):
    """Reads the tensors of a tree. With `verify`, the first read of a tensor compares the checksums of its bytes."""

    expands = True  # several tensors may share bytes, and one may repeat them

    def __init__(self, format: str, path: str, leaves: TorchLeaves, *, nbytes: int, step: int | None = None):
        self._checks, self.has_checksums = leaves.checks, leaves.has_checksums
        super().__init__(
            format,
            path,
            leaves.entries,
            leaves.arrays,
            skeleton=leaves.skeleton,
            step=step,
            nbytes=nbytes,
            left_out=leaves.left_out,
        )

    def read(self, wanted: Any, *, verify: bool = True, mmap: bool | None = None) -> Any:
        for entry, box in wanted if verify else ():
            if check := self._checks.get(entry.path):  # a lost array has none
                check(box)
        return super().read(wanted, verify=verify, mmap=mmap)

    def _damage_of(self, entry: ArrayEntry, begin: int, end: int) -> Iterator[str]:
        if begin <= 0 < end:
            try:
                self._checks[entry.path](full_box(entry.shape))
            except (PermissionError, ReplacedError):  # These are facts about the user or another program, not damage.
                raise
            except (CorruptError, OSError) as error:
                raise_if_momentary(error)
                yield str(error)


def array_of(made: Made) -> Placed | None:
    """Returns the array or the scalar that an object stands for.

    Returns None for any other object, and for arrays of other dtypes than those of numbers, dates and text. Raises
    `CorruptError` if the bytes do not have the size of the array.
    """
    what = made.what.module.replace("numpy.core.", "numpy._core."), made.what.name  # NumPy 2 has moved them.
    given, state = made.arguments, made.state
    if what == ("numpy._core.multiarray", "scalar") and len(given) == 2:
        return _placed("numpy-scalar", given[0], given[1], ())
    if what == ("numpy._core.multiarray", "_reconstruct") and given and type(state) is tuple and len(state) == 5:
        _, shape, dtype, columns, data = state
        is_plain = type(given[0]) is Global and given[0] == ("numpy", "ndarray")  # and no subclass
        return _placed("numpy", dtype, data, shape, columns=bool(columns)) if is_plain else None
    if what == ("numpy._core.numeric", "_frombuffer") and len(given) == 4:  # of protocol 5
        data = given[0]
        data = data.arguments[0] if type(data) is Made and data.what == ("builtins", "bytearray") else data
        return _placed("numpy", given[1], data, given[2], columns=given[3] == "F")
    return None


class _InMemory:
    """An array whose bytes are those of the pickle; see `Stored`."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def can_map(self) -> bool:
        return False

    def read(self, box: Box, mmap: bool) -> np.ndarray:
        part = self._array[(*(slice(*bounds) for bounds in box), ...)]
        return part.astype(part.dtype.newbyteorder("="), order="C")


def _placed(
    kind: Literal["numpy", "numpy-scalar"], dtype: Any, data: Any, shape: Any, *, columns: bool = False
) -> Placed | None:
    stored = _dtype(dtype)
    if stored is None or type(data) is not bytes:
        return None
    shape = sizes(shape)
    check_shape(shape, "an array of NumPy")
    nbytes = math.prod(shape) * stored.itemsize
    if nbytes != len(data):
        raise CorruptError(f"expected {nbytes} bytes of an array of NumPy, found {len(data)}")
    array = np.ndarray(shape, stored, data, order="F" if columns else "C")
    return Placed(dtypes.to_text(stored), shape, _InMemory(array), lambda box: None, kind)


def _dtype(made: Any) -> np.dtype | None:
    """Returns the dtype that an object stands for; None for one that has objects or fields, or is no dtype."""
    if type(made) is not Made or made.what != ("numpy", "dtype") or not made.arguments:
        return None
    kind, state = made.arguments[0], made.state
    if type(state) is not tuple or len(state) < 8 or state[2:5] != (None, None, None):
        return None
    try:
        if type(kind) is Global and kind.module == "ml_dtypes":
            return dtypes.to_numpy(kind.name)
        if type(kind) is not str or type(state[1]) is not str:
            return None
        text = state[1] + kind + (_unit(state[8]) if kind in ("M8", "m8") and len(state) > 8 else "")
        found = np.dtype(text) if DTYPE.fullmatch(text) else None
        return found if found and dtypes.to_text(found) else None
    except (UnsupportedError, TypeError, ValueError):
        return None


def _unit(metadata: Any) -> str:
    """Returns the unit of dates, such as ``[ns]``; "" if there is none, and "?" for what NumPy does not write."""
    unit = metadata[1] if type(metadata) is tuple and len(metadata) == 2 else None
    if type(unit) is not tuple or len(unit) != 4 or type(unit[0]) is not bytes or type(unit[1]) is not int:
        return "?"
    return "" if unit[0] == b"generic" else f"[{unit[1]}{unit[0].decode('latin1')}]"
