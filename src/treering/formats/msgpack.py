"""MessagePack by its structure: what small values are, and where the bytes of large ones lie.

The format is https://github.com/msgpack/msgpack/blob/master/spec.md. Bins and extensions are not read, only found, so
that the structure of a file of any size is known after a few reads of a few kilobytes.
"""

import struct
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..errors import CorruptError, UnsafeError
from ..stores.disk import Disk, opened

if TYPE_CHECKING:
    from .runs import File

_WINDOW = 8 << 10  # bytes that are read at a time
_DEPTH = 1000  # containers within one another
_VALUES = 1 << 22  # of one file; the largest trees of models have a few hundred thousand
_TEXT = 256 << 20  # bytes of text and other values of one file that are held in memory


class Raw(NamedTuple):
    """A bin: bytes of the file."""

    offset: int
    size: int


class Ext(NamedTuple):
    """An extension: its type and the bytes of the file that are its payload."""

    code: int
    offset: int
    size: int


_VALUE, _STR, _BIN, _LIST, _MAP, _EXT, _NEVER = range(7)


def _heads() -> "list[tuple[int, struct.Struct | None, Any]]":
    """By first byte: the kind, the layout of the number that follows it, and the number where none follows."""
    table: list[tuple[int, struct.Struct | None, Any]] = [(_VALUE, None, n) for n in range(0x80)]
    table += [(_MAP, None, n) for n in range(16)] + [(_LIST, None, n) for n in range(16)]
    table += [(_STR, None, n) for n in range(32)]
    table += [(_VALUE, None, None), (_NEVER, None, None), (_VALUE, None, False), (_VALUE, None, True)]
    for kind, layouts in (
        (_BIN, "B H I"),
        (_EXT, "Bb Hb Ib"),
        (_VALUE, "f d B H I Q b h i q"),
    ):
        table += [(kind, struct.Struct(">" + layout), None) for layout in layouts.split()]
    table += [(_EXT, struct.Struct(">b"), 1 << n) for n in range(5)]
    for kind, layouts in ((_STR, "B H I"), (_LIST, "H I"), (_MAP, "H I")):
        table += [(kind, struct.Struct(">" + layout), None) for layout in layouts.split()]
    return table + [(_VALUE, None, n) for n in range(-32, 0)]


_HEADS = _heads()
_NO_KEY = object()


class Scanner:
    """Reads the structure of values in a file.

    Maps become dicts, arrays lists, text `str`; bins and extensions become `Raw` and `Ext`. Everything that does not
    fit the file raises `CorruptError`, and what would take unreasonable time or memory `UnsafeError`.
    """

    def __init__(self, file: "File"):
        self.file = file
        self._window, self._base = b"", 0
        self._values, self._text = _VALUES, _TEXT

    def value(self, at: int, end: int) -> tuple[Any, int]:
        """The value at an offset and the offset behind it, which is at most `end`."""
        stack: list[list[Any]] = []  # containers that are not complete: itself, how many are missing, a key
        while True:
            kind, number, at = self._head(at, end)
            if kind == _VALUE:
                value = number
            elif kind == _STR:
                value, at = self._str(at, number, end)
            elif kind in (_BIN, _EXT):
                value = Raw(at, number) if kind == _BIN else Ext(number[1], at, number[0])
                at = self._skip(at, value.size, end)
            else:
                value = {} if kind == _MAP else []
                if number:
                    if number * (2 if kind == _MAP else 1) > end - at:
                        self._short(at + number, end)
                    if len(stack) == _DEPTH:
                        raise UnsafeError(f"{self.file.path}: containers are nested more than {_DEPTH} deep")
                    stack.append([value, number, _NO_KEY])
                    continue
            while stack:
                frame = stack[-1]
                container, _, key = frame
                if type(container) is list:
                    container.append(value)
                elif key is _NO_KEY:
                    frame[2] = self._key(value, container)
                    break
                else:
                    container[key] = value
                    frame[2] = _NO_KEY
                frame[1] -= 1
                if frame[1]:
                    break
                value = container
                stack.pop()
            else:
                return value, at

    def whole(self, at: int, end: int) -> Any:
        """The value that fills a range."""
        value, behind = self.value(at, end)
        if behind != end:
            raise CorruptError(f"{self.file.path}: expected one value up to byte {end}, found it ends at {behind}")
        return value

    def bytes(self, raw: Raw) -> bytes:
        """What a bin holds."""
        self._use_text(raw.size)
        return self.file.read(raw.offset, raw.size)

    def _head(self, at: int, end: int) -> tuple[int, Any, int]:
        """The kind, the value or size, and the offset behind it; of extensions size and type."""
        self._values -= 1
        if self._values < 0:
            raise UnsafeError(f"{self.file.path}: more than {_VALUES} values, which cannot be meant to be read")
        place = self._find(at, 1, end)
        kind, layout, number = _HEADS[self._window[place]]
        if layout is not None:
            place = self._find(at + 1, layout.size, end)
            fields = layout.unpack_from(self._window, place)
            at += layout.size
            number = fields if kind == _EXT else fields[0]
            if len(fields) == 1 and kind == _EXT:
                number = (_HEADS[self._window[place - 1]][2], fields[0])
        if kind == _NEVER:
            raise CorruptError(f"{self.file.path}: byte {at} is 0xc1, which no MessagePack value begins with")
        return kind, number, at + 1

    def _find(self, at: int, size: int, end: int) -> int:
        """Brings bytes into the window and returns where they are in it."""
        place = at - self._base
        if place < 0 or place + size > len(self._window) or at + size > end:
            if at + size > end:
                self._short(at + size, end)
            # One byte before, for who looks back at the first byte of a head.
            self._base = max(at - 1, 0)
            self._window = self.file.read(self._base, max(size + 1, min(_WINDOW, self.file.size - self._base)))
            place = at - self._base
        return place

    def _str(self, at: int, size: int, end: int) -> tuple[str, int]:
        self._use_text(size)
        if size > _WINDOW:
            self._skip(at, size, end)
            data = self.file.read(at, size)
        else:
            place = self._find(at, size, end)
            data = self._window[place : place + size]
        try:
            return data.decode(), at + size
        except UnicodeDecodeError:
            raise CorruptError(f"{self.file.path}: the text at byte {at} is not UTF-8") from None

    def _key(self, key: Any, container: dict[Any, Any]) -> Any:
        if isinstance(key, Raw):
            key = self.bytes(key)
        if type(key) not in (str, int, bool, float, bytes):
            raise CorruptError(f"{self.file.path}: expected a key, found {_called(key)}")
        if key in container:
            raise CorruptError(f"{self.file.path}: a map has the key {key!r:.100} twice")
        return key

    def _skip(self, at: int, size: int, end: int) -> int:
        if size > end - at:
            self._short(at + size, end)
        return at + size

    def _use_text(self, size: int) -> None:
        self._text -= size
        if self._text < 0:
            raise UnsafeError(f"{self.file.path}: more than {_TEXT} bytes of text, which cannot be meant to be read")

    def _short(self, expected: int, end: int) -> NoReturn:
        what = "the file" if end == self.file.size else "what it is in"
        raise CorruptError(
            f"{self.file.path}: expected a value up to byte {expected} at least, but {what} ends at {end}; "
            "it is damaged or cut short"
        )


def _called(value: Any) -> str:
    names = {dict: "a map", list: "an array", Ext: "an extension", Raw: "a bin", type(None): "nil"}
    return names.get(type(value), f"a {type(value).__name__}")
