"""Defines the entries of a checkpoint's leaves, which readers, writers and templates share.

The entry of an array has its dtype, as text so that listing needs no NumPy, and its global shape. Any other leaf is a
value, which is stored in the manifest.
"""

import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import msgspec

from .._printable import short
from ..errors import CorruptError, MismatchError
from .dtypes import itemsize
from .leaf_paths import Globs, matches
from .values import MAX_EXACT_INT, ValueType, decode

if TYPE_CHECKING:
    from .boxes import Box

ArrayType = Literal["jax", "jax-weak", "numpy", "numpy-scalar", "key"]
NO_ARRAY = ("none", "function")
_log = logging.getLogger("treering")
_LOWER_IS_BETTER = re.compile("loss|error|perplexity", re.IGNORECASE)
_MEANT_AS_MODE = re.compile("(min|max)(imum|imi[sz]e)?|low(er|est)?|high(er|est)?|smallest|largest", re.IGNORECASE)
KEY_SIZES = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}  # uint32 numbers of a key of JAX's own implementations


class ArrayEntry(msgspec.Struct, array_like=True, tag_field="leaf", tag="array", frozen=True, gc=False):
    """An array leaf.

    `shape` is the global shape of the stored array. For ``type="key"`` that is the uint32 key data, whose
    last axis belongs to the key implementation named by `impl`.
    """

    path: str
    type: ArrayType
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""

    @property
    def nbytes(self) -> int:
        """The size of the stored array in bytes, without the file's header."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def at(self, path: str) -> "ArrayEntry":
        """Returns this entry under another path."""
        return ArrayEntry(path, self.type, self.dtype, self.shape, self.impl)


class LostEntry(ArrayEntry, tag="lost", frozen=True, gc=False):
    """A damaged leaf or a damaged part of the tree: it should exist and cannot be read.

    It looks like an array, so that any code that reads it fails with a `CorruptError` that says why. With `tree` it
    stands for unknown leaves at and below its path.
    """

    why: tuple[str, ...] = ()
    tree: bool = False

    def at(self, path: str) -> "LostEntry":
        """Returns this entry under another path."""
        return lost_entry(path, *self.why, tree=self.tree)


class ValueEntry(
    msgspec.Struct, array_like=True, tag_field="leaf", tag="value", frozen=True, gc=False, forbid_unknown_fields=True
):
    """A leaf that is not an array. `value` is in the tagged form of `encode`."""

    path: str
    type: ValueType
    value: Any = None

    def at(self, path: str) -> "ValueEntry":
        """Returns this entry under another path."""
        return ValueEntry(path, self.type, self.value)

    def decode(self) -> Any:
        """Returns the Python value: None for a function, and for an iterator the list of its states."""
        if self.type == "iterator":
            return IteratorEntry(self.path, self.type, self.value).decode()
        return decode(self.type, self.value)


class IteratorInfo(msgspec.Struct, frozen=True, omit_defaults=True, rename={"name": "class"}):
    """What is recorded next to the states of an iterator.

    module, name: the module and the qualified name of its class; empty if they are not known.
    version: the version of the library that has the class.
    types: for each state, the types of its values that are not plain, by place; empty if there are none.
    """

    module: str = ""
    name: str = ""
    version: str = ""
    types: tuple[dict[str, str], ...] = ()

    def types_of(self, process: int) -> Mapping[str, str]:
        """Returns the types of the state of a process; an unknown type if those of other states are recorded."""
        return self.types[process] if process < len(self.types) else {"": "(missing)"} if self.types else {}

    def with_types(self, types: Sequence[Mapping[str, str]]) -> "IteratorInfo":
        """Returns this with the types of the states of all processes."""
        return msgspec.structs.replace(self, types=tuple(map(dict, types)) if any(types) else ())


class IteratorEntry(ValueEntry, tag="iterator", frozen=True, gc=False):
    """The states of an iterator, with what is recorded about it."""

    info: IteratorInfo = IteratorInfo()

    def at(self, path: str) -> "IteratorEntry":
        """Returns this entry under another path."""
        return IteratorEntry(path, self.type, self.value, self.info)

    def decode(self) -> list[Any]:
        """Returns the states. Values whose library is not in use are plain: tensors are NumPy arrays."""
        from .iterator_states import decode_states

        return decode_states(self.value, self.info.types_of)

    def state(self, process: int) -> Any:
        """Returns the state of a process. Raises `UnsupportedError` for a value that cannot be made here."""
        from .iterator_states import decode_process_state

        return decode_process_state(self.value, self.info.types_of, process)


class StatesEntry(IteratorEntry, tag="states", frozen=True, gc=False):
    """The states of an iterator that are stored in array files, one after another as bytes. They are read on request.

    value: their lengths in bytes, by process.
    read: reads the state of a process; see `iterator_states.unpack` for its second argument, `exact`.
    """

    read: Callable[[int, bool], Any] | None = None

    def at(self, path: str) -> "StatesEntry":
        """Returns this entry under another path."""
        return StatesEntry(path, self.type, self.value, self.info, self.read)

    def decode(self) -> list[Any]:
        """Reads the states of all processes. Raises the same errors as reading an array."""
        assert self.read is not None
        return [self.read(process, False) for process in range(len(self.value))]

    def state(self, process: int) -> Any:
        """Reads the state of a process. Raises the same errors as reading an array, and those of other iterators."""
        assert self.read is not None
        return self.read(process, True)

    # All states together are stored as one array of bytes, so the entry has the dtype and shape of that array.
    dtype = property(lambda self: "uint8")
    shape = property(lambda self: (self.nbytes,))

    @property
    def nbytes(self) -> int:
        """The size of all states in bytes."""
        return sum(self.value)

    def box(self, process: int) -> "Box":
        """Returns the box of the array that is the state of a process."""
        begin = sum(self.value[:process])
        return ((begin, begin + self.value[process]),)


Entry = ArrayEntry | ValueEntry


def visible_shape(entry: ArrayEntry) -> tuple[int, ...]:
    """Returns the shape that JAX shows: for typed keys without the last axis, which is that of their data."""
    return entry.shape[:-1] if entry.type == "key" else entry.shape


def is_absent(entry: Entry | None) -> bool:
    """Returns True for None and functions, which have no data, and if `entry` is None."""
    return entry is None or (isinstance(entry, ValueEntry) and entry.type in NO_ARRAY)


def mode_hint(metric: str) -> str:
    """Returns the end of a message about a metric that does not exist: its name may be a mistyped mode."""
    return "; a name may end with :min or :max" if ":" in metric else ""


def metric_and_mode(best: str) -> tuple[str, Literal["min", "max"]]:
    """Returns the metric and the mode that ``accuracy``, ``accuracy:max`` or ``loss:min`` names.

    Logs a warning for a loss, an error or a perplexity without a mode. Raises `MismatchError` for anything else.
    """
    if isinstance(best, str):
        metric, colon, mode = best.rpartition(":")  # a metric may have colons
        found = metric if colon and mode in ("min", "max") else best
        # Of "loss:lowest" the end is meant as a mode; the error for the metric says how to write one.
        if found is best and _LOWER_IS_BETTER.search(best) and not _MEANT_AS_MODE.fullmatch(mode):
            _log.warning(
                "best=%.100r takes the highest value; '%.100s:min' takes the lowest, '%.100s:max' the highest without "
                "this warning",
                *(best, best, best),
            )
        if found:
            return found, "min" if colon and mode == "min" else "max"
    raise MismatchError(f"best={best!r:.100}: expected METRIC, METRIC:min or METRIC:max, as text")


def step_number(step: Any) -> int:
    """Returns a step as an int.

    Raises `MismatchError` for anything but an integer from 0 to 2^53, the range that all readers of JSON hold exactly.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_EXACT_INT:
        found = "" if isinstance(step, int) else f", found the type {type(step).__name__}"
        raise MismatchError(f"step={short(step)}: expected an integer from 0 to 2^53{found}")
    return number


def check_count(name: str, n: Any, *, minimum: int = 1) -> int:
    """Returns the value of the argument `name` as an int. Raises `MismatchError` unless it is at least `minimum`."""
    try:
        number = minimum - 1 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        meant = f"; write {int(n)}" if isinstance(n, float) and n.is_integer() and n >= minimum else ""
        raise MismatchError(f"{name}: expected an integer from {minimum}, found {n!r}{meant}")
    return number


def lost_entry(path: str, *why: str, tree: bool = False) -> LostEntry:
    """Returns the entry of a leaf that cannot be read, or with `tree` of all leaves at and below its path."""
    return LostEntry(path, "numpy", "uint8", (), "", why, tree)


def is_unreadable_tree(entry: Entry | None) -> TypeGuard[LostEntry]:
    """Returns True if an entry stands for a damaged part of the tree, whose leaves are not known by name."""
    return isinstance(entry, LostEntry) and entry.tree


def glob_fits(path: str, entry: Entry, globs: Globs) -> bool:
    """Returns True if one of the globs matches a leaf's path, or could match a leaf in a damaged part of the tree."""
    return globs.may_match_below(path) if is_unreadable_tree(entry) else globs.match(path)


def glob_covers(path: str, entry: Entry | None, globs: Globs) -> bool:
    """Returns True if one of the globs matches a leaf's path. For a damaged part one has to match all of it."""
    if not is_unreadable_tree(entry):
        return globs.match(path)
    return any(glob == path or (glob.rpartition("/")[2] == "**" and matches(path, glob)) for glob in globs)


def check_readable(entries: Iterable[Entry]) -> None:
    """Raises a `CorruptError` if some of these entries cannot be read. It says which, and why."""
    entries = list(entries)
    if LostEntry not in set(map(type, entries)):  # a fast test for the usual case of thousands of sound entries
        return
    if reasons := tuple(dict.fromkeys(why for entry in entries if isinstance(entry, LostEntry) for why in entry.why)):
        listed = "\n".join(reasons[:5])
        raise CorruptError(f"{listed}\nand {len(reasons) - 5} more like these" if len(reasons) > 5 else listed)
