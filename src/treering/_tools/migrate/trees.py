"""Finds the tree, or the template, that the arguments of Orbax's saves and restores wrap."""

from typing import NamedTuple

import libcst as cst

from .calls import Part, UnknownForm, arguments, part
from .program import Program
from .variables import kind_of

_HANDLERS = ("StandardCheckpointHandler", "PyTreeCheckpointHandler")
_SAVES = ("args.StandardSave", "args.PyTreeSave")
_RESTORES = ("args.StandardRestore", "args.PyTreeRestore")
_RESTORE_ARGS = ("checkpoint_utils.construct_restore_args",)


class Wrapped(NamedTuple):
    """A tree within an argument, and how to get it from the edited call. Both are None if there is none."""

    node: cst.BaseExpression | None = None
    get: Part | None = None


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
