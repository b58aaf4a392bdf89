"""The calls of a `CheckpointManager`, and those of a `Checkpointer` of Treering that replace them."""

from collections.abc import Callable
from typing import NamedTuple

import libcst as cst

from ..._core.migration_hints import RUN_CALLS
from . import checkpointer, options, trees
from .calls import NewCall, Part, UnknownForm, arguments, part, text
from .program import Edit, Program
from .variables import kind_of

_ORDER = ("directory", "checkpointers", "options", "metadata", "item_names", "item_handlers")


class Run(NamedTuple):
    """A manager: if its saves take the tree without ``args=``, and the metric and mode of the best step."""

    old_style: bool
    best: options.Best | None


class Made(NamedTuple):
    """The call that replaces one of `CheckpointManager`, what it makes, and remarks for the person who migrates."""

    call: NewCall
    run: Run
    remarks: list[str]


def make(program: Program, call: cst.Call, treering: str) -> Made:
    """Returns what replaces ``CheckpointManager(…)``. Raises `UnknownForm`."""
    given = arguments(program, call, _ORDER)
    if "directory" not in given:
        raise UnknownForm(call, "there is no directory")
    new = [("", part(given.pop("directory")))]
    remarks: list[str] = []
    old_style = False
    if (n := given.pop("checkpointers", None)) is not None and not options.is_none(call.args[n].value):
        old_style = True
        remarks += _check_checkpointer(program, call.args[n].value)
    if (n := given.pop("item_handlers", None)) is not None and not trees.is_plain_handler(program, call.args[n].value):
        raise UnknownForm(call.args[n], "item_handlers= is not a plain handler of one tree")
    best = None
    if (n := given.pop("options", None)) is not None and not options.is_none(call.args[n].value):
        more, best = options.translate(program, call.args[n].value, n, treering, remarks)
        new += more
    else:
        new.append(options.prefix_of_steps())
    for name, n in given.items():
        raise UnknownForm(call.args[n], f"{name}= has no counterpart that migrate knows")
    return Made(NewCall(f"{treering}.Checkpointer", new), Run(old_style, best), remarks)


def _check_checkpointer(program: Program, value: cst.BaseExpression) -> list[str]:
    """Checks the second argument of a manager. Returns remarks. Raises `UnknownForm` if it is not of one tree."""
    made = options.resolved(program, value)
    if not isinstance(made, cst.Call) or kind_of(program, made) != "checkpointer":
        raise UnknownForm(value, "its checkpointer is not made in the same function, or it has several items")
    checkpointer.check(program, made)
    return [] if program.orbax_name(made.func) == "AsyncCheckpointer" else [options.IN_BACKGROUND]


def _save(program: Program, call: cst.Call, run: Run) -> NewCall:
    given = arguments(program, call, ("step", "items", "save_kwargs", "metrics", "force"))
    if not isinstance(program.parent(call), cst.Expr):
        raise UnknownForm(call, "the result of save() is used; that of Treering is not a bool")
    step = given.pop("step", None)
    if (n := given.pop("args", None)) is not None:
        tree = trees.saved(program, call, n).get
    elif (n := given.pop("items", None)) is not None and run.old_style:
        tree = part(n)
        _check_save_kwargs(program, call, given.pop("save_kwargs", None))
    else:
        tree = None
    if step is None or tree is None:
        raise UnknownForm(call, "there is no step or no tree to save")
    new: list[tuple[str, Part]] = [("", part(step)), ("", tree)]
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
        trees.check_plain(program, str(element.key.evaluated_value), element.value, None)


def _restore(program: Program, call: cst.Call, run: Run) -> NewCall:
    given = arguments(program, call, ("step", "items", "restore_kwargs", "directory", "args"))
    step = given.pop("step", None)
    like = None
    if (n := given.pop("args", None)) is not None:
        like = trees.restored(program, call, n).get
    elif (n := given.pop("items", None)) is not None and run.old_style and not options.is_none(call.args[n].value):
        like = part(n)
    for name, n in given.items():
        if not options.is_none(call.args[n].value):
            raise UnknownForm(call, f"{name}= has no counterpart that migrate knows")
    new = [("", like)] if like else []
    if step is not None and not options.is_none(call.args[step].value):
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
