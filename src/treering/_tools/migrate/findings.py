"""Reports the uses of Orbax that the adapter `treering.orbax` does not cover."""

import re
from collections.abc import Collection

import libcst as cst

from . import names
from .calls import descendants
from .program import Program, dotted

_MODULE_TEXT = re.compile(r"orbax\.checkpoint(\.\w+)*")


def report(program: Program) -> None:
    """Adds a finding for each use of Orbax that a person must change, unless an edit leaves it out."""
    missing: set[str] = set()  # Names whose import is reported. Their uses are not.
    for one in program.imports:
        inner = names.relative(one.full_name)
        if inner and one.alias not in program.consumed and (problem := names.problem(inner)):
            program.report(one.alias, f"{one.full_name} {problem}")
            missing.add(one.bound_name)
    for node, inner in program.references:
        if not program.is_consumed(node):
            _report_reference(program, node, inner, missing)
    for node in program.nodes:
        if isinstance(node, cst.ClassDef) and any(program.orbax_name(base.value) for base in node.bases):
            _report_private_attributes(program, node)
        if isinstance(node, cst.SimpleString) and not isinstance(program.parent(node), cst.Expr):
            value = node.evaluated_value
            if isinstance(value, str) and _MODULE_TEXT.fullmatch(value):
                program.report(node, f"the text {value!r} names a module of Orbax; change it by hand")


def _report_private_attributes(program: Program, subclass: cst.ClassDef) -> None:
    """Reports the private attributes that a subclass of a class of Orbax reads, and does not define itself."""
    own: set[str] = set()
    used: dict[cst.CSTNode, str] = {}
    for node in descendants(subclass):
        parent = program.parent(node)
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            own.add(node.name.value)
        elif isinstance(node, cst.Name) and isinstance(parent, cst.AssignTarget | cst.AnnAssign):
            own.add(node.value)
        elif isinstance(node, cst.Attribute) and program.code(node.value) in ("self", "cls", "super()"):
            name = node.attr.value
            if isinstance(parent, cst.AssignTarget) or (isinstance(parent, cst.AnnAssign) and parent.target is node):
                own.add(name)
            elif name.startswith("_") and not name.startswith("__"):
                used[node] = name
    base = next(name for one in subclass.bases if (name := program.orbax_name(one.value)))
    for node, name in used.items():
        if name not in own:
            program.report(node, f"{program.code(node)} is private to {base} of Orbax; use a public name")


def _report_reference(program: Program, node: cst.CSTNode, inner: str, missing: Collection[str]) -> None:
    text, parent = dotted(node) or "", program.parent(node)
    if not inner:
        if not isinstance(parent, cst.Comparison | cst.ComparisonTarget | cst.If):
            program.report(node, f"{text} is used as a value; check by hand which names are used through it")
    elif text.partition(".")[0] not in missing and (problem := names.problem(inner)):
        program.report(node, f"{text} {problem}")
    if isinstance(parent, cst.Call) and parent.func is node:
        for argument in parent.args:
            if argument.keyword and argument.keyword.value == "transforms" and program.code(argument.value) != "{}":
                advice = "use rules=[tr.rules.rename(old, new)] of tr.restore"
                program.report(argument, f"transforms= is not in {names.ADAPTER}, except {{}}; {advice}")
