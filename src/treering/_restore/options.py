"""The keyword arguments of restoring, as type checkers see them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ..rules import Rule


class ReadOptions(TypedDict, total=False):
    """Those of everything that restores, but for where arrays go; `treering.restore` describes them."""

    at: str
    rules: Sequence[Rule]
    missing: str | Iterable[str]
    extra: str | Iterable[str]
    dtype: Any
    verify: bool
    mmap: bool | None
    memory_limit: int | None
    progress: bool


class RestoreOptions(ReadOptions, total=False):
    """All of them."""

    sharding: Any


def check(options: Mapping[str, Any], call: str) -> None:
    """Raises `TypeError` for an option of restoring that there is not, even where nothing is restored yet."""
    known = RestoreOptions.__required_keys__ | RestoreOptions.__optional_keys__
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"{call} has no argument {', '.join(unknown)}; expected {', '.join(sorted(known))}")
