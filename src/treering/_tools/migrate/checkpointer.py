"""The calls of a checkpointer of Orbax that saves to one path, and those of Treering that replace them."""

import libcst as cst

from . import calls
from .calls import CallPart, NewCall, UnknownForm, arguments, part
from .program import Program

_DROPPED = ("use_ocdbt", "use_zarr3", "timeout_secs")
ENDINGS = ("close", "wait_until_finished")  # calls that are not needed: `treering.save` returns when all is done


def check(program: Program, call: cst.Call) -> None:
    """Raises `UnknownForm` unless a call makes a checkpointer of one tree, without options that matter."""
    given = arguments(program, call, ("handler",))
    if (n := given.pop("handler", None)) is not None:
        handler = call.args[n].value
        if not calls.is_plain_handler(program, handler):
            raise UnknownForm(handler, f"{program.code(handler)} is not a plain handler of one tree")
    for name in set(given) - set(_DROPPED):
        raise UnknownForm(call, f"{name}= has no counterpart that migrate knows")


def method(program: Program, name: str, call: cst.Call, treering: str) -> NewCall:
    """Returns what replaces ``checkpointer.save(…)`` or ``checkpointer.restore(…)``. Raises `UnknownForm`."""
    if name == "save":
        return _save(program, call, treering)
    if name == "restore":
        return _restore(program, call, treering)
    raise UnknownForm(call, f"{name}() has no counterpart that migrate knows")


def _save(program: Program, call: cst.Call, treering: str) -> NewCall:
    given = _named(program, call, ("directory", "item", "save_args"))
    if not isinstance(program.parent(call), cst.Expr):
        raise UnknownForm(call, "the result of save() is used")
    directory = given.pop("directory", None)
    tree: CallPart | None = None
    if (n := given.pop("args", None)) is not None:
        tree = calls.saved(program, call, n).get
    elif (n := given.pop("item", None)) is not None:
        tree = part(n)
    if directory is None or tree is None:
        raise UnknownForm(call, "there is no path or no tree to save")
    new = [("", part(directory)), ("", tree)]
    if (n := given.pop("force", None)) is not None:
        new.append(("overwrite", part(n)))
    for name, n in given.items():
        calls.check_plain(program, name, call.args[n].value, None)
    return NewCall(f"{treering}.save", new)


def _restore(program: Program, call: cst.Call, treering: str) -> NewCall:
    given = _named(program, call, ("directory", "item", "restore_args"))
    directory = given.pop("directory", None)
    if directory is None:
        raise UnknownForm(call, "there is no path")
    like: CallPart | None = None
    tree = None
    if (n := given.pop("args", None)) is not None:
        like = calls.restored(program, call, n).get
    elif (n := given.pop("item", None)) is not None:
        like, tree = part(n), call.args[n].value
    for name, n in given.items():
        calls.check_plain(program, name, call.args[n].value, tree)
    return NewCall(f"{treering}.restore", [("", part(directory)), *([("", like)] if like else [])])


def _named(program: Program, call: cst.Call, order: tuple[str, ...]) -> dict[str, int]:
    """Returns the positions of the arguments. The tree is an ``item`` in each of the checkpointers."""
    given = arguments(program, call, order)
    return {"item" if name in ("state", "target") else name: n for name, n in given.items()}
