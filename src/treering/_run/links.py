"""Links in a run's directory that lead to its steps. Such a step is not deleted; if it is moved, the link is named."""

import os
import posixpath

from ..errors import MismatchError
from ..stores.store import Store


def find_links(store: Store, run: str) -> dict[str, tuple[str, ...]]:
    """Returns the names in a run's directory that links in it lead to or into, and the names of these links."""
    if not store.has_folders:  # Buckets have no links, and listing one costs a request.
        return {}
    found: dict[str, tuple[str, ...]] = {}
    links = [name for name in store.list(run) if store.is_link(posixpath.join(run, name))]
    root = store.real_path(run) if links else run
    for link in links:
        target = os.path.relpath(store.real_path(posixpath.join(run, link)), root).split(os.sep)[0]
        if target not in (os.curdir, os.pardir):
            found[target] = (*found.get(target, ()), link)
    return found


def check_not_linked(store: Store, path: str) -> None:
    """Raises `MismatchError` for a step that a link in its run leads to."""
    run, name = posixpath.split(path)
    if found := find_links(store, run).get(name):
        raise MismatchError(f"{path}: {describe_links(found)} to this step, so it stays; remove the link first")


def describe_links(links: tuple[str, ...]) -> str:
    """Returns the beginning of a message about links: ``the link best leads``."""
    return f"the link {links[0]} leads" if len(links) == 1 else f"the links {', '.join(links)} lead"
