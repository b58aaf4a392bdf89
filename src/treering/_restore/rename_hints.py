"""Suggests rules for leaves that a checkpoint has under other paths than the template.

The rules rename and copy these leaves. The suggestion also says what to do with the leaves that only one side has.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._core.entries import Entry, is_absent
from .._core.leaf_paths import join, key_text, parent_paths, relative_to
from .._core.skeleton import Node, Skeleton, containers
from .._pytree import variable_levels
from .._pytree.walk import FlatTree
from .._rules.base import Leaves
from ..errors import TreeringError
from .origins import Origins, origins, wanted
from .path_likeness import differing_heads, names_of
from .policy import Policy
from .suggestion import RuleCall, Suggestion, apply_calls, is_plain

_MAX_CALLS = 16  # rules; a longer list would not be read
_MAX_GLOBS = 12
_T5_NAMES = re.compile(r"(encoder|decoder|transformer)/block_\d+/layer_\d+/")
_LISTS = ("list", "tuple")  # kinds of containers whose items have only numbers
_NAMED = ("dict", "object")  # kinds of containers whose items have names; those of optimizers are named tuples
_TEMPORARY = "moved:"  # before new paths, while other leaves still have these paths


def rename_suggestions(
    flat_tree: FlatTree, entries: Mapping[str, Entry], skeleton: Skeleton | None, policy: Policy, *, reordered: bool
) -> Iterator[Suggestion]:
    """Yields rules for all leaves that the checkpoint has under other paths.

    reordered: True if containers of the two sides have different classes, as after an optax chain was reordered.
    """
    if not all(is_plain(path, entries) for path in entries):
        return
    yield from _rename_suggestions(flat_tree, flat_tree, entries, skeleton, policy, reordered)
    for kinds in variable_levels.LEVEL_KINDS if flat_tree.boxes else ():
        paths = [variable_levels.path_with_levels(path, flat_tree.boxes, kinds) for path in flat_tree.paths]
        if paths != flat_tree.paths:
            there = flat_tree._replace(
                paths=paths,
                skeleton=variable_levels.skeleton_with_levels(flat_tree.skeleton, flat_tree.boxes, kinds),
                boxes={},
            )
            yield from _rename_suggestions(there, flat_tree, entries, skeleton, policy, reordered)


def list_places(flat_tree: FlatTree, skeleton: Skeleton | None) -> dict[str, tuple[Node, Node]]:
    """Returns the nodes of checkpoint and template where one is a list and the other has other names for its items."""
    known = {path: node for _, path, node in containers(skeleton or ()) if isinstance(node, Node)}
    return {
        path: (known[path], node)
        for _, path, node in containers(flat_tree.skeleton)
        if isinstance(node, Node)
        and path in known
        and known[path].count() == node.count() > 0
        and {known[path].kind, node.kind} & set(_LISTS)
        and {known[path].kind, node.kind} & set(_NAMED)
        and {*map(key_text, known[path].children())} != {*map(key_text, node.children())}
    }


def list_text(places: Mapping[str, tuple[Node, Node]]) -> str:
    """Returns a text that says which side has a list."""
    place, nodes = min(places.items(), key=lambda one: len(one[0]))
    kinds = ["an object" if node.kind == "object" else f"a {node.kind}" for node in nodes]
    return f"{place or '(root)'} is {kinds[0]} in the checkpoint, {kinds[1]} in the template"


def list_suggestions(
    flat_tree: FlatTree, entries: Mapping[str, Entry], places: Mapping[str, tuple[Node, Node]]
) -> Iterator[Suggestion]:
    """Yields rules that name the items of lists, or number those of dicts, if it is clear which item is which."""
    if not places or not all(is_plain(path, entries) for path in entries):
        return
    items = [
        tuple([join(place, key_text(key), root=not place) for key in node.children()] for node in nodes)
        for place, nodes in places.items()
    ]
    if sum(len(olds) for olds, _ in items) > _MAX_CALLS:  # Each item takes a rule.
        return
    leaves = dict(zip(flat_tree.paths, flat_tree.leaves, strict=True))
    moves: dict[str, str] = {}
    for olds, news in items:
        pairs = _pairs({path: _shapes(entries, path) for path in olds}, {path: _shapes(leaves, path) for path in news})
        for old_path, new_path in pairs:
            inside = (path for path in entries if relative_to(path, old_path) is not None)
            moves |= {path: f"{new_path}{path[len(old_path) :]}" for path in inside}
    changes = renames(moves, entries, [path for path in entries if path not in moves], set(leaves), _MAX_CALLS)
    if changes:
        calls = tuple(RuleCall.of("rename", pattern, new) for pattern, new in ordered(changes))
        yield Suggestion(list_text(places), rules=calls)


def _shapes(leaves: Mapping[str, Any], place: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the relative path and shape of each leaf in a container."""
    inside = ((relative_to(path, place), getattr(leaf, "shape", ())) for path, leaf in leaves.items())
    return sorted((path, tuple(shape)) for path, shape in inside if path is not None)


def _pairs(olds: Mapping[str, Any], news: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns which item becomes which: by the numbers in their names, or by shapes that only one item has."""
    old_paths, new_paths = _numbered(olds), _numbered(news)
    if old_paths and new_paths:
        pairs = list(zip(old_paths, new_paths, strict=True))
    else:
        pairs = [(old, new) for old, shapes in olds.items() for new, wanted in news.items() if shapes == wanted]
    is_clear = len(pairs) == len(olds) and all(olds[old] == news[new] for old, new in pairs)
    return pairs if is_clear and len(dict(pairs)) == len({new for _, new in pairs}) == len(olds) else []


def _numbered(paths: Collection[str]) -> list[str]:
    """Returns the paths of items in the order of the one number that differs in their names; [] if several do."""
    numbers = {path: tuple(map(int, re.findall("[0-9]+", path.rpartition("/")[2]))) for path in paths}
    if len({*map(len, numbers.values())}) != 1:
        return []
    differing = [column for column in zip(*numbers.values(), strict=True) if len({*column}) > 1]
    is_clear = len({*numbers.values()}) == len(paths) and len(differing) <= 1
    return sorted(numbers, key=numbers.__getitem__) if is_clear else []


def _rename_suggestions(
    there: FlatTree,
    flat_tree: FlatTree,
    entries: Mapping[str, Entry],
    skeleton: Skeleton | None,
    policy: Policy,
    reordered: bool,
) -> Iterator[Suggestion]:
    """Yields rules that turn the leaves of a checkpoint into those of `there`.

    there: the template, as `flat_tree` or with the levels that a format writes for boxes of Flax.
    """
    most = 0  # leaves that a spelling has found; another spelling has to find more to be worth a suggestion
    for text, calls in _spellings(entries, there.paths):
        try:
            leaves = apply_calls(calls, entries)
        except TreeringError:
            continue
        found = origins(there, {path: leaf.entry for path, leaf in leaves.items()}, None if calls else skeleton, policy)
        own = _calls(there, {path: leaf.entry for path, leaf in leaves.items()}, found)
        better = len(found.sources) > most
        most = max(most, len(found.sources))
        if own is None or not better or not (calls or _moves(found) or (own and reordered)):
            continue
        try:
            made = apply_calls([*calls, *own], entries)
        except TreeringError:
            continue
        if len(calls) + len(own) <= _MAX_CALLS and _makes_exactly(made, leaves, found, there):
            names = dict(zip(there.paths, flat_tree.paths, strict=True))
            yield _cause(there, names, made, found, [text, *_texts(found)], (*calls, *own))


def _spellings(entries: Mapping[str, Entry], paths: Sequence[str]) -> Iterator[tuple[str, list[RuleCall]]]:
    """Yields rules that change the spelling of all names, with a text that says why. The first has no rules."""
    yield "", []
    if any(_T5_NAMES.match(path) for path in entries):
        from ..formats.t5_names import T5_TO_T5X

        yield "the checkpoint has TensorFlow's names of T5", [RuleCall("*tr.formats.t5_names.T5_TO_T5X", T5_TO_T5X)]
    for old, new in ((".", "/"), ("/", "."), ("~1", "/"), ("/", "~1")):
        if any(old in path for path in entries) and any(new in path for path in paths):
            text = f"the checkpoint has {old!r} where the template has {new!r}"
            yield text, [RuleCall.of("rename", r"\." if old == "." else old, new)]


def _moves(found: Origins) -> bool:
    return any(path != there for path, there in found.sources.items())


def _template_paths(found: Origins) -> dict[str, str]:
    """Returns the one path of the template that each found leaf moves to.

    Several paths of the template may have the same origin. The leaf stays at its own path if that is one of them;
    the other paths become copies.
    """
    first = {there: path for path, there in found.sources.items() if path == there}
    for path, there in found.sources.items():
        if path not in found.copied:
            first.setdefault(there, path)
    return first


def _calls(flat_tree: FlatTree, entries: Mapping[str, Entry], found: Origins) -> list[RuleCall] | None:
    """Returns the rules that make each leaf of its origin, or None for more than `_MAX_CALLS` of them."""
    first = _template_paths(found)
    leaves = wanted(flat_tree)
    in_the_way = [path for path in entries if path in leaves and path not in first and not is_absent(entries[path])]
    globs = _globs(in_the_way, entries)
    moves = {there: path for there, path in first.items() if there != path}
    passed = set(in_the_way)
    there = [path for path in entries if path not in passed]
    changes = renames(moves, there, first, leaves, _MAX_CALLS)
    copies = {path: first[there] for path, there in found.sources.items() if first[there] != path}
    copied = _copies(copies, [first.get(path, path) for path in there])
    if (
        changes is None
        or copied is None
        or len(globs) + len(changes) + len(copied) + len(found.transposed) > _MAX_CALLS
    ):
        return None
    return [
        *(RuleCall.of("drop", glob) for glob in globs),
        *(RuleCall.of("rename", pattern, new) for pattern, new in ordered(changes)),
        *(RuleCall.of("copy", src, dst) for src, dst in copied),
        *(RuleCall.of("transpose", path, (1, 0)) for path in sorted(found.transposed)),
    ]


def _texts(found: Origins) -> Iterator[str]:
    """Yields texts that say how the two sides differ, and which other reading is possible."""
    first = _template_paths(found)
    heads = dict.fromkeys(differing_heads(there, path) for there, path in first.items() if there != path)
    for old, new in list(heads)[:2]:
        yield (
            f"the checkpoint has {old!r} where the template has {new!r}"
            if old and new
            else (f"the checkpoint has {old!r} more" if old else f"the template has {new!r} more")
        )
    if len(heads) > 2:
        yield f"{len(heads) - 2} more places like these"
    for path, other in found.untied.items():
        yield f"{path!r} may have been shared with {other!r}, or else it is new"
    counts = {path: first[there] for path, there in found.sources.items() if path in found.update_counts}
    for path, other in list(counts.items())[:1]:
        yield f"{path!r} continues {other!r}" if path != other else f"{path!r} continues"
    for head in found.doubtful[:1]:
        yield f"what is below {head!r} would fit as well"


def _makes_exactly(made: Leaves, leaves: Leaves, found: Origins, flat_tree: FlatTree) -> bool:
    """Returns True if the rules make each leaf of its origin, and make no other leaf of the template."""
    for path in wanted(flat_tree):
        there = found.sources.get(path)
        if there is None and path in made and not is_absent(made[path].entry):
            return False
        if there is not None and (path not in made or made[path].source != leaves[there].source):
            return False
    return True


def _cause(
    flat_tree: FlatTree,
    names: Mapping[str, str],
    made: Leaves,
    found: Origins,
    texts: Sequence[str],
    calls: tuple[RuleCall, ...],
) -> Suggestion:
    """Returns the cause with its rules, and with globs for the leaves that only one side has.

    names: the template's own path for each path of `flat_tree`.
    """
    skipped = [path for path, leaf in zip(flat_tree.paths, flat_tree.leaves, strict=True) if leaf is ...]
    known = set(flat_tree.paths)
    missing = [names[path] for path in wanted(flat_tree) if path not in found.sources]
    extra = [
        path
        for path, leaf in made.items()
        if path not in known
        and not is_absent(leaf.entry)
        and not any(relative_to(path, at) is not None for at in skipped)
    ]
    text = "; ".join(filter(None, texts)) or "a state is another one"
    globs = _globs(extra, {**made, **dict.fromkeys(known)})
    return Suggestion(text, "", calls, _globs(missing, names.values()), globs if len(globs) <= _MAX_GLOBS else "ignore")


def _globs(paths: Sequence[str], everything: Iterable[str]) -> tuple[str, ...]:
    """Returns globs that match these paths and no others, with one glob for a container if all its leaves are given."""
    inside = set(paths)
    mixed = {place for path in everything if path not in inside for place in parent_paths(path)}
    found: dict[str, None] = {}
    for path in paths:
        place = next((place for place in parent_paths(path) if place not in mixed), None)
        found[path if place is None else f"{place}/**"] = None
    return tuple(found)


def _copies(copies: Mapping[str, str], there: Sequence[str]) -> list[tuple[str, str]] | None:
    """Returns the sources and destinations of copies, or None for more than `_MAX_CALLS` of them.

    A container is one copy if all its leaves are copied.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for dst, src in copies.items():
        groups.setdefault(differing_heads(src, dst), []).append(dst)
    if len(groups) > _MAX_CALLS:
        return None
    found: list[tuple[str, str]] = []
    for (old, new), paths in groups.items():
        src, dst = old.rstrip("/"), new.rstrip("/")
        inside = [path for path in there if relative_to(path, src) is not None]
        if old.endswith("/") and new.endswith("/") and len(inside) == len(paths):
            found.append((src, dst))
        else:
            found += [(copies[path], path) for path in paths]
    return found


def renames(
    moves: Mapping[str, str], everything: Iterable[str], stay: Collection[str], taken: Collection[str], most: int
) -> list[tuple[str, str, bool]] | None:
    """Returns the renames for `moves`, or None if they are more than `most`.

    moves: the new path of each leaf that moves, by its path in the checkpoint.
    everything: all paths of the checkpoint.
    stay: paths of leaves that must not be renamed.
    taken: paths that no other leaf may be renamed to.

    Each rename is an old and a new beginning, and True if they are entire paths. A beginning is as short as possible:
    it must not match a leaf that moves elsewhere or stays, nor rename one to a path that is taken.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for there, path in moves.items():
        groups.setdefault(differing_heads(there, path), {})[there] = path
    todo, done = list(groups.items()), list[tuple[str, str, bool]]()
    while todo:
        if len(todo) + len(done) > most:  # Each group becomes at least one rename.
            return None
        (old, new), members = todo.pop(0)
        others = [path for path in everything if path.startswith(old) and path not in members]
        if not any(path in stay or new + path[len(old) :] in taken for path in others):
            is_entire_path = len(members) == 1 and old in members
            done.append((old, new, is_entire_path))
            continue
        narrower: dict[tuple[str, str], dict[str, str]] = {}
        for there, path in members.items():
            name = names_of(there[len(old) :])[:1]
            heads = (old + name[0], new + name[0]) if name else (there, path)
            narrower.setdefault(heads, {})[there] = path
        if list(narrower) == [(old, new)]:  # The path of this leaf is the beginning of another leaf's path.
            done.append((old, new, True))
        else:
            todo += narrower.items()
    return done


def ordered(renames: Sequence[tuple[str, str, bool]]) -> list[tuple[str, str]]:
    """Returns patterns and replacements, in an order in which no rule renames a leaf that another rule has moved."""

    def written(old: str, is_entire_path: bool) -> str:
        return f"^{re.escape(old)}" + ("$" if is_entire_path else "")

    def quoted(new: str) -> str:
        return new.replace("\\", r"\\")

    left, done = list(renames), list[tuple[str, str]]()
    while left:
        free = [one for one in left if not any(other is not one and _takes(other, one) for other in left)]
        if not free:  # They change places, so all of them get temporary names first.
            moved = [(written(old, is_entire), _TEMPORARY + quoted(new)) for old, new, is_entire in left]
            return [*done, *moved, (f"^{_TEMPORARY}", "")]
        done += [(written(old, is_entire), quoted(new)) for old, new, is_entire in free[:1]]
        left.remove(free[0])
    return done


def _takes(other: tuple[str, str, bool], one: tuple[str, str, bool]) -> bool:
    """Returns True if `other` would rename the leaves that `one` has made, or if `one` would overwrite its leaves."""
    return other[0].startswith(one[1]) or one[1].startswith(other[0])
