"""Recognizes quantized weights: codes, and the scales and other arrays without which the codes mean nothing.

Each library names and shapes these arrays in its own way, as `quantized_layouts` lists.
"""

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from .entries import ArrayEntry, Entry, LostEntry
from .leaf_paths import join_names
from .quantized_layouts import CODES, FLOATS, LAYOUTS, QuantizedLayout
from .source import Source, full_source
from .units import count
from .views import View

_log = logging.getLogger("treering")

_LEVELS = ("", "/value", "/raw_value", ".value", ".raw_value")  # which some formats write for boxes of Flax


@dataclasses.dataclass(frozen=True)
class Group:
    """The arrays of one quantized weight.

    path: the path of the float weight that they stand for.
    members: their paths by role; ``codes`` is the first.
    missing: the paths of needed members that the checkpoint lacks.
    """

    layout: QuantizedLayout
    path: str
    members: Mapping[str, str]
    missing: tuple[str, ...]

    @property
    def codes(self) -> str:
        """The path of the codes."""
        return self.members["codes"]


class Member(NamedTuple):
    """A leaf of a quantized weight, and what it is there: ``codes``, ``scale`` and so on."""

    group: Group
    role: str


def find_groups(entries: Mapping[str, Entry]) -> list[Group]:
    """Returns the quantized weights among the leaves of a checkpoint, in its order."""
    found = [
        group
        for path, entry in entries.items()
        if _is_array(entry) and entry.dtype in CODES
        if (group := _group_of(path, entries)) is not None
    ]
    others = {path for group in found for role, path in group.members.items() if role != "codes"}
    return [group for group in found if group.codes not in others]


def find_members(source: Source, entries: Mapping[str, Entry]) -> dict[str, Member]:
    """Returns the leaves of a source that are members of quantized weights, by their keys in `entries`.

    entries: the leaves of the source under any names.

    Rules may have renamed the leaves, or left out the rest of the weight. They are members of what the checkpoint has,
    unless a rule has changed the dtype.
    """
    full, base = _levels(source)
    known = {path: Member(group, role) for group in find_groups(base.entries) for role, path in group.members.items()}
    found: dict[str, Member] = {}
    for key, entry in entries.items() if known else ():
        origin = full.source(entry.path) if isinstance(full, View) else entry.path
        member = known.get(origin)
        if member is not None and isinstance(entry, ArrayEntry) and entry.dtype == dtype_of(base.entries[origin]):
            found[key] = member
    return found


def member_roles(source: Source) -> dict[str, str]:
    """Returns what arrays are for quantized weights, such as ``codes (qwix)``, by the paths of their entries."""
    entries = source.entries
    return {
        entries[path].path: f"{role} ({group.layout.name}){_lacks(group.missing)}"
        for path, (group, role) in find_members(source, entries).items()
    }


def _lacks(paths: Collection[str]) -> str:
    names = [path.replace(".", "/").rpartition("/")[2] for path in paths]
    return f" without {' and '.join(names)}" if names else ""


def find_cast_codes(source: Source) -> dict[str, set[str]]:
    """Returns codes that rules have made floats of without the scales, and the other members, by paths of the source.

    A rule that uses the scales, such as `dequantize`, makes weights.
    """
    full, base = _levels(source)
    groups = {group.codes: group for group in find_groups(base.entries)} if isinstance(full, View) else {}
    if not (groups and isinstance(full, View)):
        return {}
    origins = {path: full.source(path) for path in full.entries}
    others = {codes: {*group.members.values()} - {codes} for codes, group in groups.items()}
    return {
        path: {one for one, there in origins.items() if there in others[origin]}
        for path, origin in origins.items()
        if origin in groups
        if dtype_of(full.entries[path]) in FLOATS
        if others[origin].isdisjoint(entry.path for entry, _ in full.origins(path))
    }


def _levels(source: Source) -> tuple[Source, Source]:
    """Returns the complete source that has this one as a part, and the source below all rules."""
    full = full_source(source)
    base = full
    while isinstance(base, View):
        base = full_source(base._reader)
    return full, base


def catalogue(paths: Iterable[str], leaves: Iterable[Any]) -> dict[str, Entry]:
    """Returns entries for the arrays of a live tree or a template."""
    return {
        path: ArrayEntry(path, "jax", leaf.dtype.name, tuple(leaf.shape))
        for path, leaf in zip(paths, leaves, strict=True)
        if hasattr(leaf, "shape") and hasattr(getattr(leaf, "dtype", None), "name")
    }


def dtype_of(entry: Entry) -> str:
    """Returns the dtype of an array, and "" for another leaf."""
    return entry.dtype if isinstance(entry, ArrayEntry) else ""


def warn_of_kept(name: str, groups: Iterable[Group], dtype: object) -> None:
    """Logs the quantized weights whose codes and scales keep their dtypes although another one was asked for."""
    if found := {group.path or "(root)": group.layout.name for group in groups}:
        _log.warning(
            "%s: dtype=%s: codes and scales of %s (%s) keep their dtypes: %s; "
            "tr.rules.dequantize makes floats of known layouts",
            name,
            dtype,
            count(len(found), "quantized weight"),
            ", ".join(dict.fromkeys(found.values())),
            join_names(tuple(found)),
        )


def warn_of_codes(name: str, codes: Collection[str]) -> None:
    """Logs the codes that become numbers because the caller leaves out what gives them their values."""
    _log.warning(
        "%s: without their scales, these codes of quantized weights become plain numbers: %s; "
        "tr.rules.dequantize multiplies them",
        name,
        join_names(tuple(sorted(codes))),
    )


def _is_array(entry: Entry | None) -> TypeGuard[ArrayEntry]:
    """Returns True for an array that can be read and is not a typed key."""
    return isinstance(entry, ArrayEntry) and entry.type != "key" and not isinstance(entry, LostEntry)


def find_misfits(entries: Mapping[str, Entry], groups: Iterable[Group]) -> list[Group]:
    """Returns arrays that have all names of a layout, but not its dtypes or shapes.

    groups: what `find_groups` has found. The misfits are none of them.
    """
    known = {path for group in groups for path in group.members.values()}
    found = [
        group
        for path, entry in entries.items()
        if _is_array(entry) and path not in known
        if (group := _group_of(path, entries, by_name=True)) is not None and known.isdisjoint(group.members.values())
    ]
    # Arrays of other kinds may have such names. They are misfits if they look like codes, or only one library has the
    # names.
    sure = {layout.name for layout in LAYOUTS if layout.certain}
    return [one for one in found if one.layout.name in sure or dtype_of(entries[one.codes]) in CODES]


def _group_of(path: str, entries: Mapping[str, Entry], *, by_name: bool = False) -> Group | None:
    """Returns the group that has a leaf as its codes, or None. Prefers a group with all members.

    by_name: True if only names count, and those of all members must be there.
    """
    incomplete: Group | None = None
    for level in _LEVELS:
        if not path.endswith(level):
            continue
        below = path.removesuffix(level)
        for layout, codes in _ROWS.get(_last_name(below), _ANY_NAME):
            stem = below.removesuffix(codes)
            if not below.endswith(codes) or (stem and codes and codes[0] != "_" and stem[-1] not in "/."):
                continue
            if not (codes or stem) or (by_name and not codes):
                continue
            group = _made(layout, path, stem, level, entries, by_name=by_name)
            if group is not None and not group.missing:
                return group
            incomplete = incomplete or group
    return incomplete


def _last_name(path: str) -> str:
    return path[max(path.rfind("/"), path.rfind(".")) + 1 :]


def _made(
    layout: QuantizedLayout, path: str, stem: str, level: str, entries: Mapping[str, Entry], *, by_name: bool
) -> Group | None:
    """Returns the group of a layout with this stem, or None if dtypes or shapes differ, or too much is missing."""

    def names(end: str) -> Iterable[str]:
        dotted = stem.endswith(".") or (not layout.codes and "." in stem.rpartition("/")[2])
        both = (end.replace("/", "."), end) if dotted else (end, end.replace("/", "."))
        return [f"{stem}{one}{level}" for one in both]

    members, missing = {"codes": path}, []
    for role, end in (*layout.needed.items(), *layout.optional.items()):
        there = next((one for one in names(end) if _is_array(entries.get(one))), None)
        if there is not None:
            members[role] = there
        elif role in layout.needed:
            if by_name or not layout.certain:
                return None
            missing.append(next(iter(names(end))))
    found = {role: entry for role, there in members.items() if isinstance(entry := entries[there], ArrayEntry)}
    if not (by_name or layout.fits(found)):
        return None
    weight = stem + layout.weight if layout.weight else stem.rstrip("/.")
    return Group(layout, weight + level, members, tuple(missing))


# The rows and spellings of codes that a name may be the last part of, in the order of `LAYOUTS`.
_SPELLED = [
    (layout, codes) for layout in LAYOUTS for codes in dict.fromkeys((layout.codes, layout.codes.replace("/", ".")))
]
_ANY_NAME = [(layout, codes) for layout, codes in _SPELLED if codes.startswith("_") or not codes]
_ROWS = {
    name: [(layout, codes) for layout, codes in _SPELLED if _last_name(codes) == name or (layout, codes) in _ANY_NAME]
    for name in {_last_name(codes) for _, codes in _SPELLED}
}
