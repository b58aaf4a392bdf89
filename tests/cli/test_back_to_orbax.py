"""The way back: runs of Treering and of the adapter become runs that Orbax itself continues."""

import datetime
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import treering as tr
import treering.orbax as ours
from treering._tools.listing import list_run


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 2), step), "opt": [jnp.zeros(3), jnp.int32(step)]}


def save_with_treering(run: pathlib.Path) -> None:
    with tr.Checkpointer(run) as ckpts:
        for step in (10, 20, 30):
            ckpts.save(step, state(step), metrics={"loss": abs(step - 20)}, metadata={"note": step})


def save_with_the_adapter(run: pathlib.Path) -> None:
    for step, write in ((10, "orbax"), (20, "treering"), (30, "treering")):  # Some steps are in each format.
        with ours.CheckpointManager(run, metadata={"team": "a"}, write=write) as manager:
            args = ours.args.StandardSave(state(step))
            manager.save(step, args=args, metrics={"loss": abs(step - 20)}, custom_metadata={"note": step})


SAVES = {"treering": save_with_treering, "adapter": save_with_the_adapter}


@pytest.mark.parametrize("kind", SAVES)
def test_orbax_continues_a_converted_run(kind: str, tmp_path: pathlib.Path, treering: Any) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    SAVES[kind](run)
    planned = treering("convert", run, back, "--format", "orbax", "--dry-run", "--json")
    assert planned.code == 0 and not back.exists()
    found = treering("convert", run, back, "--format", "orbax", "--json")
    assert found.code == 0 and found.json["written"] == [str(back / str(step)) for step in (10, 20, 30)]
    assert {**found.json, "nbytes": 0} == {**planned.json, "nbytes": 0, "dry_run": False}
    times = {row.step: row.created for row in list_run(run).rows}
    options = ocp.CheckpointManagerOptions(max_to_keep=3, best_fn=lambda one: one["loss"], best_mode="min")
    with ocp.CheckpointManager(back, options=options) as manager:
        assert list(manager.all_steps()) == [10, 20, 30] and manager.best_step() == 20
        for step in (10, 20, 30):
            restored = manager.restore(step, args=ocp.args.StandardRestore(state(0)))
            assert not tr.diff(restored, state(step))
            assert manager.metrics(step) == {"loss": abs(step - 20)}
            about = manager.metadata(step)
            assert about.custom_metadata == {"note": step}
            assert about.commit_timestamp_nsecs / 1e9 == pytest.approx(times[step], abs=0.001)
        assert manager.metadata().custom_metadata == ({"team": "a"} if kind == "adapter" else {})
        manager.save(40, args=ocp.args.StandardSave(state(40)), metrics={"loss": 0.5})
        manager.wait_until_finished()
        assert len(manager.all_steps()) == 3 and {20, 40} <= {*manager.all_steps()}


def test_version_1_continues_a_converted_run(tmp_path: pathlib.Path, treering: Any) -> None:
    run, back, named = tmp_path / "run", tmp_path / "back", tmp_path / "named"
    save_with_treering(run)
    assert treering("convert", run, back, "--format", "orbax").code == 0
    with v1.training.Checkpointer(str(back)) as ckpts:
        assert [one.step for one in ckpts.checkpoints] == [10, 20, 30] and ckpts.latest.metrics == {"loss": 10}
        assert not tr.diff(ckpts.load_checkpointables(30, {"default": state(0)})["default"], state(30))
    assert treering("convert", run, named, "--format", "orbax", "--composite", "--rename", "^=state/").code == 0
    with v1.training.Checkpointer(str(named)) as ckpts:
        assert not tr.diff(ckpts.load(30, state(0)), state(30)) and ckpts.latest.metrics == {"loss": 10}
        assert ckpts.save(40, state(40))
        assert ckpts.latest.step == 40


def test_items_and_names_of_the_adapter_stay(tmp_path: pathlib.Path, treering: Any) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    names = {"step_prefix": "ckpt", "step_format_fixed_length": 4}
    with ours.CheckpointManager(run, options=ours.CheckpointManagerOptions(**names)) as manager:
        args = ours.args.Composite(state=ours.args.StandardSave(state(1)), config=ours.args.JsonSave({"lr": 0.1}))
        manager.save(1, args=args)
    found = treering("convert", run, back, "--format", "orbax")
    assert found.code == 0 and "1 step written, the newest as ckpt_0001" in found.out
    with ocp.CheckpointManager(back, options=ocp.CheckpointManagerOptions(**names)) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state(0)), config=ocp.args.JsonRestore())
        restored = manager.restore(1, args=args)
    assert not tr.diff(restored["state"], state(1)) and restored["config"] == {"lr": 0.1}


def test_what_is_lost_on_the_way_back_is_named(tmp_path: pathlib.Path, treering: Any) -> None:
    run, back = tmp_path / "run", tmp_path / "back"
    save_with_treering(run)
    treering("pin", run, 10)
    next((run / "step-00000020").glob("arrays*")).write_bytes(b"")
    found = treering("convert", run, back, "--format", "orbax")
    assert found.code == 1 and "not converted" in found.err and "pinned here: step-00000010" in found.err
    assert tr.steps(back) == [10, 30] and "2 steps written" in found.out
    again = treering("convert", run, back, "--format", "orbax")
    assert again.code == 3 and str(back / "10") in again.err and "--overwrite" in again.err
    tr.save(run / "step-00000040", {"w": np.ones(2), "rng": np.random.default_rng(0)}, step=40)
    refused = treering("convert", run, tmp_path / "new", "--format", "orbax")
    assert refused.code == 3 and "rng" in refused.err and not (tmp_path / "new").exists()


def test_a_step_of_a_run_has_its_time(tmp_path: pathlib.Path) -> None:
    """`keep_time_interval` of Orbax goes by the time of the commit, not by that of the conversion."""
    save_with_treering(tmp_path / "run")
    before = datetime.datetime.now(datetime.UTC)
    tr.convert(tmp_path / "run", tmp_path / "back" / "30", step=30, format="orbax")
    created = tr.open(tmp_path / "back").created
    assert created is not None and created < before
