"""Rules that change leaves one by one."""

import dataclasses
import functools
import re
from collections.abc import Callable

from ._catalogue import LostEntry
from ._paths import below, matches
from ._rules import Leaves, array, check_any, collected, expanded
from ._views import Leaf


@dataclasses.dataclass(frozen=True)
class Rename:
    pattern: re.Pattern[str]
    new: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = [path for path in leaves if self.pattern.search(path)]
        check_any(found, self.optional, f"rename({self.pattern.pattern!r}, …)", leaves)
        return collected(
            f"rename({self.pattern.pattern!r}, {self.new!r})",
            [
                (expanded(functools.partial(self.pattern.sub, self.new, path), self.new), leaf)
                for path, leaf in leaves.items()
            ],
        )


@dataclasses.dataclass(frozen=True)
class Drop:
    glob: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = {path for path in leaves if matches(path, self.glob)}
        check_any(found, self.optional, f"drop({self.glob!r})", leaves)
        return {path: leaf for path, leaf in leaves.items() if path not in found}


@dataclasses.dataclass(frozen=True)
class Copy:
    src: str
    dst: str
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = [(rest, leaf) for path, leaf in leaves.items() if (rest := below(path, self.src)) is not None]
        check_any(found, self.optional, f"copy({self.src!r}, …)", leaves)
        copies = [(f"{self.dst}/{rest}" if rest else self.dst, leaf) for rest, leaf in found]
        return collected(f"copy({self.src!r}, {self.dst!r})", [*leaves.items(), *copies])


@dataclasses.dataclass(frozen=True)
class Each:
    text: str
    glob: str
    change: Callable[[Leaf], Leaf]
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        found = {path for path in leaves if matches(path, self.glob)}
        check_any(found, self.optional, self.text, leaves)
        # One that cannot be read stays what it is: an error for those who ask for it.
        found = {path for path in found if not isinstance(leaves[path].entry, LostEntry)}
        return {path: self.change(array(leaf, self.text)) if path in found else leaf for path, leaf in leaves.items()}
