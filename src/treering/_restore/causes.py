"""The likely cause of the differences between a checkpoint and a template, and the arguments that fix it.

A suggestion is tried before it is made: the rules are applied to the checkpoint's names and shapes, and the result is
compared with the template again.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .. import rules
from .._core import views
from .._core.describe import NOTHING
from .._core.entries import Entry
from .._core.leaf_paths import below, few, matches
from .._core.skeleton import Skeleton, subtree
from .._pytree.walk import Walk
from .._rules.base import Rule, apply
from ..errors import Difference, TreeringError
from . import positions

if TYPE_CHECKING:
    from .match import Policy

_SAMPLE = 8  # missing leaves that are compared with all others
_MAX_COMPARED_LEAVES = 5000  # other leaves that they are compared with
_TRIED = 6  # suggestions of a kind
_ENOUGH = 0.1  # of the differences may be left
_NUMBER = re.compile(r"\d+")

Compare = Callable[[Walk, Mapping[str, Entry], Skeleton | None, "Policy"], tuple[Any, bool, Sequence[Difference]]]


class _Array(NamedTuple):
    """Stands for an array of the template, where it has only a shape."""

    shape: tuple[int, ...]
    dtype: Any


class _Call(NamedTuple):
    """A rule and how it is written."""

    text: str
    rule: Rule

    @classmethod
    def of(cls, name: str, *values: str) -> "_Call":
        written = [f"r{value!r}".replace("\\\\", "\\") if "\\" in value else repr(value) for value in values]
        return cls(f"tr.rules.{name}({', '.join(written)})", getattr(rules, name)(*values))


@dataclasses.dataclass(frozen=True)
class _Cause:
    """A possible cause, and the arguments that fix it."""

    text: str
    at: str = ""
    rules: tuple[_Call, ...] = ()
    missing: str = ""
    extra: str = ""
    dtype: str | None = None

    def arguments(self, policy: "Policy") -> str:
        """The arguments as the user would write them, with those that were given already."""
        given = {}
        if self.at:
            given["at"] = repr(f"{policy.at}/{self.at}".lstrip("/"))
        if self.rules:
            given["rules"] = f"[{', '.join([*(['…'] if policy.rules else []), *(call.text for call in self.rules)])}]"
        for name, glob in (("missing", self.missing), ("extra", self.extra)):
            if glob:
                value = _joined(getattr(policy, name), glob)
                given[name] = repr(value if isinstance(value, str) else list(value))
        if self.dtype:
            given["dtype"] = repr(self.dtype)
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def policy(self, policy: "Policy") -> "Policy":
        return dataclasses.replace(
            policy,
            missing=_joined(policy.missing, self.missing),
            extra=_joined(policy.extra, self.extra),
            dtype=self.dtype or policy.dtype,
        )

    def entries(
        self, entries: Mapping[str, Entry], skeleton: Skeleton | None
    ) -> tuple[Mapping[str, Entry], Skeleton | None]:
        """The checkpoint's entries and skeleton with these arguments. Raises `TreeringError` if a rule does not fit."""
        if self.at:
            entries = {rest: entry for path, entry in entries.items() if (rest := below(path, self.at)) is not None}
            return entries, None if skeleton is None else subtree(skeleton, self.at)
        if not self.rules:
            return entries, skeleton
        leaves = apply([call.rule for call in self.rules], views.leaves_of(entries))
        return {path: leaf.entry for path, leaf in leaves.items()}, None


def likely(
    walked: Walk,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: "Policy",
    differences: Sequence[Difference],
    compare: Compare,
) -> str:
    """The cause that explains most, as a sentence with the arguments that fix it; empty when none does.

    Without differences, everything was allowed and nothing was found. Arguments that would lose the position of a data
    iterator are not proposed.
    """
    most = len(differences) or len(walked.paths)
    held = positions.in_entries(entries)

    def left(cause: _Cause, like: Walk) -> int:
        try:
            changed, tree = cause.entries(entries, skeleton)
            targets, found, rest = compare(like, changed, tree, cause.policy(policy))
        except TreeringError:
            return most
        dropped = not cause.at and len(positions.in_entries(changed)) < len(held)
        if dropped or positions.loses(walked, changed, policy, cause.policy(policy)):
            return most
        if differences or not found:
            return len(rest) if found else most
        return len(rest) or sum(target.filled for target in targets)

    own = list(_own(walked, entries, differences))
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in walked.leaves)
    kinds: list[tuple[Walk, Iterable[_Cause]]] = [
        (walked, _wider(differences, policy)),
        (walked, _elsewhere(walked, entries, policy)),
        (walked, own),
        (_with_values(walked), own if shapes else ()),
    ]
    for like, causes in kinds:
        tried = [(left(cause, like), n, cause) for n, cause in enumerate(causes)]
        least, _, cause = min(tried, default=(most, 0, _Cause("")))
        if least <= most * _ENOUGH:
            rest = f", which leaves {least:,} of the {most:,}" if least else ""
            outside = tuple(repr(path) for path in held if cause.at and below(path, cause.at) is None)
            if outside:
                rest += f"; the state of an iterator lies outside of that, at {few(outside)}: restore it, too"
            arguments = cause.arguments(policy)
            return f"{cause.text}: {arguments if like is walked else f'restore(like=init(), {arguments})'}{rest}"
    return ""


def _with_values(walked: Walk) -> Walk:
    """The template, with arrays where it has only shapes."""
    leaves = [_Array(one.shape, one.dtype) if isinstance(one, jax.ShapeDtypeStruct) else one for one in walked.leaves]
    return walked._replace(leaves=leaves)


def _joined(given: Any, glob: str) -> Any:
    """A list of globs with one more; a value that allows everything stays."""
    if glob == "ignore":
        return glob
    return (
        given
        if not glob or given in ("template", "ignore")
        else tuple(dict.fromkeys((*(() if given == "error" else given), glob)))
    )


def _wider(differences: Sequence[Difference], policy: "Policy") -> Iterator[_Cause]:
    if len(differences) > 1 and policy.dtype is None:
        yield _Cause("the checkpoint's floats are wider than the template's", dtype="template")


# Leaves that are called otherwise


def _elsewhere(walked: Walk, entries: Mapping[str, Entry], policy: "Policy") -> list[_Cause]:
    """Levels that only one side has, or that are called otherwise, most likely first."""
    wanted = set(walked.paths)
    missing = [
        path for path, leaf in zip(walked.paths, walked.leaves, strict=True) if path not in entries and leaf is not ...
    ]
    others = [path for path in entries if path not in wanted][:_MAX_COMPARED_LEAVES]
    boxes = {name for inside in walked.boxes.values() for _, name in inside}  # which may be levels of the checkpoint
    short = {path: path.rpartition("/")[0] if path.rpartition("/")[2] in boxes else path for path in others}
    votes: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path in missing[:: len(missing) // _SAMPLE + 1]:
        alike: dict[tuple[str, ...], int] = {}
        for other in others:
            for change, names in _changes(path, short[other]):
                chance = len(missing) == 1 and change[0] == "last" and not getattr(entries[other], "shape", ())
                if change[0] == "at" or (not chance and _is_plain(other, entries)):
                    alike[change] = max(alike.get(change, 0), names)
        votes.update(alike)
    return [_change(*change, ruled=policy.rules) for change, _ in votes.most_common(_TRIED)]


def _is_plain(path: str, entries: Mapping[str, Entry]) -> bool:
    """Whether rules see a leaf under this path, which may have a level that shows nowhere else."""
    return path not in entries or entries[path].path.endswith(path)


def _changes(wanted: str, found: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """The changes that may have turned `found` into `wanted`: kind and parts of each; the number of equal names."""
    a, b = wanted.split("/"), found.split("/")
    shorter = min(len(a), len(b))
    if found.endswith(f"/{wanted}"):
        yield ("at", found[: -len(wanted) - 1]), shorter
    elif wanted.endswith(f"/{found}"):
        yield ("below", wanted[: -len(found) - 1]), shorter
    elif found.startswith(f"{wanted}/"):
        yield ("end", found[len(wanted) + 1 :], ""), shorter
    elif wanted.startswith(f"{found}/"):
        yield ("end", "", wanted[len(found) + 1 :]), shorter
    head = next((n for n in range(shorter) if a[n] != b[n]), shorter)
    tail = next((n for n in range(shorter - head) if a[-1 - n] != b[-1 - n]), shorter - head)
    old, new, same = b[head : len(b) - tail], a[head : len(a) - tail], head + tail
    if len(old) == len(new) == 1 and (count := _NUMBER.findall(old[0])) == _NUMBER.findall(new[0]) and count:
        yield ("numbered", _NUMBER.sub("#", old[0]), _NUMBER.sub("#", new[0])), same
    if not same or len(old) + len(new) > 4:
        return
    if not tail:
        if old and new:
            yield ("last", "/".join(old), "/".join(new)), same
        return
    numbers = [name.isdecimal() for name in (*old, *new)]
    if numbers == [True]:
        yield ("stack" if old else "unstack", "/".join([*a[:head], "*", "**"])), same
    if not any(numbers):
        place = "/".join("#" if name.isdecimal() else name for name in a[:head])
        yield ("within", place, "/".join(old), "/".join(new)), same
        if old:
            yield ("anywhere", "/".join(old), "/".join(new)), same


def _change(kind: str, *said: str, ruled: bool) -> _Cause:
    """The cause that a change points to."""
    if kind in ("at", "below"):
        levels = said[0].count("/") + 1
        more = f"has {'one level' if levels == 1 else f'{levels} levels'} more"
        if kind == "at" and not ruled:
            return _Cause(f"the checkpoint {more}", at=said[0])
        if kind == "at":
            return _Cause(f"the checkpoint {more}", rules=(_Call.of("rename", f"^{re.escape(said[0])}/", ""),))
        return _Cause(f"the template {more}", rules=(_Call.of("rename", "^", f"{_literal(said[0])}/"),))
    if kind in ("stack", "unstack"):
        one, other = ("checkpoint", "template") if kind == "stack" else ("template", "checkpoint")
        text = f"the {one} has each layer by itself, the {other} all of them in one array"
        return _Cause(text, rules=(_Call.of(kind, said[0]),))
    *place, old, new = said
    if kind == "end":
        text = f"each path of the {'checkpoint' if old else 'template'} has {old or new!r} at its end"
        if old in ("value", "raw_value"):
            text = f"it looks like Flax NNX or partitioned Linen, of which others save a level {old!r} for each leaf"
        call = _Call.of("rename", f"/{re.escape(old)}$", "") if old else _Call.of("rename", "$", f"/{_literal(new)}")
        return _Cause(text, rules=(call,))
    if kind == "numbered":
        pattern, groups = re.escape(old).replace(r"\#", r"(\d+)"), itertools.count(2)
        name = re.sub("#", lambda _: rf"\g<{next(groups)}>", _literal(new))
        call = _Call.of("rename", rf"(^|/){pattern}(/|$)", rf"\1{name}\g<{next(groups)}>")
    elif kind == "last":
        call = _Call.of("rename", rf"(^|/){re.escape(old)}$", rf"\1{_literal(new)}")
    elif kind == "anywhere":
        call = _Call.of("rename", rf"(^|/){re.escape(old)}/", rf"\1{_literal(new)}/" if new else r"\1")
    else:
        groups = itertools.count(1)
        heads = [name for name in place[0].split("/") if name]
        pattern = "".join(r"(\d+)/" if name == "#" else f"{re.escape(name)}/" for name in heads)
        kept = "".join(rf"\{next(groups)}/" if name == "#" else f"{_literal(name)}/" for name in heads)
        old_part, new_part = f"{re.escape(old)}/" if old else "", f"{_literal(new)}/" if new else ""
        call = _Call.of("rename", f"^{pattern}{old_part}", f"{kept}{new_part}")
    if old and new:
        return _Cause(f"the checkpoint has {old!r} where the template has {new!r}", rules=(call,))
    return _Cause(f"the {'checkpoint' if old else 'template'} has a level {old or new!r} more", rules=(call,))


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


# Leaves that are the template's own


def _own(walked: Walk, entries: Mapping[str, Entry], differences: Sequence[Difference]) -> Iterator[_Cause]:
    """A part of the tree in which all differences lie: a new head, another optimizer."""
    if len(differences) < 2:
        return
    paths = [one.path for one in differences]
    everything = {*walked.paths, *entries}
    leaves = [one for one in differences if one.path in everything]  # not the containers of another class
    fitting = {path for path, leaf in zip(walked.paths, walked.leaves, strict=True) if leaf is not None}.difference(
        paths
    )
    for place, glob in _globs(paths):
        inside = [path for path in everything if matches(path, glob)]
        if len(inside) == len(everything):
            continue
        text = f"all of it lies below {place!r}, where the template can keep its own"
        if all(one.found == NOTHING for one in leaves):
            yield _Cause(f"the checkpoint lacks {place!r}", missing=glob)
        elif all(one.expected == NOTHING for one in leaves):
            yield _Cause(f"the template lacks {place!r}", extra=glob)
        whole = len(leaves) < len(differences) or not fitting.intersection(inside)
        if whole and all(_is_plain(path, entries) for path in inside):
            there = any(matches(path, glob) for path in walked.paths)
            own = text if there else f"the template lacks {place!r}"
            yield _Cause(own, rules=(_Call.of("drop", glob),), missing=glob if there else "")
        if all(NOTHING in (one.found, one.expected) for one in leaves):
            yield _Cause(text, missing=glob, extra=glob)
    if all(one.expected == NOTHING for one in leaves):
        yield _Cause("the template is a part of what the checkpoint has", extra="ignore")


def _globs(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names that all the paths have in common, and a glob for each."""
    parts = [path.split("/") for path in paths]
    head: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        head.append(names[0])
    while head and head[-1].isdecimal():
        head.pop()
    common = set(parts[0]).intersection(*parts[1:]).difference(head)
    if head:
        yield "/".join(head), "/".join([*head, "**"])
    for name in sorted(common, key=parts[0].index, reverse=True):
        if not name.isdecimal():
            yield name, f"**/{name}/**"
