"""Finds the likely cause of the differences between a checkpoint and a template, and the arguments that fix it.

Each suggestion is tried first: its rules are applied to the checkpoint's names and shapes, and the result is compared
with the template again. Of the suggestions that fix the differences, the error has the one that restores most leaves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax

from .._core.describe import NOTHING
from .._core.entries import Entry
from .._core.leaf_paths import join_names, relative_to
from .._core.quantized import find_groups
from .._core.skeleton import Skeleton
from .._core.units import count
from .._pytree import variable_levels
from .._pytree.walk import FlatTree
from ..errors import Difference, TreeringError
from . import grown_parts, iterator_hints
from .level_hints import level_suggestions
from .optimizer_states import States
from .policy import Policy
from .quantized_hints import Attempt, Mixture
from .rename_hints import rename_suggestions
from .subtree_hints import find_own_subtree
from .suggestion import RuleCall, Suggestion

_MAX_LEFT_FRACTION = 0.1  # of the differences; a suggestion that leaves more is not made

Compare = Callable[[FlatTree, Mapping[str, Entry], Skeleton | None, Policy], tuple[Any, bool, Sequence[Difference]]]


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
    search, groups = _Search(flat_tree, policy, compare, grown), find_groups(entries)
    if mixture.differs:
        return _of_mixture(search, mixture, attempt, [{group.path} for group in groups])
    best = _best(search, entries, skeleton, differences, [{*group.members.values()} for group in groups])
    return "" if best is None else ": ".join(best)


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
    levels = level_suggestions(flat_tree, entries, policy)
    alone = list(find_own_subtree(flat_tree, entries, differences))
    renames = list(rename_suggestions(flat_tree, entries, skeleton, policy, reordered=reordered))
    kinds: list[tuple[FlatTree, Iterable[Suggestion]]] = [
        (flat_tree, _wider(differences, policy)),
        (flat_tree, grown_parts.suggestions(flat_tree, entries)),
        (flat_tree, levels),
        (flat_tree, alone),
        (flat_tree, renames),
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
    if not found:
        return None
    best = min(found)
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
