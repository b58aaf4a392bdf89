"""A part of a source: the leaves that are chosen of it, and their tree."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from .entries import Entry
from .skeleton import Skeleton
from .source import Source


class Part:
    """Some leaves of a source, by names of their own, and their tree; in everything else it is that source.

    The entries keep the paths by which the source reads them, so that choosing costs nothing when they are read.
    """

    level = ""  # see the reader of Orbax; a part was chosen below it

    def __init__(self, whole: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str):
        self.whole, self.entries, self.skeleton, self.below = whole, entries, skeleton, below

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["whole"], name)


def part_of(source: Source, entries: Mapping[str, Entry], skeleton: Skeleton | None, below: str = "") -> Source:
    """The part of a source that has these entries; `below` is the path in it to which their names are relative."""
    return cast("Source", Part(whole_of(source), entries, skeleton, "/".join(filter(None, [below_of(source), below]))))


def whole_of(source: Source) -> Source:
    """The source that a part is of."""
    return source.whole if isinstance(source, Part) else source


def below_of(source: Source) -> str:
    """The path to which the names of a part are relative; "" for a source that is no part."""
    return source.below if isinstance(source, Part) else ""


def name_of(source: Source) -> str:
    """The path of a source and, for a part, what it is of it, as messages have it."""
    below = below_of(source)
    return source.path + (f", at {below}" if below else "")
