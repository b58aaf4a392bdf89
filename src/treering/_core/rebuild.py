"""Builds the tree of leaves that rules have renamed, dropped or made of others. It keeps containers without changes."""

import logging
from collections.abc import Mapping

from .leaf_paths import join, key_text
from .skeleton import Node, Skeleton, assemble, containers, infer_container, places, subtree

_log = logging.getLogger("treering")


def rebuild_tree(
    sources: Mapping[str, str], skeleton: Skeleton | None, *, keep_empty: bool
) -> tuple[list[str], Skeleton, tuple[str, ...]]:
    """Returns the leaves in the order of their tree, its skeleton, and the containers whose order is only inferred.

    sources: for each path, the path of the leaf that it is or is made of in the old tree, in the order of that tree.
    skeleton: the old tree.

    If all leaves of a container come from one old container, it is that container: it has the same kind, the same keys
    and, with `keep_empty`, the same empty containers. If some of its leaves are gone, the rest keep their order.
    """
    known: dict[str, Node] = {}
    leaves: list[str] = []
    for _, path, node in containers(skeleton or ()):
        if isinstance(node, Node):
            known[path] = node
        else:
            leaves.append(path)
    with_leaves = places(leaves)
    origins = _origins(sources)
    guessed: list[str] = []
    empty: dict[str, str] = {}  # old paths of empty containers by their new paths

    def log_lost_keys(at: str) -> None:
        before = known.get(at)
        if before is not None and before.kind == "dict" and any(not isinstance(key, str) for key in before.children()):
            _log.warning(
                "%s: some of its keys were not text; because rules add names to it, all its keys become text",
                at or "(root)",
            )

    def describe(at: str, names: list[str]) -> tuple[Node, list[str]]:
        origin = origins.get(at)
        node = None if origin is None else known.get(origin)
        if node is None or origin is None:
            found, order = infer_container(at, names)
            if found.kind != "list" and len(names) > 1:
                guessed.append(at)
            log_lost_keys(at)
            return found, order
        was = [key_text(key) for key in node.children()]
        places_of = {name: join(origin, name, root=not origin) for name in was}
        bare = [name for name in was if places_of[name] in known and places_of[name] not in with_leaves and keep_empty]
        empty.update({join(at, name, root=not at): places_of[name] for name in bare})
        left = [name for name in was if name in names or name in bare]
        new = [name for name in names if name not in was]
        if not new and left == was:
            return node, was
        if not new and node.kind in ("list", "tuple", "positional") and left == was[: len(left)]:
            return Node(node.kind, node.name, len(left)), left
        found, order = infer_container(at, [*left, *new])
        if not new and node.kind not in (
            "list",
            "tuple",
            "positional",
        ):  # The keys of such a container may not be text.
            keys = dict(zip(was, node.names(), strict=True))
            kind = "dict" if node.kind == "dict" else "object"
            return Node(kind, node.name, [keys[name] for name in left]), left
        if new and (node.kind != "dict" or node.name):  # A class has an order of its own, which new names do not have.
            guessed.append(at)
        log_lost_keys(at)
        return found, order

    order, found = assemble(sources, describe, lambda path: subtree(skeleton or (), empty[path]) or ())
    return order, found, tuple(guessed)


def _origins(sources: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the old path of each container, or None if its leaves come from several containers.

    A leaf says the old path of a container if it has the same number of names below it as before.
    """
    found: dict[str, str | None] = {}
    for path, source in sources.items():
        parts, was = path.split("/"), source.split("/")
        for level in range(len(parts)):
            at, below = "/".join(parts[:level]), len(parts) - level
            origin = "/".join(was[:-below]) if below <= len(was) else None
            if found.setdefault(at, origin) != origin:
                found[at] = None
    return found
