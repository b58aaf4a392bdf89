"""Policies that choose the steps of a run to keep.

>>> keep = tr.keep.last(3) | tr.keep.best(2, "val/loss", "min") | tr.keep.every(50_000)

A step is kept if any of the joined policies keeps it. A `Checkpointer` also never deletes the step that it has just
saved or restored, the newest committed step, a pinned step, or a step that a link in the run leads to.
"""

import dataclasses
import datetime
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from ._core.entries import check_count
from ._core.tracebacks import hide_internal_frames
from .errors import MismatchError

__all__ = ["Policy", "Saved", "best", "every", "last", "size", "steps"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True)
class Saved:
    """A step as policies see it. `created` is in seconds since the epoch, `nbytes` is the size of its files.

    linked: on a disk, the sizes of its array files, by identities that are equal for a file that steps share.
    base: the step that some of its arrays are stored as differences to; None if it is complete.
    """

    step: int
    metrics: Mapping[str, float]
    created: float = 0.0
    nbytes: int = 0
    linked: Mapping[Hashable, int] = dataclasses.field(default_factory=dict)
    base: int | None = None


class _Rule(Protocol):
    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """Returns the steps to keep. `saved` are the steps of the run, ascending."""
        ...


@dataclasses.dataclass(frozen=True)
class Policy:
    """A union of rules, made by the functions of this module and joined by ``|``."""

    rules: tuple[_Rule, ...]

    def __or__(self, other: "Policy") -> "Policy":
        return Policy(self.rules + other.rules) if isinstance(other, Policy) else NotImplemented

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """Returns the steps that any rule keeps, and their bases. `saved` are the steps of the run, ascending."""
        return with_bases(saved, set().union(*(rule.kept(saved) for rule in self.rules)))

    @property
    def metrics(self) -> set[str]:
        """The metrics that the rules use."""
        return {rule.metric for rule in self.rules if isinstance(rule, _Best)}

    @property
    def numbers(self) -> set[int]:
        """The steps that rules name by number, whether they exist or not."""
        return set().union(*(rule.numbers for rule in self.rules if isinstance(rule, _Steps)))


def last(n: int | datetime.timedelta) -> Policy:
    """Keeps the `n` newest steps, or with a `timedelta` those saved within that time before the newest."""
    if isinstance(n, datetime.timedelta):
        return Policy((_LastSeconds(_check_seconds("last", n)),))
    return Policy((_Last(check_count("keep.last", n)),))


def best(n: int, metric: str, mode: Literal["min", "max"], *, unscored: Literal["keep", "drop"] = "keep") -> Policy:
    """Keeps the `n` best steps by a metric; of equal ones, the newer. NaN ranks worst.

    unscored: "keep" keeps every step without the metric. "drop" keeps only the newest of them, to fill up to `n`,
        because an evaluator may be late.
    """
    _check_mode(mode, "keep.best: ")
    if not isinstance(metric, str):
        order = "; the order is keep.best(n, metric, mode)" if isinstance(n, str) else ""
        raise MismatchError(f"keep.best: expected the name of a metric, found {metric!r}{order}")
    if unscored not in ("keep", "drop"):
        raise MismatchError(f"keep.best: expected unscored='keep' or 'drop', found {unscored!r}")
    return Policy((_Best(check_count("keep.best", n), metric, mode, unscored),))


def every(interval: int | datetime.timedelta) -> Policy:
    """Keeps the first step at or after each multiple of `interval`, including 0.

    A `timedelta` divides the time since 1970.

    >>> tr.keep.every(1000)  # of a run that saved 7, 507, 1007, 1507, 2000, 2007: keeps 7, 1007, 2000
    """
    if isinstance(interval, datetime.timedelta):
        return Policy((_EverySeconds(_check_seconds("every", interval)),))
    return Policy((_Every(check_count("keep.every", interval)),))


def steps(*numbers: int) -> Policy:
    """Keeps the given steps."""
    # A scalar of JAX has the methods of an iterable, too.
    if len(numbers) == 1 and isinstance(numbers[0], Iterable) and getattr(numbers[0], "ndim", 1):
        raise MismatchError(f"keep.steps: expected integers, found {numbers[0]!r:.100}; write keep.steps(*numbers)")
    return Policy((_Steps(frozenset(check_count("keep.steps", number, minimum=0) for number in numbers)),))


def size(nbytes: int) -> Policy:
    """Keeps the newest steps that fit into a number of bytes together, and at least the newest.

    The size of a step is that of its files on all hosts. A file that steps share counts once, in the newest of them.
    """
    return Policy((_Size(check_count("keep.size", nbytes)),))


def total_sizes(saved: Iterable[Saved]) -> Iterator[int]:
    """Yields the bytes that the first step takes, then the first two together, and so on. A shared file counts once."""
    total, counted = 0, set[Hashable]()
    for one in saved:
        total += one.nbytes - sum(nbytes for file, nbytes in one.linked.items() if file in counted)
        counted.update(one.linked)
        yield total


def with_bases(saved: Iterable[Saved], steps: Iterable[int]) -> set[int]:
    """Returns some steps and those without which they cannot be read: their bases, the bases of these, and so on."""
    bases = {one.step: one.base for one in saved if one.base is not None}
    found: set[int] = set()
    for step in steps:
        while step is not None and step not in found:
            found.add(step)
            step = bases.get(step)
    return found


def rank(saved: Sequence[Saved], metric: str, mode: Literal["min", "max"]) -> list[int]:
    """Returns the steps that have the metric, best first; of equal ones, the newer first. NaN ranks last."""
    _check_mode(mode)
    sign = -1 if mode == "max" else 1

    def key(one: Saved) -> tuple[bool, float, int]:
        value = one.metrics[metric]
        return (math.isnan(value), 0.0 if math.isnan(value) else sign * value, -one.step)

    return [one.step for one in sorted((one for one in saved if metric in one.metrics), key=key)]


@dataclasses.dataclass(frozen=True)
class _Last:
    n: int

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        return {one.step for one in saved[-self.n :]}


@dataclasses.dataclass(frozen=True)
class _LastSeconds:
    seconds: float

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        return {one.step for one in saved if one.created >= saved[-1].created - self.seconds}


@dataclasses.dataclass(frozen=True)
class _Best:
    n: int
    metric: str
    mode: Literal["min", "max"]
    unscored: Literal["keep", "drop"]

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        best = rank(saved, self.metric, self.mode)[: self.n]
        without = [one.step for one in reversed(saved) if self.metric not in one.metrics]
        return {*best, *(without if self.unscored == "keep" else without[: self.n - len(best)])}


@dataclasses.dataclass(frozen=True)
class _Every:
    n: int

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        first: dict[int, int] = {}
        for one in saved:
            first.setdefault(one.step // self.n, one.step)
        return set(first.values())


@dataclasses.dataclass(frozen=True)
class _EverySeconds:
    seconds: float

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        first: dict[float, int] = {}
        for one in saved:
            first.setdefault(one.created // self.seconds, one.step)
        return set(first.values())


@dataclasses.dataclass(frozen=True)
class _Steps:
    numbers: frozenset[int]

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        return {one.step for one in saved if one.step in self.numbers}


@dataclasses.dataclass(frozen=True)
class _Size:
    nbytes: int

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        fitting = sum(total <= self.nbytes for total in total_sizes(saved[::-1]))
        return {one.step for one in saved[-max(fitting, 1) :]}


def _check_seconds(name: str, interval: datetime.timedelta) -> float:
    if interval <= datetime.timedelta(0):
        raise MismatchError(f"keep.{name}: expected a positive time, found {interval}")
    return interval.total_seconds()


def _check_mode(mode: str, where: str = "") -> None:
    if mode not in ("min", "max"):
        raise MismatchError(f"{where}expected the mode 'min' or 'max', found {mode!r}")


for _name in ("best", "every", "last", "size", "steps"):
    globals()[_name] = hide_internal_frames(globals()[_name])
