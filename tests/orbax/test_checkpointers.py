"""The checkpointers of the drop-in for Orbax: one checkpoint at a path."""

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
import treering.orbax as ocp
from helpers import assert_same
from treering.errors import NotFoundError
from treering.stores import filesystem

TREE = {"w": jnp.arange(4.0), "n": 3}


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_standard_checkpointer_saves_in_the_background(tmp_path: Path, write: str) -> None:
    with ocp.StandardCheckpointer(write=write) as saver:
        saver.save(tmp_path / "a", TREE, custom_metadata={"run": 1})
        saver.wait_until_finished()
        assert tr.open(tmp_path / "a").format == write
        for got in (saver.restore(tmp_path / "a"), saver.restore(tmp_path / "a", TREE)):
            assert not tr.diff(got, TREE)
        meta = saver.metadata(tmp_path / "a")
        assert meta.custom_metadata == {"run": 1} and meta.item_metadata["w"].shape == (4,)
        shapes = jax.tree.map(lambda leaf: leaf.shape, meta.item_metadata.tree)
        assert shapes == {"w": (4,), "n": ()}


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_checkpoint_has_the_mode_asked_for(tmp_path: Path, write: str) -> None:
    files = ocp.options.FileOptions(path_permission_mode=0o700)
    with ocp.StandardCheckpointer(file_options=files, write=write) as saver:
        saver.save(tmp_path / "background", TREE)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), file_options=files, write=write).save(tmp_path / "now", TREE)
    context = ocp.v1.Context(write=write)
    context.file.path_permission_mode = 0o700
    with context:
        ocp.v1.save(tmp_path / "v1", TREE)
        ocp.v1.save_async(tmp_path / "v1_async", TREE).result()
        with ocp.v1.training.Checkpointer(tmp_path / "run") as ckpts:
            ckpts.save(1, TREE)
    places = ("background", "now", "v1", "v1_async", "run", "run/1")
    assert {place: oct((tmp_path / place).stat().st_mode & 0o777) for place in places} == dict.fromkeys(places, "0o700")


@pytest.mark.parametrize("kind", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_an_existing_checkpoint_is_replaced_only_by_force(tmp_path: Path, kind: Any) -> None:
    saver = kind()
    saver.save(tmp_path / "a", TREE)
    with pytest.raises(ValueError, match=r"expected a free path, found a checkpoint; pass force=True") as error:
        saver.save(tmp_path / "a", {"w": jnp.zeros(4), "n": 0})
        saver.wait_until_finished()
    assert isinstance(error.value, FileExistsError)
    assert_same(saver.restore(tmp_path / "a"), TREE)
    saver.save(tmp_path / "a", {"w": jnp.zeros(4), "n": 0}, force=True)
    assert_same(saver.restore(tmp_path / "a"), {"w": jnp.zeros(4), "n": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    saver.close()


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_force_saves_into_an_empty_directory(tmp_path: Path, write: str) -> None:
    """Programs make the directory before they save, because Orbax replaces it."""
    (tmp_path / "a").mkdir()
    ocp.PyTreeCheckpointer(write=write).save(tmp_path / "a", TREE, force=True)
    assert not tr.diff(ocp.PyTreeCheckpointer().restore(tmp_path / "a"), TREE)


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_an_item_of_a_step_has_a_path_of_its_own(tmp_path: Path, write: str) -> None:
    """Orbax has a directory for each item, and programs load parameters from that of a run."""
    with ocp.CheckpointManager(tmp_path / "run", write=write) as run:
        run.save(1, args=ocp.args.Composite(params=ocp.args.StandardSave(TREE), config=ocp.args.JsonSave({"a": 1})))
    with ocp.CheckpointManager(tmp_path / "one", write=write) as run:
        run.save(1, args=ocp.args.StandardSave(TREE))
    for path in (tmp_path / "run" / "1" / "params", tmp_path / "one" / "1" / "default"):
        assert not tr.diff(ocp.StandardCheckpointer().restore(path, TREE), TREE)
        assert ocp.PyTreeCheckpointer().metadata(path).item_metadata["w"].shape == (4,)
    assert ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(tmp_path / "run" / "1" / "config") == {"a": 1}
    if write == "treering":
        with pytest.raises(FileNotFoundError, match="expected the item 'state', found config, params"):
            ocp.StandardCheckpointer().restore(tmp_path / "run" / "1" / "state")


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_directory_may_have_the_ending_of_a_file(tmp_path: Path, write: str) -> None:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler(), write=write) as saver:
        saver.save(tmp_path / "config.json", {"a": 1})
        saver.save(tmp_path / "config.json", {"a": 2}, force=True)
        assert saver.restore(tmp_path / "config.json") == {"a": 2}


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_force_deletes_nothing_but_checkpoints(tmp_path: Path, write: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="found a directory"):
        ocp.PyTreeCheckpointer(write=write).save(tmp_path / "a", TREE, force=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("then", ["treering", "orbax"])
@pytest.mark.parametrize("first", ["treering", "orbax"])
def test_force_keeps_files_next_to_a_checkpoint(
    tmp_path: Path, first: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay in the directory, or in one next to it, which is logged. Files of the checkpoint go."""
    tr.save(tmp_path / "a", TREE, format=first)
    (tmp_path / "a" / "notes.txt").write_text("keep")
    ocp.PyTreeCheckpointer(write=then).save(tmp_path / "a", {"w": jnp.zeros(4), "n": 0}, force=True)
    assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "a", TREE), {"w": jnp.zeros(4), "n": 0})
    old = [path for path in tmp_path.iterdir() if path.name != "a"]
    assert [path.name for one in old for path in one.iterdir()] == ["notes.txt"] * (first != then)
    assert ("files in it that are not part of a checkpoint are in" in caplog.text) == (first != then)
    assert (tmp_path / "a" / "notes.txt").exists() == (first == then)


def test_what_is_missing_is_a_file_not_found_error(tmp_path: Path) -> None:
    for call in (ocp.PyTreeCheckpointer().restore, ocp.StandardCheckpointer().metadata):
        with pytest.raises(FileNotFoundError) as error:
            call(tmp_path / "nothing")
        assert isinstance(error.value, NotFoundError)
    with tr.Checkpointer(tmp_path / "run") as run:
        run.save(3, TREE)
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found a run; give the path of a step"):
        ocp.PyTreeCheckpointer().restore(tmp_path / "run")


def test_the_old_style_of_calls_works(tmp_path: Path) -> None:
    saver = ocp.PyTreeCheckpointer()
    saver.save(tmp_path / "a", TREE, save_args={"w": ocp.SaveArgs(dtype=jnp.bfloat16)})
    got = saver.restore(tmp_path / "a", item={"w": 0, "n": 0}, restore_args={"w": ocp.RestoreArgs(np.ndarray)})
    assert type(got["w"]) is np.ndarray and got["w"].dtype == jnp.bfloat16
    assert_same(saver.restore(tmp_path / "a", {"n": 0}, transforms={}), {"n": 3})
    with pytest.raises(TypeError, match="unexpected keyword"):
        saver.restore(tmp_path / "a", nothing=1)


def test_a_checkpoint_has_one_custom_metadata(tmp_path: Path) -> None:
    own = ocp.args.StandardSave(TREE, custom_metadata={"of": "item"})
    saver = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    saver.save(tmp_path / "a", own)
    assert saver.metadata(tmp_path / "a").item_metadata.custom_metadata == {"of": "item"}
    several = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    for call in (
        lambda: saver.save(tmp_path / "b", own, custom_metadata={"of": "call"}),
        lambda: several.save(tmp_path / "b", ocp.args.Composite(state=own)),
    ):
        with pytest.raises(ValueError, match="expected it once, for the entire checkpoint"):
            call()
    assert not (tmp_path / "b").exists()


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    with pytest.raises(ValueError, match="found a file"):
        saver.save(tmp_path / "file", args=ocp.args.StandardSave(TREE), force=True)
        saver.check_for_errors()
        saver.wait_until_finished()
    saver.close()


def test_a_callback_runs_after_a_background_save(tmp_path: Path) -> None:
    class Options:
        post_finalization_callback = staticmethod(lambda: done.append((tmp_path / "a").exists()))

    done: list[bool] = []
    with ocp.AsyncCheckpointer(ocp.JsonCheckpointHandler(), async_options=Options()) as saver:
        saver.save(tmp_path / "a", {"x": [1, None]})
    assert done == [True]
    assert saver.restore(tmp_path / "a") == {"x": [1, None]}


class _Loud(ocp.StandardCheckpointHandler):
    """It calls the methods that it overrides, as handlers in programs do."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        (directory / "loud").write_text("!")
        super().save(directory / "in", *args, **kwargs)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        assert (directory / "loud").read_text() == "!"
        return super().restore(directory / "in", *args, **kwargs)


class _Slow(ocp.AsyncCheckpointHandler):
    """It returns futures, and has no registered arguments."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    async def async_save(self, directory: Any, item: Any) -> Any:
        async def write() -> None:
            await asyncio.sleep(0)
            (directory / "text").write_text(item)

        return [asyncio.ensure_future(write())]

    def restore(self, directory: Any, item: Any = None) -> Any:
        return (directory / "text").read_text()


def test_a_handler_of_ones_own_saves_a_checkpoint(tmp_path: Path) -> None:
    saver = ocp.Checkpointer(_Loud())
    saver.save(tmp_path / "a", args=ocp.args.StandardSave(TREE))
    assert_same(saver.restore(tmp_path / "a", args=ocp.args.StandardRestore()), TREE)
    saver = ocp.AsyncCheckpointer(_Slow())
    saver.save(tmp_path / "b", "text")
    assert saver.restore(tmp_path / "b") == "text"


@pytest.mark.parametrize("write", ["treering", "orbax"])
def test_a_handler_saves_into_a_directory_by_itself(
    tmp_path: Path, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREERING_ORBAX_WRITE", write)
    handler = ocp.PyTreeCheckpointHandler()
    (tmp_path / "a").mkdir()
    handler.save(tmp_path / "a", TREE)
    assert not tr.diff(handler.restore(tmp_path / "a"), TREE)
    assert handler.metadata(tmp_path / "a")["w"].dtype == np.float32


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_futures_of_a_handler_run_in_the_background(tmp_path: Path) -> None:
    """The first one runs a coroutine, as an asynchronous handler of the program's own does."""
    futures, text, ended = ocp.future, tmp_path / "text", []

    async def write() -> None:
        text.write_text("written")

    one = futures.CommitFutureAwaitingContractedSignals(write(), name="text")
    chain = futures.ChainedFuture([one, futures.NoopFuture()], lambda: ended.append(text.read_text()))
    assert chain.result(10) is None and ended == ["written"]

    async def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        futures.CommitFutureAwaitingContractedSignals(fail()).result()


def test_checkpoints_go_from_orbax_and_to_orbax(tmp_path: Path) -> None:
    real = pytest.importorskip("orbax.checkpoint")
    with real.StandardCheckpointer() as theirs, ocp.StandardCheckpointer(write="orbax") as ours:
        theirs.save(tmp_path / "theirs", TREE)
        theirs.wait_until_finished()
        assert not tr.diff(ours.restore(tmp_path / "theirs", TREE), TREE)
        got = ours.restore(tmp_path / "theirs")
        assert isinstance(got["w"], jax.Array) and type(got["n"]) is int
        ours.save(tmp_path / "ours", TREE)
        ours.wait_until_finished()
        assert not tr.diff(theirs.restore(tmp_path / "ours", TREE), TREE)


@pytest.mark.long
@pytest.mark.whole
def test_force_over_the_other_format_touches_no_neighbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other checkpoints stay. After an error the old one is in its place."""
    tr.save(tmp_path / "a", {"w": np.zeros(2)})
    tr.save(tmp_path / "a.new", {"w": np.ones(2)}, format="orbax")
    with monkeypatch.context() as patch:
        move = filesystem.Filesystem.move

        def fail(store: Any, old: str, new: str, *, last: str) -> None:
            if ".new-" in old:
                raise OSError(28, "no space")
            move(store, old, new, last=last)

        patch.setattr(filesystem.Filesystem, "move", fail)
        with pytest.raises(OSError, match="no space"):
            ocp.PyTreeCheckpointer(write="orbax").save(tmp_path / "a", TREE, force=True)
    assert (tr.restore(tmp_path / "a")["w"] == 0).all() and (tr.restore(tmp_path / "a.new")["w"] == 1).all()
    ocp.PyTreeCheckpointer(write="orbax").save(tmp_path / "a", TREE, force=True)
    assert tr.open(tmp_path / "a").format == "orbax" and (tr.restore(tmp_path / "a.new")["w"] == 1).all()
