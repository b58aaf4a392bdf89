"""Finds the variables that hold objects of Orbax, and all uses of them in a file."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import libcst as cst
from libcst import metadata

from . import names, parameters
from .program import Program, dotted
from .shared import Shared

_KINDS = {
    "CheckpointManager": "manager",
    "CheckpointManagerOptions": "options",
    **dict.fromkeys(
        ("AsyncCheckpointer", "Checkpointer", "PyTreeCheckpointer", "StandardCheckpointer"), "checkpointer"
    ),
}
Key = tuple[Any, str]  # the scope or class, and the name


def kind_of(program: Program, node: cst.CSTNode) -> str | None:
    """Returns the kind of object that an expression makes, if it calls a class of Orbax; else None."""
    if not isinstance(node, cst.Call):
        return None
    if program.qualified(node.func) == f"{names.FLAX}.save_args_from_target":
        return "save_args"
    return _KINDS.get(program.orbax_name(node.func) or "")


@dataclasses.dataclass
class Variable:
    """The assignments and uses of one variable, or of several that hold the same object.

    makers: the calls that make the object, each with its statement, or the item of its ``with``.
    problems: nodes and the reasons why the object cannot be followed.
    passed: uses that are arguments of functions in this file, and the keys of the parameters.
    """

    name: str
    makers: dict[cst.Call, cst.CSTNode] = dataclasses.field(default_factory=dict)
    uses: list[cst.CSTNode] = dataclasses.field(default_factory=list)
    problems: list[tuple[cst.CSTNode, str]] = dataclasses.field(default_factory=list)
    params: list[cst.Param] = dataclasses.field(default_factory=list)
    annotations: list[cst.Annotation] = dataclasses.field(default_factory=list)
    passed: dict[cst.CSTNode, Key] = dataclasses.field(default_factory=dict)


def find(program: Program, shared: Shared) -> Iterator[Variable]:
    """Yields the variables that hold objects of Orbax. One that is passed to a function includes its parameter.

    shared: what other files use of this one.
    """
    found: dict[Key, Variable] = {}
    for node in program.nodes:
        if isinstance(node, cst.Name | cst.Attribute) and (key := _key(program, node)):
            _add(program, found.setdefault(key, Variable(program.code(node))), node)
        elif isinstance(node, cst.Param) and (scope := program.scope(node.name)):
            found.setdefault((scope, node.name.value), Variable(node.name.value)).params.append(node)
    for variable in found.values():
        for use in variable.uses:
            if target := parameters.target(program, use):
                variable.passed[use] = target
    done: set[Key] = set()
    for key, variable in found.items():
        if variable.makers and key not in done:
            keys = _connected(key, found)
            done |= keys
            yield _merged(program, found, keys, shared)


def _key(program: Program, node: cst.CSTNode) -> Key | None:
    """Returns what identifies the variable that a name is, or the attribute ``self.X``."""
    parent = program.parent(node)
    if isinstance(node, cst.Attribute):
        if dotted(node.value) != "self":
            return None
        owner = next((one for one in program.ancestors(node) if isinstance(one, cst.ClassDef)), None)
        return None if owner is None else (owner, node.attr.value)
    assert isinstance(node, cst.Name)
    keyword = isinstance(parent, cst.Arg) and parent.keyword is node
    if keyword or (isinstance(parent, cst.Attribute) and parent.attr is node) or isinstance(parent, cst.Param):
        return None
    scope = program.scope(node)
    owners = {one.scope for one in scope[node.value]} if scope else set()
    return (owners.pop(), node.value) if len(owners) == 1 else None


def _add(program: Program, variable: Variable, node: cst.CSTNode) -> None:
    parent = program.parent(node)
    if isinstance(parent, cst.AssignTarget):
        statement = program.parent(parent)
        if kind_of(program, statement.value) and len(statement.targets) == 1:
            variable.makers[statement.value] = statement
        elif dotted(statement.value) != "None":
            variable.problems.append((node, f"{variable.name} is assigned another value"))
    elif isinstance(parent, cst.AsName):
        item = program.parent(parent)
        if isinstance(item, cst.WithItem) and kind_of(program, item.item):
            variable.makers[cst.ensure_type(item.item, cst.Call)] = item
        else:
            variable.problems.append((node, f"{variable.name} is assigned another value"))
    elif isinstance(parent, cst.AnnAssign) and parent.target is node:
        variable.annotations.append(parent.annotation)
        if isinstance(parent.value, cst.Call) and kind_of(program, parent.value):
            variable.makers[parent.value] = parent
        elif parent.value is not None and dotted(parent.value) != "None":
            variable.problems.append((node, f"{variable.name} is assigned another value"))
    elif isinstance(parent, cst.FunctionDef | cst.ClassDef | cst.Global | cst.NameItem):
        pass
    else:
        variable.uses.append(node)


def _connected(key: Key, found: dict[Key, Variable]) -> set[Key]:
    links: dict[Key, set[Key]] = {}
    for one, variable in found.items():
        for other in variable.passed.values():
            links.setdefault(one, set()).add(other)
            links.setdefault(other, set()).add(one)
    keys, left = set[Key](), [key]
    while left:
        one = left.pop()
        if one not in keys:
            keys.add(one)
            left += links.get(one, ())
    return keys


def _merged(program: Program, found: dict[Key, Variable], keys: Collection[Key], shared: Shared) -> Variable:
    parts = [found[key] for key in keys if key in found]
    merged = Variable(next(one.name for one in parts if one.makers))
    followed = {use for one in parts for use, target in one.passed.items() if target in keys}
    for part in parts:
        merged.makers |= part.makers
        merged.uses += [use for use in part.uses if use not in followed]
        merged.problems += part.problems
        merged.params += part.params
        merged.annotations += [*part.annotations, *(one.annotation for one in part.params if one.annotation)]
        for param in part.params:
            merged.problems += parameters.problems(program, param, followed, shared)
    for owner, name in keys:
        if isinstance(owner, metadata.ClassScope):
            merged.problems.append((next(iter(merged.makers)), f"{merged.name} is an attribute of a class"))
        if isinstance(owner, cst.ClassDef):
            others = [node for node in program.nodes if isinstance(node, cst.Attribute) and node.attr.value == name]
            merged.problems += [
                (node, f"{program.code(node)} is used outside of its class")
                for node in others
                if _key(program, node) != (owner, name)
            ]
        if (
            name in shared.attributes
            if isinstance(owner, cst.ClassDef)
            else _is_global(owner) and shared.has_name(name)
        ):
            merged.problems.append((next(iter(merged.makers)), f"{merged.name} may be used in other files"))
    return merged


def _is_global(scope: object) -> bool:
    return isinstance(scope, metadata.GlobalScope)
