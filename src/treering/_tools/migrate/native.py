"""Replaces calls of Orbax by those of Treering: all calls of an object or none, so that the program still runs."""

import functools
from collections.abc import Collection

import libcst as cst

from . import checkpointer, manager, variables
from .calls import STAYS, EditPlan, NewCall, UnknownForm, is_test, method_call, method_name, unknown_use
from .program import Program, dotted, problem_of, unwrapped
from .variables import Shared, Variable, kind_of

_OVERWRITE = "overwrite= refuses a checkpoint that Orbax wrote; delete it, or save to another path"
_NUMPY = "arrays are restored as NumPy arrays; pass a template to restore JAX arrays, as Orbax does"


def rewrite(program: Program, shared: Shared) -> str | None:
    """Adds the edits of the objects of which every use is known, and reports the others.

    shared: what other files use of this one. Returns the name of `treering` in the edits, or None without edits.
    """
    treering = _name_of_treering(program)
    if treering is None:
        program.report(program.module, f"everything {STAYS}, because the names tr and treering are taken")
        return None
    found = list(variables.find(program, shared))
    plans = [plan for kind in _PLANS for one in found if (plan := _plan(program, one, kind, treering))]
    plans += [plan for node in program.nodes if (plan := _plan_direct_call(program, node, treering))]
    _report_rest(program, plans)
    return treering if any(plan.is_made for plan in plans) else None


def _plan(program: Program, variable: Variable, kind: str, treering: str) -> EditPlan | None:
    if {kind_of(program, call) for call in variable.makers} != {kind}:
        return None
    plan = EditPlan(program)
    plan.nodes = [*variable.makers, *(method_call(program, use) or use for use in variable.uses)]
    plan.errors = [UnknownForm(node, reason) for node, reason in variable.problems]
    _PLANS[kind](plan, variable, treering)
    plan.apply(variable.name)
    return plan


def _plan_direct_call(program: Program, maker: cst.CSTNode, treering: str) -> EditPlan | None:
    """Plans ``StandardCheckpointer().save(…)``, without a variable."""
    if not isinstance(maker, cst.Call) or kind_of(program, maker) != "checkpointer":
        return None
    call = method_call(program, maker)
    if call is None:
        return None
    plan = EditPlan(program)
    plan.nodes = [call]
    plan.attempt(lambda: checkpointer.check(program, maker))
    plan.attempt(lambda: _plan_checkpointer_call(plan, call, treering))
    plan.apply(program.code(maker.func))
    return plan


def _plan_manager(plan: EditPlan, variable: Variable, treering: str) -> None:
    program, made = plan.program, list[manager.MadeRun]()
    for call in variable.makers:
        plan.attempt(lambda call=call: made.append(manager.make(program, call, treering)))
    if plan.errors:
        return
    for call, one in zip(variable.makers, made, strict=True):
        plan.replace(call, one.call)
        for text in one.remarks:
            plan.remark(call, text)
        if one.run != made[0].run:
            plan.errors.append(UnknownForm(call, "it is made in several ways"))
    for node, inner in program.references:
        if inner == "CheckpointManager" and set(variable.annotations) & set(program.ancestors(node)):
            plan.edits.append(functools.partial(program.replace, node, f"{treering}.Checkpointer"))
            plan.edits.append(functools.partial(program.consumed.add, node))
    for use in variable.uses:
        if call := method_call(program, use):
            plan.attempt(lambda call=call: _plan_manager_call(plan, call, made[0].run))
        elif not isinstance(program.parent(use), cst.WithItem) and not is_test(program, use):
            plan.errors.append(unknown_use(program, use))


def _plan_manager_call(plan: EditPlan, call: cst.Call, run: manager.Run) -> None:
    new = manager.method(plan.program, method_name(call), call, run)
    if not isinstance(new, NewCall):
        plan.edits.append(lambda: plan.program.edit(call, new))
        return
    plan.replace(call, new)
    if method_name(call) == "restore" and all(keyword for keyword, _ in new.args):
        plan.remark(call, _NUMPY)


def _plan_checkpointer(plan: EditPlan, variable: Variable, treering: str) -> None:
    program = plan.program
    plan.errors += [UnknownForm(one, "it is passed to a function") for one in variable.params]
    for call, statement in variable.makers.items():
        plan.attempt(lambda call=call: checkpointer.check(program, call))
        plan.attempt(lambda statement=statement: _plan_removal(plan, statement))
    for use in variable.uses:
        if call := method_call(program, use):
            plan.attempt(lambda call=call: _plan_checkpointer_call(plan, call, treering))
        elif not program.is_consumed(use):
            plan.errors.append(unknown_use(program, use))


def _plan_removal(plan: EditPlan, statement: cst.CSTNode) -> None:
    """Plans to remove an assignment, or to take the block of a ``with`` out of it."""
    program = plan.program
    if isinstance(statement, cst.Assign | cst.AnnAssign):
        plan.edits.append(lambda: program.remove(statement))
        return
    block = program.parent(statement)
    if len(block.items) > 1 or not isinstance(block.body, cst.IndentedBlock):
        raise UnknownForm(statement, "its with statement has several items, or is one line")
    plan.edits.append(lambda: program.consumed.add(statement))
    plan.edits.append(lambda: program.edit(block, unwrapped))


def _plan_checkpointer_call(plan: EditPlan, call: cst.Call, treering: str) -> None:
    program, name = plan.program, method_name(call)
    if name in checkpointer.ENDINGS:
        statement = program.parent(call)
        if not isinstance(statement, cst.Expr):
            raise UnknownForm(call, f"the result of {name}() is used")
        plan.edits.append(lambda: program.remove(statement))
        return
    new = checkpointer.method(program, name, call, treering)
    plan.replace(call, new)
    if name == "restore" and len(new.args) == 1:
        plan.remark(call, _NUMPY)
    if name == "save" and any(keyword == "overwrite" for keyword, _ in new.args):
        plan.remark(call, _OVERWRITE)


def _plan_arguments(plan: EditPlan, variable: Variable, treering: str) -> None:
    """Plans to remove arguments that only replaced calls used. Nothing is reported: the calls that stay are."""
    if all(plan.program.is_consumed(use) for use in variable.uses) and not plan.errors and not variable.params:
        for statement in variable.makers.values():
            plan.attempt(functools.partial(_plan_removal, plan, statement))
    plan.errors = []


_PLANS = {
    "manager": _plan_manager,
    "checkpointer": _plan_checkpointer,
    "options": _plan_arguments,
    "save_args": _plan_arguments,
}


def _name_of_treering(program: Program) -> str | None:
    taken = {node.value for node in program.nodes if isinstance(node, cst.Name)}
    for one in program.imports:
        if one.full_name == "treering" and program.is_top_level(one.statement):
            return one.bound_name
    return next((name for name in ("tr", "treering") if name not in taken), None)


def _report_rest(program: Program, plans: Collection[EditPlan]) -> None:
    """Reports each line that still uses Orbax, unless a plan has reported it. Annotations need no change."""
    explained = {node for plan in plans for node in plan.nodes}
    lines: set[int] = set()
    for node, inner in program.references:
        above = {node, *program.ancestors(node)}
        annotated = any(isinstance(one, cst.Annotation) for one in above)
        if inner and not program.is_consumed(node) and not above & explained and not annotated:
            if problem_of(inner) is None and program.line(node) not in lines:
                program.report(node, f"{dotted(node)} {STAYS}: {_reason(program, node)}")
            lines.add(program.line(node))


def _reason(program: Program, node: cst.CSTNode) -> str:
    """Returns why a use of Orbax that no plan is about has no edit."""
    call = program.parent(node)
    kind = kind_of(program, call) if isinstance(call, cst.Call) and call.func is node else None
    name = dotted(node) or ""
    if name.endswith(".to_shape_dtype_struct"):
        return "Treering also takes the state itself as the template, so leave out this call"
    if ".args." in name:
        return "the manager or checkpointer that takes it stays, or is in another file"
    if kind is None:
        return "nothing in this file shows the manager or checkpointer that it belongs to"
    parent = program.parent(call)
    if isinstance(parent, cst.Return):
        where = "a function returns it, and the calls of others are not followed"
    elif isinstance(parent, cst.Arg):
        where = "it is passed on, and the calls of others are not followed"
    else:
        where = f"{program.code(parent)} is not a form that migrate knows"
    return f"{where}; assign it to a variable in the function that uses it"
