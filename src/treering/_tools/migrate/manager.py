"""The calls of a `CheckpointManager`, and those of a `Checkpointer` of Treering that replace them."""

import ast
from collections.abc import Callable
from typing import NamedTuple

import libcst as cst

from ..._core.migration_hints import RUN_CALLS
from . import calls, checkpointer
from .calls import CallPart, NewCall, UnknownForm, arguments, copy, part, text
from .program import Edit, Program
from .variables import kind_of

IN_BACKGROUND = "Treering saves in the background; call wait() where the step must be on the disk"
_DROPPED = ("create", "cleanup_tmp_directories", "enable_async_checkpointing")
Best = tuple[str, str]  # a metric, and "min" or "max"
_ORDER = ("directory", "checkpointers", "options", "metadata", "item_names", "item_handlers")


def translate_options(
    program: Program, value: cst.BaseExpression, at: int, treering: str, remarks: list[str]
) -> tuple[list[tuple[str, CallPart]], Best | None]:
    """Returns the arguments for the options of a manager, and the metric of the best step. Adds to the remarks.

    value: ``CheckpointManagerOptions(…)``, or a variable that holds it; the argument of the manager at a position.
    """
    made = resolved(program, value)
    if kind_of(program, made) != "options" or not isinstance(made, cst.Call):
        raise UnknownForm(value, f"options={program.code(value)} is not made in the same function")
    index = arguments(program, made, ())
    given = {name: made.args[n].value for name, n in index.items()}

    def get(name: str) -> CallPart:
        return part(at, index[name]) if made is value else copy(made.args[index[name]].value)

    for name in list(given):
        if name in _DROPPED or is_none(given[name]):
            if name == "enable_async_checkpointing" and program.code(given[name]) != "True":
                remarks.append(IN_BACKGROUND)
            del given[name]
    new: list[tuple[str, CallPart]] = []
    if (interval := given.pop("save_interval_steps", None)) and program.code(interval) != "1":
        new.append(("save_every", get("save_interval_steps")))
        remarks.append("save_every= saves only multiples; Orbax also saves the first step that a job offers")
    best = _best(program, given.pop("best_fn", None), given.pop("best_mode", None))
    if best:
        remarks.append(f"best_step() and keep ignore the metrics of steps that Orbax wrote: {best[0]!r}")
    period, most = given.pop("keep_period", None), given.pop("max_to_keep", None)
    if most:
        new.append(("keep", _policy(treering, get("max_to_keep"), best, get("keep_period") if period else None)))
    prefix = given.pop("step_prefix", None)
    if prefix is not None and not isinstance(prefix, cst.SimpleString):
        raise UnknownForm(prefix, "step_prefix= is not a text")
    new.append(prefix_of_steps(prefix))
    for name, node in given.items():
        raise UnknownForm(node, f"{name}= has no counterpart that migrate knows")
    return new, best


def prefix_of_steps(given: cst.SimpleString | None = None) -> tuple[str, CallPart]:
    """Returns the argument with which the steps have Orbax's names. The adapter may have saved some of the run."""
    return "prefix", text(f"{given.evaluated_value}_" if given and given.evaluated_value else "")


def _policy(treering: str, most: CallPart, best: Best | None, period: CallPart | None) -> CallPart:
    """Returns ``keep.last(most)`` or ``keep.best(most, …)``, with ``keep.every(period)``."""

    def get(updated: cst.Call) -> cst.BaseExpression:
        metric = [cst.Arg(text(one).get(updated)) for one in best or ()]
        policy = cst.parse_expression(f"{treering}.keep.{'best' if best else 'last'}")
        kept = cst.Call(policy, [cst.Arg(most.get(updated)), *metric])
        if period is None:
            return kept
        every = cst.Call(cst.parse_expression(f"{treering}.keep.every"), [cst.Arg(period.get(updated))])
        return cst.BinaryOperation(kept, cst.BitOr(), every)

    return CallPart(get, most.paths + (period.paths if period else ()))


def _best(program: Program, function: cst.CSTNode | None, mode: cst.CSTNode | None) -> Best | None:
    """Returns the metric and the mode of ``best_fn=lambda metrics: metrics["loss"]``."""
    if function is None:
        return None
    try:
        parsed = ast.parse(program.code(function), mode="eval").body
        assert isinstance(parsed, ast.Lambda) and isinstance(parsed.body, ast.Subscript)
        assert isinstance(parsed.body.value, ast.Name) and parsed.body.value.id == parsed.args.args[0].arg
        metric = ast.literal_eval(parsed.body.slice)
        chosen = "max" if mode is None else ast.literal_eval(program.code(mode))
    except (AssertionError, ValueError, SyntaxError):
        raise UnknownForm(function, "best_fn= is not a lambda that returns one metric") from None
    if not isinstance(metric, str) or chosen not in ("min", "max"):
        raise UnknownForm(function, "best_fn= is not a lambda that returns one metric")
    return metric, chosen


def is_none(node: cst.CSTNode) -> bool:
    """Returns True for ``None``."""
    return isinstance(node, cst.Name) and node.value == "None"


def resolved(program: Program, value: cst.BaseExpression) -> cst.CSTNode:
    """Returns an expression, or what is assigned to it if it is a variable that is assigned once in the same scope."""
    return value if isinstance(value, cst.Call) else program.only_value(value) or value


class Run(NamedTuple):
    """A manager: if its saves take the tree without ``args=``, and the metric and mode of the best step."""

    old_style: bool
    best: Best | None


class MadeRun(NamedTuple):
    """The call that replaces one of `CheckpointManager`, what it makes, and remarks for the person who migrates."""

    call: NewCall
    run: Run
    remarks: list[str]


def make(program: Program, call: cst.Call, treering: str) -> MadeRun:
    """Returns what replaces ``CheckpointManager(…)``. Raises `UnknownForm`."""
    given = arguments(program, call, _ORDER)
    if "directory" not in given:
        raise UnknownForm(call, "there is no directory")
    new = [("", part(given.pop("directory")))]
    remarks: list[str] = []
    old_style = False
    if (n := given.pop("checkpointers", None)) is not None and not is_none(call.args[n].value):
        old_style = True
        remarks += _check_checkpointer(program, call.args[n].value)
    if (n := given.pop("item_handlers", None)) is not None and not calls.is_plain_handler(program, call.args[n].value):
        raise UnknownForm(call.args[n], "item_handlers= is not a plain handler of one tree")
    best = None
    if (n := given.pop("options", None)) is not None and not is_none(call.args[n].value):
        more, best = translate_options(program, call.args[n].value, n, treering, remarks)
        new += more
    else:
        new.append(prefix_of_steps())
    for name, n in given.items():
        raise UnknownForm(call.args[n], f"{name}= has no counterpart that migrate knows")
    return MadeRun(NewCall(f"{treering}.Checkpointer", new), Run(old_style, best), remarks)


def _check_checkpointer(program: Program, value: cst.BaseExpression) -> list[str]:
    """Checks the second argument of a manager. Returns remarks. Raises `UnknownForm` if it is not of one tree."""
    made = resolved(program, value)
    if not isinstance(made, cst.Call) or kind_of(program, made) != "checkpointer":
        raise UnknownForm(value, "its checkpointer is not made in the same function, or it has several items")
    checkpointer.check(program, made)
    return [] if program.orbax_name(made.func) == "AsyncCheckpointer" else [IN_BACKGROUND]


def _save(program: Program, call: cst.Call, run: Run) -> NewCall:
    given = arguments(program, call, ("step", "items", "save_kwargs", "metrics", "force"))
    if not isinstance(program.parent(call), cst.Expr):
        raise UnknownForm(call, "the result of save() is used; that of Treering is not a bool")
    step = given.pop("step", None)
    if (n := given.pop("args", None)) is not None:
        tree = calls.saved(program, call, n).get
    elif (n := given.pop("items", None)) is not None and run.old_style:
        tree = part(n)
        _check_save_kwargs(program, call, given.pop("save_kwargs", None))
    else:
        tree = None
    if step is None or tree is None:
        raise UnknownForm(call, "there is no step or no tree to save")
    new: list[tuple[str, CallPart]] = [("", part(step)), ("", tree)]
    for name, keyword in (("metrics", "metrics"), ("custom_metadata", "metadata"), ("force", "force")):
        if (n := given.pop(name, None)) is not None:
            new.append((keyword, part(n)))
    new.append(("on_exists", text("skip")))  # as Orbax does, which returns False then
    for name in given:
        raise UnknownForm(call, f"{name}= has no counterpart that migrate knows")
    return NewCall(None, new)


def _check_save_kwargs(program: Program, call: cst.Call, at: int | None) -> None:
    if at is None:
        return
    value = call.args[at].value
    for element in value.elements if isinstance(value, cst.Dict) else [None]:
        if not isinstance(element, cst.DictElement) or not isinstance(element.key, cst.SimpleString):
            raise UnknownForm(value, "save_kwargs= is not a dict of known keys")
        calls.check_plain(program, str(element.key.evaluated_value), element.value, None)


def _restore(program: Program, call: cst.Call, run: Run) -> NewCall:
    given = arguments(program, call, ("step", "items", "restore_kwargs", "directory", "args"))
    step = given.pop("step", None)
    like = None
    if (n := given.pop("args", None)) is not None:
        like = calls.restored(program, call, n).get
    elif (n := given.pop("items", None)) is not None and run.old_style and not is_none(call.args[n].value):
        like = part(n)
    for name, n in given.items():
        if not is_none(call.args[n].value):
            raise UnknownForm(call, f"{name}= has no counterpart that migrate knows")
    new = [("", like)] if like else []
    if step is not None and not is_none(call.args[step].value):
        new.append(("step", part(step)))
    return NewCall(None, new)


def _renamed(name: str, *, is_property: bool = False, arguments_of: tuple[str, ...] = ()) -> Callable[..., Edit]:
    def form(program: Program, call: cst.Call, run: Run) -> Edit:
        if set(arguments(program, call, arguments_of)) - set(arguments_of):
            raise UnknownForm(call, "its arguments have no counterpart that migrate knows")

        def edit(updated: cst.Call) -> cst.BaseExpression:
            func = cst.ensure_type(updated.func, cst.Attribute).with_changes(attr=cst.Name(name))
            return func if is_property else updated.with_changes(func=func)

        return edit

    return form


def _best_step(program: Program, call: cst.Call, run: Run) -> NewCall:
    if run.best is None or call.args:
        raise UnknownForm(call, "the metric is not known")
    new = [("", text(one)) for one in run.best]
    return NewCall(None, new)


_METHODS: dict[str, Callable[[Program, cst.Call, Run], NewCall | Edit]] = {
    "all_steps": _renamed("steps", is_property=True, arguments_of=("read",)),
    "best_step": _best_step,
    "close": _renamed("close"),
    "delete": _renamed("delete", arguments_of=("step",)),
    "latest_step": _renamed("latest_step", is_property=True),
    "restore": _restore,
    "save": _save,
    "wait_until_finished": _renamed("wait"),
}


def method(program: Program, name: str, call: cst.Call, run: Run) -> NewCall | Edit:
    """Returns what replaces the call of a method of a manager. Raises `UnknownForm`."""
    if form := _METHODS.get(name):
        return form(program, call, run)
    hint = f"; in Treering: {RUN_CALLS[name]}" if name in RUN_CALLS else ""
    raise UnknownForm(call, f"{name}() has no counterpart that migrate knows{hint}")
