"""Compares paths by their names: what they have in common at the beginning and at the end, and what differs."""

import itertools
import re
from collections.abc import Iterator, Sequence

_BOUNDARY = re.compile(r"/|\.|~1")
_AVERAGE = re.compile(r"(?:^|[/._])(?:ema|avg|averages?|averaged|polyak|swa|mu|nu|target)(?:$|[/._])", re.IGNORECASE)
_COPY = re.compile(r"(?:^|[/._])(?:ema|avg|averages?|averaged|polyak|swa)(?:$|[/._])", re.IGNORECASE)
_NAME = re.compile(r".*?(?:/|\.|~1)|.+")  # a name with the separator after it


def suffixes(path: str) -> Iterator[str]:
    """Yields the ends of a path, the longest first, which is the path itself."""
    yield path
    for found in _BOUNDARY.finditer(path):
        yield path[found.end() :]


def is_copy(head: str) -> bool:
    """Returns True if a path begins like that of an average of the parameters, which has their names and shapes."""
    return _COPY.search(head) is not None


def is_average(head: str) -> bool:
    """Returns True if a path begins like that of something computed from the parameters: an average or a moment."""
    return _AVERAGE.search(head) is not None


def may_be_levels(old: str, new: str) -> bool:
    """Returns True if one of two beginnings of paths may be a level that replaced the other."""
    return is_level(old, new) or not common_prefix(old, new)


def is_level(old: str, new: str) -> bool:
    """Returns True if one beginning of a path is the other with more names in one place."""
    if old == new:
        return False
    few, many = sorted((old, new), key=len)
    head = len(common_prefix(few, many))
    return many.endswith(few[head:])


def common_prefix(a: str, b: str) -> str:
    """Returns the beginning that two paths have in common, up to the end of a name."""
    end = 0
    for found in _BOUNDARY.finditer(a):
        if not b.startswith(a[: found.end()]):
            break
        end = found.end()
    return a[:end]


def lead(a: str, b: str) -> int:
    """Returns the number of names that two paths have in common at their beginning."""
    return _alike(a.split("/"), b.split("/"))


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def is_similar(a: str, b: str) -> bool:
    """Returns True if two leaves may belong to one optimizer.

    They do if their paths begin with the same name, or if the entire tree may be that of the optimizer.
    """
    return lead(a, b) > 0 or a.partition("/")[0].isdecimal() or "/" not in a or "/" not in b


def most_alike(place: str, places: Sequence[str]) -> list[str]:
    """Returns those of `places` that have the most names in common with `place`, at the beginning and at the end."""
    names = place.split("/")

    def alike(other: str) -> tuple[int, int]:
        theirs = other.split("/")
        head = _alike(names, theirs)
        return head + _alike(names[head:][::-1], theirs[head:][::-1]), head

    most = max(map(alike, places), default=None)
    return [other for other in places if alike(other) == most]


def without_numbers(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def is_renumbered(old: str, new: str) -> bool:
    """Returns True if two paths differ, and only in their numbers; 00 and 0 are the same number."""
    numbers = ([int(number) for number in re.findall(r"\d+", path)] for path in (old, new))
    return without_numbers(old) == without_numbers(new) and next(numbers) != next(numbers)


def differing_heads(there: str, path: str) -> tuple[str, str]:
    """Returns the beginnings of two paths without the names that they have in common at their ends."""
    a, b = names_of(there), names_of(path)
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return "".join(a[: len(a) - same]), "".join(b[: len(b) - same])


def names_of(path: str) -> list[str]:
    return _NAME.findall(path)
