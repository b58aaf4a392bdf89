"""The options of a `CheckpointManager`, and the arguments of a `Checkpointer` of Treering that replace them."""

import ast

import libcst as cst

from .calls import Part, UnknownForm, arguments, copy, part, text
from .program import Program
from .variables import kind_of

IN_BACKGROUND = "Treering saves in the background; call wait() where the step must be on the disk"
_DROPPED = ("create", "cleanup_tmp_directories", "enable_async_checkpointing")
Best = tuple[str, str]  # a metric, and "min" or "max"


def translate(
    program: Program, value: cst.BaseExpression, at: int, treering: str, remarks: list[str]
) -> tuple[list[tuple[str, Part]], Best | None]:
    """Returns the arguments for the options of a manager, and the metric of the best step. Adds to the remarks.

    value: ``CheckpointManagerOptions(…)``, or a variable that holds it; the argument of the manager at a position.
    """
    made = resolved(program, value)
    if kind_of(program, made) != "options" or not isinstance(made, cst.Call):
        raise UnknownForm(value, f"options={program.code(value)} is not made in the same function")
    index = arguments(program, made, ())
    given = {name: made.args[n].value for name, n in index.items()}

    def get(name: str) -> Part:
        return part(at, index[name]) if made is value else copy(made.args[index[name]].value)

    for name in list(given):
        if name in _DROPPED or is_none(given[name]):
            if name == "enable_async_checkpointing" and program.code(given[name]) != "True":
                remarks.append(IN_BACKGROUND)
            del given[name]
    new: list[tuple[str, Part]] = []
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


def prefix_of_steps(given: cst.SimpleString | None = None) -> tuple[str, Part]:
    """Returns the argument with which the steps have Orbax's names. The adapter may have saved some of the run."""
    return "prefix", text(f"{given.evaluated_value}_" if given and given.evaluated_value else "")


def _policy(treering: str, most: Part, best: Best | None, period: Part | None) -> Part:
    """Returns ``keep.last(most)`` or ``keep.best(most, …)``, with ``keep.every(period)``."""

    def get(updated: cst.Call) -> cst.BaseExpression:
        metric = [cst.Arg(text(one).get(updated)) for one in best or ()]
        policy = cst.parse_expression(f"{treering}.keep.{'best' if best else 'last'}")
        kept = cst.Call(policy, [cst.Arg(most.get(updated)), *metric])
        if period is None:
            return kept
        every = cst.Call(cst.parse_expression(f"{treering}.keep.every"), [cst.Arg(period.get(updated))])
        return cst.BinaryOperation(kept, cst.BitOr(), every)

    return Part(get, most.paths + (period.paths if period else ()))


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
