"""Implements the rules that change leaves one by one."""

import dataclasses
import functools
import re
from collections.abc import Callable

from .._core.entries import LostEntry, glob_covers, is_absent, is_unreadable_tree
from .._core.leaf_paths import find_globs, find_path, relative_to
from .._core.skeleton import places
from .._core.views import Leaf
from .base import Leaves, check_any, check_known, collect_leaves, expand_pattern, matching_paths, require_array


@dataclasses.dataclass(frozen=True)
class Rename:
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
        check_any(matching_paths(leaves, self.glob), self.optional, f"drop({self.glob!r})", leaves)
        globs = find_globs(self.glob, leaves)
        return {path: leaf for path, leaf in leaves.items() if not glob_covers(path, leaf.entry, globs)}


@dataclasses.dataclass(frozen=True)
class Copy:
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
        fit = matching_paths(leaves, self.glob)
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
