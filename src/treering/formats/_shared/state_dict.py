"""Flax's state dicts in MessagePack, which the files of Flax, FJFormer, EasyLM and T5X share.

A state dict is nested maps with leaves in them. Arrays are extensions whose payload is ``[shape, dtype, bytes]``, or,
where they are larger than Flax puts into one extension, maps of several of these.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, LostEntry, ValueEntry, lost
from ..._core.leaf_paths import key_texts
from ..._core.skeleton import LEAF, Node, Skeleton, encode_key
from ..._core.values import encode
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from .extents import Blob, Layout, Runs, layout
from .msgpack import Ext, Extension, Raw, Scanner, named
from .reader import Stored, attempt

CHUNKED = "__msgpack_chunked_array__"
PLACEHOLDER = "//GDAPlaceholder:"  # text that Flax takes for an array which lies elsewhere
ARRAY, COMPLEX, SCALAR = 1, 2, 3  # types of extensions
_PATHS = 64 << 20  # characters of all paths of one file
_AXES = 64  # of a NumPy array, at most
_TEXT = re.compile(r"(str|bytes)(\d{1,9})")
_log = logging.getLogger("treering")


class Leaves(NamedTuple):
    """The leaves of a state dict, in order."""

    entries: list[Entry]
    arrays: dict[str, Stored]
    skeleton: Skeleton


class Elsewhere(NamedTuple):
    """An array that a state dict only mentions."""

    dtype: str
    shape: tuple[int, ...]
    stored: Stored


class StateDict:
    """Makes leaves of a scanned state dict.

    find: returns the array that a map or a text, given with its path, stands for, if any, or why it cannot be read.
    seen_as: dtypes that are taken for others of their size.
    """

    def __init__(
        self,
        file: Blob,
        *,
        find: Callable[[str, Any], Elsewhere | CorruptError | None] = lambda path, value: None,
        seen_as: Mapping[str, str] | None = None,
    ):
        self._file, self._find = file, find
        self._seen_as = {} if seen_as is None else seen_as
        self._kinds: dict[Extension, _Kind] = {}
        self._room = _PATHS
        self._scanner = Scanner(file, (ARRAY, COMPLEX, SCALAR))

    def scan(self, at: int, end: int) -> tuple[Any, int]:
        """The value at an offset and the offset behind it; see `Scanner`."""
        return self._scanner.value(at, end)

    def whole(self, at: int, end: int) -> Any:
        """The value that fills a range."""
        return self._scanner.whole(at, end)

    def leaves(self, tree: Any, at: str | None = None) -> Leaves:
        """The leaves of a scanned value, which lies at a path or (None) is the root.

        Raises `CorruptError` and `UnsupportedError` that name the leaf.
        """
        entries: list[Entry] = []
        arrays: dict[str, Stored] = {}
        skeleton: list[Node | int] = []
        pending: list[Iterator[tuple[str, Any]]] = [iter([(at or "", tree)])]
        while pending:
            for path, value in pending[-1]:
                try:
                    leaf = self._leaf(path, value)
                    if leaf is None:
                        node, names, children = _container(value)
                        prefix = "" if at is None and not skeleton else f"{path}/"
                        self._room -= sum(map(len, names)) + len(prefix) * len(names)
                        skeleton.append(node)
                        break
                except TreeringError as error:
                    raise type(error)(f"{self._file.path}: {path[:200] or '(root)'}: {error}") from None
                entry, stored = leaf
                skeleton.append(LEAF)
                entries.append(entry)
                if stored is not None:
                    arrays[path] = stored
            else:
                pending.pop()
                continue
            if self._room < 0:
                raise UnsafeError(f"{self._file.path}: paths of more than {_PATHS} characters together")
            pending.append(zip([prefix + name for name in names], children, strict=True))
        return Leaves(entries, arrays, skeleton)

    def _leaf(self, path: str, value: Any) -> tuple[Entry, Stored | None] | None:
        """The entry of a leaf and, of an array, where it lies; None for a container."""
        if type(value) is Ext:
            if value.says.code == COMPLEX:
                return ValueEntry(path, *encode(_complex(value.says.value))), None
            kind = self._kinds.get(value.says)
            if kind is None:
                kind = self._kinds[value.says] = self._kind(value.says)
            run = self._file, value.at + kind.offset, kind.layout.nbytes
            return ArrayEntry(path, kind.type, kind.dtype, kind.layout.shape), Runs((run,), kind.layout)
        if type(value) is dict and CHUNKED in value:
            dtype, shape, runs = _chunked(value)
            dtype, about = self._layout(dtype, shape, sum(size for _, size in runs))
            return ArrayEntry(path, "numpy", dtype, shape), Runs(tuple((self._file, *run) for run in runs), about)
        if type(value) in (dict, str) and (found := self._find(path, value)):
            if isinstance(found, CorruptError):
                return lost(path, f"{self._file.path}: {path[:200] or '(root)'}: {found}"), None
            return ArrayEntry(path, "numpy", found.dtype, found.shape), found.stored
        if type(value) in (dict, list):
            return None
        return ValueEntry(path, *encode(self._scanner.bytes(value) if type(value) is Raw else value)), None

    def _kind(self, says: Extension) -> "_Kind":
        if says.code not in (ARRAY, SCALAR):
            raise UnsupportedError(f"expected an extension of type 1, 2 or 3, as Flax has, found {says.code}")
        dtype, shape, raw = _array(says.value)
        dtype, about = self._layout(dtype, shape, raw.size)
        return _Kind("numpy-scalar" if says.code == SCALAR and not shape else "numpy", dtype, about, raw.offset)

    def _layout(self, dtype: str, shape: tuple[int, ...], found: int) -> tuple[str, Layout]:
        """The dtype as it is seen and the layout of an array for which so many bytes were found."""
        expected = math.prod(shape) * dtypes.itemsize(dtype)
        if expected != found:
            raise CorruptError(f"expected {expected} bytes of {dtype}{list(shape)}, found {found}")
        seen = self._seen_as.get(dtype, dtype)
        return seen, layout(shape, dtypes.to_numpy(dtype), dtypes.to_numpy(seen), self._file.path)


class _Kind(NamedTuple):
    """The array kind of extensions that begin alike; `offset` is where the array begins in the payload."""

    type: Literal["numpy", "numpy-scalar"]
    dtype: str
    layout: Layout
    offset: int


def _array(payload: Any) -> tuple[str, tuple[int, ...], Raw]:
    """dtype, shape and bytes of an array's extension."""
    if type(payload) is list and len(payload) == 3:
        shape, name, raw = payload
        if type(shape) is list and type(name) is str and type(raw) is Raw:
            return _dtype(name), _shape(shape), raw
    raise CorruptError(f"expected [shape, dtype, bytes] of an array, found {named(payload)}")


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    if len(sizes) <= _AXES and all(type(n) is int and n >= 0 for n in sizes):
        return tuple(sizes)
    raise CorruptError(f"expected the sizes of an array's axes, found {sizes!r:.100}")


def _dtype(name: str) -> str:
    """The text of a dtype that a file names as NumPy does."""
    if found := _TEXT.fullmatch(name):
        bits = int(found[2])
        return f"<U{bits // 32}" if found[1] == "str" else f"|S{bits // 8}"
    return name


def _chunked(value: Mapping[Any, Any]) -> tuple[str, tuple[int, ...], list[tuple[int, int]]]:
    """dtype and shape of an array that is cut up, and the offsets and sizes of its bytes."""
    sizes, chunks = numbered(value.get("shape")), numbered(value.get("chunks"))
    if sizes is None or not chunks or not all(type(chunk) is Ext and chunk.says.code == ARRAY for chunk in chunks):
        raise CorruptError("expected the shape and the chunks of a large array, each numbered from 0")
    parts = [_array(chunk.says.value) for chunk in chunks]
    dtype = parts[0][0]
    if any(part[0] != dtype for part in parts):
        raise CorruptError(f"expected chunks of one dtype, found {', '.join(sorted({part[0] for part in parts}))}")
    runs = [(chunk.at + raw.offset, raw.size) for chunk, (_, _, raw) in zip(chunks, parts, strict=True)]
    return dtype, _shape(sizes), runs


def _complex(payload: Any) -> complex:
    if type(payload) is list and len(payload) == 2 and all(type(part) in (int, float) for part in payload):
        return complex(*payload)
    raise CorruptError(f"expected [real, imaginary] of a complex number, found {named(payload)}")


def _container(value: Any) -> tuple[Node, Sequence[str], Sequence[Any]]:
    """A container's node, and the path components and values of its children."""
    if type(value) is list:
        return Node("list", "", len(value)), [str(n) for n in range(len(value))], value
    if value.keys() == {"name", "fields", "values"}:  # how Flax wrote named tuples until 2020
        fields, values = numbered(value["fields"]), numbered(value["values"])
        if (
            fields
            and values
            and len(fields) == len(values)
            and all(type(part) is str for part in [value["name"], *fields])
        ):
            return Node("namedtuple", value["name"], fields), _texts(fields), values
    keys = list(value) if set(map(type, value)) == {str} else [encode_key(key) for key in value]
    return Node("dict", "", keys), _texts(list(value)), list(value.values())


def _texts(keys: list[Any]) -> list[str]:
    texts = key_texts(keys)
    if len(set(texts)) != len(texts):
        raise CorruptError("two keys of a map read the same")
    return texts


def numbered(value: Any) -> list[Any] | None:
    """The items of a map whose keys number them; None for anything else."""
    if type(value) is not dict or any(str(n) not in value for n in range(len(value))):
        return None
    return [value[str(n)] for n in range(len(value))]


def own_step(leaves: Leaves, path: str) -> int | None:
    """The number of updates that a state itself has counted, in the leaf at a path; None where there is no such."""
    entry = next((entry for entry in leaves.entries if entry.path == path), None)
    if isinstance(entry, LostEntry):
        step = CorruptError(entry.why[0])
    elif isinstance(entry, ValueEntry):
        step = entry.decode()
    elif entry is not None and entry.shape == () and "int" in entry.dtype:
        step = attempt(lambda: int(leaves.arrays[path].read((), False)))
    else:
        return None
    if isinstance(step, CorruptError):
        _log.warning("opened without the step that the state has counted: %s", step)
    return step if type(step) is int and step >= 0 else None
