"""Finds the variables that hold objects of Orbax, and all uses of them in a file, also as parameters of functions."""

import ast
import dataclasses
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import libcst as cst
from libcst import metadata

from .program import FLAX, Program, dotted

_ALL = "*"
_KINDS = {
    "CheckpointManager": "manager",
    "CheckpointManagerOptions": "options",
    **dict.fromkeys(
        ("AsyncCheckpointer", "Checkpointer", "PyTreeCheckpointer", "StandardCheckpointer"), "checkpointer"
    ),
}
Key = tuple[Any, str]  # the scope or class, and the name


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


def parameter_of(program: Program, use: cst.CSTNode) -> tuple[metadata.Scope, str] | None:
    """Returns the parameter to which a use passes the variable, if it is one of a function in this file."""
    argument = program.parent(use)
    call = program.parent(argument) if isinstance(argument, cst.Arg) else None
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name):
        return None
    function = _function(program, call.func)
    if function is None:
        return None
    param = _bound(call, function).get(argument)
    scope = program.scope(param.name) if param else None
    return (scope, param.name.value) if param and scope else None


def _function(program: Program, name: cst.Name) -> cst.FunctionDef | None:
    scope = program.scope(name)
    nodes = [getattr(one, "node", None) for one in scope[name.value]] if scope else []
    return nodes[0] if len(nodes) == 1 and isinstance(nodes[0], cst.FunctionDef) else None


def _bound(call: cst.Call, function: cst.FunctionDef) -> dict[cst.Arg, cst.Param]:
    """Returns the parameter that each argument is for; nothing if the call or the function has stars."""
    params = function.params
    if any(one.star for one in call.args) or isinstance(params.star_arg, cst.Param) or params.star_kwarg:
        return {}
    positional = [*params.posonly_params, *params.params]
    by_name = {one.name.value: one for one in (*positional, *params.kwonly_params)}
    found: dict[cst.Arg, cst.Param] = {}
    for n, one in enumerate(call.args):
        param = by_name.get(one.keyword.value) if one.keyword else positional[n] if n < len(positional) else None
        if param:
            found[one] = param
    return found


def problems_of_parameters(
    program: Program, param: cst.Param, followed: Collection[cst.CSTNode], shared: Shared
) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yields why a parameter may get another object than those of its variable."""
    function = program.parent(program.parent(param))
    if not isinstance(function, cst.FunctionDef) or param.default is not None or function.decorators:
        yield param, f"{param.name.value} has a default, or its function has decorators"
        return
    name = function.name.value
    if shared.has_name(name):
        yield param, f"{name} may be called in other files"
    for node in program.nodes:
        if isinstance(node, cst.Name) and node.value == name and node is not function.name:
            parent = program.parent(node)
            if isinstance(parent, cst.Attribute) and parent.attr is node:
                continue
            call = parent if isinstance(parent, cst.Call) and parent.func is node else None
            bound = _bound(call, function) if call else {}
            if not any(one is param and argument.value in followed for argument, one in bound.items()):
                yield node, f"{name} is also used without {param.name.value}"


def kind_of(program: Program, node: cst.CSTNode) -> str | None:
    """Returns the kind of object that an expression makes, if it calls a class of Orbax; else None."""
    if not isinstance(node, cst.Call):
        return None
    if program.qualified(node.func) == f"{FLAX}.save_args_from_target":
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
            if target := parameter_of(program, use):
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
            merged.problems += problems_of_parameters(program, param, followed, shared)
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
