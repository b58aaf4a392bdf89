"""Reads Flax's state dicts in MessagePack, which the files of Flax, FJFormer, EasyLM and T5X contain.

A state dict consists of nested maps of leaves. An array is an extension whose payload is ``[shape, dtype, bytes]``. An
array that is too large for one extension of Flax is a map of several extensions.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..._core import dtypes
from ..._core.entries import ArrayEntry, Entry, LostEntry, ValueEntry, lost_entry
from ..._core.leaf_paths import key_texts
from ..._core.skeleton import LEAF, Node, Skeleton, encode_key
from ..._core.values import encode
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from .extents import Blob, ExtentLayout, Runs, layout
from .msgpack import Extension, PlacedExtension, Raw, Scanner, named
from .reader import Stored, attempt

CHUNKED = "__msgpack_chunked_array__"
PLACEHOLDER = "//GDAPlaceholder:"  # Flax treats text with this beginning as an array in another file
ARRAY, COMPLEX, SCALAR = 1, 2, 3  # types of extensions
_MAX_PATH_CHARACTERS = 64 << 20  # of all paths of one file together
_MAX_AXES = 64  # of a NumPy array
_TEXT = re.compile(r"(str|bytes)(\d{1,9})")
_log = logging.getLogger("treering")


class StateLeaves(NamedTuple):
    """The leaves of a state dict, in order."""

    entries: list[Entry]
    arrays: dict[str, Stored]
    skeleton: Skeleton


class Elsewhere(NamedTuple):
    """An array in another file, to which a state dict refers."""

    dtype: str
    shape: tuple[int, ...]
    stored: Stored


class StateDict:
    """Finds the leaves of a scanned state dict.

    find: called with the path and the value of every map and text. Returns the array in another file that the value
        stands for, the error if that array cannot be read, or None for other values.
    seen_as: dtypes that are read as another dtype of the same size.
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
        self._kinds: dict[Extension, _StateKind] = {}
        self._room = _MAX_PATH_CHARACTERS
        self._scanner = Scanner(file, (ARRAY, COMPLEX, SCALAR))

    def scan(self, at: int, end: int) -> tuple[Any, int]:
        """Returns the value at an offset, and the offset after it; see `Scanner`."""
        return self._scanner.value(at, end)

    def value_of_range(self, at: int, end: int) -> Any:
        """Returns the value that fills a range exactly; see `Scanner`."""
        return self._scanner.value_of_range(at, end)

    def leaves(self, tree: Any, at: str | None = None) -> StateLeaves:
        """Returns the leaves of a scanned value.

        at: the path of the value; None for the root.

        Raises `CorruptError` and `UnsupportedError` that name the leaf.
        """
        entries: list[Entry] = []
        arrays: dict[str, Stored] = {}
        skeleton: list[Node | int] = []
        # A stack of iterators replaces recursion, because a tree may be deeper than Python's recursion limit.
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
                raise UnsafeError(
                    f"{self._file.path}: expected paths of at most {_MAX_PATH_CHARACTERS} characters in all, found more"
                )
            pending.append(zip([prefix + name for name in names], children, strict=True))
        return StateLeaves(entries, arrays, skeleton)

    def _leaf(self, path: str, value: Any) -> tuple[Entry, Stored | None] | None:
        """Returns the entry of a leaf, with its array if it is one; None for a container."""
        if type(value) is PlacedExtension:
            if value.extension.code == COMPLEX:
                return ValueEntry(path, *encode(_complex(value.extension.value))), None
            kind = self._kinds.get(value.extension)
            if kind is None:
                kind = self._kinds[value.extension] = self._kind(value.extension)
            run = self._file, value.at + kind.offset, kind.layout.nbytes
            return ArrayEntry(path, kind.type, kind.dtype, kind.layout.shape), Runs((run,), kind.layout)
        if type(value) is dict and CHUNKED in value:
            dtype, shape, runs = _chunked(value)
            dtype, about = self._layout(dtype, shape, sum(size for _, size in runs))
            return ArrayEntry(path, "numpy", dtype, shape), Runs(tuple((self._file, *run) for run in runs), about)
        if type(value) in (dict, str) and (found := self._find(path, value)):
            if isinstance(found, CorruptError):
                return lost_entry(path, f"{self._file.path}: {path[:200] or '(root)'}: {found}"), None
            return ArrayEntry(path, "numpy", found.dtype, found.shape), found.stored
        if type(value) in (dict, list):
            return None
        return ValueEntry(path, *encode(self._scanner.bytes(value) if type(value) is Raw else value)), None

    def _kind(self, extension: Extension) -> "_StateKind":
        if extension.code not in (ARRAY, SCALAR):
            raise UnsupportedError(f"expected an extension of type 1, 2 or 3, as Flax has, found {extension.code}")
        dtype, shape, raw = _array(extension.value)
        dtype, about = self._layout(dtype, shape, raw.size)
        return _StateKind(
            "numpy-scalar" if extension.code == SCALAR and not shape else "numpy", dtype, about, raw.offset
        )

    def _layout(self, dtype: str, shape: tuple[int, ...], found: int) -> tuple[str, ExtentLayout]:
        """Returns the dtype under which an array is read, and its layout. Raises unless it has `found` bytes."""
        expected = math.prod(shape) * dtypes.itemsize(dtype)
        if expected != found:
            raise CorruptError(f"expected {expected} bytes of {dtype}{list(shape)}, found {found}")
        seen = self._seen_as.get(dtype, dtype)
        return seen, layout(shape, dtypes.to_numpy(dtype), dtypes.to_numpy(seen), self._file.path)


class _StateKind(NamedTuple):
    """The array of all extensions with one beginning. The array starts at `offset` in the payload."""

    type: Literal["numpy", "numpy-scalar"]
    dtype: str
    layout: ExtentLayout
    offset: int


def _array(payload: Any) -> tuple[str, tuple[int, ...], Raw]:
    """Returns the dtype, the shape and the bytes of the extension of an array."""
    if type(payload) is list and len(payload) == 3:
        shape, name, raw = payload
        if type(shape) is list and type(name) is str and type(raw) is Raw:
            return _dtype(name), _shape(shape), raw
    raise CorruptError(f"expected [shape, dtype, bytes] of an array, found {named(payload)}")


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    if len(sizes) <= _MAX_AXES and all(type(n) is int and n >= 0 for n in sizes):
        return tuple(sizes)
    raise CorruptError(f"expected the sizes of an array's axes, found {sizes!r:.100}")


def _dtype(name: str) -> str:
    """Returns the text of a dtype from the name that NumPy has for it, which may give the bits of a text."""
    if found := _TEXT.fullmatch(name):
        bits = int(found[2])
        return f"<U{bits // 32}" if found[1] == "str" else f"|S{bits // 8}"
    return name


def _chunked(value: Mapping[Any, Any]) -> tuple[str, tuple[int, ...], list[tuple[int, int]]]:
    """Returns the dtype and shape of an array in several extensions, and the offsets and sizes of their bytes."""
    sizes, chunks = numbered(value.get("shape")), numbered(value.get("chunks"))
    if (
        sizes is None
        or not chunks
        or not all(type(chunk) is PlacedExtension and chunk.extension.code == ARRAY for chunk in chunks)
    ):
        raise CorruptError("expected the shape and the chunks of a large array, each numbered from 0")
    parts = [_array(chunk.extension.value) for chunk in chunks]
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
    """Returns the node of a container, and the path components and the values of its children."""
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
    """Returns the items of a map whose keys are the numbers from 0, or None for other values."""
    if type(value) is not dict or any(str(n) not in value for n in range(len(value))):
        return None
    return [value[str(n)] for n in range(len(value))]


def own_step(leaves: StateLeaves, path: str) -> int | None:
    """Returns the number of updates that a training state has counted in the leaf at a path.

    Returns None without such a leaf. Logs a leaf that cannot be read, and returns None for it.
    """
    entry = next((entry for entry in leaves.entries if entry.path == path), None)
    if isinstance(entry, LostEntry):
        step = CorruptError(entry.why[0])
    elif isinstance(entry, ValueEntry):
        step = entry.decode()
    elif entry is not None and entry.shape == () and "int" in entry.dtype:
        try:
            step = attempt(lambda: int(leaves.arrays[path].read((), False)))
        except UnsupportedError as error:
            step = error
    else:
        return None
    if isinstance(step, CorruptError | UnsupportedError):
        _log.warning("the checkpoint opens without a step, because the leaf with its number cannot be read: %s", step)
    return step if type(step) is int and step >= 0 else None
