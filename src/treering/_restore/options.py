"""Declares the keyword arguments of a restore for type checkers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from ..rules import Rule


class ReadOptions(TypedDict, total=False):
    """The options of every call that restores, except `sharding`; `treering.restore` describes them."""

    at: str
    rules: Sequence[Rule]
    missing: str | Iterable[str]
    extra: str | Iterable[str]
    dtype: Any
    grow: Iterable[str]
    verify: bool
    mmap: bool | None
    memory_limit: int | None
    progress: bool
    read: Literal["each", "once"] | None
    max_expansion: float


class RestoreOptions(ReadOptions, total=False):
    """All options of restoring."""

    sharding: Any


def check(options: Mapping[str, Any], call: str, named: Sequence[str]) -> None:
    """Raises `TypeError` for an unknown option, so that a job fails at its start and not at its first restore.

    named: the arguments of the call besides the options, which the error lists first.
    """
    known = RestoreOptions.__required_keys__ | RestoreOptions.__optional_keys__
    if unknown := sorted(options.keys() - known):
        expected = [*named, *sorted(known - {*named})]
        raise TypeError(f"{call} has no argument {', '.join(unknown)}; expected {', '.join(expected)}")
