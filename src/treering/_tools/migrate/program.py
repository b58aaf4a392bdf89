"""A parsed program: what its names mean, the edits to make, and the lines that a person must look at."""

import ast
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import libcst as cst
from libcst import metadata

from . import names

Edit = Callable[[Any], Any]  # gets a node whose children are edited, and returns what replaces it


class Unreadable(Exception):
    """A program that cannot be parsed: the line, and the reason."""

    def __init__(self, line: int, reason: str):
        super().__init__(line, reason)
        self.line, self.reason = line, reason


class Program:
    """A program that is edited without a change to its comments and formatting.

    Raises `Unreadable`. `findings` has lines and texts. `consumed` has the nodes that the edits leave out, so that
    names in them no longer count.
    """

    def __init__(self, source: bytes):
        self._wrapper = metadata.MetadataWrapper(_parse(source), unsafe_skip_copy=False)
        kinds = (metadata.PositionProvider, metadata.ParentNodeProvider, metadata.ScopeProvider)
        found = self._wrapper.resolve_many(kinds)
        self._positions, self._parents, self._scopes = (found[kind] for kind in kinds)
        self.module = self._wrapper.module
        self._edits: dict[cst.CSTNode, Edit] = {}
        self.consumed: set[cst.CSTNode] = set()
        self.findings: list[tuple[int, str]] = []
        self.nodes = list(_walk(self.module))
        self.references = list(self._references())

    def report(self, node: cst.CSTNode, text: str) -> None:
        self.findings.append((self.line(node), text))

    def line(self, node: cst.CSTNode) -> int:
        return self._positions[node].start.line

    def parent(self, node: cst.CSTNode) -> Any:
        return self._parents[node]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        while node is not self.module:
            node = self._parents[node]
            yield node

    def scope(self, node: cst.CSTNode) -> metadata.Scope | None:
        return self._scopes.get(node)

    def code(self, node: cst.CSTNode) -> str:
        return " ".join(self.module.code_for_node(node).split())

    def qualified(self, node: cst.CSTNode) -> str | None:
        """Returns the full name of an imported object that an expression names, or None."""
        scope = self.scope(node)
        if scope is None or dotted(node) is None:
            return None
        found = scope.get_qualified_names_for(node)
        return min((one.name for one in found if one.source is metadata.QualifiedNameSource.IMPORT), default=None)

    def _references(self) -> Iterator[tuple[cst.CSTNode, str]]:
        """Yields each longest name that leads to Orbax outside of imports, and its name within `orbax.checkpoint`."""
        for node in self.nodes:
            if isinstance(node, cst.Name | cst.Attribute):
                parent = self.parent(node)
                inside = isinstance(parent, cst.Attribute | cst.ImportAlias | cst.ImportFrom | cst.AsName | cst.AssignTarget)
                if not inside and not (isinstance(parent, cst.Arg) and parent.keyword is node):
                    inner = self.orbax_name(node)
                    if inner is not None:
                        yield node, inner

    def orbax_name(self, node: cst.CSTNode) -> str | None:
        """Returns the name within `orbax.checkpoint` of an expression, "" for the module, or None."""
        name = self.qualified(node)
        return None if name is None else names.relative(name)

    def edit(self, node: cst.CSTNode, edit: Edit) -> None:
        """Adds an edit of a node. Later ones get what the earlier ones returned."""
        before = self._edits.get(node)
        self._edits[node] = edit if before is None else lambda updated: edit(before(updated))

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replaces an expression by the one that a text denotes."""
        self.edit(node, lambda _: cst.parse_expression(text))

    def remove(self, statement: cst.BaseSmallStatement) -> None:
        """Removes a statement. Comments at it stay."""
        suite = isinstance(self.parent(statement), cst.SimpleStatementSuite)
        self.edit(statement, lambda _: cst.Pass() if suite else cst.RemoveFromParent())
        self.consumed.add(statement)

    def split(self, statement: cst.BaseSmallStatement, into: Sequence[cst.BaseSmallStatement]) -> None:
        """Replaces a statement by several, each on its own line unless it shares its line."""
        line = self.parent(statement)
        if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
            self.edit(statement, lambda _: cst.FlattenSentinel(into))
            return
        self.edit(statement, lambda _: into[0])
        for one in reversed(into[1:]):
            self.add_after(line, cst.SimpleStatementLine([one]))

    def add_after(self, line: cst.SimpleStatementLine, new: Any) -> None:
        """Adds a line directly after another, or in its place if that is removed."""

        def edit(updated: Any) -> Any:
            if isinstance(updated, cst.FlattenSentinel):
                return cst.FlattenSentinel([updated[0], new, *updated[1:]])
            if not updated.body:
                return updated.with_changes(body=new.body)
            return cst.FlattenSentinel([updated, new])

        self.edit(line, edit)

    def is_consumed(self, node: cst.CSTNode) -> bool:
        return node in self.consumed or any(one in self.consumed for one in self.ancestors(node))

    def text(self, source: bytes) -> str:
        """Decodes a version of the program."""
        return source.decode(self.module.encoding)

    def edited(self) -> bytes:
        """Returns the program with all edits."""
        return self.module.visit(_Editor(self._edits)).bytes


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: dict[cst.CSTNode, Edit]):
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edit = self._edits.get(original_node)
        updated = updated_node if edit is None else edit(updated_node)
        if isinstance(updated, cst.Module | cst.IndentedBlock) and updated is not original_node:
            return _without_empty_lines_of_code(updated)
        return updated


def _without_empty_lines_of_code(block: Any) -> Any:
    """Removes the lines of a block that have lost their statement. Their comments move to the next line."""
    kept: list[Any] = []
    carried: list[cst.EmptyLine] = []
    for line in block.body:
        if isinstance(line, cst.SimpleStatementLine) and not line.body:
            comment = line.trailing_whitespace.comment
            carried += [one for one in line.leading_lines if one.comment or not carried]
            carried += [cst.EmptyLine(comment=comment)] if comment else []
        elif carried and any(one.comment for one in carried):
            kept.append(line.with_changes(leading_lines=(*carried, *line.leading_lines)))
            carried = []
        else:
            # The blank lines before what was removed stay, unless more of them follow.
            more = carried if len(carried) > len(line.leading_lines) else ()
            kept.append(line.with_changes(leading_lines=(*more, *line.leading_lines)) if more else line)
            carried = []
    if not kept and isinstance(block, cst.IndentedBlock):
        kept, carried = [cst.SimpleStatementLine([cst.Pass()], leading_lines=carried)], []
    footer = [one for one in carried if one.comment]
    return block.with_changes(body=kept, footer=(*footer, *block.footer))


def dotted(node: cst.CSTNode) -> str | None:
    """Returns the text of a name such as ``a.b.c``, or None for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (base := dotted(node.value)) is not None:
        return f"{base}.{node.attr.value}"
    return None


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    stack = [node]
    while stack:
        one = stack.pop()
        yield one
        stack += reversed(one.children)


def _parse(source: bytes) -> cst.Module:
    try:
        # Python's own parser comes first: LibCST's crashes on deeply nested text.
        ast.parse(source)
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise Unreadable(error.raw_line, error.message) from None
    except (SyntaxError, ValueError) as error:
        raise Unreadable(getattr(error, "lineno", None) or 1, getattr(error, "msg", str(error))) from None
    except (RecursionError, MemoryError):
        raise Unreadable(1, "nested too deeply") from None
    if module.bytes != source:
        raise Unreadable(1, "LibCST cannot reproduce this file exactly")
    return module


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: its statement, its node, and the names before and after ``as``."""

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


def imports(program: Program) -> Iterator[Import]:
    """Yields the absolute imports of a program, name by name; ``*`` is left out."""
    for node in program.nodes:
        if isinstance(node, cst.Import):
            for alias in node.names:
                yield Import(node, alias, dotted(alias.name) or "", None)
        elif isinstance(node, cst.ImportFrom) and node.module and not node.relative:
            for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
                yield Import(node, alias, dotted(node.module) or "", dotted(alias.name))
