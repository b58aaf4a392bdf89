"""The entries of a checkpoint's leaves, which readers, writers and templates share.

An array leaf is described by its dtype (as text, so that listing needs no NumPy) and global shape; any
other leaf is a value that travels inside the manifest.
"""

import math
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import msgspec

from ..errors import CorruptError, MismatchError
from .leaf_paths import matches, may_match_below
from .values import EXACT, ValueType, decode

if TYPE_CHECKING:
    from .boxes import Box

ArrayType = Literal["jax", "jax-weak", "numpy", "numpy-scalar", "key"]
NO_ARRAY = ("none", "function")
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
        """The bytes of the array as it is stored, without those of the file around it."""
        from .dtypes import itemsize

        return math.prod(self.shape) * itemsize(self.dtype)

    def at(self, path: str) -> "ArrayEntry":
        """This array under another path."""
        return ArrayEntry(path, self.type, self.dtype, self.shape, self.impl)


class LostEntry(ArrayEntry, tag="lost", frozen=True, gc=False):
    """A leaf, or everything below a path, that should be there and cannot be read.

    It looks like an array, so that any code that reads it fails with a `CorruptError` that says why. With `tree` it may
    stand for any leaves at and below its path.
    """

    why: tuple[str, ...] = ()
    tree: bool = False

    def at(self, path: str) -> "LostEntry":
        """This loss under another path."""
        return lost(path, *self.why, tree=self.tree)


class ValueEntry(
    msgspec.Struct, array_like=True, tag_field="leaf", tag="value", frozen=True, gc=False, forbid_unknown_fields=True
):
    """A leaf that is no array. `value` is in the tagged form of `encode`."""

    path: str
    type: ValueType
    value: Any = None

    def at(self, path: str) -> "ValueEntry":
        """This value under another path."""
        return ValueEntry(path, self.type, self.value)

    def decode(self) -> Any:
        """The Python value; None for functions, which have no value here, and the states of iterators."""
        if self.type == "iterator":
            from .states import decoded

            return decoded(self.value)
        return decode(self.type, self.value)


class StatesEntry(ValueEntry, tag="states", frozen=True, gc=False):
    """The states of an iterator that lie in array files, one after another as bytes, and are read on request.

    `value` has their lengths in bytes, process by process; `read` returns the state of a process.
    """

    read: Callable[[int], Any] | None = None

    def at(self, path: str) -> "StatesEntry":
        """These states under another path."""
        return StatesEntry(path, self.type, self.value, self.read)

    def decode(self) -> list[Any]:
        """Reads the states of all processes. Raises what reading an array raises."""
        return [self.state(process) for process in range(len(self.value))]

    def state(self, process: int) -> Any:
        """Reads the state of a process. Raises what reading an array raises."""
        assert self.read is not None
        return self.read(process)

    dtype = property(lambda self: "uint8")  # of all of them as one array, which is how they are stored
    shape = property(lambda self: (self.nbytes,))

    @property
    def nbytes(self) -> int:
        """The bytes of all states."""
        return sum(self.value)

    def box(self, process: int) -> "Box":
        """The part of the array that is the state of a process."""
        begin = sum(self.value[:process])
        return ((begin, begin + self.value[process]),)


Entry = ArrayEntry | ValueEntry


def is_absent(entry: Entry | None) -> bool:
    """Returns True for None and functions, which carry no data, and where there is no entry."""
    return entry is None or (isinstance(entry, ValueEntry) and entry.type in NO_ARRAY)


def step_number(step: Any) -> int:
    """A step as an int. Raises `MismatchError` for anything but an integer from 0 to 2^53, the exact range of JSON."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= EXACT:
        raise MismatchError(f"step={step!r:.100}: expected an integer from 0 to 2^53")
    return number


def lost(path: str, *why: str, tree: bool = False) -> LostEntry:
    """The entry of a leaf that should lie at a path, or with `tree` of leaves at or below it, and cannot be read."""
    return LostEntry(path, "numpy", "uint8", (), "", why, tree)


def is_lost_tree(entry: Entry | None) -> TypeGuard[LostEntry]:
    """Whether an entry stands for leaves whose names are not known."""
    return isinstance(entry, LostEntry) and entry.tree


def fits(path: str, entry: Entry, globs: str | Iterable[str]) -> bool:
    """Whether a leaf's path fits one of the globs; where a tree is lost, whether that of a leaf of it could."""
    if not is_lost_tree(entry):
        return matches(path, globs)
    return any(may_match_below(path, glob) for glob in ((globs,) if isinstance(globs, str) else globs))


def covered(path: str, entry: Entry | None, globs: str | Iterable[str]) -> bool:
    """Whether a leaf's path fits one of the globs; where a tree is lost, whether one fits all of it or is its path."""
    if not is_lost_tree(entry):
        return matches(path, globs)
    candidates = (globs,) if isinstance(globs, str) else globs
    return any(glob == path or (glob.rpartition("/")[2] == "**" and matches(path, glob)) for glob in candidates)


def check_whole(entries: Iterable[Entry]) -> None:
    """Raises a `CorruptError` that says which of these entries cannot be read, and why."""
    entries = list(entries)
    if LostEntry not in set(map(type, entries)):  # of thousands
        return
    if reasons := tuple(dict.fromkeys(why for entry in entries if isinstance(entry, LostEntry) for why in entry.why)):
        listed = "\n".join(reasons[:5])
        raise CorruptError(f"{listed}\nand {len(reasons) - 5} more like these" if len(reasons) > 5 else listed)
