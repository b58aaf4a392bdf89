"""Compares the public names, signatures, options and errors of the adapter with those of the installed Orbax."""

import enum
import importlib.metadata
import inspect
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as real
import pytest

import treering.orbax as ocp
from orbax_names import names
from treering.orbax import namespaces
from treering.orbax.errors import UnsupportedNameError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RELEASE = namespaces.RELEASE


def ours(path: str) -> Any:
    found: Any = ocp
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_every_name_of_orbax_is_taken_or_has_advice() -> None:
    if importlib.metadata.version("orbax-checkpoint") != RELEASE:
        pytest.skip(f"the list of names is that of Orbax {RELEASE}")
    wrong: list[str] = []
    for path, _ in names():
        try:
            ours(path)
        except AttributeError:
            if not namespaces.advice(path):
                wrong.append(path)
    assert wrong == []


def parameters(call: Any) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return None


def untaken(theirs: Any, mine: Any) -> Iterator[str]:
    """Yields the parameters that only Orbax's callable takes, and those that only ours wants in any case."""
    expected, found = parameters(theirs), parameters(mine)
    if expected is None or found is None:
        return
    kinds = {one.kind for one in found.values()}
    for name, one in expected.items():
        if name in ("self", "cls") or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        if name not in found and one.VAR_KEYWORD not in kinds:
            yield f"{name}="
        elif name not in found or found[name].kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        elif one.default is not one.empty and found[name].default is one.empty:
            yield f"{name}= without a default"


def has_attribute(owner: type, name: str) -> bool:
    """Returns True if objects of a class have an attribute, or raise the error that says what to use instead."""
    try:
        return hasattr(owner, name) or bool(inspect.getattr_static(owner, name))
    except AttributeError:
        annotated = {key for one in owner.__mro__ for key in vars(one).get("__annotations__", ())}
        computed = "__getattr__" in vars(owner) and hasattr(owner(), name)
        return name in annotated or name in (parameters(owner) or ()) or computed


def differences_of_class(path: str, theirs: type, mine: type) -> Iterator[str]:
    if issubclass(theirs, enum.Enum):
        yield from (f"{path}.{name}" for name in theirs.__members__ if not hasattr(mine, name))
    elif issubclass(theirs, BaseException):
        builtin = [one for one in theirs.__mro__ if one.__module__ == "builtins"]
        yield from (f"{path}: {one.__name__}" for one in builtin if not issubclass(mine, one))
    elif not getattr(mine, "_is_protocol", False):
        yield from (f"{path}({what})" for what in untaken(theirs, mine))
        fields = getattr(theirs, "__dataclass_fields__", {})
        for name, one in fields.items():
            own = getattr(mine, "__dataclass_fields__", {}).get(name)
            if own is not None and type(one.default) in (bool, int, float, str) and own.default != one.default:
                yield f"{path}.{name}: default {one.default!r}"
        for name in {**fields, **vars(theirs)}:
            if name.startswith("_"):
                continue
            if not has_attribute(mine, name):
                yield f"{path}.{name}"
            elif callable(ours := getattr(mine, name, None)) and callable(value := getattr(theirs, name, None)):
                yield from (f"{path}.{name}({what})" for what in untaken(value, ours))


def test_signatures_options_and_errors_are_those_of_orbax() -> None:
    if importlib.metadata.version("orbax-checkpoint") != RELEASE:
        pytest.skip(f"the list of names is that of Orbax {RELEASE}")
    wrong: list[str] = []
    for path, theirs in names():
        try:
            mine = ours(path)
        except AttributeError:
            continue  # see `test_every_name_of_orbax_is_taken_or_has_advice`
        if namespaces.is_refused(mine) or isinstance(theirs, types.ModuleType):
            continue
        if isinstance(theirs, type) and isinstance(mine, type):
            wrong += differences_of_class(path, theirs, mine)
        elif callable(theirs) and callable(mine):
            wrong += [f"{path}({what})" for what in untaken(theirs, mine)]
    assert wrong == []


MISSING_ATTRIBUTES: list[Callable[[], Any]] = [
    lambda: ocp.Checkpointer.structure,
    lambda: ocp.StandardCheckpointer().cancel,
    lambda: ocp.future.NoopFuture().cancel(),
    lambda: ocp.metadata.ArrayMetadata.from_shape_dtype_struct(None),
    lambda: ocp.v1.options.MemoryOptions.RegulatorOptions,
]


@pytest.mark.parametrize("read", MISSING_ATTRIBUTES)
def test_a_missing_attribute_says_what_to_use(read: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedNameError, match=r"^treering\.orbax\.\w+\.\w+ is not supported; "):
        read()


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_step_knows_its_times(tmp_path: pathlib.Path, write: str) -> None:
    with ocp.CheckpointManager(tmp_path, write=write) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    found = ocp.step.standard_name_format().find_step(tmp_path, 3)
    assert (
        found.commit_timestamp_nsecs
        == found.init_timestamp_nsecs
        == int(found.commit_timestamp.timestamp() * 1e6) * 1000
    )
    with pytest.raises(ValueError, match="expected the step 4, found no complete one"):
        ocp.step.standard_name_format().find_step(tmp_path, 4)
    if write == "orbax":
        theirs = real.path.step.standard_name_format().find_step(tmp_path, 3)
        assert abs(found.commit_timestamp_nsecs - theirs.commit_timestamp_nsecs) < 1000
