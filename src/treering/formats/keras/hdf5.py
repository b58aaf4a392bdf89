"""Parses HDF5 files as h5py writes them by default: groups, arrays and attributes.

h5py itself is not used: HDF5 is a C library, which some damaged files crash. No link is followed. "HDF5 File Format
Specification Version 3.0" describes what is parsed here.
"""

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._core import dtypes
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError
from ...stores.store import Blob
from .._shared.extents import check_shape
from .._shared.unknown_files import HDF5_MAGIC
from .types import Kind, TypeRefused, parse_type

UNDEFINED = (1 << 64) - 1  # the address of nothing
OTHER_VERSION = "of a version of HDF5 that h5py does not write by default"
ADVICE = (
    "load it in the program that wrote it (weights of Keras: model.load_weights; other arrays: h5py, those of bfloat16 "
    "by dataset[...].view('bfloat16') after `import ml_dtypes`), and save its arrays with treering.save"
)
_PAGE_BYTES = 1 << 16  # that are read of a file at a time
_PAGES = 256  # that are kept
_MAX_PART_BYTES = 64 << 20  # of a header or of a heap of names
_MAX_READS = 4  # of each byte of the metadata, on average; parts that overlap could be read without end
_MAX_PATH_CHARACTERS = 64 << 20  # of all names together
_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _EXTERNAL, _LAYOUT, _FILTERS = 1, 2, 3, 6, 7, 8, 11
_ATTRIBUTE, _CONTINUATION, _SYMBOLS, _ATTRIBUTE_INFO = 12, 16, 17, 21
_SHARED = 2  # a flag of a message: its contents are elsewhere
_KEPT = {_DATASPACE, _LINK_INFO, _DATATYPE, _LINK, _EXTERNAL, _LAYOUT, _FILTERS, _ATTRIBUTE, _SYMBOLS, _ATTRIBUTE_INFO}
_HARD, _SOFT, _EXTERNAL_LINK = 0, 1, 64  # types of links
_LINKS = {_SOFT: "a soft link", _EXTERNAL_LINK: "a link to another file"}


class Section:
    """The bytes of an HDF5 file, which may be a range of another one. Addresses count from its beginning."""

    def __init__(self, file: Blob, name: str, begin: int, nbytes: int):
        self.file, self.name, self.begin, self.nbytes = file, name, begin, nbytes
        self._page = functools.lru_cache(_PAGES)(self._read_page)
        self._bytes_left = _MAX_READS * nbytes

    def _read_page(self, number: int) -> bytes:
        at = number * _PAGE_BYTES
        return self.file.read(self.begin + at, min(_PAGE_BYTES, self.nbytes - at))

    def check(self, at: int, nbytes: int) -> None:
        """Raises `CorruptError` unless a range is in the file."""
        if at + nbytes > self.nbytes:
            raise CorruptError(f"{self.name}: expected {nbytes} bytes from {at} on, found the end at {self.nbytes}")

    def read(self, at: int, nbytes: int) -> bytes:
        """Reads a part of the metadata."""
        self.check(at, nbytes)
        if nbytes > _MAX_PART_BYTES:
            raise UnsafeError(f"{self.name}: expected at most {_MAX_PART_BYTES} bytes of metadata, found {nbytes}")
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise UnsafeError(f"{self.name}: expected separate parts, found parts that contain each other")
        first, last = at // _PAGE_BYTES, (at + nbytes - 1) // _PAGE_BYTES
        data = b"".join(self._page(number) for number in range(first, last + 1))
        return data[at - first * _PAGE_BYTES :][:nbytes]

    def block(self, at: int, magic: bytes, nbytes: int) -> bytes:
        """Reads a part that begins with four known bytes."""
        data = self.read(at, nbytes)
        if not data.startswith(magic):
            raise CorruptError(f"{self.name}: expected {magic!r} at {at}, found {data[:4]!r}")
        return data

    def numbers(self, form: str, at: int) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.read(at, struct.calcsize("<" + form)))


class HdfArray(NamedTuple):
    """An array in a file. `chunks` is the shape of its chunks; None if it is contiguous.

    address: of the bytes, or of the index of the chunks; `UNDEFINED` if no bytes are stored.
    nbytes: of the bytes; None for chunks.
    filters: the numbers of the filters that packed each chunk, in order.
    """

    shape: tuple[int, ...]
    kind: Kind
    address: int
    nbytes: int | None
    chunks: tuple[int, ...] | None
    filters: tuple[int, ...]


class HdfContents(NamedTuple):
    """What a file has: arrays and attributes by path, and what cannot be read here, with the reason."""

    arrays: dict[str, HdfArray]
    attributes: dict[str, dict[str, Any]]
    left_out: list[str]


class _Message(NamedTuple):
    kind: int
    flags: int
    at: int
    data: bytes


class _RefusedObject(Exception):
    """Says why an array or a group cannot be read here."""


def parse(file: Section) -> HdfContents:
    """Returns what a file has. Raises `CorruptError`, `UnsafeError`, and `UnsupportedError` with the names of all
    objects that cannot be read here."""
    try:
        return _Parser(file).contents(_root(file))
    except TreeringError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptError(f"{file.name}: expected HDF5, found a part that is damaged: {error}") from None


def _root(file: Section) -> int:
    """Returns the address of the root group, which the superblock has."""
    if file.read(0, min(8, file.nbytes)) != HDF5_MAGIC:
        raise CorruptError(f"{file.name}: expected HDF5, found other bytes at the beginning")
    version, *_, offsets, lengths, _ = file.numbers("BBBBBBBB", 8)
    if version > 1 or (offsets, lengths) != (8, 8):
        raise UnsupportedError(f"{file.name}: {OTHER_VERSION} (superblock {version}); {ADVICE}")
    base, _, end, _ = file.numbers("QQQQ", 24 + 4 * version)
    if base:
        raise UnsupportedError(f"{file.name}: expected HDF5 from the first byte on, found a user block; {ADVICE}")
    if end > file.nbytes:
        raise CorruptError(f"{file.name}: expected {end} bytes, found {file.nbytes}; it is cut short")
    return file.numbers("Q", 24 + 4 * version + 40)[0]


class _Parser:
    def __init__(self, file: Section):
        self._file, self._room = file, _MAX_PATH_CHARACTERS
        self._arrays: dict[str, HdfArray] = {}
        self._first_paths: dict[int, str] = {}  # of arrays, by address; an array may have several names
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}  # the places and sizes of texts, by address and number
        self._attributes: dict[str, dict[str, Any]] = {}
        self._left_out: list[str] = []
        self._groups: dict[int, str] = {}  # their paths, by address
        self._seen: set[int] = set()  # addresses of nodes of trees

    def contents(self, root: int) -> HdfContents:
        problems: list[str] = []
        pending = [("", root)]
        while pending:
            path, address = pending.pop()
            if (first := self._first_paths.get(address)) is not None:
                self._arrays[path] = self._arrays[first]
                if first in self._attributes:
                    self._attributes[path] = self._attributes[first]
                continue
            if (first := self._groups.get(address)) is not None:
                problems.append(f"  {path}: a second path of the group {first or '(root)'}")
                continue
            try:
                messages = list(self._messages(address))
                links = self._links(messages)
                if links is None:
                    self._arrays[path] = self._array(path, messages)
                    self._first_paths[address] = path
                    continue
                self._groups[address] = path
                self._add_attributes(path, messages)
            except (_RefusedObject, TypeRefused) as error:
                problems.append(f"  {path or '(root)'}: {error}")
                continue
            inner: list[tuple[str, int]] = []
            for name, kind, target in links:
                place = f"{path}/{name}" if path else name
                self._room -= len(place)
                if self._room < 0:
                    raise UnsafeError(f"{self._file.name}: expected fewer objects or shorter paths")
                if kind == _HARD:
                    inner.append((place, target))
                else:
                    problems.append(f"  {place}: {_LINKS.get(kind, 'a link of a kind that a program has defined')}")
            pending += reversed(inner)
        if problems:
            raise UnsupportedError(
                "\n".join([f"{self._file.name}: Treering cannot read these objects:", *problems, f"  {ADVICE}"])
            )
        return HdfContents(self._arrays, self._attributes, self._left_out)

    def _messages(self, address: int) -> Iterator[_Message]:
        """Yields the messages in the header of an object."""
        file = self._file
        version, _, count, _, nbytes = file.numbers("BBHII", address)
        if version != 1:
            if file.read(address, 4) == b"OHDR":
                raise _RefusedObject(f"an object {OTHER_VERSION} (object header 2)")
            raise CorruptError(f"{file.name}: expected the header of an object at {address}, found version {version}")
        blocks, begun = [(address + 16, nbytes)], set[int]()
        for at, size in blocks:
            if at in begun:
                raise CorruptError(f"{file.name}: the header at {address} contains itself")
            begun.add(at)
            data, place = file.read(at, size), 0
            while place + 8 <= size and count:
                kind, length, flags = struct.unpack_from("<HHB", data, place)
                place += 8
                if place + length > size:
                    raise CorruptError(f"{file.name}: a message at {at + place} is longer than its header")
                count -= 1
                body = data[place : place + length]
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", body[:16]))
                elif kind in _KEPT:
                    yield _Message(kind, flags, at + place, body)
                place += length
        if count:
            raise CorruptError(f"{file.name}: expected {count} more messages in the header at {address}, found none")

    def _links(self, messages: Sequence[_Message]) -> list[tuple[str, int, int]] | None:
        """Returns the links of a group, as name, type and address; None for an object that is no group."""
        kinds = {message.kind for message in messages}
        if not kinds & {_SYMBOLS, _LINK_INFO, _LINK}:
            return None
        found: list[tuple[str, int, int]] = []
        for message in messages:
            if message.kind == _SYMBOLS:
                tree, heap = struct.unpack("<QQ", message.data[:16])
                found += self._symbols(tree, heap)
            elif message.kind == _LINK:
                found.append(_link(message.data))
            elif message.kind == _LINK_INFO:
                skipped = 8 if message.data[1] & 1 else 0
                if struct.unpack_from("<Q", message.data, 2 + skipped)[0] != UNDEFINED:
                    raise _RefusedObject("a group of HDF5's newer form, which many names have if one is not ASCII")
        return found

    def _symbols(self, tree: int, heap: int) -> Iterator[tuple[str, int, int]]:
        file = self._file
        file.block(heap, b"HEAP", 32)
        nbytes, _, begin = file.numbers("QQQ", heap + 8)
        names, last = file.read(begin, nbytes), b""  # Names ascend, which shows most damage to them.
        for _, at in leaves(file, tree, 0, 8, self._seen):
            if at in self._seen:
                raise CorruptError(f"{file.name}: the names at {at} are in two groups")
            self._seen.add(at)
            _, version, _, count = struct.unpack("<4sBBH", file.block(at, b"SNOD", 8))
            for n in range(count):
                offset, address, kind = file.numbers("QQI", at + 8 + 40 * n)
                end = names.find(b"\0", offset)
                name = names[offset : max(end, 0)]
                if (version, kind > 2) != (1, False) or name <= last:
                    raise CorruptError(
                        f"{file.name}: expected a name after {last!r:.100} in its group, found {name!r:.100}"
                    )
                last = name
                yield _name(name), _SOFT if kind == 2 else _HARD, address

    def _array(self, path: str, messages: Sequence[_Message]) -> HdfArray:
        found = {message.kind: message for message in messages}
        if _EXTERNAL in found:
            raise _RefusedObject("its bytes are in another file")
        if any(found[kind].flags & _SHARED for kind in (_DATASPACE, _DATATYPE, _LAYOUT, _FILTERS) if kind in found):
            raise _RefusedObject("its type is elsewhere in the file")
        if _LAYOUT not in found:
            raise _RefusedObject("a named type, without an array")
        if not {_DATASPACE, _DATATYPE} <= found.keys():
            raise CorruptError(f"{self._file.name}: expected the shape and the dtype of {path}, found none")
        shape = _shape(found[_DATASPACE].data)
        if shape is None:
            raise _RefusedObject("an empty array without a shape")
        check_shape(shape, f"{self._file.name}: {path}")
        attributes = self._add_attributes(path, messages)
        kind = parse_type(found[_DATATYPE].data, attributes.get("dtype"))
        if kind.named:  # The attribute only says what the dtype says.
            del attributes["dtype"]
            if not attributes:
                del self._attributes[path]
        address, nbytes, chunks = _layout(found[_LAYOUT], len(shape))
        filters = _filters(found[_FILTERS].data) if _FILTERS in found else ()
        return HdfArray(shape, kind, address, nbytes, chunks, filters)

    def _add_attributes(self, path: str, messages: Sequence[_Message]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for message in messages:
            if message.kind == _ATTRIBUTE_INFO:
                skipped = 2 if message.data[1] & 1 else 0
                if struct.unpack_from("<Q", message.data, 2 + skipped)[0] != UNDEFINED:
                    self._left_out.append(f"the attributes of {path or 'the root'}")
            elif message.kind == _ATTRIBUTE:
                name, value = self._attribute(message)
                if value is None:
                    self._left_out.append(f"the attribute {name:.100} of {path or 'the root'}")
                else:
                    found[name] = value
        if found:
            self._attributes[path] = found
        return found

    def _attribute(self, message: _Message) -> tuple[str, Any]:
        """Returns the name and value of an attribute; None for a value of a type that is not read here."""
        data = message.data
        version, flags, *sizes = struct.unpack_from("<BBHHH", data)
        at, step = (8, 8) if version == 1 else (9 if version == 3 else 8, 1)
        parts: list[bytes] = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += -(-size // step) * step
        name = _name(parts[0].rstrip(b"\0"))
        if message.flags & _SHARED or (version > 1 and flags) or not 1 <= version <= 3:
            return name, None
        shape = _shape(parts[2])
        if shape is None or len(shape) > 1:
            return name, None
        try:
            value = self._value(parts[1], shape[0] if shape else 1, data[at:])
        except (TypeRefused, UnicodeDecodeError):
            return name, None
        return name, value if shape else value[0]

    def _value(self, kind: bytes, count: int, data: bytes) -> list[Any]:
        if kind[0] & 15 == 9 and kind[1] & 15 == 1:  # text of any length, in a heap
            return [self._text(*struct.unpack_from("<IQI", data, 16 * n)) for n in range(count)]
        found = parse_type(kind, None)
        dtype = found.stored
        is_own = found.certain and found.dtype == dtypes.to_text(dtype)  # and no bfloat16, whose bits are stored
        if not is_own or count * dtype.itemsize > len(data):
            raise TypeRefused
        values = np.frombuffer(data, dtype, count).tolist()
        return [value.decode() if isinstance(value, bytes) else value for value in values]

    def _text(self, nbytes: int, heap: int, number: int) -> str:
        if not nbytes:
            return ""
        if heap not in self._heaps:
            self._heaps[heap] = dict(self._texts(heap))
        if number not in self._heaps[heap]:
            raise CorruptError(f"{self._file.name}: expected the text {number} in the heap at {heap}, found none")
        at, size = self._heaps[heap][number]
        return self._file.read(at, min(nbytes, size)).decode()

    def _texts(self, heap: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the numbers, places and sizes of the texts in a heap."""
        self._file.block(heap, b"GCOL", 16)
        at, end = heap + 16, heap + self._file.numbers("Q", heap + 8)[0]
        while at + 16 <= end:
            number, _, size = self._file.numbers("HHxxxxQ", at)
            if not number:
                break
            yield number, (at + 16, size)
            at += 16 + -(-size // 8) * 8


def leaves(file: Section, address: int, kind: int, key_bytes: int, seen: set[int]) -> Iterator[tuple[bytes, int]]:
    """Yields the keys and addresses in the leaves of a version 1 B-tree. No node may be in `seen`, where all go."""
    pending: list[tuple[int, int | None]] = [(address, None)]
    while pending:
        at, expected = pending.pop()
        if at in seen:
            raise CorruptError(f"{file.name}: the tree at {address} contains itself")
        seen.add(at)
        _, found, level, used = struct.unpack("<4sBBH", file.block(at, b"TREE", 8))
        if found != kind or (expected is not None and level != expected):
            raise CorruptError(f"{file.name}: expected a tree of kind {kind} at {at}, found {found}, level {level}")
        step = key_bytes + 8
        data = file.read(at + 24, used * step + key_bytes)
        inner = [(data[n * step :][:key_bytes], data[n * step + key_bytes :][:8]) for n in range(used)]
        children = [(key, int.from_bytes(child, "little")) for key, child in inner]
        if level:
            pending += [(child, level - 1) for _, child in reversed(children)]
        else:
            yield from children


def _name(data: bytes) -> str:
    try:
        if data:
            return data.decode()
        raise ValueError("expected a name, found none")
    except UnicodeDecodeError:
        raise ValueError(f"expected a name in UTF-8, found {data!r:.100}") from None


def _link(data: bytes) -> tuple[str, int, int]:
    """Returns the name, type and address of a Link message."""
    _, flags = data[:2]
    at, kind = 2, _HARD
    if flags & 8:
        kind, at = data[at], at + 1
    at += 8 * bool(flags & 4) + bool(flags & 16)
    width = 1 << (flags & 3)
    size, at = int.from_bytes(data[at : at + width], "little"), at + width
    name, at = _name(data[at : at + size]), at + size
    return name, kind, struct.unpack_from("<Q", data, at)[0] if kind == _HARD else 0


def _shape(data: bytes) -> tuple[int, ...] | None:
    """Returns the shape of a Dataspace message; None if it says that there is none."""
    version, rank, _, kind = data[:4]
    if version not in (1, 2):
        raise ValueError(f"expected a shape of version 1 or 2, found {version}")
    if version == 2 and kind == 2:
        return None
    return struct.unpack_from(f"<{rank}Q", data, 8 if version == 1 else 4)


def _layout(message: _Message, rank: int) -> tuple[int, int | None, tuple[int, ...] | None]:
    """Returns the address and size of an array, or the address of the index of its chunks and the shape of each."""
    data = message.data
    version, kind = data[:2]
    if version in (3, 4) and kind == 0:
        return message.at + 4, struct.unpack_from("<H", data, 2)[0], None
    if version in (3, 4) and kind == 1:
        return *struct.unpack_from("<QQ", data, 2), None
    if version == 3 and kind == 2 and data[2] == rank + 1:
        return struct.unpack_from("<Q", data, 3)[0], None, struct.unpack_from(f"<{rank}I", data, 11)
    if kind == 3:
        raise _RefusedObject("a virtual dataset, whose bytes are in other files")
    raise _RefusedObject(f"an array {OTHER_VERSION}")


def _filters(data: bytes) -> tuple[int, ...]:
    """Returns the numbers of the filters of a Filter Pipeline message of version 1 or 2."""
    version, count = data[:2]
    at, found = (8, list[int]()) if version == 1 else (2, [])
    for _ in range(count):
        number = struct.unpack_from("<H", data, at)[0]
        short = version != 1 and number < 256
        name = 0 if short else struct.unpack_from("<H", data, at + 2)[0]
        values = struct.unpack_from("<H", data, at + (4 if short else 6))[0]
        at += (6 if short else 8) + (-(-name // 8) * 8 if version == 1 else name) + 4 * values
        at += 4 * (values & 1) if version == 1 else 0
        found.append(number)
    return tuple(found)
