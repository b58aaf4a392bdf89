"""Tests the errors for calls of other libraries: one line that ends with Treering's call, which works as written."""

import datetime
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import treering as tr
from treering._core import migration_hints
from treering.errors import MismatchError, UnsupportedError

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]
STATE = {"params": {"w": jnp.arange(6.0)}, "opt": jnp.zeros(2)}


def init() -> Any:
    return STATE


@pytest.fixture
def scope(tmp_path: pathlib.Path) -> Any:
    """Returns the names that the answers use."""
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        ckpts.save(3, STATE, metrics={"loss": 1.0})
        tr.save(tmp_path / "c", STATE)
        yield {
            **{"metrics": {"loss": 0.5}, "publisher": tr.Publisher(tmp_path / "stream"), "version": 1, "stream": run},
            **{"tr": tr, "ckpts": ckpts, "ckpt": tr.open(run), "datetime": datetime, "run": run, "init": init},
            **{"path": tmp_path / "c", "state": STATE, "step": 3, "ocp": ocp},
        }


def answer_of(error: BaseException) -> str:
    line = next(line for line in str(error).splitlines() if "in Treering: " in line)
    return line.rpartition("in Treering: ")[2]


def call(answer: str, scope: dict[str, Any], new: pathlib.Path) -> Any:
    if "tr.save" in answer:
        scope = {**scope, "path": new}
    elif "ckpts.save" in answer:
        scope = {**scope, "step": scope["ckpts"].latest_step + 1}
    found = eval(answer, scope)
    return found.result() if isinstance(found, tr.PendingSave) else found


CALLED = [
    "tr.Checkpointer(run, max_to_keep=5, save_interval_steps=10)",
    "tr.Checkpointer(run, best_fn=lambda m: m['loss'], best_mode='min', keep_period=1000)",
    "tr.Checkpointer(run, item_names=('state',))",
    "tr.Checkpointer(run, options=ocp.CheckpointManagerOptions(max_to_keep=3))",
    "tr.Checkpointer(run, ocp.CheckpointManagerOptions(max_to_keep=3))",
    "tr.Checkpointer(run, ocp.StandardCheckpointer(), ocp.CheckpointManagerOptions())",
    "tr.CheckpointManagerOptions(max_to_keep=3)",
    "tr.CheckpointManager(run)",
    "tr.args.StandardSave(state)",
    "ckpts.save(step, args=ocp.args.StandardSave(state))",
    "ckpts.save(step, state, args=None)",
    "tr.save(path, args=ocp.args.StandardSave(state))",
    "tr.save(path, state, args=None)",
    "tr.save(path, state, format='safetensors', args=None)",
    "tr.save(path, state, format='flax', args=None)",
    "tr.save(path, state, format='orbax', args=None)",
    "tr.save_async(path, state, args=None).result()",
    "tr.save(path, state, force=True)",
    "ckpts.restore(step, args=ocp.args.StandardRestore(state))",
    "ckpts.restore(target=state)",
    "ckpts.restore(3)",
    "ckpts.restore(np.int64(3))",
    "ckpts.restore(3, state)",
    "ckpts.restore(3, like=state)",
    "tr.restore(run, 3)",
    "tr.restore(path, target=state)",
    "tr.restore(path, restore_dtype='bfloat16')",
    "ckpt.restore(target=state)",
    "ckpts.restore_or_init(init, target=state)",
    "ckpts.restore(ocp.args.StandardRestore(state))",
    "ckpts.restore({'params': ocp.args.PyTreeRestore(state), 'opt': ...}, missing='template')",
    "ckpts.save(4, ocp.args.StandardSave(state))",
    "ckpts.save(4, {'state': ocp.args.StandardSave(state)})",
    "ckpts.save(4, ocp.args.Composite(state=ocp.args.StandardSave(state)))",
    "ckpts.all_steps()",
    "ckpts.should_save(step)",
    "ckpts.wait_until_finished()",
    "tr.save(state, path)",
    "ckpts.save(state, 4)",
    "tr.restore(state, path)",
    "tr.restore(path, template=state)",
    "tr.record(run, {'loss': 0.5}, 3)",
    "next(tr.follow_weights(state, run))",
    "publisher.publish(state, 4)",
]


@pytest.mark.parametrize("wrong", CALLED)
def test_a_call_of_orbax_is_answered_with_ours(wrong: str, scope: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """The error for a call of Orbax names the call of Treering."""
    with pytest.raises((TypeError, AttributeError, MismatchError)) as caught:
        eval(wrong, {**scope, "np": np, "path": tmp_path / "c2" if "save" in wrong else scope["path"]})
    call(answer_of(caught.value), scope, tmp_path / "new")
    about_an_argument = not any(text in str(caught.value) for text in ("by its name", "without Orbax's", "in another"))
    assert not (about_an_argument and isinstance(caught.value, MismatchError))


ARGUMENTS = [(name, argument) for name, (_, table) in migration_hints.CALLS.items() for argument in table]


@pytest.mark.long
def test_every_answer_works_and_answers_what_is_no_name_here(scope: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """Every answer is valid code, and belongs to a name that Treering does not have."""
    for n, (name, argument) in enumerate(ARGUMENTS):
        owner, _, method = name.rpartition(".")
        instance = {"": tr, "Checkpointer": scope["ckpts"], "Checkpoint": scope["ckpt"]}[owner]
        with pytest.raises(TypeError) as caught:
            getattr(instance, method)(**{argument: None})
        answer = answer_of(caught.value)
        call(answer, scope, tmp_path / str(n))


@pytest.mark.parametrize("owner", ["ckpts", "tr"])
def test_every_name_of_another_library_is_answered(owner: str, scope: dict[str, Any], tmp_path: pathlib.Path) -> None:
    table = {"ckpts": migration_hints.RUN_CALLS, "tr": migration_hints.MODULE_CALLS}[owner]
    for n, name in enumerate(table):
        assert not hasattr(scope[owner], name)
        with pytest.raises(AttributeError, match=f"no attribute {name!r}; in Treering: ") as caught:
            getattr(scope[owner], name)
        call(answer_of(caught.value), scope, tmp_path / str(n))


def test_what_several_arguments_mean_is_one_call() -> None:
    """Several arguments of another library are answered by one call."""
    with pytest.raises(TypeError) as caught:
        tr.Checkpointer("run", max_to_keep=3, keep_period=10, save_interval_steps=5)  # type: ignore[call-arg]
    assert (
        answer_of(caught.value) == "tr.Checkpointer(run, save_every=1000, keep=tr.keep.last(3) | tr.keep.every(1000))"
    )


def test_other_mistakes_raise_their_usual_errors(tmp_path: pathlib.Path) -> None:
    """Mistakes that are no habit of another library raise their usual errors."""
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, 5)
        assert ckpts.restore(3) == tr.restore(tmp_path / "run", 3) == 5  # A number is a valid template.
        ckpts.save(2, STATE)
        with pytest.raises(MismatchError) as differs:
            ckpts.restore({"params": 3})
        with pytest.raises(TypeError) as unknown:
            ckpts.save(3, STATE, metricts={})  # type: ignore[call-arg]
        with pytest.raises(AttributeError, match="'Checkpointer' object has no attribute 'stepps'") as misspelt:
            ckpts.stepps  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(UnsupportedError) as leaf:
            ckpts.save(3, {"x": object()})
    for caught in (differs, unknown, misspelt, leaf):
        assert "Treering:" not in str(caught.value)


def test_error_in_property_is_not_a_missing_name(tmp_path: pathlib.Path) -> None:
    """An AttributeError inside a property of a subclass is raised unchanged."""

    class Own(tr.Checkpointer):
        @property
        def metrics(self) -> Any:
            return self.logger.metrics  # type: ignore[attr-defined]

    with Own(tmp_path / "run") as ckpts, pytest.raises(AttributeError, match=r"no attribute 'logger'$"):
        ckpts.metrics  # noqa: B018


def test_what_the_pages_call_a_property_is_one(tmp_path: pathlib.Path) -> None:
    """The names that the pages describe as properties are properties."""
    pages = pathlib.Path(__file__).parent.parent / "docs"
    assert "comes from `ckpts.latest_step()`" in (pages / "troubleshooting.md").read_text()
    for name in ("steps", "latest_step", "directory", "preempted", "is_saving"):
        assert isinstance(getattr(tr.Checkpointer, name), property)
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(3, STATE)
        # Python raises this error itself, so Treering cannot change it.
        with pytest.raises(TypeError, match=r"^'int' object is not callable$"):
            ckpts.latest_step()  # type: ignore[misc]
