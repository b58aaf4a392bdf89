"""Tests of a run that begins: again in a used folder, and next to other steps that the user may mean instead."""

import logging
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
import treering.orbax as ocp
from thread_jobs import processes
from treering import stores
from treering._cli.main import main
from treering._run import new_run
from treering.errors import MismatchError, NotFoundError, TreeringError, UnsupportedError


def init() -> dict[str, Any]:
    return {"x": np.zeros(3)}


def _save(run: pathlib.Path, *steps: int, value: float = 1, **options: Any) -> None:
    with tr.Checkpointer(run, **options) as ckpts:
        for step in steps:
            ckpts.save(step, {"x": np.full(3, float(value))})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def found() -> list[str]:
        texts = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        caplog.clear()
        return texts

    return found


# A path that can be no run


def test_a_checkpoint_or_a_file_is_no_run_for_a_save(tmp_path: pathlib.Path) -> None:
    _save(tmp_path / "run", 1)
    step = tmp_path / "run" / "step-00000001"
    tr.save(tmp_path / "one", init())
    with pytest.raises(MismatchError, match=r"expected a run, found step 1 of the run .*run; pass the run"):
        _save(step, 2)
    with pytest.raises(MismatchError, match="one: expected a run, found a checkpoint of the format 'treering'"):
        _save(tmp_path / "one", 2)
    with tr.Publisher(step) as publisher, pytest.raises(MismatchError, match="found step 1 of the run"):
        publisher.publish(1, {"w": np.ones(3)})
    assert not list(step.glob("step-*")) and tr.verify(tmp_path / "run").ok


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors"])
def test_a_file_is_no_run_before_any_work_is_done(tmp_path: pathlib.Path, name: str) -> None:
    tr.save(tmp_path / name, init(), format="safetensors")
    with tr.Checkpointer(tmp_path / name) as ckpts:
        with pytest.raises(MismatchError, match=f"{name}: expected a directory for the run, found a file"):
            ckpts.restore_or_init(init)
        with pytest.raises(MismatchError, match=f"{name}: expected a directory for the run, found a file"):
            ckpts.save(1, init())


# Starting over in a used folder


@pytest.mark.long
@pytest.mark.parametrize("back", [None, 0])
@pytest.mark.parametrize("local", [False, True])
def test_new_start_archives_all_steps(
    tmp_path: pathlib.Path, back: int | None, local: bool, warnings: Callable[[], list[str]]
) -> None:
    run = tmp_path / "run"
    options: Any = {"keep": tr.keep.last(2), "local": tmp_path / "near" if local else None}
    _save(run, 10, 20, 30, **options)
    with tr.Checkpointer(run, **options) as ckpts:
        ckpts.pin(20)
        ckpts.rewind(back)
        (text,) = {text.partition(";")[0] for text in warnings()}
        assert text == "the run starts over" and ckpts.steps == []
        assert ckpts.restore_or_init(init)[1] == 0
        assert not warnings(), "the program knows of the steps that it has just archived"
        for step in (1, 2, 3):
            ckpts.save(step, {"x": np.full(3, 2.0)})
        ckpts.rewind(2)
        ckpts.save(3, {"x": np.full(3, 2.0)})
    with tr.Checkpointer(run, **options) as ckpts:
        state, step = ckpts.restore_or_init(init)
    assert step == 3 and state["x"][0] == 2 and tr.steps(run) == [2, 3]
    assert tr.steps(run / "rewound-1") == [20, 30]
    with tr.Checkpointer(run) as ckpts:  # restores from the archived run
        ckpts.rewind(None)
    assert main(["cp", str(run / "rewound-1"), str(run)]) == 0
    with tr.Checkpointer(run) as ckpts:
        assert ckpts.restore_or_init(init)[0]["x"][0] == 1 and ckpts.restored_step == 30 and ckpts.pinned == [20]


def test_step_0_is_a_step_to_go_back_to_where_it_is_saved(tmp_path: pathlib.Path) -> None:
    _save(tmp_path, 0, 1)
    with tr.Checkpointer(tmp_path) as ckpts:
        ckpts.rewind(0)
        assert ckpts.steps == [0]
        ckpts.rewind(None)
        ckpts.rewind(None)
        assert ckpts.steps == [] and tr.steps(tmp_path / "rewound-2") == [0]
    with tr.Checkpointer(tmp_path / "new") as ckpts:
        ckpts.rewind(None)  # works in an empty run too: the first job need not check
        assert ckpts.restore_or_init(init)[1] == 0


@pytest.mark.parametrize("options", [{"missing": 7}, {"extra": 7}, {"max_expansion": 0}])
def test_wrong_options_fail_in_the_first_job(tmp_path: pathlib.Path, options: Any) -> None:
    """A run without steps restores nothing. Otherwise they would fail only the job after it."""
    with tr.Checkpointer(tmp_path) as ckpts, pytest.raises(MismatchError, match=next(iter(options))):
        ckpts.restore_or_init(init, **options)


def test_new_start_among_steps_of_another_library_is_refused(tmp_path: pathlib.Path) -> None:
    from flax.training import checkpoints

    _save(tmp_path, 1)
    checkpoints.save_checkpoint(str(tmp_path), {"x": np.ones(3)}, 5, keep=10)
    with (
        tr.Checkpointer(tmp_path) as ckpts,
        pytest.raises(UnsupportedError, match=r"checkpoint_5: after the beginning, and .* move it out"),
    ):
        ckpts.rewind(None)
    assert tr.steps(tmp_path) == [1, 5]


def test_rewind_command_archives_all_steps(tmp_path: pathlib.Path) -> None:
    """`treering rewind --all` archives all steps."""
    _save(tmp_path, 1, 2)
    assert main(["rewind", str(tmp_path)]) == 2 == main(["rewind", str(tmp_path), "1", "--all"])
    assert main(["rewind", str(tmp_path), "--all"]) == 0
    assert tr.steps(tmp_path) == [] and tr.steps(tmp_path / "rewound-1") == [1, 2]


# Next to other steps


def _another_prefix(run: pathlib.Path) -> dict[str, Any]:
    _save(run, 9, 500)
    return {"prefix": "ckpt-"}


def _checkpoints_by_hand(run: pathlib.Path) -> dict[str, Any]:
    tr.save(run / "epoch_3", init())
    return {}


def _copies_of_ray(run: pathlib.Path) -> dict[str, Any]:
    for n, made in enumerate((_save_step_3, lambda path: tr.save(path, init()))):
        made(run / f"checkpoint_2026-11-28_16-26-5{n}.702806")
    return {}


def _save_step_3(path: pathlib.Path) -> None:
    _save(path.parent / "other", 3)
    (path.parent / "other" / "step-00000003").rename(path)
    shutil.rmtree(path.parent / "other")


def _archived_steps(run: pathlib.Path) -> dict[str, Any]:
    _save(run, 1, 2)
    with tr.Checkpointer(run) as ckpts:
        ckpts.rewind(None)
    return {}


def _run_within(run: pathlib.Path) -> dict[str, Any]:
    _save(run / "gpt", 1, 2)
    return {}


def _run_around(run: pathlib.Path) -> dict[str, Any]:
    _save(run.parent, 1, 2)
    return {}


_STARTS: dict[str, tuple[Callable[[pathlib.Path], dict[str, Any]], str]] = {
    "prefix": (_another_prefix, "step-00000500 is in it; pass prefix='step-' to continue from there"),
    "by hand": (_checkpoints_by_hand, "epoch_3 is in it; pass prefix='epoch_' to continue from there"),
    "a time": (
        _copies_of_ray,
        "checkpoints in it that are not steps: checkpoint_2026-11-28_16-26-50.702806, checkpoint_2026-11-28_16",
    ),
    "set aside": (
        _archived_steps,
        "archived steps, which `treering cp` brings back: {run}/rewound-1 (newest step 2)",
    ),
    "within": (_run_within, "it has runs in it: {run}/gpt (newest step 2); pass the one that is meant"),
    "around": (_run_around, "it is within the run {parent} (newest step 2)"),
}


@pytest.mark.parametrize("start", _STARTS)
@pytest.mark.parametrize("call", ["restore_or_init", "save"])
def test_run_that_begins_next_to_steps_names_them_once(
    tmp_path: pathlib.Path, start: str, call: str, warnings: Callable[[], list[str]]
) -> None:
    run = tmp_path / "parent" / "run"
    make, words = _STARTS[start]
    options = make(run)
    warnings()
    with tr.Checkpointer(run, **options) as ckpts:
        if call == "restore_or_init":
            assert ckpts.restore_or_init(init)[1] == 0
        ckpts.save(1, init())
        ckpts.save(2, init())
    (text,) = warnings()
    assert text.startswith(f"{run}: starts over, but ") and words.format(run=run, parent=run.parent) in text
    with tr.Checkpointer(run, **options) as ckpts:
        assert ckpts.restore_or_init(init)[1] == 2
        ckpts.save(3, init())
    assert not warnings()


@pytest.mark.parametrize("start", _STARTS)
def test_error_without_a_step_names_steps_close_by(tmp_path: pathlib.Path, start: str) -> None:
    run = tmp_path / "parent" / "run"
    make, words = _STARTS[start]
    options = make(run)
    ckpts = tr.Checkpointer(run, **options)
    for call in (ckpts.restore, ckpts.open, lambda: ckpts.restore(step=1), lambda: ckpts.rewind(1)):
        with pytest.raises(NotFoundError) as caught:
            call()
        assert words.format(run=run, parent=run.parent) in str(caught.value)


def test_a_run_whose_steps_are_on_another_local_disk(tmp_path: pathlib.Path, warnings: Callable[[], list[str]]) -> None:
    """A warning says that steps may be in another `local=` directory."""
    run = tmp_path / "run"
    with tr.Checkpointer(run, local=tmp_path / "a") as ckpts:
        ckpts.save(1, init())
    shutil.rmtree(run / "step-00000001")  # as if the job had been killed before it uploaded its step
    with tr.Checkpointer(run, local=tmp_path / "a") as ckpts:
        assert ckpts.restore_or_init(init)[1] == 1 and not warnings()
    shutil.rmtree(run / "step-00000001")
    for local in (None, tmp_path / "b"):
        assert tr.Checkpointer(run, local=local).restore_or_init(init)[1] == 0
        assert (
            "it was written from another local= directory, which may have steps that are not uploaded" in warnings()[0]
        )


# A directory that is not the run


@pytest.mark.parametrize("library", ["treering", "orbax"])
def test_the_directory_of_a_step_is_answered_with_its_run(tmp_path: pathlib.Path, library: str) -> None:
    run, path = tmp_path / "run", tmp_path / "run" / "step-00000003"
    if library == "treering":
        _save(run, 3)
    else:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(run) as manager:
            manager.save(3, args=ocp.args.StandardSave(init()))
        path = run / "3" / "default"
    ckpts = tr.Checkpointer(path)
    calls: list[Callable[[], object]] = [
        lambda: ckpts.restore_or_init(init),
        lambda: ckpts.restore(),
        lambda: tr.restore(path, step=3),
        lambda: tr.record(path, 3, {"loss": 1}),
    ]
    for call in calls:
        with pytest.raises(TreeringError) as caught:
            call()
        assert f"step 3 of the run {run}; pass the run" in str(caught.value).splitlines()[0]
        assert "begin in another" not in str(caught.value)
    assert not list(path.glob("step-*")), "no step was saved in it"


def test_the_search_for_runs_stops_at_its_limit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is asked about directories that are not searched, however many there are; the log says so."""
    monkeypatch.setattr(new_run, "_MAX_SEARCHED_FOLDERS", 3)
    for n in range(9):
        _save(tmp_path / "a" / f"{n}", 1)
    asked: list[str] = []
    is_folder = new_run.is_folder

    def counted(store: Any, path: str, **options: Any) -> bool:
        asked.append(path)
        return is_folder(store, path, **options)

    monkeypatch.setattr(new_run, "is_folder", counted)
    with caplog.at_level(logging.INFO, "treering"):
        found = new_run.runs_below(stores.get(str(tmp_path)), str(tmp_path), levels=2)
    assert found.count("newest step 1") == 3 and asked == [f"{tmp_path}/a", *(f"{tmp_path}/a/{n}" for n in range(4))]
    assert "only the first 3 directories were searched" in caplog.text


def test_a_directory_of_runs_is_answered_with_the_runs(
    tmp_path: pathlib.Path, warnings: Callable[[], list[str]]
) -> None:
    for name in ("a", "b"):
        _save(tmp_path / name, 1)
    (tmp_path / "empty").mkdir()
    for call in (tr.restore, tr.open, tr.verify, lambda path: tr.restore(path, step=1)):
        with pytest.raises(NotFoundError) as caught:
            call(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path}: expected a checkpoint or a run, found a directory of runs; pass the one that is meant: "
            f"{tmp_path}/a (newest step 1), {tmp_path}/b (newest step 1)"
        )
    with pytest.raises(NotFoundError, match=f"it has runs in it: {tmp_path}/a"):
        tr.record(tmp_path, 1, {"loss": 1})
    assert not list(tr.follow(tmp_path, timeout=0)) and f"runs in it: {tmp_path}/a" in warnings()[0]
    with pytest.raises(MismatchError, match="from 0"):
        tr.Checkpointer(tmp_path / "a").rewind(-1)


def test_newer_steps_of_the_adapter_are_named(tmp_path: pathlib.Path, warnings: Callable[[], list[str]]) -> None:
    """The adapter gives its steps the names of Orbax. A run must not go back to the last step that Orbax saved."""
    run = tmp_path / "run"
    for step, write in ((1, "orbax"), (2, "treering")):
        with ocp.CheckpointManager(run, write=write) as manager:
            manager.save(step, args=ocp.args.StandardSave(init()))
    warnings()
    with tr.Checkpointer(run) as ckpts:
        assert ckpts.restore_or_init(init)[1] == 1
    words = "continues from 1 of another library, but 2 is in it; pass prefix='' to continue from there"
    assert warnings() == [f"{run}: {words}"]
    with tr.Checkpointer(run, prefix="") as ckpts:
        assert ckpts.restore_or_init(init)[1] == 2
    assert not warnings()


def test_what_is_no_function_without_arguments_is_answered(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, init())
    for run in (tmp_path / "run", tmp_path / "new"):
        with tr.Checkpointer(run) as ckpts:
            with pytest.raises(
                TypeError, match=r"expected init, a function .*, found a dict; .* lambda: make_state\(\)"
            ):
                ckpts.restore_or_init(init())  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"missing a required argument: 'key'\); .* lambda: init\(key\)"):
                ckpts.restore_or_init(lambda key: init())  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"has no argument bets; expected like, step, best, fallback, at, "):
                ckpts.restore(bets="loss")  # type: ignore[call-arg]


def test_a_part_shows_its_own_size(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "a", {"model": np.ones(1000, "float32"), "opt": np.ones(1_000_000, "float32")})
    ckpt = tr.open(tmp_path / "a")
    assert all("1 leaf · 4.00 KB" in part._repr_html_() for part in (ckpt.at("model"), ckpt.select("model")))
    assert "2 leaves · 4.0" in ckpt._repr_html_() and "MB" in ckpt._repr_html_()


def test_a_disk_that_fills_is_warned_of_before(tmp_path: pathlib.Path, warnings: Callable[[], list[str]]) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4500k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    try:
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            for step in (1, 2, 3, 4):
                ckpts.save(step, {"x": np.full(125_000, step * 1.0)}).result()
                ckpts.wait()
                said = warnings()
                assert len(said) == (step == 3), said
                assert step != 3 or "two more saves will not fit: they need 2.01 MB, and " in said[0]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_the_best_step_is_opened_and_restored(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    with tr.Checkpointer(run) as ckpts:
        for step, loss in ((1, 0.5), (2, 0.1), (3, float("nan"))):
            ckpts.save(step, {"x": np.full(3, step)}, metrics={"loss": loss})
    assert tr.open(run, best="loss:max").step == 1 and tr.open(run, best="loss:min").step == 2
    assert (
        tr.restore(run, best="loss:min")["x"][0]
        == 2
        == tr.restore(run, {"x": np.zeros(3, int)}, best="loss:min")["x"][0]
    )
    with tr.Checkpointer(run) as ckpts:
        assert ckpts.restore(best="loss:max")["x"][0] == 1 and ckpts.restored_step == 1
        with pytest.raises(MismatchError, match="step= or best=, found both"):
            ckpts.restore(step=1, best="loss:min")
        assert ckpts.restore(best="loss:min")["x"][0] == 2
        ckpts.save(4, {"x": np.full(3, 4)})  # continues from step 2
    assert tr.steps(run) == [1, 2, 4] and tr.steps(run / "rewound-1") == [3]
    with pytest.raises(MismatchError, match="metric='los': expected one that a step has, found loss"):
        tr.open(run, best="los:min")
    with pytest.raises(MismatchError, match="step= or best=, found both"):
        tr.restore(run, step=1, best="loss:min")
    with pytest.raises(MismatchError, match=r"best='': expected METRIC, METRIC:min or METRIC:max"):
        tr.open(run, best="")
    with pytest.raises(NotFoundError, match="expected a step with the metric 'loss', found no metrics"):
        tr.open(tmp_path / "none", best="loss:min")


@pytest.mark.parametrize("metric", ["loss", "Val/Loss", "error_rate", "perplexity"])
def test_the_highest_loss_is_taken_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, metric: str
) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"x": np.ones(3)}, metrics={metric: 1 / step, "accuracy": step})
    assert tr.open(tmp_path / "run", best=f"{metric}:max").step == 1
    assert tr.open(tmp_path / "run", best="accuracy").step == 2 and not caplog.records
    assert tr.open(tmp_path / "run", best=metric).step == 1
    assert f"takes the highest value; '{metric}:min' takes the lowest" in caplog.text
    assert tr.open(tmp_path / "run", best=f"{metric}:min").step == 2  # as it advises
    with pytest.raises(MismatchError, match=r"found .*accuracy.*; a name may end with :min or :max"):
        tr.open(tmp_path / "run", best="accuracy:mx")


def test_a_wrong_mode_of_best_is_one_error_and_no_warning(
    tmp_path: pathlib.Path, warnings: Callable[[], list[str]]
) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(1, init(), metrics={"loss": 0.5, "loss:ema": 0.5, "train:loss": 0.5})
    with pytest.raises(MismatchError, match=r"found loss, loss:ema, train:loss.* a name may end with :min or :max"):
        tr.open(tmp_path / "run", best="loss:lowest")
    assert not warnings()
    for name in ("train:loss", "loss:ema"):
        assert tr.open(tmp_path / "run", best=name).step == 1
        assert f"'{name}:min' takes the lowest" in warnings()[0]


def test_the_processes_of_a_job_take_the_same_best_step(tmp_path: pathlib.Path) -> None:
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
            ckpts.save(step, {"x": np.full(3, step)}, metrics={"loss": loss})
    found: dict[int, int] = {}

    def body(process: int) -> None:
        with tr.Checkpointer(tmp_path / "run") as ckpts:
            found[process] = int(ckpts.restore({"x": np.zeros(3, int)}, best="loss:min")["x"][0])

    with processes(2) as job:
        job.run(body)
    assert not job.errors and found == {0: 2, 1: 2}
