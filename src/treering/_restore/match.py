"""Matches a template against a checkpoint, without I/O.

The result says for every leaf of the template what to read and how to make the leaf from it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._core import dtypes
from .._core.describe import FUNCTION, NONE, NOTHING, describe_entry, mismatch_error
from .._core.entries import ArrayEntry, Entry, LostEntry, ValueEntry, check_readable, is_absent
from .._core.leaf_paths import closest, glob_hint, join_names, matches, parent_paths, relative_to
from .._core.quantized_layouts import SMALL_DTYPES
from .._core.skeleton import Skeleton, containers
from .._pytree import variable_levels
from .._pytree.leaves import is_function
from .._pytree.walk import FlatTree
from .._rules.base import Rule
from ..errors import Difference, MismatchError
from . import grown_parts, named_tuples
from .grown_parts import Grown
from .iterator_hints import OutsideState, with_hints
from .leaf_targets import LeafMismatch, LeafTarget, check_width, missing_target, target_of
from .policy import Policy
from .quantized_hints import Mixture, dtype_of_member
from .saved_kinds import saved_target

_log = logging.getLogger("treering")
_ARRAYS = ("numpy", "numpy-scalar", "jax")


def match(
    flat_tree: FlatTree,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: Policy,
    name: str,
    as_written: Mapping[str, Entry],
    *,
    records_kinds: bool,
    elsewhere: Callable[[], OutsideState],
    problems: Sequence[Difference],
    grown: Callable[[Sequence[str]], Grown],
    dequantized: Callable[[Rule], Mapping[str, Entry]],
) -> list[LeafTarget]:
    """Returns one target per template leaf, in order.

    flat_tree: the template.
    entries, skeleton: the checkpoint.
    name: the path of the checkpoint, for errors.
    as_written: the entries under their paths in the checkpoint, which rules match. The paths of `entries` are those of
        the template: they lack the levels that some formats have for boxes (see `variable_levels`).
    records_kinds: see `source.records_kinds`.
    elsewhere: returns the iterators and unreadable parts outside the restored part, for the hints of an error.
    problems: differences that are known already.
    grown: returns the template with the parts grown that globs match.
    dequantized: returns `as_written` after a rule that makes floats of quantized weights.

    Raises `MismatchError` with the likely cause and every difference.
    """
    policy = policy.among(flat_tree.paths, entries)  # A glob that matches nothing stays; `_check_globs` rejects it.
    if LostEntry in set(map(type, entries.values())):
        check_readable(_needed_lost_entries(entries, flat_tree, policy))

    def compare(
        like: FlatTree, entries: Mapping[str, Entry], skeleton: Skeleton | None, policy: Policy, *, written: bool = True
    ) -> _Compared:
        entries = variable_levels.rename_to_tree(like, entries) if written else entries
        return _compare(like, entries, skeleton, policy, records_kinds)

    _check_globs(policy, flat_tree, entries, name)
    targets, found, differences = compare(flat_tree, entries, skeleton, policy, written=False)
    differences = [*problems, *differences]
    filled = [] if differences else [p for p, target in zip(flat_tree.paths, targets, strict=True) if target.filled]
    # If all leaves are missing, the restore fails even if `missing` allows that: probably the path or names are wrong.
    if differences or (filled and not found):
        differences = grown_parts.with_hints(differences, flat_tree, entries, policy.at, grown)
        differences = with_hints(differences, flat_tree, entries, elsewhere())
        mixture = Mixture.of(flat_tree, entries, as_written, differences)
        attempt = mixture.attempt(dequantized)
        differences = mixture.with_hints(differences, attempt)
        from .likely_cause import suggest_fix  # Imported here, because only this error needs the rules.

        try:
            cause = suggest_fix(flat_tree, as_written, skeleton, policy, differences, compare, grown, mixture, attempt)
        except Exception:  # A defect in the suggestion must not hide the differences.
            _log.debug("%s: the likely cause could not be found", name, exc_info=True)
            cause = ""
        if differences:
            raise mismatch_error(name, differences, flat_tree.paths, entries, cause)
        raise _nothing_found(name, filled, entries, cause)
    named_tuples.warn_of_renamed(flat_tree.skeleton, skeleton or (), name)
    return targets


class _Compared(NamedTuple):
    """The targets of a template's leaves, and the differences. `found`: the checkpoint has some of the leaves."""

    targets: list[LeafTarget]
    found: bool
    differences: list[Difference]


def _compare(
    flat_tree: FlatTree,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: Policy,
    records_kinds: bool,
) -> _Compared:
    targets: list[LeafTarget] = []
    differences: list[Difference] = []
    skipped: list[str] = []
    used: set[str] = set()
    without: dict[str, str] = {}  # by path: the template has None or a function, and the checkpoint has data
    found = False
    alike: dict[tuple[Any, ...], LeafTarget] = {}  # the target of one leaf of each kind, to reuse for thousands like it
    for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
        entry = entries.get(path)
        kind: tuple[Any, ...] | None = None
        member = None
        array = entry if isinstance(entry, ArrayEntry) else None
        if array is not None and (policy.dtype is not None or array.dtype in SMALL_DTYPES):
            member = policy.quantized().get(path)
        if (
            array is not None
            and member is None
            and getattr(leaf, "shape", None) == array.shape
            and hasattr(leaf, "dtype")
        ):
            kind = type(leaf), leaf.dtype, getattr(leaf, "weak_type", False), array.type, array.dtype
            kind = (*kind, path in policy.cast_leaves) if policy.cast_leaves else kind
            if (like := alike.get(kind)) is not None:
                used.add(path)
                targets.append(LeafTarget(like.make, array, like.dtype, like.weak))
                continue
        if leaf is ...:
            skipped.append(path)
            targets.append(LeafTarget("value", value=...))
            continue
        absent = is_absent(entry)
        if leaf is None or is_function(leaf):
            if absent:
                used.add(path)
            else:
                without[path] = NONE if leaf is None else FUNCTION
            targets.append(LeafTarget("value", value=leaf))
            continue
        used.add(path)
        try:
            if absent:
                targets.append(missing_target(path, leaf, entry, allowed=policy.allows("missing", path)))
            else:
                assert entry is not None
                found = True
                make = saved_target if policy.kinds == "saved" and path not in policy.cast_leaves else target_of
                asked = policy.dtype if member is None else dtype_of_member(leaf, entry, member, policy.dtype)
                targets.append(make(path, leaf, entry, asked, records_kinds))
                if kind is not None and targets[-1].make in _ARRAYS:
                    alike[kind] = targets[-1]
        except LeafMismatch as difference:
            differences.append(Difference(path, *difference.args))
    for path, entry in () if entries.keys() <= used else entries.items():
        if path in used or is_absent(entry):
            continue
        if any(relative_to(path, at) is not None for at in skipped) or policy.allows("extra", path):
            continue
        hint = f"extra='ignore' or extra=[{path!r}] leaves it out"
        differences.append(Difference(path, without.get(path, NOTHING), describe_entry(entry), hint))
    # The class of a container matters only if the checkpoint has something to restore in it. If the restore fails
    # anyway, all classes are compared, because another class may be the cause.
    classes = named_tuples.class_differences(flat_tree.skeleton, skeleton or ())
    if not differences and found:
        classes = [one for one in classes if not _keeps_own_values(one.path, flat_tree.paths, targets)]
    differences += classes
    return _Compared(targets, found, differences)


def _keeps_own_values(path: str, paths: Sequence[str], targets: Sequence[LeafTarget]) -> bool:
    """Returns True if all leaves of a container keep the template's values, because the checkpoint has none."""
    inside = [target.filled for at, target in zip(paths, targets, strict=True) if relative_to(at, path) is not None]
    return bool(inside) and all(inside)


def _check_globs(policy: Policy, flat_tree: FlatTree, entries: Mapping[str, Entry], name: str) -> None:
    """Raises `MismatchError` for a glob in `missing` that matches no leaf, because it is probably misspelt.

    Such a glob in `extra` or `grow` is only logged: it may match in the first checkpoint that a loop restores, which
    another library wrote, and not in those that the loop saves.
    """
    for glob in _without_match(policy.missing, flat_tree.paths):
        raise MismatchError(
            f"missing=[{glob!r}]: expected a glob that matches a leaf of the template, found no match in "
            f"{join_names(tuple(flat_tree.paths))}{glob_hint(glob, flat_tree.paths)}"
        )
    parts: list[str] = []
    if policy.grow:
        inner = [path for _, path, _ in containers(flat_tree.skeleton) if path]
        parts = list(dict.fromkeys([*inner, *flat_tree.paths, *entries]))
    for option, globs, known in (("extra", policy.extra, entries), ("grow", policy.grow, parts)):
        for glob in _without_match(globs, known):
            among, hint = join_names(tuple(known)), glob_hint(glob, known)
            _log.warning("%s: %s: the glob %r matches none of %s%s", name, option, glob, among, hint)


def _without_match(globs: str | Iterable[str], paths: Collection[str]) -> Iterator[str]:
    known = set(paths)
    for glob in () if isinstance(globs, str) else globs:
        if glob not in known and not any(matches(path, glob) for path in paths):
            yield glob


def _nothing_found(name: str, filled: Sequence[str], entries: Mapping[str, Entry], cause: str) -> MismatchError:
    """Returns the error for a checkpoint that has none of the template's leaves.

    Without this error, only the training loss would show that nothing was restored.
    """
    nearest = closest(filled[0], [path for path, entry in entries.items() if not is_absent(entry)])
    hint = f"; likely: {cause}" if cause else f"; closest: {nearest}" if nearest else ""
    return MismatchError(
        f"{name}: expected the leaves of the template ({len(filled)}, such as {filled[0]!r}), found none of them, so "
        f"nothing would be restored; the checkpoint has {join_names(tuple(entries))}{hint}"
    )


def match_without_template(
    entries: Mapping[str, Entry], policy: Policy, to_jax: Collection[str], name: str
) -> list[LeafTarget]:
    """Returns the targets of a restore without a template, in order.

    Arrays of the types `to_jax` become JAX arrays, other arrays NumPy arrays, and keys typed PRNG keys. Other values
    stay as they are. Raises `MismatchError` for arrays that cannot become JAX arrays.
    """
    check_readable(entries.values())
    targets: list[LeafTarget] = []
    differences: list[Difference] = []
    # The target of one array of each kind, to reuse for thousands like it
    alike: dict[tuple[str, str, bool], LeafTarget] = {}
    for path, entry in entries.items():
        if isinstance(entry, ValueEntry):
            targets.append(LeafTarget("value", value=entry.decode()))
        elif like := alike.get(
            kind := (entry.type, entry.dtype, policy.dtype is not None and path in policy.quantized())
        ):
            targets.append(LeafTarget(like.make, entry, like.dtype, like.weak))
        else:
            try:
                targets.append(_untemplated(path, entry, policy, in_jax=entry.type in to_jax))
                alike[kind] = targets[-1]
            except LeafMismatch as difference:
                differences.append(Difference(entry.path, *difference.args))
    if differences:
        paths = [entry.path for entry in entries.values()]
        raise mismatch_error(name, differences, paths, {}, what="cannot become JAX arrays")
    return targets


def _untemplated(path: str, entry: ArrayEntry, policy: Policy, *, in_jax: bool) -> LeafTarget:
    """Returns the target of an array without a template. Raises `LeafMismatch` if JAX cannot have the dtype."""
    dtype = dtypes.to_numpy(entry.dtype)
    if entry.type == "key":
        return LeafTarget("key", entry, dtype)
    dtype = policy.cast(path, dtype)
    if in_jax:
        check_width(dtype, entry)
    make = "jax" if in_jax else "numpy-scalar" if entry.type == "numpy-scalar" else "numpy"
    return LeafTarget(make, entry, dtype, entry.type == "jax-weak")


def _needed_lost_entries(entries: Mapping[str, Entry], flat_tree: FlatTree, policy: Policy) -> Iterator[Entry]:
    """Yields the unreadable entries that cannot be skipped.

    The template asks for them, or for a leaf inside or around them, or `policy` does not let it leave them out.
    """
    skipped = [path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is ...]
    asked, leaves = {""}, set[str]()
    for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True):
        if leaf is not None and leaf is not ... and not is_function(leaf):
            leaves.add(path)
            asked |= {path, *parent_paths(path)}
    for path, entry in entries.items():
        left_out = policy.allows("extra", path, entry) or any(relative_to(path, at) is not None for at in skipped)
        if isinstance(entry, LostEntry) and (
            path in asked or not left_out or not leaves.isdisjoint(parent_paths(path))
        ):
            yield entry
