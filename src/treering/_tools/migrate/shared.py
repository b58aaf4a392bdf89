"""Finds the names of one file that other files use, because an object that they use cannot change alone."""

import ast
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_ALL = "*"


class Shared(NamedTuple):
    """What other files use of one file: the names at its top level that they import, and any attributes."""

    names: frozenset[str]
    attributes: frozenset[str]

    def has_name(self, name: str) -> bool:
        """Returns True if another file may use a name of the top level."""
        return name in self.names or _ALL in self.names


class _Uses(NamedTuple):
    imported: set[tuple[str, str]]  # the last part of a module's name, and a name in it
    attributes: set[str]


def shared_names(sources: Mapping[str, bytes]) -> dict[str, Shared]:
    """Returns what the other files use of each of these files, by their paths. Files with errors are left out."""
    uses = {path: _uses(source) for path, source in sources.items()}
    return {path: _shared(path, [one for other, one in uses.items() if other != path]) for path in sources}


def _shared(path: str, others: Iterable[_Uses]) -> Shared:
    folder, name = os.path.split(os.path.abspath(path))
    stem = os.path.basename(folder) if name == "__init__.py" else os.path.splitext(name)[0]
    names = {used for one in others for module, used in one.imported if module == stem}
    return Shared(frozenset(names), frozenset().union(*(one.attributes for one in others)))


def _uses(source: bytes) -> _Uses:
    found = _Uses(set(), set())
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    modules: dict[str, str] = {}  # what may be a module, by the name that it has here
    own: set[str] = set()  # attributes that this file assigns to `self`
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update((one.asname or one.name, one.name.rpartition(".")[2]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            found.imported.update((module, one.name) for one in node.names)
            modules.update((one.asname or one.name, one.name) for one in node.names)
        elif isinstance(node, ast.Attribute) and _is_self(node.value) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if not (_is_self(node.value) and node.attr in own):
                found.attributes.add(node.attr)
            if (module := modules.get(_dotted(node.value))) is not None:
                found.imported.add((module, node.attr))
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
