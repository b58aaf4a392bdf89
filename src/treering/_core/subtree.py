"""Defines a part of a source: some of its leaves, and their tree."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import UnsupportedError
from .entries import Entry
from .skeleton import Skeleton
from .source import Source, left_out


class Subtree:
    """Some leaves of a source under names of their own, and their tree. Everything else is that of the source.

    The entries keep the paths by which the source reads them, so a part adds no work when they are read.
    """

    # The reader of Orbax may have a level and items. A part is chosen below them, so it has neither.
    level, item_names = "", None

    def __init__(self, full: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str):
        self.full, self.entries, self.skeleton, self.below = full, entries, skeleton, below

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["full"], name)


def subtree_of(source: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str = "") -> Source:
    """Returns the part of a source that has these entries. Their names are relative to the path `below`."""
    return cast(
        "Source", Subtree(full_source(source), entries, skeleton, "/".join(filter(None, [subtree_path(source), below])))
    )


def full_source(source: Source) -> Source:
    """Returns the source that a part belongs to, or the source itself if it is not a part."""
    return source.full if isinstance(source, Subtree) else source


def is_left_out(source: Source) -> bool:
    """Returns True for a source, or a part of one, with data of unknown kinds only."""
    full = full_source(source)
    return any(left_out(full)) and len(full.skeleton or ()) <= 1 and not full.entries


def check_not_left_out(source: Source) -> None:
    """Raises `UnsupportedError` for a source with data of unknown kinds only."""
    if is_left_out(source):
        found = ", ".join(left_out(source))
        raise UnsupportedError(
            f"{source.path}: expected leaves that Treering can read, found only {found}; restore it with the library "
            "that wrote it, or by its handler with treering.orbax"
        )


def subtree_path(source: Source) -> str:
    """Returns the path to which the names of a part are relative, or "" for a source that is not a part."""
    return source.below if isinstance(source, Subtree) else ""


def source_name(source: Source) -> str:
    """Returns the path of a source for messages. For a part it also says which part."""
    below = subtree_path(source)
    return source.path + (f", at {below}" if below else "")
