"""Reads the arguments of calls, and makes new calls from parts of the old ones."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import libcst as cst

from .program import Program


class UnknownForm(Exception):
    """A use of Orbax that has no edit: the node, and the reason."""

    def __init__(self, node: cst.CSTNode, reason: str):
        super().__init__(node, reason)
        self.node, self.reason = node, reason


def arguments(program: Program, call: cst.Call, order: Sequence[str]) -> dict[str, int]:
    """Returns the positions of the arguments by their names. Positional arguments have the names in `order`."""
    if any(isinstance(node, cst.Comment) for node in descendants(call)):
        raise UnknownForm(call, "there are comments within the call")
    found: dict[str, int] = {}
    for n, one in enumerate(call.args):
        if one.star:
            raise UnknownForm(call, f"{one.star} hides the arguments")
        if one.keyword is None and n >= len(order):
            raise UnknownForm(call, "there are too many arguments")
        found[one.keyword.value if one.keyword else order[n]] = n
    return found


def descendants(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Returns a node and all nodes below it."""
    return [node, *(one for child in node.children for one in descendants(child))]


class Part(NamedTuple):
    """A part of a new call: how to get it from the old call, whose parts are edited, and the paths that it takes.

    A path has the position of an argument, then, if that is a call, the position of one of its arguments, and so on.
    """

    get: Callable[[cst.Call], cst.BaseExpression]
    paths: tuple[tuple[int, ...], ...] = ()


def part(*path: int) -> Part:
    """Returns the part at a path."""
    return Part(lambda call: _at(call, path), (path,))


def text(value: str) -> Part:
    """Returns a part that is a text."""
    return Part(lambda _: cst.SimpleString(json.dumps(value)))


def copy(node: cst.BaseExpression) -> Part:
    """Returns a part that is a copy of an expression elsewhere in the program."""
    return Part(lambda _: node.deep_clone())


def _at(call: cst.Call, path: Sequence[int]) -> cst.BaseExpression:
    found: Any = call
    for n in path:
        found = found.args[n].value
    return found


@dataclasses.dataclass(frozen=True)
class NewCall:
    """A call that replaces another: its function, or None for the same, and the arguments by name ("" for none)."""

    func: str | None
    args: Sequence[tuple[str, Part]]

    def edit(self, updated: cst.Call) -> cst.Call:
        """Returns the new call, laid out as the old one was."""
        old, new = updated.args, list[cst.Arg]()
        for n, (name, one) in enumerate(self.args):
            comma: Any = cst.MaybeSentinel.DEFAULT
            equal: Any = cst.MaybeSentinel.DEFAULT
            after: Any = cst.SimpleWhitespace("")
            if n == len(self.args) - 1 and old:
                comma, after = old[-1].comma, old[-1].whitespace_after_arg
            elif len(old) > 1:
                comma = old[min(n, len(old) - 2)].comma
            if name:
                equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            keyword = cst.Name(name) if name else None
            new.append(cst.Arg(one.get(updated), keyword, equal, comma=comma, whitespace_after_arg=after))
        func = updated.func if self.func is None else cst.parse_expression(self.func)
        return updated.with_changes(func=func, args=new)

    def apply(self, program: Program, call: cst.Call) -> None:
        """Adds the edit, and marks as consumed the nodes that the new call leaves out."""
        program.edit(call, self.edit)
        kept = {_at(call, path) for _, one in self.args for path in one.paths}
        _consume(program, call, kept | ({call.func} if self.func is None else set()))


def _consume(program: Program, node: cst.CSTNode, kept: set[Any]) -> None:
    if node in kept:
        return
    if not kept & set(descendants(node)):
        program.consumed.add(node)
        return
    for child in node.children:
        _consume(program, child, kept)
