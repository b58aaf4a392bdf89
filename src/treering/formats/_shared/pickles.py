"""Reads pickles without running them.

A pickle is a program that imports names and calls them. This interpreter imports nothing and calls nothing: a name
becomes a `Global`, and a call becomes a `Made` that records the name and the arguments. The caller decides what the few
names that it knows stand for.
"""

import logging
import struct
from typing import Any, NamedTuple

from ..._core.leaf_paths import join_names
from ...errors import CorruptError, TreeringError, UnsafeError, UnsupportedError

_FREE_OBJECTS = 1 << 20  # that any pickle may make; beyond that one for each `_BYTES_PER_OBJECT` bytes
_BYTES_PER_OBJECT = 2  # the fewest that a pickler writes, for an empty list in a list
_MAX_KEY_BITS = 64
_SCALARS = {str, int, float, bool, bytes, type(None)}
_MODULE_VERSIONS = "_metadata"  # an attribute of every `state_dict` of a module: the versions of its layers' code
_ONE = 1  # the bytes of an opcode
_HIGHEST_PROTOCOL = 5
_log = logging.getLogger("treering")


class Global(NamedTuple):
    """A name that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent:
    """A reference to something outside the pickle."""

    def __init__(self, key: Any):
        self.key = key


class Made:
    """An object that a pickle would make: what it calls, the arguments, and what it then sets, appends and updates."""

    __slots__ = ("arguments", "items", "pairs", "state", "what")

    def __init__(self, what: Global, arguments: tuple[Any, ...]):
        self.what, self.arguments = what, arguments
        self.state: Any = None
        # None instead of empty containers, because a checkpoint may have millions of objects.
        self.items: list[Any] | None = None
        self.pairs: dict[Any, Any] | None = None


class _Invalid(Exception):
    """The bytes are no pickle."""


def read_pickle(data: bytes, name: str) -> Any:
    """Returns what a pickle describes: plain values, lists, dicts, tuples, and the classes above.

    An `OrderedDict` is a dict without its attributes, which are logged. Objects may contain themselves.

    Raises `CorruptError`, `UnsafeError` and `UnsupportedError`, whose messages begin with `name`.
    """
    machine = _Machine(data)
    try:
        found = machine.run()
    except (_Invalid, IndexError, KeyError, UnicodeError) as error:
        raise CorruptError(f"{name}: expected a pickle: {error or type(error).__name__}; it is damaged") from None
    except TreeringError as error:
        raise type(error)(f"{name}: {error}") from None
    if machine.lost:
        _log.warning("%s: attributes of ordered dicts are left out: %s", name, join_names(tuple(machine.lost)))
    return found


class _Machine:
    """Interprets one pickle."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._encoded: dict[int, tuple[str, bytes]] = {}  # texts by id, because a pickle may encode one many times
        self.lost: dict[str, None] = {}  # the names of the attributes of ordered dicts, in order
        self._room = _FREE_OBJECTS + len(data) // _BYTES_PER_OBJECT

    def run(self) -> Any:
        while (opcode := self._take(_ONE)) != b".":
            if opcode == b"\x94":
                self._memo[len(self._memo)] = self._stack[-1]
            elif opcode in _GETS:
                self._stack.append(self._memo[self._number(_GETS[opcode])])
            elif opcode in _FIXED:
                code, nbytes = _FIXED[opcode]
                self._stack.append(struct.unpack(code, self._take(nbytes))[0])
            elif opcode in _SIZED:
                width, decode = _SIZED[opcode]
                self._stack.append(decode(self._take(self._number(width))))
            elif opcode in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode])
            elif opcode in _PUTS:
                self._memo[self._number(_PUTS[opcode])] = self._stack[-1]
            else:
                self._act(opcode)
        if len(self._stack) != 1 or self._marked:
            raise _Invalid("one object, found another number")
        return self._stack[0]

    def _act(self, opcode: bytes) -> None:
        """Runs an opcode that makes or changes an object."""
        stack = self._stack
        if opcode in _MAKERS:
            self._room -= 1
            if self._room < 0:
                raise UnsafeError(f"expected at most one object for {_BYTES_PER_OBJECT} bytes of a pickle, found more")
        if opcode == b"(":
            self._marked.append(stack)
            self._stack = []
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            if len(stack) < count:
                raise _Invalid("a tuple of more than there is")
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif opcode in _MARKED:
            own = self._popped()
            _MARKED[opcode](self._stack, own)
        elif opcode == b"a":
            _append(stack, [stack.pop()])
        elif opcode == b"s":
            _update(stack, [stack.pop(-2), stack.pop()])
        elif opcode == b"c":
            stack.append(Global(self._line(), self._line()))
        elif opcode == b"\x93":
            name, module = stack.pop(), stack.pop()
            if type(name) is not str or type(module) is not str:
                raise _Invalid("a name that is no text")
            stack.append(Global(module, name))
        elif opcode in (b"R", b"\x81", b"\x92"):
            if opcode == b"\x92":
                stack.pop()  # keyword arguments, which no object has that a caller knows
            arguments, what = stack.pop(), stack.pop()
            stack.append(self._called(what, arguments))
        elif opcode == b"b":
            state, target = stack.pop(), stack[-1]
            if type(target) is Made:
                target.state = state
            elif type(target) is dict:
                self.lost |= dict.fromkeys(name for name in attribute_names(state) if name != _MODULE_VERSIONS)
            else:
                raise _Invalid(f"attributes of a {type(target).__name__}")
        elif opcode == b"Q":
            stack.append(Persistent(stack.pop()))
        elif opcode == b"0":
            stack.pop()
        elif opcode == b"2":
            stack.append(stack[-1])
        elif opcode == b"\x80":
            if (protocol := self._take(1)[0]) > _HIGHEST_PROTOCOL:
                raise UnsupportedError(f"expected a pickle of at most protocol {_HIGHEST_PROTOCOL}, found {protocol}")
        elif opcode == b"\x95":
            self._take(8)  # the size of a frame, which only helps to read ahead
        else:
            raise UnsupportedError(f"the opcode {opcode!r} of a pickle, which is not read here")

    def _called(self, what: Any, arguments: Any) -> Any:
        """Returns what a call stands for: a `Made`, or a plain value for the calls that picklers write for those."""
        if type(arguments) is tuple and type(what) is Made:  # protocol 2 gets a nested class by a call of `getattr`
            return Made(_inner_name(what), arguments)
        if type(what) is not Global or type(arguments) is not tuple:
            raise _Invalid("a call of something that is no name")
        if not arguments and what in _EMPTY_VALUES:
            return _EMPTY_VALUES[what]()
        if what == ("_codecs", "encode") and [*map(type, arguments)] == [str, str] and arguments[1] == "latin1":
            text = arguments[0]
            if id(text) not in self._encoded:
                self._encoded[id(text)] = text, text.encode("latin1")
            return self._encoded[id(text)][1]
        return Made(what, arguments)

    def _take(self, nbytes: int) -> bytes:
        found = self._data[self._at : self._at + nbytes]
        if len(found) < nbytes:
            raise _Invalid(f"{nbytes} bytes at {self._at}, found {len(found)}")
        self._at += nbytes
        return found

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise _Invalid("a line without an end")
        return self._take(end + 1 - self._at)[:-1].decode()

    def _popped(self) -> list[Any]:
        """Returns the objects above the last mark, and removes both."""
        own, self._stack = self._stack, self._marked.pop()
        return own


def attribute_names(state: Any) -> list[str]:
    """Returns the names of the attributes in the state of an object: a dict, or a tuple of one and one of slots."""
    dicts = state if type(state) is tuple else (state,)
    return [name for one in dicts if type(one) is dict for name in one if type(name) is str]


def _inner_name(made: Made) -> Global:
    """Returns the name of what a call of `getattr` gets, which has a dot in it, and otherwise of what is called."""
    owner, name, *_ = [*made.arguments, None, None]
    if type(owner) is Global and type(name) is str:
        return Global(owner.module, f"{owner.name}.{name}")
    return Global(made.what.module, f"{made.what.name}()")


def _append(stack: list[Any], items: list[Any]) -> None:
    target = stack[-1]
    if type(target) is Made:
        if target.items is None:
            target.items = []
        target = target.items
    if type(target) is not list:
        raise _Invalid(f"items of a {type(target).__name__}")
    target += items


def _update(stack: list[Any], items: list[Any]) -> None:
    target = stack[-1]
    if type(target) is Made:
        if target.pairs is None:
            target.pairs = {}
        target = target.pairs
    if type(target) is not dict or len(items) % 2:
        raise _Invalid(f"entries of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only flat keys: hashing a deeply nested tuple would exhaust the stack of the interpreter.
        flat = (
            type(key) in _SCALARS
            or type(key) in (Made, Global)
            or (type(key) is tuple and {*map(type, key)} <= _SCALARS)
        )
        if not flat:
            raise UnsupportedError(f"a dict with a key of type {type(key).__name__}; expected text or numbers")
        for part in key if type(key) is tuple else (key,):
            if type(part) is int and part.bit_length() > _MAX_KEY_BITS:
                raise UnsupportedError(f"a dict with a whole number of {part.bit_length()} bits as a key")
        target[key] = value


def _made_set(kind: str) -> Made:
    return Made(Global("builtins", kind), ())


def _frozen_set(stack: list[Any], items: list[Any]) -> None:
    stack.append(_made_set("frozenset"))
    _append(stack, items)


def _dict(stack: list[Any], items: list[Any]) -> None:
    stack.append({})
    _update(stack, items)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


# The bytes of a length, and what the bytes after it mean.
_SIZED: dict[bytes, tuple[int, Any]] = {
    b"X": (4, _text),
    b"\x8c": (1, _text),
    b"\x8d": (8, _text),
    b"U": (1, _text),
    b"T": (4, _text),
    b"B": (4, bytes),
    b"C": (1, bytes),
    b"\x8e": (8, bytes),
    b"\x96": (8, lambda data: Made(Global("builtins", "bytearray"), (data,))),
    b"\x8a": (1, _integer),
    b"\x8b": (4, _integer),
}
_FIXED = {b"J": ("<i", 4), b"K": ("<B", 1), b"M": ("<H", 2), b"G": (">d", 8)}
_EMPTY_VALUES: dict[Any, Any] = {
    Global("collections", "OrderedDict"): dict,
    Global("builtins", "bytes"): bytes,
    Global("__builtin__", "bytes"): bytes,
}
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False}
_PUTS = {b"q": 1, b"r": 4}  # the bytes of the number
_GETS = {b"h": 1, b"j": 4}
_EMPTY: dict[bytes, Any] = {b"}": dict, b"]": list, b")": tuple, b"\x8f": lambda: _made_set("set")}
_MAKERS = {bytes([code]) for code in b"(}]\x8f\x85\x86\x87tld\x91c\x93R\x81\x92Q"}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_MARKED: dict[bytes, Any] = {
    b"t": lambda stack, items: stack.append(tuple(items)),
    b"l": lambda stack, items: stack.append(items),
    b"d": _dict,
    b"e": _append,
    b"u": _update,
    b"1": lambda stack, items: None,
    b"\x90": _append,
    b"\x91": _frozen_set,
}
