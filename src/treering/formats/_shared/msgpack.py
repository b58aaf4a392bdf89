"""Reads the structure of MessagePack files: small values themselves, and of large ones only the offset and size.

The format is https://github.com/msgpack/msgpack/blob/master/spec.md. The contents of bins (byte strings) are not read.
So a few reads of a few kilobytes give the structure of a file of any size.
"""

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import CorruptError, UnsafeError
from ...stores.file_io import opened
from ...stores.read_errors import reading
from ...stores.store import Store

if TYPE_CHECKING:
    from ...stores.store import Blob

_MAX_HEAD_BYTES = 9  # before the contents of a value
_MIN_WINDOW_BYTES = 1 << 10  # that one read gets where the values are far from each other
_MAX_WINDOW_BYTES = 256 << 10  # that one read gets where the values are close to each other
_MAX_SKIP_BYTES = 4 << 10  # a larger gap between two values is skipped, a smaller one is read
DEPTH = 1000  # nested containers
_MAX_VALUES = 1 << 20  # in one file; the largest trees of models have a few hundred thousand
_MAX_PREFIXES = 1 << 10  # of extensions, that a scanner remembers
_MAX_PREFIX_BYTES = 64
_ENTRY_BYTES = 32 + _MAX_PREFIX_BYTES  # of a map entry with a short key and a known prefix
_MAX_TEXT_BYTES = 64 << 20  # of the text and the small bins of one file, which are held in memory


class Raw(msgspec.Struct, frozen=True, gc=False):
    """A bin (byte string). Its offset counts from the start of the file, or of the payload of its extension."""

    offset: int
    size: int


class Extension(msgspec.Struct, frozen=True, eq=False):
    """The type of an extension, and the value in its payload if the payload is MessagePack, else None."""

    code: int
    value: Any


class PlacedExtension(msgspec.Struct, frozen=True):
    """An extension in a file. `at` is the offset of its payload.

    Extensions with equal beginnings share one `extension`.
    """

    extension: Extension
    at: int


VALUE, STR, BIN, LIST, MAP, EXT, NEVER = range(7)


def _head_table() -> list[tuple[int, struct.Struct | None, Any]]:
    """Returns a table by first byte: the kind, the layout of the next bytes, and a value or size.

    The last is None if the next bytes give the value or size.
    """
    table: list[tuple[int, struct.Struct | None, Any]] = [(VALUE, None, n) for n in range(0x80)]
    table += [(MAP, None, n) for n in range(16)]
    table += [(LIST, None, n) for n in range(16)]
    table += [(STR, None, n) for n in range(32)]
    table += [(VALUE, None, None), (NEVER, None, None), (VALUE, None, False), (VALUE, None, True)]
    for kind, layouts in (BIN, "B H I"), (EXT, "Bb Hb Ib"), (VALUE, "f d B H I Q b h i q"):
        table += [(kind, struct.Struct(f">{layout}"), None) for layout in layouts.split()]
    table += [(EXT, struct.Struct(">b"), 1 << n) for n in range(5)]
    for kind, layouts in (STR, "B H I"), (LIST, "H I"), (MAP, "H I"):
        table += [(kind, struct.Struct(f">{layout}"), None) for layout in layouts.split()]
    return table + [(VALUE, None, n) for n in range(-32, 0)]


_HEAD_TABLE = _head_table()
_NO_KEY = object()


class Scanner:
    """Reads the structure of values in a file.

    Maps become dicts, arrays lists, text `str`; bins become `Raw`, extensions `PlacedExtension`.

    nested: the types of extensions whose payload is MessagePack.

    Raises `CorruptError` for values that do not fit into the file, and `UnsafeError` for values that would take an
    unreasonable amount of time or memory.

    A model has thousands of arrays but few shapes. So up to the bin at its end, most extensions have the same bytes as
    an earlier one. The scanner remembers these beginnings and does not parse them again.
    """

    def __init__(self, file: "Blob", nested: tuple[int, ...] = ()):
        self.file = file
        self._nested_codes = nested
        self._window, self._base, self._window_bytes = b"", 0, _MIN_WINDOW_BYTES
        self._values_left, self._text_left = _MAX_VALUES, _MAX_TEXT_BYTES  # how many more values and bytes are allowed
        # By the bytes with which an extension begins: its contents, the offset of its payload, and its size.
        self._templates: dict[bytes, tuple[Extension, int, int]] = {}
        self._template_lengths: list[int] = []  # the different lengths of these beginnings

    def value(self, at: int, end: int) -> tuple[Any, int]:
        """Returns the value at an offset, and the offset after it, which is at most `end`."""
        return self._value(at, end, 0)

    def value_of_range(self, at: int, end: int) -> Any:
        """Returns the value that fills a range exactly. Raises `CorruptError` for a shorter value."""
        return self._filling(at, end, 0)

    def bytes(self, raw: Raw) -> bytes:
        """Returns the contents of a bin."""
        self._use_text(raw.size)
        return self.file.read(raw.offset, raw.size)

    def _filling(self, at: int, end: int, payload: int) -> Any:
        value, behind = self._value(at, end, payload)
        if behind != end:
            raise CorruptError(f"{self.file.path}: expected a value that ends at byte {end}, found one to {behind}")
        return value

    def _value(self, at: int, end: int, payload: int) -> tuple[Any, int]:
        """Returns the value at an offset, and the offset after it.

        payload: the offset of the payload of the extension that the value is in, or 0.

        A stack replaces recursion: a file may nest containers deeper than Python's recursion limit.
        """
        stack: list[list[Any]] = []  # of each open container: itself, the number of missing items, and a pending key
        while True:
            value, missing, at = self._begin_value(at, end, payload)
            if len(stack) == DEPTH and type(value) in (dict, list):
                raise UnsafeError(f"{self.file.path}: containers are nested more than {DEPTH} deep")
            if missing:
                stack.append([value, missing, _NO_KEY])
            elif stack:
                self._add_child(stack[-1], value, payload)
            else:
                return value, at
            while True:
                frame = stack[-1]
                if frame[2] is _NO_KEY and not payload and type(frame[0]) is dict:
                    at = self._read_alike(frame, at, end)
                if frame[1]:
                    break
                value = stack.pop()[0]
                if not stack:
                    return value, at
                self._add_child(stack[-1], value, payload)

    def _begin_value(self, at: int, end: int, payload: int) -> tuple[Any, int, int]:
        """Returns a value, the number of items that it still needs if it is a container, and the offset after it."""
        begin = at
        kind, value, code, at = self._head(at, end)
        if kind == VALUE:
            return value, 0, at
        if kind in (LIST, MAP):
            inner = 2 * value if kind == MAP else value
            self._check(at + inner, end)  # Each item has at least one byte.
            self._values_left -= inner
            if self._values_left < 0:
                raise UnsafeError(f"{self.file.path}: expected at most {_MAX_VALUES} values, found more")
            return {} if kind == MAP else [], value, at
        behind = at + value
        self._check(behind, end)
        if kind == STR:
            return self._str(at, value, end), 0, behind
        if kind == BIN:
            return Raw(at - payload, value), 0, behind
        if payload or code not in self._nested_codes:
            return PlacedExtension(Extension(code, None), at), 0, behind
        extension = Extension(code, self._filling(at, behind, at))
        self._add_template(extension, begin, at, behind)
        return PlacedExtension(extension, at), 0, behind

    def _add_child(self, frame: list[Any], value: Any, payload: int) -> None:
        """Puts a value into a container, or keeps it as the key of the next value."""
        container, _, key = frame
        if type(container) is list:
            container.append(value)
        elif key is _NO_KEY:
            frame[2] = self._key(value, container, payload)
            return
        else:
            container[key] = value
            frame[2] = _NO_KEY
        frame[1] -= 1

    def _add_template(self, extension: Extension, begin: int, at: int, behind: int) -> None:
        """Remembers the beginning of an extension if its payload is a list that ends with a bin."""
        last = extension.value[-1] if type(extension.value) is list and extension.value else None
        if type(last) is not Raw or len(self._templates) == _MAX_PREFIXES:
            return
        place, length = begin - self._base, at + last.offset - begin
        if 0 <= place <= len(self._window) - length and length <= _MAX_PREFIX_BYTES:
            self._templates[self._window[place : place + length]] = extension, at - begin, behind - begin
            if length not in self._template_lengths:
                self._template_lengths.append(length)

    def _read_alike(self, frame: list[Any], at: int, end: int) -> int:
        """Reads entries of a map while they are extensions with a known beginning. Returns the offset after the last.

        It stops at an entry that is malformed or has a long key. `_begin_value` then reads that entry or raises.
        """
        container, missing, _ = frame
        known, lengths, text = self._templates, self._template_lengths, 0
        window, base, last = self._window, self._base, len(self._window) - _ENTRY_BYTES
        while missing and known:
            place = at - base
            if not 0 <= place <= last:
                if at == end:
                    break
                place = self._locate(at, min(_ENTRY_BYTES, end - at), end)
                window, base, last = self._window, self._base, len(self._window) - _ENTRY_BYTES
            first = window[place]
            if first & 0xE0 != 0xA0:  # The key is not text of less than 32 bytes.
                break
            begin, found = place + 1 + (first & 31), None
            for length in lengths:
                found = known.get(window[begin : begin + length])
                if found is not None:
                    break
            if found is None:
                break
            try:
                key = window[place + 1 : begin].decode()
            except UnicodeDecodeError:
                break
            extension, inner, size = found
            begin += base
            if key in container or begin + size > end:
                break
            container[key] = PlacedExtension(extension, begin + inner)
            missing, at, text = missing - 1, begin + size, text + len(key)
        self._use_text(text)
        frame[1] = missing
        return at

    def _head(self, at: int, end: int) -> tuple[int, Any, int, int]:
        """Returns the kind of a value, the value or its size, the type of an extension, and the offset after them."""
        place = at - self._base
        if place < 0 or place + _MAX_HEAD_BYTES > len(self._window) or at + _MAX_HEAD_BYTES > end:
            place = self._locate(at, max(min(_MAX_HEAD_BYTES, end - at), 1), end)
        kind, layout, value = _HEAD_TABLE[self._window[place]]
        if layout is None:
            if kind == NEVER:
                raise CorruptError(f"{self.file.path}: expected a value at byte {at}, found 0xc1, which begins none")
            return kind, value, 0, at + 1
        behind = at + 1 + layout.size
        if behind > end:
            self._check(behind, end)
        fields = layout.unpack_from(self._window, place + 1)
        return kind, fields[0] if value is None else value, fields[-1], behind

    def _locate(self, at: int, size: int, end: int) -> int:
        """Returns the position of some bytes in the window. Reads a new window if they are not in it.

        The window grows while its successors start close to its end, and shrinks again after a jump over large bins.
        """
        place = at - self._base
        if place < 0 or place + size > len(self._window) or at + size > end:
            self._check(at + size, end)
            is_close = 0 <= place <= len(self._window) + _MAX_SKIP_BYTES
            self._window_bytes = min(4 * self._window_bytes, _MAX_WINDOW_BYTES) if is_close else _MIN_WINDOW_BYTES
            self._window = self.file.read(at, max(size, min(self._window_bytes, self.file.size - at)))
            self._base, place = at, 0
        return place

    def _str(self, at: int, size: int, end: int) -> str:
        self._use_text(size)
        place = self._locate(at, size, end)
        try:
            return self._window[place : place + size].decode()
        except UnicodeDecodeError:
            raise CorruptError(f"{self.file.path}: the text at byte {at} is not UTF-8") from None

    def _key(self, key: Any, container: dict[Any, Any], payload: int) -> Any:
        if type(key) is Raw:
            key = self.bytes(Raw(payload + key.offset, key.size))
        if type(key) not in (str, int, bool, float, bytes):
            raise CorruptError(f"{self.file.path}: expected a key, found {named(key)}")
        if key in container:
            raise CorruptError(f"{self.file.path}: a map has the key {key!r:.100} twice")
        return key

    def _use_text(self, size: int) -> None:
        self._text_left -= size
        if self._text_left < 0:
            raise UnsafeError(f"{self.file.path}: expected at most {_MAX_TEXT_BYTES} bytes of text, found more")

    def _check(self, expected: int, end: int) -> None:
        if expected > end:
            raise CorruptError(
                f"{self.file.path}: expected a value up to byte {expected} or further, but its container or the file "
                f"ends at {end}; the file is damaged or cut short"
            )


def named(value: Any) -> str:
    """Returns the kind of a value, or a small value itself, for error messages."""
    kinds = {dict: "a map", list: "an array", PlacedExtension: "an extension", Raw: "a bin", type(None): "nil"}
    return kinds.get(type(value), f"{value!r:.100}")


def pack(value: bool | int | float | str | bytes | list[int] | None) -> bytes:
    """Returns a value as MessagePack, in the shortest form."""
    return msgspec.msgpack.encode(value)


def map_head(count: int) -> bytes:
    """Returns the bytes before the keys and values of a map."""
    return _sized_head(count, ((16, 0x80), (1 << 16, 0xDE), (1 << 32, 0xDF)))


def list_head(count: int) -> bytes:
    """Returns the bytes before the items of an array."""
    return _sized_head(count, ((16, 0x90), (1 << 16, 0xDC), (1 << 32, 0xDD)))


def bin_head(size: int) -> bytes:
    """Returns the bytes before the contents of a bin."""
    return _sized_head(size, ((1 << 8, 0xC4), (1 << 16, 0xC5), (1 << 32, 0xC6)))


def ext_head(code: int, size: int) -> bytes:
    """Returns the bytes before the payload of an extension."""
    if size in (1, 2, 4, 8, 16):
        return bytes([0xD4 + size.bit_length() - 1, code])
    return _sized_head(size, ((1 << 8, 0xC7), (1 << 16, 0xC8), (1 << 32, 0xC9))) + bytes([code])


def _sized_head(size: int, forms: tuple[tuple[int, int], ...]) -> bytes:
    limit, first = next(form for form in forms if size < form[0])
    if limit == 16:
        return bytes([first + size])
    return bytes([first]) + size.to_bytes((limit.bit_length() - 1) // 8, "big")


def beginning(store: Store, path: str, size: int = 4096) -> bytes:
    """Returns the first bytes of a file, fewer if it is shorter, or b"" without a file."""
    found = store.stat(path)
    if found is None or not found.is_file:
        return b""
    with reading(path), opened(store, path) as blob:
        return blob.read_up_to(size)


def begins_with(kind: int) -> Callable[[bytes], bool]:
    """Returns a function that returns True for bytes that begin with a value of a kind. It looks only at the first."""
    return lambda data: bool(data) and _HEAD_TABLE[data[0]][0] == kind


def ending(store: Store, path: str, size: int) -> bytes:
    """Returns the last bytes of a file, fewer if it is shorter, or b"" without a file."""
    found = store.stat(path)
    if found is None or not found.is_file:
        return b""
    with reading(path), opened(store, path) as blob:
        return blob.read(max(blob.size - size, 0), min(blob.size, size))


def tokens(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the tokens up to the first bin or extension, or up to the end of the data.

    A token is a kind with its value, text, number of items, size or type.
    """
    at = 0
    try:
        while True:
            kind, layout, value = _HEAD_TABLE[data[at]]
            at += 1
            if layout is not None:
                fields = layout.unpack_from(data, at)
                value = fields[-1] if kind == EXT else fields[0]
                at += layout.size
            if kind == STR:
                begin, at = at, at + value
                value = data[begin:at].decode() if at <= len(data) else data[at]
            yield kind, value
            if kind in (BIN, EXT, NEVER):
                return
    except (IndexError, ValueError, struct.error):
        return
