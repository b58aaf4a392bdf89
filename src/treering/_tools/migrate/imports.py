"""Changes the imports of Orbax to those of the adapter, with all comments and formatting."""

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

import libcst as cst
from libcst import metadata

from .program import ADAPTER, FLAX, MODULES, ORBAX, Import, Program, dotted, is_private, new_module, relative_name

_STAYS = "stays; import orbax.checkpoint, so that migrate can change it"


def rewrite(program: Program, *, native: str | None) -> None:
    """Adds the edits of all imports of Orbax, and of the full names ``orbax.checkpoint.X``.

    native: the name under which the edited statements use `treering`, or None if they do not. If it is given,
        `treering` is imported, and imports of Orbax that only edited statements used are removed.
    """
    found = [one for one in program.imports if one.module == "orbax" or relative_name(one.full_name) is not None]
    unused: set[cst.CSTNode] = set()
    binding: set[cst.CSTNode] = set()  # the statements that bind the name `treering` now
    if native:
        found += [one for one in program.imports if one.name and f"{one.full_name}.".startswith(f"{FLAX}.")]
        unused = _unused(program, found)
    for statement in dict.fromkeys(one.statement for one in found):
        mine = [one for one in found if one.statement is statement]
        if all(one.alias in unused for one in mine) and not _has_other_names(statement, mine):
            program.remove(statement)
        elif isinstance(statement, cst.Import):
            _rewrite_import(program, statement, mine, unused, binding)
        else:
            _rewrite_from(program, statement, mine, unused)
    _rewrite_stars(program)
    _rewrite_full_names(program, found, binding)
    _report_unbound(program, binding)
    if native:
        _import_treering(program, native, found)


def _has_other_names(statement: cst.Import | cst.ImportFrom, mine: Sequence[Import]) -> bool:
    return not isinstance(statement.names, cst.ImportStar) and len(statement.names) > len(mine)


def _unused(program: Program, found: Sequence[Import]) -> set[cst.CSTNode]:
    """Returns the imports whose names only edited statements used. Texts count as uses, as in annotations."""
    is_used: dict[str, bool] = {}
    for node in program.nodes:
        if isinstance(node, cst.Name) and program.is_use(node):
            is_used[node.value] = is_used.get(node.value, False) or not program.is_consumed(node)
    texts = " ".join(node.value for node in program.nodes if isinstance(node, cst.SimpleString))
    return {
        one.alias
        for one in found
        if is_used.get(one.bound_name) is False and not re.search(rf"\b{one.bound_name}\.", texts)
    }


def _rewrite_import(
    program: Program,
    statement: cst.Import,
    mine: Sequence[Import],
    unused: Collection[cst.CSTNode],
    binding: set[cst.CSTNode],
) -> None:
    for one in mine:
        new = new_module(one.module)
        if one.alias in unused:
            program.edit(one.alias, lambda _: cst.RemoveFromParent())
            program.edit(statement, _without_last_comma)
        elif one.module == "orbax":
            if one.alias.asname or any(_is_other_use(program, node) for node in program.nodes):
                program.report(one.alias, f"this import {_STAYS}")
                continue
            new = ADAPTER
        if new and one.alias not in unused:
            program.replace(one.alias.name, new)
            if not one.alias.asname:
                binding.add(statement)


def _imports_of(program: Program, node: cst.CSTNode) -> set[cst.CSTNode]:
    """Returns the statements that bind the first name of a dotted one."""
    scope = program.scope(node)
    name = (dotted(node) or "").partition(".")[0]
    return set() if scope is None else {one.node for one in scope[name] if isinstance(one, metadata.Assignment)}


def _without_last_comma(updated: cst.Import) -> Any:
    last = updated.names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return updated.with_changes(names=[*updated.names[:-1], last])


def _is_other_use(program: Program, node: cst.CSTNode) -> bool:
    """Returns True for the name ``orbax`` of the package, if no ``.checkpoint`` follows."""
    if not isinstance(node, cst.Name) or node.value != "orbax" or program.qualified(node) != "orbax":
        return False
    parent = program.parent(node)
    if isinstance(parent, cst.Attribute):
        return parent.value is node and parent.attr.value != "checkpoint"
    return not isinstance(parent, cst.ImportAlias | cst.ImportFrom)


def _rewrite_from(
    program: Program, statement: cst.ImportFrom, mine: Sequence[Import], unused: Collection[cst.CSTNode]
) -> None:
    """Changes the module of a ``from`` import. Names that move to different modules get a statement for each."""
    assert isinstance(statement.names, Sequence)
    old = mine[0].module
    groups: dict[str, list[cst.ImportAlias]] = {}
    imported = {one.alias: one for one in mine}
    for alias in statement.names:
        if alias in unused:
            continue
        module, name = _new_home(imported[alias]) if alias in imported else (old, alias.evaluated_name)
        if name != alias.evaluated_name:
            asname = alias.asname or cst.AsName(cst.Name(alias.evaluated_name))
            alias = alias.with_changes(name=cst.Name(name), asname=asname)
        groups.setdefault(module, []).append(alias)
    if len(groups) == 1 and len(statement.names) == sum(map(len, groups.values())):
        ((module, aliases),) = groups.items()
        program.edit(
            statement, lambda updated: updated.with_changes(module=cst.parse_expression(module), names=aliases)
        )
        return
    if "#" in program.module.code_for_node(statement):
        program.report(statement, "this import needs several modules now; split it by hand, because it has comments")
        return
    program.split(statement, [_from_import(module, aliases) for module, aliases in groups.items()])


def _from_import(module: str, aliases: Sequence[cst.ImportAlias]) -> cst.ImportFrom:
    found: Any = cst.parse_statement(f"from {module} import x")
    return found.body[0].with_changes(names=[one.with_changes(comma=cst.MaybeSentinel.DEFAULT) for one in aliases])


def _new_home(one: Import) -> tuple[str, str]:
    """Returns the module from which to import a name, and its name there."""
    assert one.name is not None
    if new := MODULES.get(one.full_name):
        module, _, name = new.rpartition(".")
        return module, name
    if is_private(one.name):  # The adapter has none. Any other name that it lacks raises its error there.
        return one.module, one.name
    return new_module(one.module) or one.module, one.name


def _rewrite_stars(program: Program) -> None:
    for node in program.nodes:
        if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar) and not node.relative:
            module = dotted(node.module) if node.module else None
            if module and relative_name(module) is not None:
                program.report(node, f"{program.code(node)} hides the names; check by hand which are used")
                if node.module and (new := new_module(module)):
                    program.replace(node.module, new)


def _rewrite_full_names(program: Program, found: Sequence[Import], binding: set[cst.CSTNode]) -> None:
    staying = [one.module for one in found if one.name is None and not new_module(one.module)]
    for node, _ in program.references:
        text = dotted(node) or ""
        if any(f"{text}.".startswith(f"{module}.") for module in staying if module != "orbax"):
            continue
        if text.startswith(ORBAX) and not _imports_of(program, node) & binding:
            if not program.is_consumed(node):
                program.report(node, f"{text} {_STAYS}")
            continue
        while text.startswith(ORBAX) and text not in MODULES:
            node = cst.ensure_type(node, cst.Attribute).value
            text = dotted(node) or ""
        if text in MODULES:
            program.replace(node, MODULES[text])


def _report_unbound(program: Program, binding: set[cst.CSTNode]) -> None:
    """Reports other packages of `orbax` that a program used through its import of `orbax.checkpoint`."""
    mixed = {one.statement for one in program.imports if one.bound_name == "orbax" and not new_module(one.module)}
    for node in program.nodes:
        if not _is_other_use(program, node) or not program.is_use(node):
            continue
        if _imports_of(program, node) <= binding - mixed:
            above = program.parent(node)
            text = program.code(above if isinstance(above, cst.Attribute) else node)
            program.report(node, f"nothing imports orbax any more; add import {text}")


def _import_treering(program: Program, name: str, found: Sequence[Import]) -> None:
    """Imports `treering` at the top level: after its first import of Orbax there, or else after the first imports."""
    if any(one.module == "treering" and one.name is None and one.bound_name == name for one in program.imports):
        return
    alias = cst.ImportAlias(cst.Name("treering"), None if name == "treering" else cst.AsName(cst.Name(name)))
    new = cst.SimpleStatementLine([cst.Import([alias])])
    top = [line for line in program.module.body if isinstance(line, cst.SimpleStatementLine)]
    statements = {one.statement for one in found}
    for line in top:
        if statements & set(line.body):
            program.add_after(line, [new])
            return
    first = list(itertools.takewhile(_is_import_or_docstring, program.module.body))
    if first:
        program.add_after(first[-1], [new])
    else:
        program.edit(program.module, lambda updated: updated.with_changes(body=[new, *updated.body]))


def _is_import_or_docstring(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and isinstance(
        line.body[0], cst.Import | cst.ImportFrom | cst.Expr
    )
