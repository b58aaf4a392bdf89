"""Implements the rules that change leaves one by one, make one leaf of several, or several of one."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._core import dtypes
from .._core.entries import ArrayEntry, Entry, LostEntry, glob_covers, is_absent, is_unreadable_tree, visible_shape
from .._core.leaf_paths import find_globs, find_path, has_wildcards, matches_exactly, relative_to
from .._core.skeleton import places
from .._core.views import Leaf, part
from .._core.views_groups import joined, mapped, reshaped, stacked
from .._core.views_quantized import Step, scaled
from ..errors import MismatchError
from .base import (
    Leaves,
    TextFields,
    axis_of,
    check_alike,
    check_any,
    check_known,
    collect_leaves,
    expand_pattern,
    first_if_no_arrays,
    level_of,
    matching_paths,
    replace_groups,
    require_array,
)

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class Stack(TextFields):
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"stack({self.glob!r})"
        level = level_of(self.glob, text)
        check_known(leaves, text, self.glob)
        groups: dict[str, dict[int, str]] = {}
        for path in leaves:
            if matches_exactly(path, self.glob) and (parts := path.split("/"))[level].isdecimal():
                number = int(parts.pop(level))
                groups.setdefault("/".join(parts), {})[number] = path
        check_any(groups, self.optional, text, leaves)
        members = {path: name for name, group in groups.items() for path in group.values()}
        made: dict[str, Leaf] = {}
        for name, group in groups.items():
            if sorted(group) != list(range(len(group))):
                raise MismatchError(f"{text}: expected {name} with numbers from 0, found {sorted(group)[:5]}…")
            if none := first_if_no_arrays(leaves[path] for path in group.values()):
                made[name] = none
                continue
            own = [require_array(leaves[group[n]], text, or_keys=True) for n in sorted(group)]
            check_alike(own, text)
            made[name] = stacked(own, name, axis_of(self.axis, len(visible_shape(own[0].array)) + 1, text))
        return replace_groups(text, leaves, members, {name: [(name, leaf)] for name, leaf in made.items()})


@dataclasses.dataclass(frozen=True)
class Unstack(TextFields):
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"unstack({self.glob!r})"
        level = level_of(self.glob, text)
        parts = self.glob.split("/")
        glob = "/".join(parts[:level] + parts[level + 1 :])
        check_known(leaves, text, glob)
        found = [path for path in leaves if matches_exactly(path, glob)]
        check_any(found, self.optional, text, leaves)
        absent = [path for path in found if has_wildcards(glob) and is_absent(leaves[path].entry)]
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path in found:
            if path in absent:
                continue
            leaf = require_array(leaves[path], text, or_keys=True)
            axis = axis_of(self.axis, len(visible_shape(leaf.array)), text)
            made[path] = [
                (name, part(leaf, name, axis, n, n + 1, drop_axis=True))
                for n, name in enumerate(_numbered(path, level, leaf.array.shape[axis]))
            ]
        most = max(map(len, made.values()), default=1)
        made.update({path: [(name, leaves[path]) for name in _numbered(path, level, most)] for path in absent})
        return replace_groups(text, leaves, {path: path for path in found}, made)


def _numbered(path: str, level: int, count: int) -> list[str]:
    """Returns `count` paths, with the numbers from 0 inserted at a level of a path."""
    names = path.split("/")
    return ["/".join([*names[:level], str(n), *names[level:]]) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class Split:
    pattern: re.Pattern[str]
    new: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"split({self.pattern.pattern!r}, …)"
        check_known(leaves, text)
        found = {path: match for path in leaves if (match := self.pattern.fullmatch(path))}
        check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path, match in found.items():
            if is_absent(leaves[path].entry) and path != self.pattern.pattern:
                made[path] = [
                    (expand_pattern(functools.partial(match.expand, new), new), leaves[path]) for new in self.new
                ]
                continue
            leaf = require_array(leaves[path], text, or_keys=True)
            axis = axis_of(self.axis, len(visible_shape(leaf.array)), text)
            size = leaf.array.shape[axis]
            sizes = self.sizes or (size // len(self.new),) * len(self.new)
            if sum(sizes) != size or len(sizes) != len(self.new):
                raise MismatchError(
                    f"{text}: {path} has {size} along axis {axis}, which is not {' + '.join(str(n) for n in sizes)}"
                )
            made[path], start = [], 0
            for new, own in zip(self.new, sizes, strict=True):
                name = expand_pattern(functools.partial(match.expand, new), new)
                made[path].append((name, part(leaf, name, axis, start, start + own)))
                start += own
        return replace_groups(text, leaves, {path: path for path in found}, made)


@dataclasses.dataclass(frozen=True)
class Concat(TextFields):
    patterns: tuple[re.Pattern[str], ...]
    new: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"concat({[pattern.pattern for pattern in self.patterns]}, …)"

        def make(name: str, own: Sequence[Leaf]) -> Leaf:
            axis = axis_of(self.axis, len(visible_shape(own[0].array)), text)
            check_alike(own, text, but=axis)
            return joined(own, name, axis)

        return _grouped(self.patterns, self.new, make, leaves, text, self.optional, or_keys=True)


@dataclasses.dataclass(frozen=True)
class Combine(TextFields):
    patterns: tuple[re.Pattern[str], ...]
    new: str
    function: "Callable[..., np.ndarray]"
    shape: tuple[int, ...] | None
    dtype: str | None
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        def make(name: str, own: Sequence[Leaf]) -> Leaf:
            first = own[0].array
            shape = first.shape if self.shape is None else self.shape
            return mapped(own, name, self.function, shape, self.dtype or first.dtype, "pass shape= and dtype=")

        text = f"combine({[pattern.pattern for pattern in self.patterns]}, …)"
        return _grouped(self.patterns, self.new, make, leaves, text, self.optional)


def _grouped(
    patterns: Sequence[re.Pattern[str]],
    new: str,
    make: Callable[[str, Sequence[Leaf]], Leaf],
    leaves: Leaves,
    text: str,
    optional: bool,
    *,
    or_keys: bool = False,
) -> Leaves:
    """Returns the leaves with one leaf for each group. The leaves of a group match the patterns, one leaf per
    pattern, and expand `new` to the same path.
    """
    check_known(leaves, text)
    groups: dict[str, dict[int, str]] = {}
    for n, pattern in enumerate(patterns):
        for path in leaves:
            if match := pattern.fullmatch(path):
                name = expand_pattern(functools.partial(match.expand, new), new)
                if n in groups.setdefault(name, {}):
                    raise MismatchError(f"{text}: {path} and {groups[name][n]} would both be part {n} of {name}")
                groups[name][n] = path
    check_any(groups, optional, text, leaves)
    made: dict[str, list[tuple[str, Leaf]]] = {}
    for name, group in groups.items():
        if len(group) != len(patterns):
            pattern = next(p.pattern for n, p in enumerate(patterns) if n not in group)
            raise MismatchError(f"{text}: nothing matches {pattern!r} for {name}, found only {sorted(group.values())}")
        own = [leaves[group[n]] for n in range(len(group))]
        none = first_if_no_arrays(own) if list(group.values()) != [pattern.pattern for pattern in patterns] else None
        made[name] = [(name, none or make(name, [require_array(leaf, text, or_keys=or_keys) for leaf in own]))]
    return replace_groups(text, leaves, {path: name for name, group in groups.items() for path in group.values()}, made)


@dataclasses.dataclass(frozen=True)
class Scale(TextFields):
    pattern: re.Pattern[str]
    scale: str
    dtype: str
    block: tuple[int, ...] | None
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"scale({self.pattern.pattern!r}, {self.scale!r}, …)"
        check_known(leaves, text)
        wanted = {
            path: expand_pattern(functools.partial(match.expand, self.scale), self.scale)
            for path in leaves
            if (match := self.pattern.fullmatch(path))
        }
        found = {path: scale for path, scale in wanted.items() if scale in leaves}
        check_any(found, self.optional, text, leaves)
        scales = set(found.values())
        for path, scale in wanted.items():
            if path in scales and path in found:
                raise MismatchError(f"{text}: {path} is a scale, and has the scale {scale}; choose a narrower pattern")
            if path not in scales and path not in found and _is_quantized(leaves[path].entry):
                raise MismatchError(f"{text}: {path} has one byte per element, and there is no {scale} to scale it by")
        made = {
            path: self._made(require_array(leaves[path], text), require_array(leaves[scale], text), text)
            for path, scale in found.items()
        }
        return {path: made.get(path, leaf) for path, leaf in leaves.items() if path not in scales}

    def _made(self, leaf: Leaf, scale: Leaf, text: str) -> Leaf:
        for one in (leaf.array, scale.array):
            if not _fits_float32(dtypes.to_numpy(one.dtype)):
                raise MismatchError(
                    f"{text}: {one.path} is {one.dtype}, which float32 cannot hold exactly; cast it before"
                )
        shape, found = leaf.array.shape, scale.array.shape
        if self.block is None and math.prod(found) == 1:
            found = (1,) * len(shape)
            scale = reshaped(scale, found)
        if self.block is None:
            expected = "one scale, or along each axis the size 1 or the size of the array"
            fits = len(found) == len(shape) and all(own in (1, n) for own, n in zip(found, shape, strict=True))
            block = tuple(max(n, 1) if own == 1 else 1 for own, n in zip(found, shape, strict=False))
        else:
            expected = f"a scale for each block of {list(self.block)}"
            block = self.block
            fits = len(block) == len(shape) and found == tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        if not fits:
            raise MismatchError(
                f"{text}: {leaf.entry.path} has the shape {list(shape)} and its scale, {scale.entry.path}, "
                f"{list(found)}; expected {expected}: pass block=, or reshape the scale by a rule before"
            )
        return scaled(leaf, [Step("multiply", scale, block)], self.dtype, may_overflow=False)


def _is_quantized(entry: Entry) -> bool:
    """Returns True if an entry is an array with one byte per element, which probably needs a scale."""
    if not isinstance(entry, ArrayEntry) or isinstance(entry, LostEntry) or entry.type == "key":
        return False
    dtype = dtypes.to_numpy(entry.dtype)
    return dtype.itemsize == 1 and (dtypes.is_float(dtype) or dtypes.is_integer(dtype))


def _fits_float32(dtype: "np.dtype[Any]") -> bool:
    """Returns True if float32 can hold all values of a dtype."""
    import numpy as np

    return (dtype.itemsize <= 2 and dtypes.is_integer(dtype)) or dtypes.widens(dtype, np.dtype(np.float32))


@dataclasses.dataclass(frozen=True)
class Rename(TextFields):
    pattern: re.Pattern[str]
    new: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        check_known(leaves, f"rename({self.pattern.pattern!r}, …)")
        found = [path for path in leaves if self.pattern.search(path)]
        check_any(found, self.optional, f"rename({self.pattern.pattern!r}, …)", leaves)
        return collect_leaves(
            f"rename({self.pattern.pattern!r}, {self.new!r})",
            [
                (expand_pattern(functools.partial(self.pattern.sub, self.new, path), self.new), leaf)
                for path, leaf in leaves.items()
            ],
        )


@dataclasses.dataclass(frozen=True)
class Drop:
    glob: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"drop({self.glob!r})"
        check_any(matching_paths(leaves, self.glob, text), self.optional, text, leaves)
        globs = find_globs(self.glob, leaves)
        return {path: leaf for path, leaf in leaves.items() if not glob_covers(path, leaf.entry, globs)}


@dataclasses.dataclass(frozen=True)
class Copy(TextFields):
    src: str
    dst: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        src = find_path(self.src, places(leaves))
        found = [(rest, leaf) for path, leaf in leaves.items() if (rest := _copied(path, leaf, src)) is not None]
        check_any(found, self.optional, f"copy({self.src!r}, …)", leaves)
        copies = [(f"{self.dst}/{rest}" if rest else self.dst, leaf) for rest, leaf in found]
        return collect_leaves(f"copy({self.src!r}, {self.dst!r})", [*leaves.items(), *copies])


@dataclasses.dataclass(frozen=True)
class Each:
    text: str
    glob: str
    change: Callable[[Leaf], Leaf]
    optional: bool
    or_keys: bool = False

    def apply(self, leaves: Leaves) -> Leaves:
        fit = matching_paths(leaves, self.glob, self.text)
        # Leaves without data are skipped if a wildcard matches them. A rule that names such a leaf itself is a mistake.
        named = find_globs(self.glob, leaves)
        arrays = [path for path in fit if path in named or not is_absent(leaves[path].entry)]
        fit = arrays or ([] if self.optional else fit)
        check_any(fit, self.optional, self.text, leaves)
        # A damaged leaf stays as it is: reading it raises an error that says why.
        found = {path for path in fit if not isinstance(leaves[path].entry, LostEntry)}
        return {
            path: self.change(require_array(leaf, self.text, or_keys=self.or_keys)) if path in found else leaf
            for path, leaf in leaves.items()
        }


def _copied(path: str, leaf: Leaf, source: str) -> str | None:
    """Returns the path of a leaf relative to the copied `source`, or None if the leaf is not in it."""
    if is_unreadable_tree(leaf.entry) and relative_to(source, path) is not None:
        return ""  # The source is somewhere in this damaged part, so the copy is damaged too.
    return relative_to(path, source)
