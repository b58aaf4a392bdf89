"""A parsed program: what its names mean, the edits to make, and the lines that a person must look at.

Names of Orbax become those of the adapter `treering.orbax`, which lacks some. Edits keep comments and formatting, also
those of removed statements.
"""

import ast
import dataclasses
import importlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst import metadata

ORBAX, ADAPTER = "orbax.checkpoint", "treering.orbax"
_OLD_V1 = f"{ORBAX}.experimental.v1"  # Older releases of Orbax have version 1 only there.
MODULES = {_OLD_V1: f"{ADAPTER}.v1", ORBAX: ADAPTER}  # modules with a name of their own, the longest first
FLAX = "flax.training.orbax_utils"  # It imports Orbax.
Edit = Callable[[Any], Any]  # takes a node whose children are edited, and returns what replaces it


def relative_name(name: str) -> str | None:
    """Returns a dotted name within `orbax.checkpoint`, "" for the module itself, or None if it is not of Orbax.

    A name within the adapter is one too, so that a migrated program can be migrated further.
    """
    if f"{name}.".startswith(f"{ADAPTER}."):
        return name[len(ADAPTER) + 1 :]
    if not f"{name}.".startswith(f"{ORBAX}."):
        return None
    if f"{name}.".startswith(f"{_OLD_V1}."):
        name = f"{ORBAX}.v1{name.removeprefix(_OLD_V1)}"
    return name[len(ORBAX) + 1 :]


def problem_of(inner: str) -> str | None:
    """Returns what to do about a name within `orbax.checkpoint` that the adapter lacks, or None if it has the name."""
    if is_private(inner):
        return "is private to Orbax; use a public name"
    # The adapter is a layer above, and a program that has nothing to migrate does not need it.
    found, namespaces = importlib.import_module(ADAPTER), importlib.import_module(f"{ADAPTER}.namespaces")
    parts = inner.split(".") if inner else []
    for level, part in enumerate(parts):
        path = ".".join(parts[: level + 1])
        known = isinstance(found, types.ModuleType | type)
        if namespaces.is_refused(found) or (known and not hasattr(found, part)):
            instead = namespaces.advice(path) or "see docs/migrate/orbax.md"
            return f"is not in {ADAPTER}; {instead}"
        if not known:  # an attribute of an object, such as the result of a call
            return None
        found = getattr(found, part)
    return f"is not in {ADAPTER}; {namespaces.advice(inner)}" if namespaces.is_refused(found) else None


def is_private(inner: str) -> bool:
    """Returns True if a part of a dotted name begins with an underscore."""
    return any(part.startswith("_") for part in inner.split("."))


def new_module(name: str) -> str | None:
    """Returns the module of the adapter that stands for a module of Orbax, or None if there is none."""
    inner = relative_name(name)
    if inner is None or problem_of(inner):
        return None
    return f"{ADAPTER}.{inner}" if inner else ADAPTER


class _Removed(cst.Pass):
    """Stands for a removed statement until its block is edited. LibCST itself would drop the comments of the line."""


def removed(_: Any) -> cst.Pass:
    """Is the edit that removes a statement."""
    return _Removed()


def unwrapped(block: Any) -> Any:
    """Is the edit that replaces a ``with`` by the statements in it."""
    comment = block.body.header.comment
    before = [*block.leading_lines, *([cst.EmptyLine(comment=comment)] if comment else [])]
    return cst.FlattenSentinel(
        [
            cst.SimpleStatementLine([_Removed()], leading_lines=before),
            *block.body.body,
            cst.SimpleStatementLine([_Removed()], leading_lines=block.body.footer),
        ]
    )


def added_after(new: Sequence[cst.SimpleStatementLine]) -> Edit:
    """Returns the edit that adds lines after one, or in its place if all its statements are removed."""

    def edit(line: Any) -> Any:
        if isinstance(line, cst.FlattenSentinel):
            first, *others = line
            return cst.FlattenSentinel([first, *new, *others])
        if _is_removed(line):
            return cst.FlattenSentinel([line.with_changes(body=new[0].body), *new[1:]])
        return cst.FlattenSentinel([line, *new])

    return edit


def edited(module: cst.Module, edits: Mapping[cst.CSTNode, Edit]) -> cst.Module:
    """Returns the module with the edits of its nodes."""
    return cst.ensure_type(module.visit(_Editor(edits)), cst.Module)


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Mapping[cst.CSTNode, Edit]):
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edit = self._edits.get(original_node)
        updated = updated_node if edit is None else edit(updated_node)
        if isinstance(updated, cst.Module | cst.IndentedBlock) and updated is not original_node:
            return _without_removed_lines(updated)
        return updated


def _is_removed(line: Any) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and all(isinstance(one, _Removed) for one in line.body)


def _without_removed_lines(block: Any) -> Any:
    """Leaves out the removed statements of a block. Their comments move to the next line."""
    kept: list[Any] = []
    carried: list[cst.EmptyLine] = []
    for line in block.body:
        if _is_removed(line):
            comment = line.trailing_whitespace.comment
            carried += [*line.leading_lines, *([cst.EmptyLine(comment=comment)] if comment else [])]
            continue
        if isinstance(line, cst.SimpleStatementLine) and any(isinstance(one, _Removed) for one in line.body):
            *others, last = (one for one in line.body if not isinstance(one, _Removed))
            line = line.with_changes(body=[*others, last.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
        if carried and (any(one.comment for one in carried) or not line.leading_lines):
            line = line.with_changes(leading_lines=(*carried, *line.leading_lines))
        kept.append(line)
        carried = []
    if not kept and isinstance(block, cst.IndentedBlock):
        kept, carried = [cst.SimpleStatementLine([cst.Pass()], leading_lines=carried)], []
    footer = [one for one in carried if one.comment]
    return block.with_changes(body=kept, footer=(*footer, *block.footer))


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
        return None if name is None else relative_name(name)

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
