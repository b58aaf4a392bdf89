"""Finds the likely cause of the differences between a checkpoint and a template, and the arguments that fix it.

Each suggestion is tried first: its rules are applied to the checkpoint's names and shapes, and the result is compared
with the template again. Of the suggestions that fix the differences, the error has the one that restores most leaves.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from .._core.describe import ABSENT, NOTHING
from .._core.entries import Entry
from .._core.leaf_paths import join_names, matches, relative_to
from .._core.quantized import find_groups
from .._core.skeleton import Skeleton
from .._core.units import count
from .._pytree import variable_levels
from .._pytree.leaves import is_function
from .._pytree.walk import FlatTree
from ..errors import Difference, TreeringError
from . import grown_parts, iterator_hints
from .optimizer_states import States
from .path_likeness import is_average, is_renumbered, without_numbers
from .policy import Policy
from .quantized_hints import Attempt, Mixture
from .rename_hints import list_places, list_suggestions, list_text, rename_suggestions
from .suggestion import RuleCall, Suggestion, is_plain

_MAX_LEFT_FRACTION = 0.1  # of the differences; a suggestion that leaves more is not made

Compare = Callable[[FlatTree, Mapping[str, Entry], Skeleton | None, Policy], tuple[Any, bool, Sequence[Difference]]]
_MAX_SAMPLED_LEAVES = 8  # missing leaves that are compared with all others
_MAX_COMPARED_LEAVES = 5000  # other leaves that each of the sample is compared with
_MAX_SUGGESTIONS = 6  # suggestions that are tried at most, as each applies rules to all leaves
_NUMBER = re.compile(r"\d+")


class _Array(NamedTuple):
    """Represents an array of the template if the template has only its shape and dtype."""

    shape: tuple[int, ...]
    dtype: Any


class _Search(NamedTuple):
    """The template, what the caller allows, and the functions that try a cause; see `match.match`."""

    flat_tree: FlatTree
    policy: Policy
    compare: Compare
    grown: Callable[[Sequence[str]], grown_parts.Grown]


class _Score(NamedTuple):
    """The rank of a cause: the smallest is the best.

    unrestored: minus the number of leaves that the cause restores; 0 if the cause fixes only a part.
    kind, number: the position of the cause among all that were tried.
    left: the number of differences that the cause leaves.
    """

    unrestored: int
    kind: int
    left: int
    number: int


def suggest_fix(
    flat_tree: FlatTree,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: Policy,
    differences: Sequence[Difference],
    compare: Compare,
    grown: Callable[[Sequence[str]], grown_parts.Grown],
    mixture: Mixture,
    attempt: Attempt,
) -> str:
    """Returns the cause that explains most, as a sentence with the arguments that fix it; an empty text if none does.

    `differences` is empty if nothing differs only because missing leaves were allowed, yet no leaf matched. Arguments
    that would lose the position of a data iterator, or take a quantized weight apart, are never suggested.

    mixture: the quantized weights of both sides.
    attempt: the checkpoint with floats instead of them.
    """
    if said := _no_state(flat_tree, entries) or _too_deep(flat_tree.paths, entries, policy.at):
        return said
    search, groups = _Search(flat_tree, policy, compare, grown), find_groups(entries)
    if mixture.differs:
        return _of_mixture(search, mixture, attempt, [{group.path} for group in groups])
    best = _best(search, entries, skeleton, differences, [{*group.members.values()} for group in groups])
    return "" if best is None else ": ".join(filter(None, best))


def _no_state(flat_tree: FlatTree, entries: Iterable[str]) -> str:
    """Returns advice if the template is the function that makes the state, or a path in the checkpoint; else ""."""
    if tuple(flat_tree.paths) != ("",):
        return ""
    (leaf,) = flat_tree.leaves
    if isinstance(leaf, str):
        inside = any(relative_to(path, leaf) is not None for path in entries)
        return f"the template is a text, the path of a part: at={leaf!r} chooses that" if leaf and inside else ""
    if not is_function(leaf):
        return ""
    what = f"the class {leaf.__name__}, and not an object of it" if isinstance(leaf, type) else "a function"
    return f"the template is {what}; for a function init that makes the state, it is jax.eval_shape(init)"


def _too_deep(wanted: Iterable[str], entries: Iterable[str], at: str) -> str:
    """Returns advice if the template has the last level of `at` and leaves next to it; else "".

    Without such leaves a rule can add the level, and leaves of the checkpoint next to it cause no error.
    """
    parent, _, level = at.rpartition("/")
    levels = {path.split("/")[0] for path in wanted}
    if level not in levels or len(levels) == 1 or level in {path.split("/")[0] for path in entries}:
        return ""
    instead = f"at={parent!r}" if parent else "leave out at="
    return f"the template has the level {level!r} itself, so at= is one level too deep: {instead}"


def _of_mixture(search: _Search, mixture: Mixture, attempt: Attempt, weights: Sequence[Set[str]]) -> str:
    """Returns the cause if only one side is quantized: the rule that makes floats, and what else is needed then."""
    call, made, refusal = attempt
    if call is None or made is None:
        return mixture.cause("", refusal)
    differences = search.compare(search.flat_tree, made, None, search.policy)[2]
    fix = Suggestion("", rules=(call,)).arguments(search.policy)
    if differences and not mixture.only_wanted:
        best = _best(search, made, None, differences, weights, (call,))
        fix = (
            f"{fix}, which leaves {count(len(differences), 'difference')}" if best is None else f"{best[1]} ({best[0]})"
        )
    return mixture.cause(fix, "")


def _best(
    search: _Search,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    differences: Sequence[Difference],
    needed: Sequence[Set[str]],
    first: tuple[RuleCall, ...] = (),
) -> tuple[str, str] | None:
    """Returns the cause that explains most, and the arguments that fix it, or None.

    needed: groups of leaves of the checkpoint. The cause must not leave out a part of a group, nor an entire group
        inside its `at` unless the template has all that it wants.
    first: rules that `entries` are already changed by.
    """
    flat_tree, policy, compare, grown = search
    most = len(differences) or len(flat_tree.paths)
    held = iterator_hints.iterator_paths(entries)
    known = set(flat_tree.paths)
    states = States(flat_tree.paths, flat_tree.skeleton, entries, skeleton)

    def tried(cause: Suggestion, like: FlatTree) -> tuple[int, int]:
        """Returns the number of leaves that a cause restores, and the number of differences that it leaves."""
        try:
            like = grown(cause.policy(policy).grow).flat_tree if cause.grow else like
            leaves = cause.leaves(entries)
            sources = variable_levels.rename_to_tree(like, {path: leaf.source for path, leaf in leaves.items()})
            # `rename_suggestions` chooses alike states itself.
            changed = (cause.rules or cause.at) and cause not in renames
            if changed and not all(states.may_become(there, path) for path, there in sources.items() if path in known):
                return 0, most
            now = {path: leaf.entry for path, leaf in leaves.items()}
            targets, found, rest = compare(like, now, cause.skeleton(skeleton), cause.policy(policy))
        except TreeringError:
            return 0, most
        dropped = not cause.at and len(iterator_hints.iterator_paths(now)) < len(held)
        if dropped or iterator_hints.loses_position(flat_tree, now, policy, cause.policy(policy)):
            return 0, most
        filled = sum(target.filled for target in targets)  # leaves that keep the template's value
        used = {there for path, there in sources.items() if path in known}
        for group in needed:
            left = {path for path in group - used if not policy.allows("extra", path, entries.get(path))}
            inside = any(relative_to(path, cause.at) is not None for path in left)
            if left and (group & used or (inside and not is_filled)):
                return 0, most
        if not found:
            return len(targets) - filled, most
        # Without differences, a cause is also judged by the leaves that the template still fills.
        left = len(rest) if differences else len(rest) or filled
        return len(targets) - filled, left

    is_filled = all(one.expected == NOTHING for one in differences)
    reordered = bool({one.path for one in differences}.difference(flat_tree.paths, entries))
    levels = _level_suggestions(flat_tree, entries, policy)
    alone = list(_find_own_subtree(flat_tree, entries, differences))
    renames = list(rename_suggestions(flat_tree, entries, skeleton, policy, reordered=reordered))
    lists = list_places(flat_tree, skeleton)
    kinds: list[tuple[FlatTree, Iterable[Suggestion]]] = [
        (flat_tree, _wider(differences, policy)),
        (flat_tree, grown_parts.suggestions(flat_tree, entries)),
        (flat_tree, levels),
        (flat_tree, alone),
        (flat_tree, renames),
        (flat_tree, list_suggestions(flat_tree, entries, lists)),
    ]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat_tree.leaves):
        kinds += [(_with_placeholders(flat_tree), alone), (_with_placeholders(flat_tree), renames)]
    found: dict[_Score, tuple[FlatTree, Suggestion]] = {}
    for kind, (like, causes) in enumerate(kinds):
        for n, cause in enumerate(causes):
            kept, left = tried(cause, like)
            # A cause that leaves differences ranks behind those that fix all. Level suggestions are exempt.
            fixes_all = not left or causes is levels
            if left <= most * _MAX_LEFT_FRACTION:
                found[_Score(-kept if fixes_all else 0, kind, left, n)] = like, cause
    best = min(found, default=None)
    # Without rules that name each item, another cause would leave out what only has another name.
    if lists and (best is None or found[best][1].missing or found[best][1].extra):
        return f"{list_text(lists)}; use the same in the template, or rename each item by a rule", ""
    if best is None:
        return None
    like, cause = found[best]
    rest = f", which leaves {best.left:,} of the {most:,}" if best.left else ""
    outside = tuple(repr(path) for path in held if cause.at and relative_to(path, cause.at) is None)
    if outside:
        rest += f"; the state of an iterator is outside of that, at {join_names(outside)}: restore it, too"
    arguments = dataclasses.replace(cause, rules=(*first, *cause.rules)).arguments(policy)
    alike = [one.at for tried, (_, one) in found.items() if one.at not in ("", cause.at) and tried[:3] == best[:3]]
    text = f"{cause.text} ({alike[0]!r} would fit as well)" if cause.at and alike else cause.text
    return text, f"{arguments if like is flat_tree else f'restore(like=init(), {arguments})'}{rest}"


def _with_placeholders(flat_tree: FlatTree) -> FlatTree:
    """Returns the template with stand-ins for arrays instead of `jax.ShapeDtypeStruct`."""
    leaves = [
        _Array(one.shape, one.dtype) if isinstance(one, jax.ShapeDtypeStruct) else one for one in flat_tree.leaves
    ]
    return flat_tree._replace(leaves=leaves)


def _wider(differences: Sequence[Difference], policy: Policy) -> Iterable[Suggestion]:
    if len(differences) > 1 and policy.dtype is None:
        yield Suggestion("the checkpoint's floats are wider than the template's", dtype="template")


def _level_suggestions(flat_tree: FlatTree, entries: Mapping[str, Entry], policy: Policy) -> list[Suggestion]:
    """Levels that only one side has, or that are called otherwise, most likely first."""
    wanted = set(flat_tree.paths)
    missing = [
        path
        for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True)
        if path not in entries and leaf is not ...
    ]
    others = [path for path in entries if path not in wanted][:_MAX_COMPARED_LEAVES]
    boxes = {name for inside in flat_tree.boxes.values() for _, name in inside}  # which may be levels of the checkpoint
    short = {path: path.rpartition("/")[0] if path.rpartition("/")[2] in boxes else path for path in others}
    votes: collections.Counter[tuple[str, ...]] = collections.Counter()
    for path in missing[:: len(missing) // _MAX_SAMPLED_LEAVES + 1]:
        alike: dict[tuple[str, ...], int] = {}
        for other in others:
            for change, names in _changes(path, short[other]):
                is_number = not getattr(entries[other], "shape", ())
                chance = len(missing) == 1 and change[0] in ("last", "root") and is_number
                if change[0] == "at" or (not chance and is_plain(other, entries)):
                    alike[change] = max(alike.get(change, 0), names)
        votes.update(alike)
    series = {without_numbers(path) for path in wanted if path in entries}

    def is_one_of_many(change: tuple[str, ...]) -> bool:
        """Returns True if the change would renumber one layer of a series whose other layers keep their numbers."""
        return is_renumbered(*change[-2:]) and any(without_numbers(change[-2]) in path for path in series)

    likely = sorted(
        (change for change in votes if not is_one_of_many(change)),
        key=lambda change: (-votes[change], is_average(change[1])),
    )
    return [_change(*change, ruled=policy.rules) for change in likely[:_MAX_SUGGESTIONS]]


def _changes(wanted: str, found: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields the changes that may have turned `found` into `wanted`.

    Each is the kind of the change with its details, and the number of names that the two paths have in common.
    """
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
    if old and len(a) == len(b) == 1:
        yield ("root", *old, *new), same
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


def _change(kind: str, *said: str, ruled: bool) -> Suggestion:
    """Returns the cause for a change that `_changes` has found, with the arguments that undo it.

    ruled: True if the caller gave rules. An `at=` would change the paths that these see, so another rule is suggested.
    """
    if kind in ("at", "below"):
        levels = said[0].count("/") + 1
        more = f"has {'one level' if levels == 1 else f'{levels} levels'} more"
        if kind == "at" and not ruled:
            return Suggestion(f"the checkpoint {more}", at=said[0])
        if kind == "at":
            return Suggestion(f"the checkpoint {more}", rules=(RuleCall.of("rename", f"^{re.escape(said[0])}/", ""),))
        return Suggestion(f"the template {more}", rules=(RuleCall.of("rename", "^", f"{_literal(said[0])}/"),))
    if kind in ("stack", "unstack"):
        one, other = ("checkpoint", "template") if kind == "stack" else ("template", "checkpoint")
        text = f"the {one} has each layer by itself, the {other} all of them in one array"
        return Suggestion(text, rules=(RuleCall.of(kind, said[0]),))
    *place, old, new = said
    if kind == "end":
        text = f"each path of the {'checkpoint' if old else 'template'} has {old or new!r} at its end"
        if old in ("value", "raw_value"):
            text = f"it looks like Flax NNX or partitioned Linen, where other libraries save a level {old!r} per leaf"
        call = (
            RuleCall.of("rename", f"/{re.escape(old)}$", "") if old else RuleCall.of("rename", "$", f"/{_literal(new)}")
        )
        return Suggestion(text, rules=(call,))
    if kind == "numbered":
        pattern, groups = re.escape(old).replace(r"\#", r"(\d+)"), itertools.count(2)
        name = re.sub("#", lambda _: rf"\g<{next(groups)}>", _literal(new))
        call = RuleCall.of("rename", rf"(^|/){pattern}(/|$)", rf"\1{name}\g<{next(groups)}>")
    elif kind == "root":
        call = RuleCall.of("rename", f"^{re.escape(old)}$", _literal(new))
    elif kind == "last":
        call = RuleCall.of("rename", rf"(^|/){re.escape(old)}$", rf"\1{_literal(new)}")
    elif kind == "anywhere":
        call = RuleCall.of("rename", rf"(^|/){re.escape(old)}/", rf"\1{_literal(new)}/" if new else r"\1")
    else:
        groups = itertools.count(1)
        heads = [name for name in place[0].split("/") if name]
        pattern = "".join(r"(\d+)/" if name == "#" else f"{re.escape(name)}/" for name in heads)
        kept = "".join(rf"\{next(groups)}/" if name == "#" else f"{_literal(name)}/" for name in heads)
        old_part, new_part = f"{re.escape(old)}/" if old else "", f"{_literal(new)}/" if new else ""
        call = RuleCall.of("rename", f"^{pattern}{old_part}", f"{kept}{new_part}")
    if old and new:
        return Suggestion(f"the checkpoint has {old!r} where the template has {new!r}", rules=(call,))
    return Suggestion(f"the {'checkpoint' if old else 'template'} has a level {old or new!r} more", rules=(call,))


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def _find_own_subtree(
    flat_tree: FlatTree, entries: Mapping[str, Entry], differences: Sequence[Difference]
) -> Iterator[Suggestion]:
    """Yields causes for a part of the tree that contains all differences, such as a new head or another optimizer."""
    if len(differences) < 2:
        return
    paths = [one.path for one in differences]
    everything = {*flat_tree.paths, *entries}
    leaves = [one for one in differences if one.path in everything]  # not the containers of another class
    fitting = {
        path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is not None
    }.difference(paths)
    for place, glob in _globs(paths, everything):
        inside = [path for path in everything if matches(path, glob)]
        if len(inside) == len(everything):
            continue
        text = f"all differences are below {place!r}, where the template can keep its own"
        if all(one.found in ABSENT for one in leaves):
            part = "a part of " if any(path in entries for path in inside) else ""
            yield Suggestion(f"the checkpoint lacks {part}{place!r}", missing=(glob,))
        elif all(one.expected in ABSENT for one in leaves):
            part = "a part of " if any(matches(path, glob) for path in flat_tree.paths) else ""
            yield Suggestion(f"the template lacks {part}{place!r}", extra=(glob,))
        # Dropping the checkpoint's part would also lose leaves in it that match, so it is suggested only without any.
        differs_entirely = len(leaves) < len(differences) or not fitting.intersection(inside)
        if differs_entirely and all(is_plain(path, entries) for path in inside):
            there = any(matches(path, glob) for path in flat_tree.paths)
            reason = text if there else f"the template lacks {place!r}"
            yield Suggestion(reason, rules=(RuleCall.of("drop", glob),), missing=(glob,) if there else ())
        if all(one.found in ABSENT or one.expected in ABSENT for one in leaves):
            yield Suggestion(text, missing=(glob,), extra=(glob,))
    if all(one.expected in ABSENT for one in leaves):
        yield Suggestion("the template is a part of what the checkpoint has", extra="ignore")


def _globs(paths: Sequence[str], everything: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the containers that all these paths are in, and a glob for each."""
    parts = [path.split("/") for path in paths]
    head: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        head.append(names[0])
    while head and head[-1].isdecimal() and _is_all("/".join(head), "/".join(head[:-1]), everything):
        head.pop()
    common = set(parts[0]).intersection(*parts[1:]).difference(head)
    if head:
        yield "/".join(head), "/".join([*head, "**"])
    for name in sorted(common, key=parts[0].index, reverse=True):
        if not name.isdecimal():
            yield name, f"**/{name}/**"


def _is_all(place: str, around: str, everything: Collection[str]) -> bool:
    """Returns True if everything in the container `around` is in the container `place`."""
    return all(relative_to(path, place) is not None for path in everything if relative_to(path, around) is not None)
