"""Says what to do if only one of checkpoint and template is quantized, and keeps codes from becoming floats.

No hint here leaves out a part of a quantized weight: codes mean nothing without their scales, and a template that keeps
its own weights has random ones.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._core import dtypes, views
from .._core.describe import NOTHING, describe_entry
from .._core.entries import ArrayEntry, Entry
from .._core.quantized import Group, Member, catalogue, find_groups
from .._core.source import Source, full_source
from .._core.units import count
from .._pytree.variable_levels import find_levels
from .._pytree.walk import FlatTree
from .._rules.base import Rule, apply
from ..errors import Difference, TreeringError
from .leaf_targets import LeafMismatch, leaf_text
from .suggestion import RuleCall

_COMPLETE = "get a complete copy of it"
_TOGETHER = "make floats of it, or use the template of the quantized model"
_SAME_LAYOUT = "put the dtypes and shapes that were saved into the template"
_LEAVES_OUT = "extra='ignore' leaves out both"
_NARROWS = re.compile("dtype='template'")
_QUANTIZE = "restore into the template of the float model, and quantize that as the program does"


def dtype_of_member(leaf: Any, entry: Entry, member: Member, asked: Any) -> Any:
    """Returns the `dtype` argument for a member of a quantized weight.

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
        raise LeafMismatch(
            leaf_text(leaf),
            describe_entry(entry),
            _hint_for(member, _makes_floats(_dequantize(want.name))),
        )
    return None if asked is None else "template"


def _hint_for(member: Member, fix: str) -> str:
    """Returns the hint for a member of the checkpoint where the template has floats or nothing."""
    what = f"{member.role} of a quantized weight ({member.group.layout.name})"
    if member.group.missing:
        return f"{what} whose {' and '.join(map(repr, member.group.missing))} the checkpoint lacks; {_COMPLETE}"
    return f"{what}, of no use without its {'scale' if member.role == 'codes' else 'codes'}; {fix}"


def _dequantize(dtype: str) -> RuleCall:
    """Returns the rule that makes floats of a dtype, or of that of the scales, of all quantized weights."""
    return RuleCall.of("dequantize", "**", *filter(None, [dtype]))


def _makes_floats(call: RuleCall) -> str:
    return f"rules=[{call.text}] makes floats of both"


class Attempt(NamedTuple):
    """What the rule that makes floats of quantized weights makes of a checkpoint.

    entries: the leaves then, or None if the rule fails or was not tried.
    refusal: why it fails.
    """

    call: RuleCall | None = None
    entries: Mapping[str, Entry] | None = None
    refusal: str = ""


def dequantized(source: Source, entries: Mapping[str, Entry], rule: Rule) -> Mapping[str, Entry]:
    """Returns what the leaves of a source are after a rule. It may read small arrays, which say shapes."""
    leaves = apply([rule], views.plain_leaves(entries), full_source(source))
    return {path: leaf.entry for path, leaf in leaves.items()}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The quantized weights of a checkpoint and of a template, under the paths of the template.

    saved, wanted: all of them.
    only_saved, only_wanted: those that the other side does not have in the same layout.
    unused: those of the checkpoint that a template does not want, although all that it wants is there.
    dtype: that of the floats which the template has for them, or has at all; "" if there are none, or several dtypes.
    """

    saved: Sequence[Group]
    wanted: Sequence[Group]
    only_saved: Sequence[Group]
    only_wanted: Sequence[Group]
    unused: Sequence[Group]
    dtype: str

    @classmethod
    def of(
        cls,
        flat_tree: FlatTree,
        entries: Mapping[str, Entry],
        written: Iterable[str],
        differences: Sequence[Difference],
    ) -> "Mixture":
        """Compares a template with the leaves of a checkpoint.

        written: the paths of the leaves in the checkpoint, which may have levels for boxes that `entries` lack.
        """
        more = {one.path for one in differences if one.expected == NOTHING}
        is_filled = len(more) == len(differences)
        template = catalogue(flat_tree.paths, flat_tree.leaves)
        saved, wanted = find_groups(entries), find_groups(template)
        levels = find_levels(flat_tree.paths, flat_tree.boxes, {*written, *(group.path for group in saved)})
        names = {there: path for path, there in levels.items()}
        saved = [dataclasses.replace(group, path=names.get(group.path, group.path)) for group in saved]
        unused = [group for group in saved if is_filled and more.issuperset(group.members.values())]
        rest = [group for group in saved if group not in unused]
        found = {entry.dtype for group in saved if (entry := _float_at(template, group.path)) is not None}
        found = found or {entry.dtype for path in template if (entry := _float_at(template, path)) is not None}
        return cls(
            saved,
            wanted,
            _not_among(rest, wanted, template),
            _not_among(wanted, saved, entries),
            unused,
            next(iter(found)) if len(found) == 1 else "",
        )

    @property
    def differs(self) -> bool:
        """True if only one side is quantized, or both in different layouts."""
        return bool(self.only_saved or self.only_wanted)

    def text(self) -> str:
        """Returns what differs, without what to do."""
        if not self.only_saved:
            return f"the template is quantized ({_listed(self.only_wanted)}), and the checkpoint is not"
        own = f"the checkpoint is quantized ({_listed(self.only_saved)})"
        if self.only_wanted:
            return f"{own}, and the template in another layout ({_listed(self.only_wanted)})"
        return f"{own}, and the template is not"

    def attempt(self, change: Callable[[Rule], Mapping[str, Entry]]) -> Attempt:
        """Tries to make floats of the weights that only the checkpoint has quantized."""
        if not self.only_saved or any(group.missing for group in self.only_saved):
            return Attempt()
        call = _dequantize(self.dtype)
        try:
            return Attempt(call, change(call.rules[0]))
        except TreeringError as error:
            return Attempt(call, refusal=str(error).partition("\n")[0])

    def cause(self, fix: str, refusal: str) -> str:
        """Returns the likely cause, with what to do.

        fix: the arguments that make floats of all weights, if they do.
        refusal: the reason why that is not possible, or "".
        """
        if not self.only_saved:
            return f"{self.text()}: {_QUANTIZE}"
        if lacks := [path for group in self.only_saved for path in group.missing]:
            return f"{self.text()}; the checkpoint lacks {lacks[0]!r}, so the codes mean nothing: {_COMPLETE}"
        if refusal:
            return f"{self.text()}: tr.rules.{refusal}"
        return f"{self.text()}: {f'{_QUANTIZE}, with ' if self.only_wanted else ''}{fix}"

    def with_hints(self, differences: Iterable[Difference], attempt: Attempt) -> list[Difference]:
        """Returns the differences. The hints of those that concern quantized weights do not take them apart."""
        fix = _TOGETHER if attempt.call is None or attempt.entries is None else _makes_floats(attempt.call)
        hints = {
            **{path: _QUANTIZE for group in self.wanted for path in (group.path, *group.members.values())},
            **{group.path: f"the checkpoint has it quantized; {fix}" for group in self.only_saved},
            **{path: f"codes mean nothing without it; {_COMPLETE}" for group in self.saved for path in group.missing},
            **{
                path: _hint_for(
                    Member(group, role),
                    _LEAVES_OUT if group in self.unused else fix if group in self.only_saved else _SAME_LAYOUT,
                )
                for group in self.saved
                for role, path in group.members.items()
            },
        }
        # The other side may have the float weights under other names.
        names = {
            **{_last_name(group.path): _QUANTIZE for group in self.only_wanted},
            **{_last_name(group.path): f"the checkpoint may have it quantized; {fix}" for group in self.only_saved},
        }
        changed: list[Difference] = []
        for one in differences:
            hint = hints.get(one.path) or (names.get(_last_name(one.path)) if NOTHING in one[1:3] else None)
            changed.append(one if hint is None or _NARROWS.match(one.hint) else one._replace(hint=hint))
        return changed


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
        and (group.layout.name not in layouts or _float_at(entries, group.path) is not None)
    ]


def _float_at(entries: Mapping[str, Entry], path: str) -> ArrayEntry | None:
    """Returns the array of floats that a tree has at a path, if it has one."""
    entry = entries.get(path)
    if isinstance(entry, ArrayEntry) and entry.type != "key" and entry.dtype.startswith(("float", "bfloat")):
        return entry
    return None


def _last_name(path: str) -> str:
    return re.split("[/.]|~1", path)[-1]


def _listed(groups: Sequence[Group]) -> str:
    names = ", ".join(dict.fromkeys(group.layout.name for group in groups))
    return f"{names}: {count(len(groups), 'weight')}, such as {groups[0].path or '(root)'!r}"
