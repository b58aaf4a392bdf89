"""MessagePack by its structure: the small values themselves, and the places of large ones.

The format is https://github.com/msgpack/msgpack/blob/master/spec.md. The contents of bins are not read, only found, so
that the structure of a file of any size is known after a few reads of a few kilobytes.
"""

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import CorruptError, UnsafeError
from ...stores.read_errors import reading
from ...stores.store import Store
from ...stores.whole_files import opened

if TYPE_CHECKING:
    from ...stores.store import Blob

_HEAD = 9  # bytes, at most, before the contents of a value
_WINDOW = 1 << 10  # bytes that are read at a time where they lie apart
_MOST_AHEAD = 256 << 10  # bytes that are read at a time where they lie close together
_NEAR = 4 << 10  # bytes that take no longer to read than to leap over
DEPTH = 1000  # containers within one another
_MOST_VALUES = 1 << 20  # in one file; the largest trees of models have a few hundred thousand
_MOST_KNOWN = 1 << 10  # ways in which extensions begin
_LONGEST_KNOWN = 64  # bytes of such a beginning
_AHEAD = 32 + _LONGEST_KNOWN  # bytes of a short key and such a beginning
_TEXT = 64 << 20  # bytes of text and small bins of one file that are held in memory


class Raw(msgspec.Struct, frozen=True, gc=False):
    """A bin: bytes of the file, or of the payload of the extension that it is in."""

    offset: int
    size: int


class Extension(msgspec.Struct, frozen=True, eq=False):
    """The contents of an extension: its type, and the value in its payload where that is MessagePack again."""

    code: int
    value: Any


class Ext(msgspec.Struct, frozen=True):
    """An extension in its place: `at` is the offset of its payload. Extensions that begin alike share `says`."""

    says: Extension
    at: int


VALUE, STR, BIN, LIST, MAP, EXT, NEVER = range(7)


def _heads() -> list[tuple[int, struct.Struct | None, Any]]:
    """By first byte: the kind, the layout of the next bytes, and the value or size where these do not give it."""
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


_HEADS = _heads()
_NO_KEY = object()


class Scanner:
    """Reads the structure of values in a file.

    Maps become dicts, arrays lists, text `str`; bins become `Raw`, extensions `Ext`. Values that do not fit the file
    raise `CorruptError`, and those that would take unreasonable time or memory `UnsafeError`. `nested`: the types of
    extensions whose payload is MessagePack again.

    A model has thousands of arrays and few shapes, so most extensions begin with the same bytes as an earlier one, up
    to the bin with which they end. These are not taken apart again.
    """

    def __init__(self, file: "Blob", nested: tuple[int, ...] = ()):
        self.file = file
        self._nested = nested
        self._window, self._base, self._ahead = b"", 0, _WINDOW
        self._values, self._text = _MOST_VALUES, _TEXT
        self._known: dict[bytes, tuple[Extension, int, int]] = {}  # by how it begins: where payload and value end
        self._lengths: list[int] = []  # of these beginnings

    def value(self, at: int, end: int) -> tuple[Any, int]:
        """The value at an offset and the offset behind it, which is at most `end`."""
        return self._value(at, end, 0)

    def whole(self, at: int, end: int) -> Any:
        """The value that fills a range."""
        return self._whole(at, end, 0)

    def bytes(self, raw: Raw) -> bytes:
        """The contents of a bin."""
        self._use_text(raw.size)
        return self.file.read(raw.offset, raw.size)

    def _whole(self, at: int, end: int, payload: int) -> Any:
        value, behind = self._value(at, end, payload)
        if behind != end:
            raise CorruptError(f"{self.file.path}: expected a value that ends at byte {end}, found one up to {behind}")
        return value

    def _value(self, at: int, end: int, payload: int) -> tuple[Any, int]:
        """The value at an offset and the offset behind it; `payload`: the offset of its extension's payload, or 0."""
        stack: list[list[Any]] = []  # containers that are not complete: itself, how many are missing, a key
        while True:
            value, missing, at = self._one(at, end, payload)
            if len(stack) == DEPTH and type(value) in (dict, list):
                raise UnsafeError(f"{self.file.path}: containers are nested more than {DEPTH} deep")
            if missing:
                stack.append([value, missing, _NO_KEY])
            elif stack:
                self._put(stack[-1], value, payload)
            else:
                return value, at
            while True:
                frame = stack[-1]
                if frame[2] is _NO_KEY and not payload and type(frame[0]) is dict:
                    at = self._alike(frame, at, end)
                if frame[1]:
                    break
                value = stack.pop()[0]
                if not stack:
                    return value, at
                self._put(stack[-1], value, payload)

    def _one(self, at: int, end: int, payload: int) -> tuple[Any, int, int]:
        """A value, how many it still has to get where it is a container, and the offset behind it."""
        begin = at
        kind, value, code, at = self._head(at, end)
        if kind == VALUE:
            return value, 0, at
        if kind in (LIST, MAP):
            inner = 2 * value if kind == MAP else value
            self._check(at + inner, end)  # a byte each at least
            self._values -= inner
            if self._values < 0:
                raise UnsafeError(f"{self.file.path}: more than {_MOST_VALUES} values, which cannot be meant")
            return {} if kind == MAP else [], value, at
        behind = at + value
        self._check(behind, end)
        if kind == STR:
            return self._str(at, value, end), 0, behind
        if kind == BIN:
            return Raw(at - payload, value), 0, behind
        if payload or code not in self._nested:
            return Ext(Extension(code, None), at), 0, behind
        says = Extension(code, self._whole(at, behind, at))
        self._remember(says, begin, at, behind)
        return Ext(says, at), 0, behind

    def _put(self, frame: list[Any], value: Any, payload: int) -> None:
        """Puts a value into a container, or keeps it as the key of the next."""
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

    def _remember(self, says: Extension, begin: int, at: int, behind: int) -> None:
        """Keeps how an extension begins, when it is a list that ends with a bin."""
        last = says.value[-1] if type(says.value) is list and says.value else None
        if type(last) is not Raw or len(self._known) == _MOST_KNOWN:
            return
        place, length = begin - self._base, at + last.offset - begin
        if 0 <= place <= len(self._window) - length and length <= _LONGEST_KNOWN:
            self._known[self._window[place : place + length]] = says, at - begin, behind - begin
            if length not in self._lengths:
                self._lengths.append(length)

    def _alike(self, frame: list[Any], at: int, end: int) -> int:
        """Takes entries of a map as long as they are extensions that begin like earlier ones; where the rest begins.

        Entries that are malformed, or longer than usual, are left there.
        """
        container, missing, _ = frame
        known, lengths, text = self._known, self._lengths, 0
        window, base, last = self._window, self._base, len(self._window) - _AHEAD
        while missing and known:
            place = at - base
            if not 0 <= place <= last:
                if at == end:
                    break
                place = self._find(at, min(_AHEAD, end - at), end)
                window, base, last = self._window, self._base, len(self._window) - _AHEAD
            first = window[place]
            if first & 0xE0 != 0xA0:  # no text of less than 32 bytes
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
            says, inner, size = found
            begin += base
            if key in container or begin + size > end:
                break
            container[key] = Ext(says, begin + inner)
            missing, at, text = missing - 1, begin + size, text + len(key)
        self._use_text(text)
        frame[1] = missing
        return at

    def _head(self, at: int, end: int) -> tuple[int, Any, int, int]:
        """The kind, the value or size, the type of an extension, and the offset behind."""
        place = at - self._base
        if place < 0 or place + _HEAD > len(self._window) or at + _HEAD > end:
            place = self._find(at, max(min(_HEAD, end - at), 1), end)
        kind, layout, value = _HEADS[self._window[place]]
        if layout is None:
            if kind == NEVER:
                raise CorruptError(f"{self.file.path}: byte {at} is 0xc1, with which no value begins")
            return kind, value, 0, at + 1
        behind = at + 1 + layout.size
        if behind > end:
            self._check(behind, end)
        fields = layout.unpack_from(self._window, place + 1)
        return kind, fields[0] if value is None else value, fields[-1], behind

    def _find(self, at: int, size: int, end: int) -> int:
        """The position in the window of some bytes; moves the window when they are not in it."""
        place = at - self._base
        if place < 0 or place + size > len(self._window) or at + size > end:
            self._check(at + size, end)
            near = 0 <= place <= len(self._window) + _NEAR
            self._ahead = min(4 * self._ahead, _MOST_AHEAD) if near else _WINDOW
            self._window = self.file.read(at, max(size, min(self._ahead, self.file.size - at)))
            self._base, place = at, 0
        return place

    def _str(self, at: int, size: int, end: int) -> str:
        self._use_text(size)
        place = self._find(at, size, end)
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
        self._text -= size
        if self._text < 0:
            raise UnsafeError(f"{self.file.path}: more than {_TEXT} bytes of text, which cannot be meant to be read")

    def _check(self, expected: int, end: int) -> None:
        if expected > end:
            raise CorruptError(
                f"{self.file.path}: expected a value up to byte {expected} or further, but what it lies in ends at "
                f"{end}; the file is damaged or cut short"
            )


def named(value: Any) -> str:
    """The kind of a value, or a small value itself, for messages."""
    kinds = {dict: "a map", list: "an array", Ext: "an extension", Raw: "a bin", type(None): "nil"}
    return kinds.get(type(value), f"{value!r:.100}")


def pack(value: bool | int | float | str | bytes | list[int] | None) -> bytes:
    """A value as MessagePack, in the shortest form."""
    return msgspec.msgpack.encode(value)


def map_head(count: int) -> bytes:
    """The bytes before the keys and values of a map."""
    return _sized(count, ((16, 0x80), (1 << 16, 0xDE), (1 << 32, 0xDF)))


def list_head(count: int) -> bytes:
    """The bytes before the items of an array."""
    return _sized(count, ((16, 0x90), (1 << 16, 0xDC), (1 << 32, 0xDD)))


def bin_head(size: int) -> bytes:
    """The bytes before the contents of a bin."""
    return _sized(size, ((1 << 8, 0xC4), (1 << 16, 0xC5), (1 << 32, 0xC6)))


def ext_head(code: int, size: int) -> bytes:
    """The bytes before the payload of an extension."""
    if size in (1, 2, 4, 8, 16):
        return bytes([0xD4 + size.bit_length() - 1, code])
    return _sized(size, ((1 << 8, 0xC7), (1 << 16, 0xC8), (1 << 32, 0xC9))) + bytes([code])


def _sized(size: int, forms: tuple[tuple[int, int], ...]) -> bytes:
    limit, first = next(form for form in forms if size < form[0])
    if limit == 16:
        return bytes([first + size])
    return bytes([first]) + size.to_bytes((limit.bit_length() - 1) // 8, "big")


def beginning(store: Store, path: str, size: int = 4096) -> bytes:
    """The first bytes of a file, fewer where it is shorter; b"" where there is no file."""
    found = store.stat(path)
    if found is None or not found.is_file:
        return b""
    with reading(path), opened(store, path) as blob:
        return blob.read_up_to(size)


def begins_with(kind: int) -> Callable[[bytes], bool]:
    """Tells whether bytes begin with a value of a kind, of which there may be no more than the first byte."""
    return lambda data: bool(data) and _HEADS[data[0]][0] == kind


def ending(store: Store, path: str, size: int) -> bytes:
    """The last bytes of a file, fewer where it is shorter; b"" where there is no file."""
    found = store.stat(path)
    if found is None or not found.is_file:
        return b""
    with reading(path), opened(store, path) as blob:
        return blob.read(max(blob.size - size, 0), min(blob.size, size))


def tokens(data: bytes) -> Iterator[tuple[int, Any]]:
    """The tokens up to the first bin or extension: kinds, and their values, text, counts, sizes or types."""
    at = 0
    try:
        while True:
            kind, layout, value = _HEADS[data[at]]
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
