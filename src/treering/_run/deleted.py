"""What process 0 has deleted on its disk, until the disks of the other hosts have no part of it any more.

A step that is not there may have been deleted, or never been known to this disk: only what such a mark, an empty file
in the run's directory, says to be deleted is taken away from the others.
"""

import contextlib
import posixpath
import re
from collections.abc import Collection

from ..formats.treering import host_parts
from ..stores.store import Store
from ..stores.whole_files import make_empty

_MARK = re.compile(r"deleted-([0-9a-f]{16})")


def note(store: Store, root: str, path: str) -> None:
    """Says, durably, that the step at a path is deleted, before it is."""
    note_all(store, root, host_parts.identities(store, path))


def note_all(store: Store, root: str, identities: Collection[str]) -> None:
    """Says it of all steps with these identities."""
    for identity in identities:
        with contextlib.suppress(FileExistsError):
            make_empty(store, posixpath.join(root, f"deleted-{identity}"))
    if identities:
        store.settle(root)


def noted(store: Store, root: str) -> set[str]:
    """The identities of which it is said."""
    return {found[1] for name in store.list(root) if (found := _MARK.fullmatch(name))}


def drop(store: Store, root: str, identities: Collection[str]) -> None:
    """Removes the marks: nobody has any part of these, or another disk has the marks."""
    for identity in identities:
        with contextlib.suppress(FileNotFoundError):
            store.delete(posixpath.join(root, f"deleted-{identity}"))
