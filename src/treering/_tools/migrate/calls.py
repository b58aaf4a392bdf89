"""Reads the arguments of calls, and makes new calls from parts of the old ones.

The edits of one object of Orbax are a `EditPlan`: they are made together or not at all.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import libcst as cst

from .program import ADAPTER, Program
from .variables import kind_of

STAYS = f"stays with {ADAPTER}"
_HANDLERS = ("StandardCheckpointHandler", "PyTreeCheckpointHandler")
_SAVES = ("args.StandardSave", "args.PyTreeSave")
_RESTORES = ("args.StandardRestore", "args.PyTreeRestore")
_RESTORE_ARGS = ("checkpoint_utils.construct_restore_args",)


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


class CallPart(NamedTuple):
    """A part of a new call: how to get it from the old call, whose parts are edited, and the paths that it takes.

    A path has the position of an argument, then, if that is a call, the position of one of its arguments, and so on.
    """

    get: Callable[[cst.Call], cst.BaseExpression]
    paths: tuple[tuple[int, ...], ...] = ()


def part(*path: int) -> CallPart:
    """Returns the part at a path."""
    return CallPart(lambda call: _at(call, path), (path,))


def text(value: str) -> CallPart:
    """Returns a part that is a text."""
    return CallPart(lambda _: cst.SimpleString(json.dumps(value)))


def copy(node: cst.BaseExpression) -> CallPart:
    """Returns a part that is a copy of an expression elsewhere in the program."""
    return CallPart(lambda _: node.deep_clone())


def _at(call: cst.Call, path: Sequence[int]) -> cst.BaseExpression:
    found: Any = call
    for n in path:
        found = found.args[n].value
    return found


@dataclasses.dataclass(frozen=True)
class NewCall:
    """A call that replaces another: its function, or None for the same, and the arguments by name ("" for none)."""

    func: str | None
    args: Sequence[tuple[str, CallPart]]

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


class EditPlan:
    """The edits of one object, which are made only if there are no errors."""

    def __init__(self, program: Program):
        self.program = program
        self.edits: list[Callable[[], object]] = []
        self.errors: list[UnknownForm] = []
        self.nodes: list[cst.CSTNode] = []  # what the plan is about

    @property
    def is_made(self) -> bool:
        return bool(self.edits) and not self.errors

    def attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UnknownForm as error:
            self.errors.append(error)

    def replace(self, call: cst.Call, new: NewCall) -> None:
        self.edits.append(lambda: new.apply(self.program, call))

    def remark(self, node: cst.CSTNode, text: str) -> None:
        self.edits.append(lambda: self.program.report(node, text))

    def apply(self, name: str) -> None:
        """Makes the edits, or else reports why the object of this name stays as it is."""
        for error in self.errors:
            self.program.report(error.node, f"{name} {STAYS}: {error.reason}")
        for edit in () if self.errors else self.edits:
            edit()


def method_call(program: Program, use: cst.CSTNode) -> cst.Call | None:
    """Returns the call of a method of an object, if a use is one."""
    attribute = program.parent(use)
    if not isinstance(attribute, cst.Attribute) or attribute.value is not use:
        return None
    call = program.parent(attribute)
    return call if isinstance(call, cst.Call) and call.func is attribute else None


def method_name(call: cst.Call) -> str:
    """Returns the name of the method that is called."""
    return cst.ensure_type(call.func, cst.Attribute).attr.value


def unknown_use(program: Program, use: cst.CSTNode) -> UnknownForm:
    """Returns the error for a use that is no call of a method."""
    parent = program.parent(use)
    if isinstance(parent, cst.Arg | cst.Return):
        return UnknownForm(use, "it is returned" if isinstance(parent, cst.Return) else "it is passed on")
    return UnknownForm(use, f"{program.code(parent)} is not a form that migrate knows")


def is_test(program: Program, use: cst.CSTNode) -> bool:
    """Returns True if a use only tests if there is an object."""
    parent = program.parent(use)
    if isinstance(parent, cst.Comparison):
        return all(isinstance(one.operator, cst.Is | cst.IsNot) for one in parent.comparisons)
    return isinstance(parent, cst.If | cst.UnaryOperation)


class Wrapped(NamedTuple):
    """A tree within an argument, and how to get it from the edited call. Both are None if there is none."""

    node: cst.BaseExpression | None = None
    get: CallPart | None = None


def saved(program: Program, call: cst.Call, at: int) -> Wrapped:
    """Returns the tree of ``args=StandardSave(tree)``, which is the argument at a position of the call."""
    found = _unwrapped(program, call, at, _SAVES, ("item", "save_args"))
    if found.node is None:
        raise UnknownForm(call.args[at], "there is no tree to save")
    return found


def restored(program: Program, call: cst.Call, at: int) -> Wrapped:
    """Returns the template of ``args=StandardRestore(template)``, if it has one."""
    return _unwrapped(program, call, at, _RESTORES, ("item", "restore_args"))


def _unwrapped(program: Program, call: cst.Call, at: int, kinds: tuple[str, ...], order: tuple[str, ...]) -> Wrapped:
    value = call.args[at].value
    if not isinstance(value, cst.Call) or (name := program.orbax_name(value.func)) not in kinds:
        raise UnknownForm(value, f"{_head(program, value)} is not one of {', '.join(kinds)}")
    order = order if "PyTree" in name else order[:1]
    given = arguments(program, value, order)
    position = given.pop("item", None)
    node = None if position is None else value.args[position].value
    for keyword, n in given.items():
        check_plain(program, keyword, value.args[n].value, node)
    return Wrapped() if node is None or position is None else Wrapped(node, part(at, position))


def _head(program: Program, value: cst.CSTNode) -> str:
    return program.code(value.func if isinstance(value, cst.Call) else value)


def is_plain_handler(program: Program, value: cst.CSTNode) -> bool:
    """Returns True if an expression makes a handler of one tree, without arguments."""
    return isinstance(value, cst.Call) and program.orbax_name(value.func) in _HANDLERS and not value.args


def check_plain(program: Program, keyword: str, value: cst.CSTNode, tree: cst.BaseExpression | None) -> None:
    """Raises `UnknownForm` unless Treering does without an argument: those that Flax or Orbax derive from the tree."""
    if keyword == "save_args":
        call = value if isinstance(value, cst.Call) else program.only_value(value)
        if call is not None and kind_of(program, call) == "save_args":
            return
    if keyword == "restore_args" and isinstance(value, cst.Call) and program.orbax_name(value.func) in _RESTORE_ARGS:
        same = len(value.args) == 1 and tree is not None and value.args[0].value.deep_equals(tree)
        if same:
            return
    raise UnknownForm(value, f"{keyword}={_short(program.code(value))} has no counterpart that migrate knows")


def _short(code: str) -> str:
    return code if len(code) <= 40 else f"{code[:39]}…"
