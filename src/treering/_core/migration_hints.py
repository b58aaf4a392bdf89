"""Helps users who write the calls of other checkpoint libraries: the error ends with the call of Treering."""

import contextlib
import difflib
import inspect
import itertools
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import MismatchError, TreeringError

_LAST, _EVERY, _BEST = "keep=tr.keep.last(3)", "keep=tr.keep.every(1000)", "keep=tr.keep.best(3, 'loss', 'min')"
_PARTLY = "missing='template', extra='ignore'"

# Keyword arguments of other libraries, and the arguments of Treering that say the same. "" means that Treering always
# does it, or that the argument is the state itself.
_RUN = {
    **dict.fromkeys(("max_to_keep", "preservation_policy"), _LAST),
    **dict.fromkeys(("keep_period", "force_keep_period", "keep_every_n_steps"), _EVERY),
    **dict.fromkeys(("best_fn", "best_mode"), _BEST),
    "keep_checkpoints_without_metrics": "keep=tr.keep.best(3, 'loss', 'min', unscored='drop')",
    "keep_time_interval": "keep=tr.keep.every(datetime.timedelta(hours=1))",
    **dict.fromkeys(("save_interval_steps", "period"), "save_every=1000"),
    "save_interval": "save_every=datetime.timedelta(minutes=10)",
    **dict.fromkeys(
        ("save_decision_policy", "save_on_steps", "should_save_fn"), "save_every=lambda step: step % 1000 == 0"
    ),
    "step_prefix": "prefix='step-'",
    "options": f"save_every=1000, {_LAST}",
    **dict.fromkeys(("async_options", "timeout_secs"), "timeout=30"),
    **dict.fromkeys(
        (
            *("checkpointers", "cleanup_tmp_directories", "create", "directory", "enable_async_checkpointing"),
            *("enable_background_delete", "handler_registry", "item_handlers", "item_names", "read_only"),
            *("step_format_fixed_length", "step_name_format", "step_policies"),
        ),
        "",
    ),
}
_BOTH = {
    **dict.fromkeys(("args", "item", "items", "pytree", "state", "target"), ""),
    "state_transformation_fns": "rules=[tr.rules.cast('**', 'bfloat16')]",
}
_SAVE = {
    **_BOTH,
    **dict.fromkeys(("save_args", "save_kwargs"), ""),
    "custom_metadata": "metadata={'lr': 1e-3}",
    "save_dtype": "dtype='bfloat16'",
}
_RESTORE = {
    **_BOTH,
    **dict.fromkeys(("abstract_pytree", "abstract_state", "restore_args", "restore_kwargs", "template"), ""),
    **dict.fromkeys(("fallback_state", "allow_partial", "allow_partial_mpa_restoration"), "missing='template'"),
    "partial_restore": "extra='ignore'",
    **dict.fromkeys(("orbax_transforms", "strict", "transforms", "transforms_default_to_original"), _PARTLY),
    **dict.fromkeys(("float_dtype", "restore_dtype"), "dtype='bfloat16'"),
}
# Public calls by their qualified name: the call, with a place for arguments, and the keyword arguments that other
# libraries have for it.
CALLS = {
    "Checkpointer.__init__": ("tr.Checkpointer(run{})", _RUN),
    "Checkpointer.save": ("ckpts.save(step, state{})", {**_SAVE, "overwrite": "on_exists='overwrite'"}),
    "Checkpointer.restore": ("ckpts.restore(state, step=step{})", _RESTORE),
    "Checkpointer.restore_or_init": ("ckpts.restore_or_init(init{})", _RESTORE),
    "save": ("tr.save(path, state{})", {**_SAVE, "force": "overwrite=True"}),
    "save_async": ("tr.save_async(path, state{})", {**_SAVE, "force": "overwrite=True"}),
    "restore": ("tr.restore(path, state{})", _RESTORE),
    "Checkpoint.restore": ("ckpt.restore(state{})", _RESTORE),
    "record": ("tr.record(run, step, metrics{})", {}),
    "Publisher.publish": ("publisher.publish(version, state{})", {}),
    "follow_weights": ("tr.follow_weights(stream, state{})", {}),
    "convert": ("tr.save(dst, state{})", {}),
}
_PUBLIC = {"StepList": "Checkpointer", "open_checkpoint": "open"}  # names that differ within the library
_ANOTHER_ORDER = "the arguments are in another order"
_SWAPPED = {"convert": "convert reads a path; save writes a tree or a `Checkpoint`"}
_RESTORES_STEPS = {  # calls that take the template as the argument that is the step in other libraries
    "Checkpointer.restore": "ckpts.restore(state, step=step)",
    "restore": "tr.restore(run, state, step=step)",
}

# Attributes that a `Checkpointer` or the module has in other libraries, and the calls of Treering.
RUN_CALLS = {
    "all_steps": "ckpts.steps",
    "best_checkpoint": "ckpts.best_step('loss', 'min')",
    "check_for_errors": "ckpts.wait()",
    "checkpoints": "ckpts.steps",
    "is_saving_in_progress": "ckpts.is_saving",
    "item_metadata": "ckpts.open(step).abstract()",
    "latest": "ckpts.latest_step",
    "load": "ckpts.restore(state, step=step)",
    "load_checkpoint": "ckpts.restore(state, step=step)",
    "load_pytree": "ckpts.restore(state, step=step)",
    "metadata": "ckpts.open(step).metadata",
    "metrics": "ckpts.open(step).metrics",
    "reached_preemption": "ckpts.preempted",
    "record": "tr.record(run, step, {'val/loss': 0.5})",
    "reload": "ckpts.steps",
    "restore_checkpoint": "ckpts.restore(state, step=step)",
    "save_async": "ckpts.save(step, state)",
    "save_checkpoint": "ckpts.save(step, state)",
    "save_pytree": "ckpts.save(step, state)",
    "should_save": "ckpts.save(step, state) is not None",
    "wait_until_finished": "ckpts.wait()",
}
MODULE_CALLS = {
    **dict.fromkeys(("CheckpointManagerOptions", "options"), f"tr.Checkpointer(run, save_every=1000, {_LAST})"),
    "CheckpointManager": "tr.Checkpointer(run)",
    **dict.fromkeys(("AsyncCheckpointer", "PyTreeCheckpointer", "StandardCheckpointer"), "tr.save(path, state)"),
    **dict.fromkeys(("PyTreeCheckpointHandler", "StandardCheckpointHandler", "args"), "tr.save(path, state)"),
    **dict.fromkeys(("save_checkpoint", "save_file", "save_pytree"), "tr.save(path, state)"),
    "SaveArgs": "tr.save(path, state, dtype='bfloat16')",
    **dict.fromkeys(("ArrayRestoreArgs", "RestoreArgs", "load", "load_checkpoint"), "tr.restore(path, state)"),
    **dict.fromkeys(("load_file", "load_pytree", "restore_checkpoint"), "tr.restore(path, state)"),
    "latest_checkpoint": "tr.open(path).path",
    "latest_step": "max(tr.steps(run), default=None)",
    "restore_or_init": "tr.Checkpointer(run).restore_or_init(init)",
    **dict.fromkeys(
        ("checkpoint_utils", "checkpoints_iterator", "wait_for_new_checkpoint"), "next(tr.follow(run, newest=True))"
    ),
}


def with_hint(message: str, call: str) -> str:
    """Returns the message of an error, with the call to write instead at its end."""
    return f"{message}; in Treering: {call}"


def attribute(owner: object, name: str, calls: Mapping[str, str]) -> Any:
    """Raises the `AttributeError` of a `__getattr__`, with the call of Treering if another library has the attribute.

    An error within a property of the owner is raised as it is.
    """
    try:
        return object.__getattribute__(owner, name)  # raises Python's own error again
    except AttributeError as error:
        if error.name != name or name not in calls:
            raise
        raise AttributeError(with_hint(str(error), calls[name]), name=name, obj=owner) from None


def leaf_hint(leaf_type: type) -> str:
    """Returns advice for a leaf that is an argument object of Orbax, or ""."""
    if not _is_of_orbax(leaf_type):
        return ""
    call = "ckpts.restore(state, step=step)" if "Restore" in leaf_type.__name__ else "ckpts.save(step, state)"
    items = "ckpts.save(step, {'state': state})" if "Composite" in leaf_type.__name__ else ""
    return with_hint("pass the state itself, without Orbax's arguments", items or call)


def add_hint(
    error: TypeError | MismatchError,
    function: Callable[..., object],
    given: Sequence[object],
    options: Mapping[str, object],
) -> None:
    """Adds the right call to the error of a public call that was given wrong arguments, or those of another library.

    Raises a `TypeError` instead if the error is a `MismatchError` about the name or the order of the arguments.
    """
    if not error.args:
        return
    name, text = function.__qualname__, str(error.args[0])
    traceback = error.__traceback__
    while traceback and (inner := traceback.tb_next) and inner.tb_frame.f_code.co_filename == contextlib.__file__:
        traceback = inner  # a context manager around the call
    unbound = not isinstance(error, TreeringError) and traceback is not None and traceback.tb_next is None
    if unbound:
        public = _public_name(function)
        text = text.replace(f"{name}()", f"{public}()", 1)
        error.args = (f"{text}; expected {public}{_parameters(function)}",)
    if name not in CALLS:
        return
    call, keywords = CALLS[name]
    foreign = [option for option in options if option in keywords]
    if foreign and (unbound or any(re.search(rf"(?<!\w){option}(?!\w)", text) for option in foreign)):
        error.args = (with_hint(text, call.format(_arguments(keywords[option] for option in foreign))),)
        if isinstance(error, TreeringError):
            raise TypeError(*error.args) from None
        return
    if isinstance(error, MismatchError) and (hint := _misspelt(options, function, text)):
        raise TypeError(f"{text}; {hint}") from None
    if unbound and any(_is_of_orbax(type(one)) for one in given):
        error.args = (with_hint(text, call.format(_arguments([keywords.get("options", "")]))),)
    first = 1 if "." in name or name == "record" else 0  # the first argument is the object, or certainly the run
    parameters = list(inspect.signature(function).parameters.values())
    named = [options[one.name] for one in parameters if one.name in options and one.kind is one.POSITIONAL_OR_KEYWORD]
    if isinstance(error, MismatchError) and _are_swapped([*given, *named][first:]):
        raise TypeError(with_hint(f"{text}\n{_SWAPPED.get(name, _ANOTHER_ORDER)}", call.format(""))) from None
    like = given[1] if len(given) > 1 else options.get("like")
    if name not in _RESTORES_STEPS or not isinstance(like, numbers.Integral):
        return
    if unbound or (isinstance(error, MismatchError) and error.differences):
        error.args = (with_hint(f"{text}\na step is passed by its name", _RESTORES_STEPS[name]),)


def _misspelt(options: Mapping[str, object], function: Callable[..., object], text: str) -> str:
    """Returns advice if an error is about an option of a format that looks like a misspelt argument, or ""."""
    known = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for option in options.keys() - known:
        if re.search(rf"(?<!\w){option}(?!\w)", text) and (similar := difflib.get_close_matches(option, known, 1)):
            return f"perhaps {similar[0]}= was meant"
    return ""


def _public_name(function: Callable[..., object]) -> str:
    """Returns the name of a public call as users write it, such as `tr.keep.last` or `Checkpointer.save`."""
    owner, _, name = function.__qualname__.rpartition(".")
    if owner:
        return f"tr.{owner}" if name == "__init__" else f"{_PUBLIC.get(owner, owner)}.{name}"
    modules = itertools.takewhile(lambda module: not module.startswith("_"), function.__module__.split(".")[1:])
    return ".".join(["tr", *modules, _PUBLIC.get(name, name)])


def _parameters(function: Callable[..., object]) -> str:
    """Returns the parameters of a call: defaults of those that may be passed by position, and names of the others."""
    shown: list[str] = []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            shown.append(f"{name}=…")
        elif one.kind is one.POSITIONAL_OR_KEYWORD:
            shown.append(name if one.default is one.empty else f"{name}={one.default!r}")
        else:
            shown.append(str(one).partition(":")[0])
    return f"({', '.join(one for one in shown if one != 'self')})"


def _are_swapped(given: Sequence[object]) -> bool:
    """Returns True if the first argument is a tree, neither a path nor a step, but the second can be one of these.

    An empty or wrong path, `None` or bytes, is no tree: it keeps its own error.
    """
    places = [isinstance(one, str | os.PathLike | numbers.Integral) for one in given[:2]]
    return places == [False, True] and not isinstance(given[0], bytes | None)


def _is_of_orbax(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "orbax"


def _arguments(texts: Any) -> str:
    """Returns the text of the arguments, each once. Several `keep=` become one, joined by ``|``."""
    kept: dict[str, None] = {}
    others: dict[str, None] = {}
    for text in filter(None, texts):
        before, keep, policy = text.partition("keep=")
        others.update(dict.fromkeys(filter(None, [before.rstrip(", ") if keep else text])))
        kept.update(dict.fromkeys([policy] if keep else []))
    return "".join(f", {one}" for one in [*others, *([f"keep={' | '.join(kept)}"] if kept else [])])
