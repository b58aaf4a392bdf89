"""Which steps of a run are kept.

>>> keep = tr.keep.last(3) | tr.keep.best(2, "val/loss", "min") | tr.keep.every(50_000)

A step is kept when any of the joined policies wants it. Beyond that, a `Checkpointer` never deletes what it
has just saved, nor the newest committed step, nor a pinned one.
"""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from .errors import MismatchError


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a policy knows of a step. `created` is in seconds since the epoch, `nbytes` its size on the disk."""

    step: int
    metrics: Mapping[str, float]
    created: float = 0.0
    nbytes: int = 0


class _Rule(Protocol):
    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """The steps to keep of those that are there, which come in ascending order."""
        ...


@dataclasses.dataclass(frozen=True)
class Policy:
    """A union of rules. Made by the functions of this module and joined by ``|``."""

    rules: tuple[_Rule, ...]

    def __or__(self, other: "Policy") -> "Policy":
        return Policy(self.rules + other.rules)

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        """The steps to keep of those that are there, which come in ascending order."""
        return set().union(*(rule.kept(saved) for rule in self.rules))


def last(n: int) -> Policy:
    """The `n` newest steps."""
    return Policy((_Last(_count("last", n)),))


def best(n: int, metric: str, mode: Literal["min", "max"], *, unscored: Literal["keep", "drop"] = "keep") -> Policy:
    """The `n` best steps by a metric; of equal ones the newer. NaN ranks worst.

    Steps saved without the metric are kept, or not, as `unscored` says, and do not count.
    """
    if mode not in ("min", "max"):
        raise MismatchError(f"keep.best: expected the mode 'min' or 'max', found {mode!r}")
    if unscored not in ("keep", "drop"):
        raise MismatchError(f"keep.best: expected unscored='keep' or 'drop', found {unscored!r}")
    return Policy((_Best(_count("best", n), metric, mode, unscored),))


def every(interval: int | datetime.timedelta) -> Policy:
    """Steps that are multiples of `interval`, step 0 included; or the first of each time interval since 1970."""
    if isinstance(interval, datetime.timedelta):
        if interval <= datetime.timedelta(0):
            raise MismatchError(f"keep.every: expected a positive interval, found {interval}")
        return Policy((_EveryTime(interval.total_seconds()),))
    return Policy((_Every(_count("every", interval)),))


def steps(*numbers: int) -> Policy:
    """These very steps."""
    return Policy((_Steps(frozenset(numbers)),))


def rank(saved: Sequence[Saved], metric: str, mode: Literal["min", "max"]) -> list[int]:
    """The steps that have the metric, best first; of equal ones the newer first, NaN last."""
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
class _Best:
    n: int
    metric: str
    mode: Literal["min", "max"]
    unscored: Literal["keep", "drop"]

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        kept = set(rank(saved, self.metric, self.mode)[: self.n])
        if self.unscored == "keep":
            kept |= {one.step for one in saved if self.metric not in one.metrics}
        return kept


@dataclasses.dataclass(frozen=True)
class _Every:
    n: int

    def kept(self, saved: Sequence[Saved]) -> set[int]:
        return {one.step for one in saved if one.step % self.n == 0}


@dataclasses.dataclass(frozen=True)
class _EveryTime:
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


def _count(name: str, n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise MismatchError(f"keep.{name}: expected a number from 1, found {n!r}")
    return n
