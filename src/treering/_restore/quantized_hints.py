"""Says what to do if only one of checkpoint and template is quantized, and keeps codes from becoming floats.

No hint here leaves out a part of a quantized weight: codes mean nothing without their scales, and a template that keeps
its own weights has random ones.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .._core import dtypes
from .._core.describe import describe_entry
from .._core.entries import ArrayEntry, Entry
from .._core.quantized import Group, Member, catalogue, find_groups
from .._core.units import count
from .._pytree.variable_levels import find_levels
from .._pytree.walk import FlatTree
from ..errors import Difference
from .leaf_targets import LeafMismatch, leaf_text

_DEFAULT_DTYPE = "bfloat16"  # of the floats that a hint proposes, if the template does not say
_QUANTIZE = "restore into the template of the float model, and quantize that as the program does"


def dtype_of_member(leaf: Any, entry: Entry, member: Member, asked: Any) -> Any:
    """Returns the `dtype` argument that counts for a member of a quantized weight.

    asked: the argument of the restore. It does not apply to codes. Other members have the template's dtype then.

    Raises `LeafMismatch` if the leaf has floats for codes, because only together with a scale they mean numbers.
    """
    want = getattr(leaf, "dtype", None)
    if (
        member.role == "codes"
        and isinstance(entry, ArrayEntry)
        and isinstance(want, np.dtype)
        and dtypes.is_float(want)
        and want.name != entry.dtype
    ):
        raise LeafMismatch(leaf_text(leaf), describe_entry(entry), _hint_for(member, want.name))
    return None if asked is None else "template"


def _hint_for(member: Member, dtype: str) -> str:
    """Returns the hint for a member of the checkpoint where the template has floats or nothing."""
    kind = f"quantized weight ({member.group.layout.name})"
    if member.group.missing:
        ends = " and ".join(repr(path) for path in member.group.missing)
        return f"this is the {member.role} of a {kind} whose {ends} the checkpoint lacks; get a complete copy of it"
    what = f"these are codes of a {kind}, which need their scale" if member.role == "codes" else (
        f"this is the {member.role} of a {kind}, which it must not be read without"
    )  # fmt: skip
    return f"{what}; rules=[{dequantize_text(dtype)}] makes floats of both"


def dequantize_text(dtype: str) -> str:
    """Returns the rule that makes floats of all quantized weights, as the user would write it."""
    return f"tr.rules.dequantize('**', {dtype!r})"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The quantized weights of a checkpoint and of a template, under the paths of the template.

    saved, wanted: all of them.
    only_saved, only_wanted: those that the other side does not have in the same layout.
    dtype: that of the floats which the template has for them.
    """

    saved: Sequence[Group]
    wanted: Sequence[Group]
    only_saved: Sequence[Group]
    only_wanted: Sequence[Group]
    dtype: str

    @classmethod
    def of(cls, flat_tree: FlatTree, entries: Mapping[str, Entry], written: Iterable[str] = ()) -> "Mixture":
        """Compares a template with the leaves of a checkpoint.

        written: the paths of the leaves in the checkpoint, which may have levels for boxes that `entries` lack.
        """
        template = catalogue(flat_tree.paths, flat_tree.leaves)
        saved, wanted = find_groups(entries), find_groups(template)
        levels = find_levels(flat_tree.paths, flat_tree.boxes, {*written, *(group.path for group in saved)})
        names = {there: path for path, there in levels.items()}
        saved = [dataclasses.replace(group, path=names.get(group.path, group.path)) for group in saved]
        found = Counter(entry.dtype for group in saved if (entry := _float_at(template, group)) is not None)
        return cls(
            saved,
            wanted,
            _not_among(saved, wanted, template),
            _not_among(wanted, saved, entries),
            found.most_common(1)[0][0] if found else _DEFAULT_DTYPE,
        )

    @property
    def differs(self) -> bool:
        """True if only one side is quantized, or both in different layouts."""
        return bool(self.only_saved or self.only_wanted)

    def text(self) -> str:
        """Returns what differs, without what to do."""
        if not self.only_saved:
            return f"the template is quantized ({_listed(self.only_wanted)}), and the checkpoint has floats there"
        own = f"the checkpoint is quantized ({_listed(self.only_saved)})"
        if self.only_wanted:
            return f"{own}, and the template in another layout ({_listed(self.only_wanted)})"
        return f"{own}, and the template has floats there"

    def cause(self, fix: str, refusal: str) -> str:
        """Returns the likely cause, with what to do.

        fix: the arguments that make floats of all weights, if they do.
        refusal: the reason why that is not possible, or "".
        """
        if not self.only_saved:
            return f"{self.text()}: {_QUANTIZE}"
        if lacks := [path for group in self.only_saved for path in group.missing]:
            return f"{self.text()}; the checkpoint lacks {lacks[0]!r}, so the codes mean nothing: get a complete copy"
        if refusal:
            return f"{self.text()}: make floats of it with the library that wrote it ({refusal})"
        return f"{self.text()}: {f'{_QUANTIZE}, with ' if self.only_wanted else ''}{fix}"

    def with_hints(self, differences: Iterable[Difference]) -> list[Difference]:
        """Returns the differences. The hints of those that concern quantized weights do not take them apart."""
        members = {path: Member(group, role) for group in self.saved for role, path in group.members.items()}
        floats = {group.path: group for group in self.only_saved}
        wanted = {path: Member(group, role) for group in self.wanted for role, path in group.members.items()}
        lacking = {path for group in self.saved for path in group.missing}
        changed: list[Difference] = []
        for one in differences:
            if one.path in members:
                hint = _hint_for(members[one.path], self.dtype)
                if one.path in wanted and not self.differs:
                    hint = f"these are the {wanted[one.path].role} of a quantized weight, which must be those saved"
            elif one.path in floats:
                hint = f"the checkpoint has it quantized; rules=[{dequantize_text(self.dtype)}] makes floats"
            elif one.path in lacking:
                hint = "the codes in the checkpoint mean nothing without it; get a complete copy of it"
            elif one.path in wanted or any(group.path == one.path for group in self.only_wanted):
                hint = _QUANTIZE
            else:
                changed.append(one)
                continue
            changed.append(one._replace(hint=hint))
        return changed

    def takes_apart(self, used: set[str], left_out: Iterable[str]) -> bool:
        """Returns True if a change would leave out a member of a weight of the checkpoint.

        used: the leaves of the checkpoint that are restored.
        left_out: the leaves that the caller leaves out anyway.
        """
        left_out = set(left_out)
        return any(path not in used and path not in left_out for group in self.saved for path in group.members.values())


def _not_among(groups: Sequence[Group], others: Sequence[Group], entries: Mapping[str, Entry]) -> list[Group]:
    """Returns the groups that the other side does not have.

    Under other names it may have them, unless it has the float weight, or no weight in this layout.

    entries: the leaves of the other side.
    """
    layouts = {group.layout.name for group in others}
    known = {(group.codes, group.layout.name) for group in others}
    return [
        group
        for group in groups
        if (group.codes, group.layout.name) not in known
        and (group.layout.name not in layouts or _float_at(entries, group) is not None)
    ]


def _float_at(entries: Mapping[str, Entry], group: Group) -> ArrayEntry | None:
    """Returns the array of floats that a tree has for a quantized weight, if it has one."""
    entry = entries.get(group.path)
    known = isinstance(entry, ArrayEntry) and entry.type != "key" and entry.dtype.startswith(("float", "bfloat"))
    return entry if known and isinstance(entry, ArrayEntry) else None


def _listed(groups: Sequence[Group]) -> str:
    names = ", ".join(dict.fromkeys(group.layout.name for group in groups))
    return f"{names}: {count(len(groups), 'weight')}, such as {groups[0].path or '(root)'!r}"
