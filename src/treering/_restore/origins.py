"""Finds the leaves of a template that a checkpoint has under other paths, for the suggestion in an error."""

import collections
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core.entries import ArrayEntry, Entry, is_absent
from .._core.skeleton import Skeleton
from .._pytree.leaves import is_function
from .._pytree.walk import FlatTree
from .leaf_targets import LeafMismatch, target_of
from .optimizer_states import States, paths_by_state
from .path_likeness import (
    common_prefix,
    is_average,
    is_copy,
    is_level,
    is_renumbered,
    is_similar,
    lead,
    may_be_levels,
    most_alike,
    names_of,
    suffixes,
    without_numbers,
)
from .policy import Policy

_MAX_COMPARED_LEAVES = 20_000
_MAX_CANDIDATES = 20  # leaves of the checkpoint that are compared for each end of a path
_MIN_RENAMED_SHARE = 0.9  # of the parameters that only one side has; a level that holds as many may be renamed
_POSITIONS = re.compile(r"pos|wpe|type|segment|patch|time", re.IGNORECASE)  # embeddings that no head is tied to
_HEAD = re.compile(r"head|logits|unemb|output|decod|classif", re.IGNORECASE)
_EMBEDDING = re.compile(r"emb|wte|token|vocab|lookup|shared", re.IGNORECASE)


class Origins(NamedTuple):
    """The origin of each leaf of a template, as far as it is clear.

    sources: the path in the checkpoint, by the path in the template.
    untied: a leaf that probably shared the array of another leaf when it was saved, with the path of that leaf.
    copied: all leaves that become copies because of `untied`, including those of optimizer states.
    transposed: those of `copied` that are transposed.
    update_counts: counts of updates that take the value of another count.
    doubtful: beginnings of other paths that would match as well.
    """

    sources: dict[str, str]
    untied: dict[str, str]
    copied: set[str]
    transposed: set[str]
    update_counts: set[str]
    doubtful: list[str]


class _Search:
    def __init__(self, flat_tree: FlatTree, entries: Mapping[str, Entry], skeleton: Skeleton | None, policy: Policy):
        self.leaves = wanted(flat_tree)
        self.entries = {path: entry for path, entry in entries.items() if not is_absent(entry)}
        self.states = States(self.leaves, flat_tree.skeleton, self.entries, skeleton)
        self.dtype = policy.dtype
        self.sources: dict[str, str] = {}
        self.untied: dict[str, str] = {}
        self.copied: set[str] = set()
        self.transposed: set[str] = set()
        self.update_counts: set[str] = set()
        self.doubtful: list[str] = []
        self._kinds = {path: _kind_of(leaf) for path, leaf in self.leaves.items()}
        self._fitting: dict[tuple[Any, ...], bool] = {}  # by the kinds of two leaves

    def fits(self, path: str, found: str) -> bool:
        """Returns True if the template's leaf can be made of the checkpoint's."""
        kind, entry = self._kinds[path], self.entries[found]
        if kind is None or not isinstance(entry, ArrayEntry):
            return self._fits(path, entry)
        both = kind, entry.type, entry.dtype, entry.shape, entry.impl
        if both not in self._fitting:
            self._fitting[both] = self._fits(path, entry)
        return self._fitting[both]

    def _fits(self, path: str, entry: Entry) -> bool:
        try:
            target_of(path, self.leaves[path], entry, self.dtype, records_kinds=True)
        except LeafMismatch:
            return False
        return True

    def unmatched(self) -> list[str]:
        return [path for path in self.leaves if path not in self.sources]

    def in_place(self) -> None:
        """Finds leaves under the same path."""
        for path in self.leaves:
            if path in self.entries and self.states.may_become(path, path) and self.fits(path, path):
                self.sources[path] = path

    def in_states(self) -> None:
        """Finds leaves of optimizer states in states of the same kind.

        If several states of that kind have the leaf, the one with the most similar path is the origin.
        """
        ours, theirs = paths_by_state(self.states.template), paths_by_state(self.states.found)
        used = set(self.sources.values())
        claims: dict[str, list[str]] = collections.defaultdict(list)
        for (kind, place), leaves in ours.items():
            others = {at: there for (other, at), there in theirs.items() if other == kind}
            arrays = {rest: path for rest, path in leaves.items() if _rank(self.leaves[path])}
            for rest, path in arrays.items():
                having = [
                    at
                    for at, there in others.items()
                    if path not in self.sources
                    and rest in there
                    and there[rest] not in used
                    and self.fits(path, there[rest])
                ]
                best = most_alike(place, having)
                if len(best) == 1:
                    claims[others[best[0]][rest]].append(path)
        for found, paths in claims.items():
            if len(paths) == 1:  # If several leaves claim one origin, it is unknown which of them it belongs to.
                self.sources[paths[0]] = found
        for (kind, place), leaves in ours.items():
            others = {at: there for (other, at), there in theirs.items() if other == kind}
            arrays = [path for path in leaves.values() if _rank(self.leaves[path])]
            origins = {self.sources[path] for path in arrays if path in self.sources}
            if arrays and not origins:  # A new state starts with its own count, not with the count of another state.
                continue
            for rest, path in leaves.items():
                having = [
                    at
                    for at, there in others.items()
                    if path not in self.sources
                    and rest in there
                    and (not arrays or origins.intersection(there.values()))
                    and self.fits(path, there[rest])
                ]
                if best := most_alike(place, having):
                    self.sources[path] = others[best[0]][rest]

    def with_levels(self) -> None:
        """Finds leaves whose paths have more or fewer names, or another name, in one place at their beginning.

        Each pair of beginnings gets a vote from every leaf that it would explain, and those with most votes come first.
        """
        used = set(self.sources.values())
        rest = self.unmatched()[:_MAX_COMPARED_LEAVES]
        by_end: dict[str, list[str]] = collections.defaultdict(list)
        for found in self.entries:
            if found not in used:
                for end in suffixes(found):
                    by_end[end].append(found)
        votes: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
        likely: dict[tuple[str, str], bool] = {}
        for path in rest:
            for end in suffixes(path):
                has_voted = False
                for found in by_end.get(end, ())[:_MAX_CANDIDATES]:
                    if not self.fits(path, found):
                        continue
                    heads = found[: len(found) - len(end)], path[: len(path) - len(end)]
                    if heads not in likely:
                        likely[heads] = may_be_levels(*heads)
                    if likely[heads] and self.states.may_become(found, path):
                        votes[heads][path] = found
                        has_voted = True
                if has_voted:  # Shorter ends have less in common with the path.
                    break
        series = {
            without_numbers(head) for path in self.sources if self.sources[path] == path for head in _prefixes(path)
        }
        moved: set[str] = set()
        ours = sum(path not in self.states.template for path in rest)
        theirs = sum(path not in self.states.found and path not in used for path in self.entries)
        for heads, pairs in sorted(votes.items(), key=lambda vote: (-len(vote[1]), *map(is_average, vote[0]))):
            old, new = heads
            # An average of the parameters is not an origin of the parameters. While other layers of a series keep their
            # numbers, one layer does not move to the number of another.
            if (old and new and is_copy(old) != is_copy(new)) or (
                is_renumbered(old, new) and without_numbers(old) in series
            ):
                continue
            are_most = len(pairs) >= min(ours, theirs) * _MIN_RENAMED_SHARE and (
                len(pairs) > 1 or moved.intersection(heads)
            )
            if not are_most and not is_level(old, new):
                continue
            moved.update(heads)
            if any(path in self.sources for path in pairs):
                self.doubtful.append(old)
            elif any(found in used for found in pairs.values()):
                self.doubtful.append(new)
            for path, found in pairs.items():
                if path not in self.sources and found not in used:
                    self.sources[path] = found
                    used.add(found)
                    ours -= path not in self.states.template
                    theirs -= found not in self.states.found

    def counts(self) -> None:
        """Finds an origin for counts of updates that only the template has, such as the count of a new schedule.

        All counts of one optimizer are equal, so another count of it says the value.
        """
        places = {found: path for path, found in self.sources.items()}
        inside = collections.Counter(one.place for one in self.states.found.values())
        for path in self.unmatched():
            state, leaf = self.states.template.get(path), self.leaves[path]
            if state is None or not state.is_count or _rank(leaf):
                continue
            names = self.states.names[state.place]
            if len(names) > 1 and names.isdisjoint(("hyperparams", "gradient_step")):
                continue  # Such a state uses the count itself: a new average corrects its bias by its own count.
            having = {
                places.get(found, found): found
                for found, one in self.states.found.items()
                if one.is_count
                and getattr(self.entries[found], "dtype", None) == str(leaf.dtype)
                and self.fits(path, found)
                and is_similar(path, places.get(found, found))
            }
            schedules = [place for place, found in having.items() if inside[self.states.found[found].place] == 1]
            if best := most_alike(path, schedules or list(having)):
                self.sources[path] = having[best[0]]
                self.update_counts.add(path)

    def shared(self) -> None:
        """Finds matrices that were one array with another when saved, such as a head that was tied to an embedding."""
        rest = [path for path in self.unmatched() if path not in self.states.template]
        for path in rest:
            shape = _shape(self.leaves[path])
            if len(shape) != 2 or min(shape) < 2:
                continue
            for turned in (False, True):
                wished = shape[::-1] if turned else shape
                alike = [
                    other
                    for other, found in self.sources.items()
                    if other not in self.states.template
                    and getattr(self.entries[found], "shape", None) == wished
                    and getattr(self.entries[found], "dtype", None) == str(self.leaves[path].dtype)
                ]
                most = max((lead(path, other) for other in alike), default=0)
                alike = [other for other in alike if lead(path, other) == most]
                alike = [other for other in alike if not _POSITIONS.search(other)]
                named = [other for other in alike if _EMBEDDING.search(other[len(common_prefix(path, other)) :])]
                best = alike if len(alike) == 1 else named
                sure = bool(named) or (len(rest) == 1 and shape[0] != shape[1] and _HEAD.search(path))
                if len(best) == 1 and sure and without_numbers(best[0]) != without_numbers(path):
                    self._share_source(path, best[0], turned)
                    break

    def _share_source(self, path: str, other: str, turned: bool) -> None:
        head = len(common_prefix(path, other))
        new, old = path[head:], other[head:]
        self.untied[path] = other
        for one in self.unmatched():
            before = one[: len(one) - len(new)]
            source = before + old
            if one.endswith(new) and (not before or before[-1] in "/.") and source in self.sources:
                shape = _shape(self.leaves[source])
                if _shape(self.leaves[one]) == (shape[::-1] if turned else shape):
                    self.sources[one] = self.sources[source]
                    self.copied.add(one)
                    if turned:
                        self.transposed.add(one)


def origins(flat_tree: FlatTree, entries: Mapping[str, Entry], skeleton: Skeleton | None, policy: Policy) -> Origins:
    """Returns where the checkpoint has each leaf of the template; not those of which it is not clear."""
    search = _Search(flat_tree, entries, skeleton, policy)
    search.in_place()
    search.in_states()
    search.with_levels()
    search.counts()
    search.shared()
    return Origins(
        search.sources, search.untied, search.copied, search.transposed, search.update_counts, search.doubtful
    )


def wanted(flat_tree: FlatTree) -> dict[str, Any]:
    """Returns the template's leaves that take something from a checkpoint, by path."""
    pairs = zip(flat_tree.paths, flat_tree.leaves, strict=True)
    return {path: leaf for path, leaf in pairs if leaf is not None and leaf is not ... and not is_function(leaf)}


def _kind_of(leaf: Any) -> tuple[Any, ...] | None:
    """Returns what decides which arrays a leaf of a template can be made of; None if that may be more."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return None
    return type(leaf), leaf.dtype, leaf.shape, getattr(leaf, "weak_type", False)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _prefixes(path: str) -> Iterator[str]:
    """Yields the beginnings of a path, up to the end of each of its names."""
    names = names_of(path)
    return ("".join(names[:n]) for n in range(1, len(names) + 1))


def _rank(leaf: Any) -> int:
    return len(_shape(leaf))
