"""Changes of names, shapes and values between a checkpoint and a template.

>>> from treering import rules
>>> hf_to_jax = [
...     rules.rename(r"model\\.layers\\.(\\d+)\\.", r"layers/\\1/"),
...     rules.transpose("layers/*/*.weight", (1, 0)),
...     rules.stack("layers/*/**", axis=0),
... ]
>>> print(tr.open("model.safetensors").apply(hf_to_jax))

Rules are applied in order, to leaves that are still in the checkpoint: a box of a leaf is made of the boxes that it
takes, when it is read. Paths and globs are those of `treering.Checkpoint`: ``*`` and ``?`` stay within a component,
``**`` spans any number of them. A rule that matches nothing is an error, unless it is `optional`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ._catalogue import ArrayEntry
from ._paths import below, matches
from ._views import Leaf, joined, mapped, part, reshaped, stacked, transposed
from ._views import cast as _cast
from .errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

Leaves = dict[str, Leaf]


class Rule(Protocol):
    """A change of leaves by path."""

    def apply(self, leaves: Leaves) -> Leaves:
        """The leaves after the change. Raises `MismatchError`."""
        ...


def apply(rules: "Sequence[Rule]", leaves: Leaves) -> Leaves:
    """Applies rules in order. Raises `MismatchError` that says which rule failed."""
    for rule in rules:
        if not hasattr(rule, "apply"):
            raise MismatchError(f"rules: expected what treering.rules makes, found {rule!r}")
        leaves = rule.apply(leaves)
    return leaves


def rename(pattern: str, new: str, *, optional: bool = False) -> Rule:
    """Replaces what a regular expression matches in paths; ``\\1`` in `new` is its first group.

    >>> rename(r"^encoder/block_0*(\\d+)/", r"encoder/layers_\\1/")
    """
    return _Rename(_compiled(pattern), new, optional)


def drop(glob: str, *, optional: bool = False) -> Rule:
    """Leaves leaves out."""
    return _Drop(glob, optional)


def copy(src: str, dst: str, *, optional: bool = False) -> Rule:
    """Gives a leaf, or all below a path, a second time under another path."""
    return _Copy(src, dst, optional)


def cast(glob: str, dtype: Any, *, optional: bool = False) -> Rule:
    """Changes dtypes, as `numpy.ndarray.astype` does."""
    import numpy as np

    from ._dtypes import to_text

    return _Each(f"cast({glob!r}, {dtype!r})", glob, lambda leaf: _cast(leaf, to_text(np.dtype(dtype))), optional)


def transpose(glob: str, axes: Sequence[int], *, optional: bool = False) -> Rule:
    """Changes the order of axes, as `numpy.transpose` does."""

    def change(leaf: Leaf) -> Leaf:
        rank = len(leaf.array.shape)
        own = tuple(axis + rank if axis < 0 else axis for axis in axes)
        if sorted(own) != list(range(rank)):
            raise MismatchError(
                f"{leaf.entry.path}: an array of shape {list(leaf.array.shape)} has not the axes {axes}"
            )
        return transposed(leaf, own)

    return _Each(f"transpose({glob!r}, {tuple(axes)})", glob, change, optional)


def reshape(glob: str, shape: Sequence[int], *, optional: bool = False) -> Rule:
    """Changes shapes, as `numpy.reshape` does in C order; one size may be -1."""

    def change(leaf: Leaf) -> Leaf:
        size, known = math.prod(leaf.array.shape), math.prod(n for n in shape if n != -1)
        own = tuple(size // known if n == -1 and known else n for n in shape)
        if math.prod(own) != size or list(shape).count(-1) > 1 or min(own, default=0) < 0:
            raise MismatchError(f"{leaf.entry.path}: {list(leaf.array.shape)} cannot become {list(shape)}")
        return reshaped(leaf, own)

    return _Each(f"reshape({glob!r}, {tuple(shape)})", glob, change, optional)


def stack(glob: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """Puts leaves side by side along a new axis, in the order of the numbers in the place of the first ``*``.

    >>> stack("layers/*/kernel")  # layers/0/kernel, layers/1/kernel, … become layers/kernel
    """
    return _Stack(glob, axis, optional)


def unstack(glob: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """The opposite of `stack` with the same glob: takes an axis apart.

    >>> unstack("layers/*/kernel")  # layers/kernel becomes layers/0/kernel, layers/1/kernel, …
    """
    return _Unstack(glob, axis, optional)


def split(
    pattern: str, new: Sequence[str], axis: int = 0, sizes: Sequence[int] | None = None, *, optional: bool = False
) -> Rule:
    """Cuts leaves apart along an axis, into parts of one size or of the given `sizes`.

    pattern: a regular expression that matches the whole path; `new` are the names, ``\\1`` its first group.

    >>> split(r"(.*)/qkv", [r"\\1/query", r"\\1/key", r"\\1/value"], axis=1)
    """
    return _Split(_compiled(pattern), tuple(new), axis, None if sizes is None else tuple(sizes), optional)


def concat(patterns: Sequence[str], new: str, axis: int = 0, *, optional: bool = False) -> Rule:
    """The opposite of `split`: puts leaves one behind the other along an axis, in the order of the patterns.

    >>> concat([r"(.*)/query", r"(.*)/key", r"(.*)/value"], r"\\1/qkv", axis=1)
    """
    return _Concat(tuple([_compiled(pattern) for pattern in patterns]), new, axis, optional)


def map(
    glob: str,
    function: "Callable[[np.ndarray], np.ndarray]",
    shape: Sequence[int] | None = None,
    *,
    optional: bool = False,
) -> Rule:
    """Calls a function on whole arrays; `shape` is that of its results where it differs. The last resort."""

    def change(leaf: Leaf) -> Leaf:
        return mapped(leaf, function, leaf.array.shape if shape is None else tuple(shape))

    return _Each(f"map({glob!r}, …)", glob, change, optional)


@dataclasses.dataclass(frozen=True)
class _Rename:
    pattern: re.Pattern[str]
    new: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = [path for path in leaves if self.pattern.search(path)]
        _check_any(found, self.optional, f"rename({self.pattern.pattern!r}, …)", leaves)
        return _collected(
            f"rename({self.pattern.pattern!r}, {self.new!r})",
            [
                (_expanded(functools.partial(self.pattern.sub, self.new, path), self.new), leaf)
                for path, leaf in leaves.items()
            ],
        )


@dataclasses.dataclass(frozen=True)
class _Drop:
    glob: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = {path for path in leaves if matches(path, self.glob)}
        _check_any(found, self.optional, f"drop({self.glob!r})", leaves)
        return {path: leaf for path, leaf in leaves.items() if path not in found}


@dataclasses.dataclass(frozen=True)
class _Copy:
    src: str
    dst: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = [(rest, leaf) for path, leaf in leaves.items() if (rest := below(path, self.src)) is not None]
        _check_any(found, self.optional, f"copy({self.src!r}, …)", leaves)
        copies = [(f"{self.dst}/{rest}" if rest else self.dst, leaf) for rest, leaf in found]
        return _collected(f"copy({self.src!r}, {self.dst!r})", [*leaves.items(), *copies])


@dataclasses.dataclass(frozen=True)
class _Each:
    text: str
    glob: str
    change: Callable[[Leaf], Leaf]
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = {path for path in leaves if matches(path, self.glob)}
        _check_any(found, self.optional, self.text, leaves)
        return {path: self.change(_array(leaf, self.text)) if path in found else leaf for path, leaf in leaves.items()}


@dataclasses.dataclass(frozen=True)
class _Stack:
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"stack({self.glob!r})"
        level = _level(self.glob, text)
        groups: dict[str, dict[int, str]] = {}
        for path in leaves:
            if matches(path, self.glob) and (parts := path.split("/"))[level].isdecimal():
                number = int(parts.pop(level))
                groups.setdefault("/".join(parts), {})[number] = path
        _check_any(groups, self.optional, text, leaves)
        members = {path: name for name, group in groups.items() for path in group.values()}
        made: dict[str, Leaf] = {}
        for name, group in groups.items():
            if sorted(group) != list(range(len(group))):
                raise MismatchError(f"{text}: expected {name} with the numbers from 0, found {sorted(group)[:5]}…")
            own = [_array(leaves[group[n]], text) for n in sorted(group)]
            _check_alike(own, text)
            made[name] = stacked(own, name, _axis(self.axis, len(own[0].array.shape) + 1, text))
        return _replaced(text, leaves, members, {name: [(name, leaf)] for name, leaf in made.items()})


@dataclasses.dataclass(frozen=True)
class _Unstack:
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"unstack({self.glob!r})"
        level = _level(self.glob, text)
        parts = self.glob.split("/")
        glob = "/".join(parts[:level] + parts[level + 1 :])
        found = [path for path in leaves if matches(path, glob)]
        _check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path in found:
            leaf = _array(leaves[path], text)
            axis = _axis(self.axis, len(leaf.array.shape), text)
            names = path.split("/")
            made[path] = []
            for n in range(leaf.array.shape[axis]):
                name = "/".join([*names[:level], str(n), *names[level:]])
                made[path].append((name, part(leaf, name, axis, n, n + 1, drop_axis=True)))
        return _replaced(text, leaves, {path: path for path in found}, made)


@dataclasses.dataclass(frozen=True)
class _Split:
    pattern: re.Pattern[str]
    new: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"split({self.pattern.pattern!r}, …)"
        found = {path: match for path in leaves if (match := self.pattern.fullmatch(path))}
        _check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path, match in found.items():
            leaf = _array(leaves[path], text)
            axis = _axis(self.axis, len(leaf.array.shape), text)
            size = leaf.array.shape[axis]
            sizes = self.sizes or (size // len(self.new),) * len(self.new)
            if sum(sizes) != size or len(sizes) != len(self.new):
                raise MismatchError(
                    f"{text}: {path} has {size} along axis {axis}, which is not {' + '.join(str(n) for n in sizes)}"
                )
            made[path], start = [], 0
            for new, own in zip(self.new, sizes, strict=True):
                name = _expanded(functools.partial(match.expand, new), new)
                made[path].append((name, part(leaf, name, axis, start, start + own)))
                start += own
        return _replaced(text, leaves, {path: path for path in found}, made)


@dataclasses.dataclass(frozen=True)
class _Concat:
    patterns: tuple[re.Pattern[str], ...]
    new: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"concat({[pattern.pattern for pattern in self.patterns]}, …)"
        groups: dict[str, dict[int, str]] = {}
        for n, pattern in enumerate(self.patterns):
            for path in leaves:
                if match := pattern.fullmatch(path):
                    name = _expanded(functools.partial(match.expand, self.new), self.new)
                    if n in groups.setdefault(name, {}):
                        raise MismatchError(f"{text}: {path} and {groups[name][n]} would both be part {n} of {name}")
                    groups[name][n] = path
        _check_any(groups, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for name, group in groups.items():
            if len(group) != len(self.patterns):
                lacking = next(p.pattern for n, p in enumerate(self.patterns) if n not in group)
                raise MismatchError(
                    f"{text}: nothing matches {lacking!r} for {name}, found only {sorted(group.values())}"
                )
            own = [_array(leaves[group[n]], text) for n in range(len(group))]
            axis = _axis(self.axis, len(own[0].array.shape), text)
            _check_alike(own, text, but=axis)
            made[name] = [(name, joined(own, name, axis))]
        return _replaced(text, leaves, {path: name for name, group in groups.items() for path in group.values()}, made)


def _replaced(
    text: str, leaves: Leaves, members: Mapping[str, str], made: Mapping[str, list[tuple[str, Leaf]]]
) -> Leaves:
    """The leaves with those that are members of something in its place, where the first of them was."""
    out: list[tuple[str, Leaf]] = []
    done: set[str] = set()
    for path, leaf in leaves.items():
        if path not in members:
            out.append((path, leaf))
        elif members[path] not in done:
            done.add(members[path])
            out += made[members[path]]
    return _collected(text, out)


def _collected(text: str, pairs: Sequence[tuple[str, Leaf]]) -> Leaves:
    out: Leaves = {}
    for path, leaf in pairs:
        if path in out:
            raise MismatchError(
                f"{text}: two leaves would be called {path!r}: {out[path].entry.path}, {leaf.entry.path}"
            )
        out[path] = leaf.at(path)
    return out


def _check_any(found: Any, optional: bool, text: str, leaves: Leaves) -> None:
    if not found and not optional:
        shown = ", ".join(list(leaves)[:5]) + (", …" if len(leaves) > 5 else "")
        raise MismatchError(f"{text}: matches none of the {len(leaves)} leaves ({shown}); pass optional=True if it may")


def _array(leaf: Leaf, text: str) -> Leaf:
    if not isinstance(leaf.entry, ArrayEntry):
        raise MismatchError(f"{text}: {leaf.entry.path} is no array but a {leaf.entry.type}; choose a narrower pattern")
    if leaf.entry.type == "key":
        raise MismatchError(f"{text}: {leaf.entry.path} is an array of PRNG keys, which can only be renamed or dropped")
    return leaf


def _check_alike(leaves: Sequence[Leaf], text: str, but: int | None = None) -> None:
    """All have the dtype and shape of the first, but for one axis."""
    first = leaves[0].array
    for leaf in leaves[1:]:
        shapes = [[n for axis, n in enumerate(one.shape) if axis != but] for one in (first, leaf.array)]
        if leaf.array.dtype != first.dtype or shapes[0] != shapes[1]:
            shown = [f"{one.path} {one.dtype}{list(one.shape)}" for one in (first, leaf.array)]
            raise MismatchError(f"{text}: expected arrays of one shape and dtype, found {' and '.join(shown)}")


def _level(glob: str, text: str) -> int:
    parts = glob.split("/")
    if "*" not in parts or "**" in parts[: parts.index("*")]:
        raise MismatchError(f"{text}: expected a '*' in the place of the numbers, with no '**' before it")
    return parts.index("*")


def _axis(axis: int, rank: int, text: str) -> int:
    if not -rank <= axis < rank:
        raise MismatchError(f"{text}: axis {axis} of {rank}")
    return axis % rank


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise MismatchError(f"{pattern!r} is not a regular expression: {error}") from None


def _expanded(expand: Callable[[], str], new: str) -> str:
    try:
        return expand()
    except (re.error, IndexError) as error:
        raise MismatchError(f"{new!r} does not fit the pattern: {error}") from None
