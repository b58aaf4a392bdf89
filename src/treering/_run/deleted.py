"""Marks of steps that process 0 has deleted from its local tier, kept until no other host's disk has a part of them.

A step that is missing on the disk of process 0 may have been deleted, or that disk may never have known it. A mark, an
empty file in the run's directory, tells the two apart: other hosts delete only the parts of marked steps.
"""

import contextlib
import posixpath
import re
from collections.abc import Collection

from ..formats.treering import host_parts
from ..stores.file_io import make_empty
from ..stores.store import Store

_MARK = re.compile(r"deleted-([0-9a-f]{16})")


def note(store: Store, root: str, path: str) -> None:
    """Marks the step at a path as deleted. The mark is durable before the step is deleted."""
    note_all(store, root, host_parts.identities(store, path))


def note_all(store: Store, root: str, identities: Collection[str]) -> None:
    """Marks all steps with these identities as deleted, durably."""
    for identity in identities:
        with contextlib.suppress(FileExistsError):
            make_empty(store, posixpath.join(root, f"deleted-{identity}"))
    if identities:
        store.settle(root)


def noted(store: Store, root: str) -> set[str]:
    """Returns the identities of the steps that are marked as deleted."""
    return {found[1] for name in store.list(root) if (found := _MARK.fullmatch(name))}


def drop(store: Store, root: str, identities: Collection[str]) -> None:
    """Removes marks: no disk has a part of these steps any more, or another disk has the marks."""
    for identity in identities:
        with contextlib.suppress(FileNotFoundError):
            store.delete(posixpath.join(root, f"deleted-{identity}"))
