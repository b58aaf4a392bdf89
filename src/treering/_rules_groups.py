"""Rules that make one leaf of several, or several of one."""

import dataclasses
import functools
import re

from ._paths import matches
from ._rules import Leaves, array, axis_of, check_alike, check_any, expanded, level_of, replaced
from ._views import Leaf, part
from ._views_groups import joined, stacked
from .errors import MismatchError


@dataclasses.dataclass(frozen=True)
class Stack:
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"stack({self.glob!r})"
        level = level_of(self.glob, text)
        groups: dict[str, dict[int, str]] = {}
        for path in leaves:
            if matches(path, self.glob) and (parts := path.split("/"))[level].isdecimal():
                number = int(parts.pop(level))
                groups.setdefault("/".join(parts), {})[number] = path
        check_any(groups, self.optional, text, leaves)
        members = {path: name for name, group in groups.items() for path in group.values()}
        made: dict[str, Leaf] = {}
        for name, group in groups.items():
            if sorted(group) != list(range(len(group))):
                raise MismatchError(f"{text}: expected {name} with the numbers from 0, found {sorted(group)[:5]}…")
            own = [array(leaves[group[n]], text) for n in sorted(group)]
            check_alike(own, text)
            made[name] = stacked(own, name, axis_of(self.axis, len(own[0].array.shape) + 1, text))
        return replaced(text, leaves, members, {name: [(name, leaf)] for name, leaf in made.items()})


@dataclasses.dataclass(frozen=True)
class Unstack:
    glob: str
    axis: int
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"unstack({self.glob!r})"
        level = level_of(self.glob, text)
        parts = self.glob.split("/")
        glob = "/".join(parts[:level] + parts[level + 1 :])
        found = [path for path in leaves if matches(path, glob)]
        check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path in found:
            leaf = array(leaves[path], text)
            axis = axis_of(self.axis, len(leaf.array.shape), text)
            names = path.split("/")
            made[path] = []
            for n in range(leaf.array.shape[axis]):
                name = "/".join([*names[:level], str(n), *names[level:]])
                made[path].append((name, part(leaf, name, axis, n, n + 1, drop_axis=True)))
        return replaced(text, leaves, {path: path for path in found}, made)


@dataclasses.dataclass(frozen=True)
class Split:
    pattern: re.Pattern[str]
    new: tuple[str, ...]
    axis: int
    sizes: tuple[int, ...] | None
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        text = f"split({self.pattern.pattern!r}, …)"
        found = {path: match for path in leaves if (match := self.pattern.fullmatch(path))}
        check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for path, match in found.items():
            leaf = array(leaves[path], text)
            axis = axis_of(self.axis, len(leaf.array.shape), text)
            size = leaf.array.shape[axis]
            sizes = self.sizes or (size // len(self.new),) * len(self.new)
            if sum(sizes) != size or len(sizes) != len(self.new):
                raise MismatchError(
                    f"{text}: {path} has {size} along axis {axis}, which is not {' + '.join(str(n) for n in sizes)}"
                )
            made[path], start = [], 0
            for new, own in zip(self.new, sizes, strict=True):
                name = expanded(functools.partial(match.expand, new), new)
                made[path].append((name, part(leaf, name, axis, start, start + own)))
                start += own
        return replaced(text, leaves, {path: path for path in found}, made)


@dataclasses.dataclass(frozen=True)
class Concat:
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
                    name = expanded(functools.partial(match.expand, self.new), self.new)
                    if n in groups.setdefault(name, {}):
                        raise MismatchError(f"{text}: {path} and {groups[name][n]} would both be part {n} of {name}")
                    groups[name][n] = path
        check_any(groups, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        for name, group in groups.items():
            if len(group) != len(self.patterns):
                lacking = next(p.pattern for n, p in enumerate(self.patterns) if n not in group)
                raise MismatchError(
                    f"{text}: nothing matches {lacking!r} for {name}, found only {sorted(group.values())}"
                )
            own = [array(leaves[group[n]], text) for n in range(len(group))]
            axis = axis_of(self.axis, len(own[0].array.shape), text)
            check_alike(own, text, but=axis)
            made[name] = [(name, joined(own, name, axis))]
        return replaced(text, leaves, {path: name for name, group in groups.items() for path in group.values()}, made)
