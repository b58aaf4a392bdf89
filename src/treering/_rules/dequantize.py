"""Implements the rule that makes float weights of quantized ones; see `treering._core.quantized`."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core.describe import describe_entry
from .._core.entries import is_absent
from .._core.leaf_paths import find_globs, join_names, parent_paths
from .._core.quantized import find_groups, find_misfits
from .._core.source import Source
from .._core.views import Leaf
from ..errors import MismatchError
from .base import Leaves, check_any, check_known, replace_groups
from .quantized_weight import QuantizedWeight, deciding

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger("treering")


@dataclasses.dataclass(frozen=True)
class Dequantize:
    glob: str
    dtype: str | None
    config: Mapping[str, Any]
    optional: bool

    def apply(self, leaves: Leaves) -> Leaves:
        return self.apply_to(leaves, None)

    def apply_to(self, leaves: Leaves, source: Source | None) -> Leaves:
        text = f"dequantize({self.glob!r})"
        check_known(leaves, text, self.glob)
        entries = {path: leaf.entry for path, leaf in leaves.items()}
        groups = find_groups(entries)
        globs = find_globs(self.glob, [*leaves, *(group.path for group in groups)], text)
        for group in find_misfits(entries, groups):
            if globs.match(group.path):
                shown = ", ".join(f"{path} {describe_entry(entries[path])}" for path in group.members.values())
                raise MismatchError(
                    f"{text}: {group.path}: expected dtypes and shapes of {group.layout.name}, found {shown}; the "
                    "files are damaged or of another release. A glob that does not match it leaves it as it is"
                )
        found = [group for group in groups if globs.match(group.path)]
        check_any(found, self.optional, text, leaves)
        made: dict[str, list[tuple[str, Leaf]]] = {}
        names = deciding(found, leaves, text)
        values = dict(zip(names, _read([names[name] for name in names], source, text), strict=True))
        for group in found:
            if group.path in made:
                both = [one.codes for one in found if one.path == group.path]
                raise MismatchError(
                    f"{text}: {' and '.join(both)} would both be {group.path}; drop one by a rule before"
                )
            weight = QuantizedWeight(group, leaves, source, values, self.dtype, self.config, text).made()
            made[group.path] = [(group.path, weight.at(group.path))]
        dropped = [path for group in found for role, path in group.members.items() if role == "activation"]
        if dropped:
            _log.info("%s: left out with their weights: %s", text, join_names(tuple(dropped)))
        members = {path: group.path for group in found for path in group.members.values()}
        rest = {path: leaf for path, leaf in leaves.items() if path in members or not _is_void(path, leaf, made)}
        return replace_groups(text, rest, members, made)


def _is_void(path: str, leaf: Leaf, made: Mapping[str, Any]) -> bool:
    """Returns True for a member that a weight does not have, such as a zero point that is None."""
    return is_absent(leaf.entry) and any(above in made for above in parent_paths(path))


def _read(leaves: Sequence[Leaf], source: Source | None, text: str) -> "Iterator[np.ndarray]":
    """Reads leaves now, all together."""
    if leaves and source is None:
        raise MismatchError(f"{text}: {leaves[0].entry.path} can only be read from an open checkpoint")
    plans = [leaf.plan_of(tuple((0, size) for size in leaf.array.shape)) for leaf in leaves]
    arrays = iter(source.read([need for plan in plans for need in plan.needs]) if source and leaves else ())
    for plan in plans:
        yield plan.make([next(arrays) for _ in plan.needs])
