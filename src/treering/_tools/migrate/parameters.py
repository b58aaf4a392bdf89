"""Follows variables into the parameters of functions in the same file."""

from collections.abc import Collection, Iterator

import libcst as cst
from libcst import metadata

from .program import Program
from .shared import Shared


def target(program: Program, use: cst.CSTNode) -> tuple[metadata.Scope, str] | None:
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


def problems(
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
