"""Suggests a cause when the paths of a checkpoint and of a template differ by the same levels in many places."""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping

from .._core.entries import Entry
from .._pytree.walk import FlatTree
from .path_likeness import is_average, is_renumbered, without_numbers
from .policy import Policy
from .suggestion import RuleCall, Suggestion, is_plain

_MAX_SAMPLED_LEAVES = 8  # missing leaves that are compared with all others
_MAX_COMPARED_LEAVES = 5000  # other leaves that each of the sample is compared with
_MAX_SUGGESTIONS = 6  # suggestions that are tried at most, as each applies rules to all leaves
_NUMBER = re.compile(r"\d+")


def level_suggestions(flat_tree: FlatTree, entries: Mapping[str, Entry], policy: Policy) -> list[Suggestion]:
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
                chance = len(missing) == 1 and change[0] == "last" and not getattr(entries[other], "shape", ())
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
