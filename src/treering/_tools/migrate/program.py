"""A parsed program: what its names mean, the edits to make, and the lines that a person must look at."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst import metadata

from . import names
from .editing import Edit, added_after, edited, removed


class Unreadable(Exception):
    """A program that cannot be parsed: the line, and the reason."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.line, self.reason = line, reason


@dataclasses.dataclass(frozen=True)
class Import:
    """One name of an import: its statement, its node, the module, and the name in it, which ``import`` lacks."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    module: str
    name: str | None

    @property
    def full_name(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"

    @property
    def bound_name(self) -> str:
        """The name that the import adds to its scope."""
        return self.alias.evaluated_alias or self.alias.evaluated_name.partition(".")[0]


class Program:
    """A program that is edited without a change to its comments and formatting.

    Raises `Unreadable`. `findings` has lines and texts. `consumed` has the nodes that the edits leave out, so that
    names in them no longer count. `references` has each longest name that leads to Orbax outside of imports, and its
    name within `orbax.checkpoint`.
    """

    def __init__(self, source: bytes):
        wrapper = metadata.MetadataWrapper(_parse(source))
        kinds = (metadata.PositionProvider, metadata.ParentNodeProvider, metadata.ScopeProvider)
        found: Any = wrapper.resolve_many(kinds)
        self._positions, self._parents, self._scopes = (found[kind] for kind in kinds)
        self.module = wrapper.module
        self._edits: dict[cst.CSTNode, Edit] = {}
        self.consumed: set[cst.CSTNode] = set()
        self.findings: list[tuple[int, str]] = []
        self.nodes = [self.module, *_below(self.module)]
        self.imports = list(self._imports())
        self.references = list(self._references())

    # What the nodes are

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def parent(self, node: cst.CSTNode) -> Any:
        return self._parents[node]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while node is not self.module:
            node = self._parents[node]
            yield node

    def is_top_level(self, statement: cst.CSTNode) -> bool:
        """Returns True if a statement runs whenever the module is imported."""
        return self._parents[self._parents[statement]] is self.module

    def code(self, node: cst.CSTNode) -> str:
        """Returns the code of a node as one line."""
        return " ".join(self.module.code_for_node(node).split())

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        return self._scopes.get(node)

    def qualified(self, node: cst.CSTNode) -> str | None:
        """Returns the full name of an imported object that an expression names, or None."""
        scope = self.scope(node)
        if scope is None or dotted(node) is None:
            return None
        found = scope.get_qualified_names_for(node)
        return min((one.name for one in found if one.source is metadata.QualifiedNameSource.IMPORT), default=None)

    def orbax_name(self, node: cst.CSTNode) -> str | None:
        """Returns the name within `orbax.checkpoint` of an expression, "" for the module, or None."""
        name = self.qualified(node)
        return None if name is None else names.relative(name)

    def is_use(self, node: cst.CSTNode) -> bool:
        """Returns True if a name reads a variable: it is not in an import, assigned, a keyword, or an attribute."""
        parent = self.parent(node)
        if isinstance(parent, cst.ImportAlias | cst.ImportFrom | cst.AsName | cst.AssignTarget):
            return False
        if isinstance(parent, cst.Attribute):
            return parent.value is node and self.is_use(parent)
        return not (isinstance(parent, cst.Arg) and parent.keyword is node)

    def only_value(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """Returns what is assigned to a variable that is assigned once, in the scope of the node; else None."""
        scope = self.scope(node)
        found = [*scope[node.value]] if scope and isinstance(node, cst.Name) else []
        if len(found) != 1 or found[0].scope is not scope or not isinstance(found[0], metadata.Assignment):
            return None
        target = self._parents[found[0].node]
        statement = self._parents[target] if isinstance(target, cst.AssignTarget) else None
        return statement.value if isinstance(statement, cst.Assign) else None

    def _imports(self) -> Iterator[Import]:
        """Yields the absolute imports, name by name, without ``*``."""
        for node in self.nodes:
            if isinstance(node, cst.Import):
                for alias in node.names:
                    yield Import(node, alias, dotted(alias.name) or "", None)
            elif isinstance(node, cst.ImportFrom) and node.module and not node.relative:
                for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
                    yield Import(node, alias, dotted(node.module) or "", dotted(alias.name))

    def _references(self) -> Iterator[tuple[cst.CSTNode, str]]:
        for node in self.nodes:
            longest = isinstance(node, cst.Name | cst.Attribute) and not isinstance(self.parent(node), cst.Attribute)
            if longest and self.is_use(node) and (inner := self.orbax_name(node)) is not None:
                yield node, inner

    # What is to be done

    def report(self, node: cst.CSTNode, text: str) -> None:
        self.findings.append((self.line(node), text))

    def edit(self, node: cst.CSTNode, edit: Edit) -> None:
        """Adds an edit of a node. A later edit gets what the earlier one returned."""
        before = self._edits.get(node)
        self._edits[node] = edit if before is None else lambda updated: edit(before(updated))

    def replace(self, node: cst.CSTNode, code: str) -> None:
        """Replaces an expression by the one that a text denotes."""
        self.edit(node, lambda _: cst.parse_expression(code))

    def remove(self, statement: cst.BaseSmallStatement) -> None:
        """Removes a statement. Comments at it stay."""
        alone = isinstance(self.parent(statement), cst.SimpleStatementSuite)
        self.edit(statement, (lambda _: cst.Pass()) if alone else removed)
        self.consumed.add(statement)

    def split(self, statement: cst.BaseSmallStatement, into: Sequence[cst.BaseSmallStatement]) -> None:
        """Replaces a statement by several, each on its own line unless it shares its line."""
        line = self.parent(statement)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            self.edit(statement, lambda _: into[0])
            self.add_after(line, [cst.SimpleStatementLine([one]) for one in into[1:]])
        else:
            self.edit(statement, lambda _: cst.FlattenSentinel(into))

    def add_after(self, line: cst.CSTNode, new: Sequence[cst.SimpleStatementLine]) -> None:
        self.edit(line, added_after(new))

    def is_consumed(self, node: cst.CSTNode) -> bool:
        return node in self.consumed or any(one in self.consumed for one in self.ancestors(node))

    def edited(self) -> bytes:
        """Returns the program with all edits."""
        return edited(self.module, self._edits).bytes

    def text(self, source: bytes) -> str:
        """Decodes a version of the program."""
        return source.decode(self.module.encoding)


def dotted(node: cst.CSTNode) -> str | None:
    """Returns the text of a name such as ``a.b.c``, or None for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr.value}"
    return None


def _below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    stack = list(reversed(node.children))
    while stack:
        one = stack.pop()
        yield one
        stack += reversed(one.children)


def _parse(source: bytes) -> cst.Module:
    try:
        # Python's own parser comes first: that of LibCST crashes on text that is nested too deeply.
        ast.parse(source)
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise Unreadable(error.raw_line, error.message) from None
    except (SyntaxError, ValueError) as error:
        raise Unreadable(getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))) from None
    except MemoryError:
        raise Unreadable(1, "nested too deeply") from None
    if module.bytes != source:
        raise Unreadable(1, "LibCST cannot reproduce this file exactly")
    return module
