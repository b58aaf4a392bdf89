"""Collects the edits of one object of Orbax, which are made together or not at all."""

from collections.abc import Callable

import libcst as cst

from . import names
from .calls import NewCall, UnknownForm
from .program import Program

STAYS = f"stays with {names.ADAPTER}"


class Plan:
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
