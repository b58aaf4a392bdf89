"""A template against a checkpoint: pure, no I/O. Says for every leaf what to read and what to make of it."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import ml_dtypes
import msgspec
import numpy as np

from . import _dtypes, _iterators, _processes
from ._catalogue import NO_ARRAY, ArrayEntry, Entry, LostEntry, ValueEntry, check_whole, covered
from ._leaves import is_function
from ._paths import above, below, closest, few, matches
from ._tree import Node, Skeleton, Walk, containers
from .errors import MismatchError

_HINTS = 20  # differences for which the closest name is looked for, which takes milliseconds each
_SCALARS = frozenset((bool, int, float, complex, str, bytes))
_ARRAYS = ("numpy", "numpy-scalar", "jax")
_ON_HOST = (np.ndarray, np.generic)  # made once: a union of classes takes longer to make than to ask


class Target(msgspec.Struct, frozen=True, gc=False):
    """What a leaf becomes.

    `make` says how: an array of `dtype` on the host or in JAX, a scalar, a key; a number of the Python type `value`; or
    `value` is the leaf itself.
    """

    make: Literal["numpy", "numpy-scalar", "jax", "key", "number", "value"]
    entry: ArrayEntry | None = None
    dtype: Any = None
    weak: bool = False
    value: Any = None
    state: tuple[Any] | None = None  # for the value, which is an iterator
    filled: bool = False  # whether the value is the template's for want of one in the checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What differences are allowed, as `treering.restore` says."""

    missing: str | Iterable[str] = "error"
    extra: str | Iterable[str] = "error"
    dtype: Any = None

    def __post_init__(self) -> None:
        for name, value, words in (("missing", self.missing, "template"), ("extra", self.extra, "ignore")):
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))  # it is gone through once for each leaf
            elif value not in ("error", words):
                raise MismatchError(f"{name}={value!r}: expected 'error', {words!r} or a list of globs of paths")
        if self.dtype is None or (isinstance(self.dtype, str) and self.dtype == "template"):
            return
        try:
            known = _dtypes.is_float(np.dtype(self.dtype))
        except TypeError:
            known = False
        if not known:
            raise MismatchError(f"dtype={self.dtype!r}: expected 'template' or a floating-point dtype")

    def allows(self, which: Literal["missing", "extra"], path: str, entry: Entry | None = None) -> bool:
        value = self.missing if which == "missing" else self.extra
        return value != "error" if isinstance(value, str) else covered(path, entry, value)

    def cast(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What floats become where there is no template."""
        asked = self.dtype not in (None, "template") and _dtypes.is_float(dtype)
        return np.dtype(self.dtype) if asked else dtype


class _Difference(Exception):
    """expected, found, what would allow it"""


def match(
    walked: Walk,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: Policy,
    name: str,
    *,
    numbers_are_arrays: bool,
) -> list[Target]:
    """One target per template leaf, in order; `numbers_are_arrays` is that of `treering.formats.Reader`.

    Raises `MismatchError` with every difference.
    """
    if any(isinstance(entry, LostEntry) for entry in entries.values()):
        check_whole(_needed(entries, walked, policy))
    targets: list[Target] = []
    problems: list[str] = []
    skipped: list[str] = []
    used: set[str] = set()
    known = list(entries)
    found = False  # anything of the template
    alike: dict[tuple[Any, ...], Target] = {}  # what became of a leaf of some kind, for the thousands like it
    for path, leaf in zip(walked.paths, walked.leaves, strict=True):
        entry = entries.get(path)
        kind: tuple[Any, ...] | None = None
        if isinstance(entry, ArrayEntry) and getattr(leaf, "shape", None) == entry.shape and hasattr(leaf, "dtype"):
            kind = type(leaf), leaf.dtype, getattr(leaf, "weak_type", False), entry.type, entry.dtype
            if (like := alike.get(kind)) is not None:
                used.add(path)
                targets.append(Target(like.make, entry, like.dtype, like.weak))
                continue
        if leaf is ...:
            skipped.append(path)
            targets.append(Target("value", value=...))
            continue
        absent = entry is None or (isinstance(entry, ValueEntry) and entry.type in NO_ARRAY)
        if leaf is None or is_function(leaf):
            if absent:
                used.add(path)
            targets.append(Target("value", value=leaf))
            continue
        used.add(path)
        try:
            if absent:
                names = known if len(problems) < _HINTS else ()
                targets.append(_missing(path, leaf, policy, names))
            else:
                assert entry is not None
                found = True
                targets.append(_target(leaf, entry, policy, numbers_are_arrays))
                if kind is not None and targets[-1].make in _ARRAYS:
                    alike[kind] = targets[-1]
        except _Difference as difference:
            problems.append(_line(path, *difference.args))
    for path, entry in entries.items():
        if path in used or (isinstance(entry, ValueEntry) and entry.type in NO_ARRAY):
            continue
        if any(below(path, at) is not None for at in skipped) or policy.allows("extra", path):
            continue
        problems.append(_line(path, "nothing", describe(entry), f"extra='ignore' or extra=[{path!r}] leaves it out"))
    problems += _other_classes(walked.skeleton, skeleton or ())
    if problems:
        count = f"{len(problems)} difference{'s' if len(problems) > 1 else ''}"
        raise MismatchError("\n".join([f"{name}: the checkpoint does not fit the template: {count}", *problems]))
    _check_found(found, targets, walked.paths, entries, policy, name)
    return targets


def _check_found(
    found: bool,
    targets: Sequence[Target],
    paths: Sequence[str],
    entries: Mapping[str, Entry],
    policy: Policy,
    name: str,
) -> None:
    """Raises `MismatchError` where all of the template's arrays would be the template's own, and for idle globs.

    Whoever asks for a checkpoint and gets what he had is not to find out by the loss.
    """
    for glob in () if isinstance(policy.missing, str) else policy.missing:
        if not any(matches(path, glob) for path in paths):
            shown = few(tuple(paths))
            raise MismatchError(f"missing=[{glob!r}]: expected a glob of leaves of the template, found none in {shown}")
    filled = [path for path, target in zip(paths, targets, strict=True) if target.filled]
    if filled and not found:
        near = closest(filled[0], list(entries))
        raise MismatchError(
            f"{name}: expected arrays of the template, found none of the {len(filled)} (such as {filled[0]!r}), so "
            f"nothing would be restored; the checkpoint has {few(tuple(entries))}"
            + (f"; closest: {near}" if near else "")
        )


def untemplated(entries: Sequence[Entry], policy: Policy, to_jax: Collection[str], name: str) -> list[Target]:
    """Targets without a template: NumPy arrays, JAX ones of those of some types, typed keys, and values as they are."""
    check_whole(entries)
    targets: list[Target] = []
    problems: list[str] = []
    cast = functools.cache(lambda text: policy.cast(_dtypes.to_numpy(text)))
    for entry in entries:
        if isinstance(entry, ValueEntry):
            targets.append(Target("value", value=entry.decode()))
        elif entry.type == "key":
            targets.append(Target("key", entry, _dtypes.to_numpy(entry.dtype)))
        else:
            dtype = cast(entry.dtype)
            try:
                if entry.type in to_jax:
                    _check_width(dtype, entry)
                make = "jax" if entry.type in to_jax else "numpy-scalar" if entry.type == "numpy-scalar" else "numpy"
                targets.append(Target(make, entry, dtype, entry.type == "jax-weak"))
            except _Difference as difference:
                problems.append(_line(entry.path, *difference.args))
    if problems:
        raise MismatchError("\n".join([f"{name}: the checkpoint cannot become JAX arrays", *problems]))
    return targets


def _needed(entries: Mapping[str, Entry], walked: Walk, policy: Policy) -> Iterator[Entry]:
    """What a template asks for and what it may not leave out, of that which cannot be read."""
    skipped = [path for path, leaf in zip(walked.paths, walked.leaves, strict=True) if leaf is ...]
    asked, leaves = {""}, set[str]()
    for path, leaf in zip(walked.paths, walked.leaves, strict=True):
        if leaf is not None and leaf is not ... and not is_function(leaf):
            leaves.add(path)
            asked |= {path, *above(path)}
    for path, entry in entries.items():
        left_out = policy.allows("extra", path, entry) or any(below(path, at) is not None for at in skipped)
        if isinstance(entry, LostEntry) and (path in asked or not left_out or not leaves.isdisjoint(above(path))):
            yield entry


def describe(entry: Entry) -> str:
    """An entry in a few characters: ``float32[2,3]``, ``int``, ``key<threefry2x32>[]``."""
    if isinstance(entry, LostEntry):
        return "lost"
    if isinstance(entry, ValueEntry):
        return entry.type
    if entry.type == "key":
        return f"key<{entry.impl}>[{','.join(map(str, entry.shape[:-1]))}]"
    return f"{entry.dtype}[{','.join(map(str, entry.shape))}]"


def shorten(value: Any) -> str:
    """A value for people to read: not more than 60 characters, and no number that Python refuses to print."""
    return f"({value.bit_length()} bits)" if type(value) is int and abs(value) >> 200 else f"{value!r:.60}"


def _target(leaf: Any, entry: Entry, policy: Policy, numbers_are_arrays: bool) -> Target:
    if type(leaf) in _SCALARS:
        if isinstance(entry, ValueEntry) and entry.type == type(leaf).__name__:
            return Target("value", value=entry.decode())
        may = type(leaf) is int or numbers_are_arrays
        if may and isinstance(entry, ArrayEntry) and _is_number(entry, type(leaf)):
            return Target("number", entry, _dtypes.to_numpy(entry.dtype), value=type(leaf))
        _differ(type(leaf).__name__, entry, "a template leaf of that type would take it")
    on_host = isinstance(leaf, _ON_HOST)
    if not (on_host or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        if _iterators.is_iterator(type(leaf)):
            return _iterator_target(leaf, entry)
        _differ(f"{type(leaf).__module__}.{type(leaf).__qualname__}", entry, "no leaf of this type can be restored")
    if not (on_host or isinstance(leaf.dtype, np.dtype)) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _key_target(leaf, entry)
    want = np.dtype(leaf.dtype)
    shape = tuple(leaf.shape)
    if isinstance(entry, ValueEntry):
        dtype, value = _number(leaf, entry, want, policy), entry.decode()
    else:
        if entry.type == "key" or shape != entry.shape:
            hint = "shapes must be equal" if entry.type != "key" else "a typed key is no plain array"
            _differ(_shape_text(leaf), entry, hint)
        if isinstance(leaf, np.character):
            found = _dtypes.to_numpy(entry.dtype)
            want = found if found.kind == want.kind else want  # of any length
        dtype, value = _dtype_for(want, entry.dtype, policy.dtype), None
        if isinstance(dtype, str):
            _differ(_shape_text(leaf), entry, dtype)
    if not on_host:
        _check_width(dtype, entry, "" if dtype == want else ", to which dtype= casts it")
    weak = not on_host and bool(getattr(leaf, "weak_type", False)) and dtype == want
    make = "numpy-scalar" if isinstance(leaf, np.generic) else "numpy" if on_host else "jax"
    return Target(make, entry if isinstance(entry, ArrayEntry) else None, dtype, weak, value)


def _number(leaf: Any, entry: ValueEntry, want: np.dtype[Any], policy: Policy) -> np.dtype[Any]:
    """The dtype of the array without axes that a number of Python becomes, of which nothing may be lost unasked."""
    expected, value = _shape_text(leaf), entry.decode()
    of_kind = {"bool": want.kind == "b", "int": _dtypes.is_integer(want), "complex": want.kind == "c"}
    if tuple(leaf.shape) or not of_kind.get(entry.type, entry.type == "float" and _dtypes.is_float(want)):
        _differ(expected, entry, f"a template leaf of type {entry.type} would take it")
    if entry.type == "int" and (np.array(value).dtype.hasobject or not fits(np.array(value), want)):
        _differ(expected, f"int {shorten(value)}", "it does not fit; use a wider integer in the template")
    if entry.type == "float" and policy.dtype not in (None, "template"):
        return np.dtype(policy.dtype)
    if entry.type in ("float", "complex") and not (entry.type == "float" and policy.dtype == "template"):
        narrowed = type(value)(_dtypes.cast(np.array(value), want))
        if narrowed != value and value == value:
            allowed = "dtype='template' allows that" if entry.type == "float" else f"use {np.dtype(complex)}"
            _differ(expected, f"{entry.type} {shorten(value)}", f"it would become {narrowed!r}; {allowed}")
    return want


@functools.lru_cache(maxsize=512)
def _dtype_for(want: np.dtype[Any], found: str, asked: Any) -> np.dtype[Any] | str:
    """What an array of dtype `found` becomes where the template has `want`, or why it cannot."""
    have = _dtypes.to_numpy(found)
    if _dtypes.is_float(have) and asked not in (None, "template"):
        return np.dtype(asked)
    if have == want.newbyteorder("<") or _dtypes.widens(have, want):
        return want
    if _dtypes.is_integer(have) and _dtypes.is_integer(want):
        return want  # tested value by value when it is read
    if _dtypes.is_float(have) and _dtypes.is_float(want):
        return want if asked == "template" else "dtype='template' narrows floats to the template's"
    return f"one kind of number does not become another; use {found} in the template"


def _key_target(leaf: Any, entry: Entry) -> Target:
    impl = _key_impl(leaf.dtype)
    expected = f"key<{impl}>[{','.join(map(str, leaf.shape))}]"
    if not isinstance(entry, ArrayEntry) or entry.type != "key":
        _differ(expected, entry, "only typed keys become typed keys; see jax.random.wrap_key_data")
    if entry.impl != impl or entry.shape[:-1] != tuple(leaf.shape):
        _differ(expected, entry, "shapes and key implementations must be equal")
    return Target("key", entry, _dtypes.to_numpy(entry.dtype))


@functools.lru_cache(maxsize=64)
def _key_impl(dtype: Any) -> str:
    """The name of the implementation of keys, which JAX tells of keys alone and not of their dtype."""
    names: list[str] = []
    jax.eval_shape(lambda key: names.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return names[0]


def _iterator_target(leaf: Any, entry: Entry) -> Target:
    index, count = _processes.position()
    if not isinstance(entry, ValueEntry) or entry.type != "iterator":
        _differ(f"the state of a {type(leaf).__name__}", entry, "only iterators take it, and nothing else does")
    state, saved = _iterators.of_process(entry, index, count)
    if saved != count:
        _differ(
            f"the states of {count} iterators, one per process",
            f"those of {saved}",
            "restore with that many processes, or put `...` in its place and set its position yourself (Grain's "
            "ElasticIterator has one state for any number of processes)",
        )
    return Target("value", value=leaf, state=(state,))


def _missing(path: str, leaf: Any, policy: Policy, known: Sequence[str]) -> Target:
    near = closest(path, known)
    found = f"nothing (closest: {near})" if near else "nothing"
    expected = type(leaf).__name__ if type(leaf) in _SCALARS else _shape_text(leaf)
    if not policy.allows("missing", path):
        raise _Difference(expected, found, f"missing='template' or missing=[{path!r}] takes the template's")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise _Difference(expected, found, "the template has no value to take, only a shape")
    return Target("value", value=leaf, filled=True)


def _other_classes(template: Skeleton, found: Skeleton) -> list[str]:
    """Named tuples of another class at the same path: a reordered optax chain shows in nothing else."""
    classes = {path: node.name for _, path, node in _named_tuples(found)}
    return [
        _line(path, node.name, classes[path], "was the order of an optimizer chain changed?")
        for _, path, node in _named_tuples(template)
        if classes.get(path, node.name) != node.name
    ]


def _named_tuples(skeleton: Skeleton) -> Iterable[tuple[int, str, Node]]:
    if not any(node.kind == "namedtuple" for node in skeleton if isinstance(node, Node)):
        return []
    return [
        (n, path, node)
        for n, path, node in containers(skeleton)
        if isinstance(node, Node) and node.kind == "namedtuple"
    ]


def _is_number(entry: ArrayEntry, kind: type) -> bool:
    """Whether an array is what a number of Python becomes, of which nothing is lost on the way back."""
    if entry.shape:
        return False
    dtype = _dtypes.to_numpy(entry.dtype)
    if kind is int:
        return _dtypes.is_integer(dtype)
    return (kind is bool and dtype.kind == "b") or (kind in (float, complex) and _dtypes.widens(dtype, np.dtype(kind)))


def fits(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Whether integers survive a change of width."""
    if not values.size:
        return True
    wide = values.astype(np.int64) if values.dtype.kind == "V" else values
    limits = ml_dtypes.iinfo(dtype)
    return limits.min <= int(wide.min()) and int(wide.max()) <= limits.max


def _check_width(dtype: np.dtype[Any], found: Entry, why: str = "") -> None:
    """Raises when JAX has not, as it is set up, the dtype that an array is to have there."""
    allowed = _canonical(dtype, jax.config.read("jax_enable_x64"))
    if allowed == dtype:
        return
    if allowed is None:
        raise _Difference("a dtype that JAX has", describe(found), "restore it into a NumPy array")
    if isinstance(found, ArrayEntry) and found.dtype == dtype.name:
        hint = "switch it on, or restore into NumPy"
        raise _Difference(f"{allowed.name}, for jax_enable_x64 is off", describe(found), hint)
    raise _Difference(
        f"{dtype.name}{why or ' (the template has it)'}, which JAX has not while jax_enable_x64 is off",
        describe(found),
        f"use {allowed.name}, or switch it on",
    )


def is_of_jax(dtype: np.dtype[Any]) -> bool:
    """Whether JAX, as it is set up, has a dtype."""
    return _canonical(dtype, jax.config.read("jax_enable_x64")) == dtype


@functools.lru_cache(maxsize=512)
def _canonical(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any] | None:  # x64 only tells the cached answers apart
    return None if dtype.kind in "MmSU" else np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _shape_text(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return type(leaf).__name__ if shape is None else f"{dtype}[{','.join(map(str, shape))}]"


def _differ(expected: str, found: Entry | str, hint: str) -> NoReturn:
    raise _Difference(expected, found if isinstance(found, str) else describe(found), hint)


def _line(path: str, expected: str, found: str, hint: str) -> str:
    return f"  {path or '(root)'}: expected {expected}, found {found}; {hint}"
