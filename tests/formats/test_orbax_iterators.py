"""The positions of data iterators in Orbax runs, as Grain's own handlers write them."""

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import grain
import grain.checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as ocp1

import treering as tr
from helpers import assert_same
from jobs import run_job
from treering._cli.main import main as command
from treering.errors import CorruptError, MismatchError, UnsupportedError

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::pytest.PytestWarning"),
]

STATE = {"w": np.arange(3.0), "step": np.array(2)}
DRAWN = 3


def dataset() -> Any:
    return iter(grain.MapDataset.range(1000).shuffle(seed=1).batch(4).to_iter_dataset())


def loader() -> Any:
    sampler = grain.samplers.IndexSampler(1000, shuffle=True, seed=3, shard_options=grain.sharding.NoSharding())
    return iter(grain.DataLoader(data_source=range(1000), sampler=sampler, worker_count=0))


def elastic() -> Any:
    return iter(grain.experimental.ElasticIterator(grain.MapDataset.range(1000), 8, grain.sharding.NoSharding()))


def packed() -> Any:
    """An iterator whose state has tuples, as a state in memory; and no document is left over after three sequences."""
    documents = grain.MapDataset.range(1000).map(lambda n: {"tokens": np.full((4, 1, 3, 2)[n % 4], n)})
    return iter(grain.experimental.ConcatThenSplitIterDataset(documents.to_iter_dataset(), length_struct={"tokens": 5}))


class Counter:
    """An iterator whose state is bytes, which may or may not be JSON."""

    def __init__(self, text: str):
        self.n, self.text = 0, text

    def __next__(self) -> int:
        self.n += 1
        return self.n

    def get_state(self) -> bytes:
        return self.text.format(self.n).encode()

    def set_state(self, state: bytes) -> None:
        before, after = self.text.split("{}")
        self.n = int(state.decode().removeprefix(before).removesuffix(after))


KINDS = {
    "dataset": dataset,
    "loader": loader,
    "elastic": elastic,
    "packed": packed,
    "text": lambda: Counter("position {}"),
    "number": lambda: Counter("{}"),
}


def drawn(make: Any) -> Any:
    data = make()
    for _ in range(DRAWN):
        next(data)
    return data


def save(path: Path, data: Any, name: str = "data", state: str = "state", step: int = 2) -> Path:
    """Saves a run with a train state and an iterator."""
    items = {
        state: ocp.args.StandardSave(jax.tree.map(jnp.asarray, STATE)),
        name: grain.checkpoint.CheckpointSave(data),
    }
    with ocp.CheckpointManager(path) as run:
        run.save(step, args=ocp.args.Composite(**items))
    return path


def followed(data: Any) -> list[Any]:
    return list(itertools.islice(data, 5)) if hasattr(data, "__iter__") else [next(data) for _ in range(5)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and one.name == "treering"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_goes_on_where_orbax_saved_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    data = drawn(KINDS[kind])
    save(tmp_path / "run", data)
    expected = followed(data)
    tr.convert(tmp_path / "run", tmp_path / "native")
    for path in (tmp_path / "run", tmp_path / "run" / "2", tmp_path / "native"):
        new = KINDS[kind]()
        tree = tr.restore(path, like={"state": STATE, "data": new})
        assert tree["data"] is new and np.array_equal(tree["state"]["w"], STATE["w"])
        assert_same(followed(new), expected)
        assert tr.verify(path).ok
    assert not tr.diff(tmp_path / "run", tmp_path / "native") and not warnings(caplog)
    with tr.Checkpointer(tmp_path / "run") as ckpts:  # the run continues
        tree, step = ckpts.restore_or_init(lambda: {"state": STATE, "data": KINDS[kind]()})
        assert step == 2
        assert_same(followed(tree["data"]), expected)
        ckpts.save(3, tree)
    assert tr.steps(tmp_path / "run") == [2, 3]


@pytest.mark.long
def test_maxtext(tmp_path: Path) -> None:
    """MaxText's items are `items` and `iter`; a template may contain only one of them."""
    data = drawn(dataset)
    save(tmp_path / "run", data, name="iter", state="items")
    expected = followed(data)
    ckpt = tr.open(tmp_path / "run")
    assert list(ckpt) == ["items/step", "items/w", "iter"]
    assert ckpt["iter"] == tr.restore(tmp_path / "run")["iter"] == [{"next_index": DRAWN}]
    assert "iter        iterator [{'next_index': 3}]" in str(ckpt)
    for like in ({"items": STATE, "iter": dataset()}, {"items": ..., "iter": dataset()}):
        assert_same(followed(tr.restore(tmp_path / "run", like=like)["iter"]), expected)
    assert_same(followed(tr.restore(tmp_path / "run", like=dataset(), at="iter")), expected)
    with pytest.raises(UnsupportedError, match=r"iter: only the native format holds the state of data iterators"):
        tr.convert(tmp_path / "run", tmp_path / "other", format="safetensors")
    save(tmp_path / "run", data, name="iter", state="items", step=4)
    shutil.copytree(tmp_path / "run" / "4" / "iter", tmp_path / "run" / "4" / "more" / "iter")  # an item within an item
    assert tr.open(tmp_path / "run", step=4)["more/iter"] == [{"next_index": DRAWN + 5}]


@pytest.mark.long
def test_iterators_by_themselves_and_of_version_1(tmp_path: Path) -> None:
    data = drawn(dataset)
    ocp.Checkpointer(grain.checkpoint.CheckpointHandler()).save(tmp_path / "alone", data)
    with ocp.CheckpointManager(tmp_path / "only") as run:
        run.save(2, args=grain.checkpoint.CheckpointSave(data))
    ocp1.save_checkpointables(tmp_path / "v1", {"state": STATE, "data": data})
    expected = followed(data)
    for name in ("alone", "only"):
        assert tr.restore(tmp_path / name) == [{"next_index": DRAWN}]
        assert_same(followed(tr.restore(tmp_path / name, like=dataset())), expected)
    assert_same(followed(tr.restore(tmp_path / "only", like={"default": dataset()})["default"]), expected)
    found = tr.restore(tmp_path / "v1", like={"state": STATE, "data": dataset()})
    assert_same(followed(found["data"]), expected)
    (tmp_path / "alone" / "process_0-of-1.json").rename(tmp_path / "moved")
    with pytest.raises(CorruptError, match="alone: expected the states of an iterator, found nothing"):
        tr.open(tmp_path / "alone")
    (tmp_path / "moved").rename(tmp_path / "alone" / "process_0-of-1.json")
    tr.save(tmp_path / "alone", STATE, format="orbax", overwrite=True)
    assert not (tmp_path / "alone" / "process_0-of-1.json").exists()


@pytest.mark.parametrize("ending", ["pkl", "bin", "txt", ""])
def test_states_in_other_files(tmp_path: Path, ending: str) -> None:
    class Pickled(Counter):
        def get_state(self) -> bytes:
            return b"\x80\x04" + super().get_state()

        def set_state(self, state: bytes) -> None:
            super().set_state(state.removeprefix(b"\x80\x04"))

    save(tmp_path / "run", drawn(dataset))
    file = tmp_path / "run" / "2" / "data" / "process_0-of-1.json"
    file.unlink()
    data = drawn(lambda: Pickled("{}"))
    file.with_suffix(f".{ending}" if ending else "").write_bytes(data.get_state())
    new = Pickled("{}")
    tr.restore(tmp_path / "run", like={"state": STATE, "data": new})
    assert new.n == data.n and tr.open(tmp_path / "run")["data"] == [data.get_state()]
    with pytest.raises(MismatchError, match=r"data: this .*Iterator does not accept the saved state"):
        tr.restore(tmp_path / "run", like={"state": STATE, "data": dataset()})


def of_two(path: Path, *, make: Any = dataset) -> Path:
    """Saves a run of two processes, each with its own state; elastic iterators have the same state in both."""
    save(path, drawn(make))
    folder = path / "2" / "data"
    for index in range(2):
        state = json.loads((folder / "process_0-of-1.json").read_text())
        state = state if make is elastic else {"next_index": 10 + index}
        (folder / f"process_{index}-of-2.json").write_text(json.dumps(state))
    (folder / "process_0-of-1.json").unlink()
    return path


@pytest.mark.long
def test_another_number_of_processes(tmp_path: Path) -> None:
    run = of_two(tmp_path / "run")
    new = dataset()
    with pytest.raises(MismatchError, match=r"data: expected the states of 1 iterators, .* found those of 2;") as error:
        tr.restore(run, like={"state": STATE, "data": new})
    assert_not_proposed(str(error.value))
    assert_same(followed(new), followed(dataset()))
    assert tr.open(run)["data"] == [{"next_index": 10}, {"next_index": 11}]
    new.set_state(tr.open(run)["data"][1])
    save(tmp_path / "same", drawn(elastic))
    expected = followed(drawn(elastic))
    found = tr.restore(of_two(tmp_path / "elastic", make=elastic), like={"state": STATE, "data": elastic()})
    assert_same(followed(found["data"]), expected)


@pytest.mark.slow
def test_each_process_takes_its_own(tmp_path: Path) -> None:
    """Grain writes and reads states by the index of JAX's processes."""
    first, second = run_job(tmp_path, "orbax_iterators.each_process_takes_its_own", processes=2)
    assert first.report != second.report
    assert tr.open(tmp_path / "run")["data"] == [{"next_index": 3}, {"next_index": 5}]


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, r"data: expected the states of an iterator, process_0-of-1\.json and so on, found nothing"),
        ({"process_0-of-2.json": b"{}"}, r"data: expected the states of 2 processes, found those of 0"),
        (
            {"process_0-of-1.json": b"{}", "process_0-of-2.json": b"{}", "process_1-of-2.json": b"{}"},
            r"data: expected the files of one job, found those of jobs with 1, 2 processes",
        ),
        (
            {"process_0-of-1.json": b"{}", "process_0-of-1.txt": b"{}"},
            r"data: expected one state for each process, found two for process 0",
        ),
        ({"process_0-of-1.json": b""}, r"process_0-of-1\.json: expected the state of an iterator, found an empty file"),
        (
            {"process_0-of-1.json": b"\0" * 40},
            r"process_0-of-1\.json: expected the state of an iterator, found only 0s",
        ),
        ({"process_0-of-1.json": b'{"next_ind'}, r"process_0-of-1\.json: expected JSON"),
        ({"process_3-of-2.json": b"{}"}, r"data: expected the states of 2 processes, found those of 3"),
        (
            {"process_0-of-999999999.json": b"{}"},
            r"data: expected the states of 999999999 processes, found those of 0;",
        ),
        ({"process_0-of-0.json": b"{}"}, r"data: expected the states of 0 processes, found those of 0"),
    ],
)
def test_damaged_states(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    """A damaged state is an error, and everything else can still be read."""
    run = save(tmp_path / "run", drawn(dataset))
    folder = run / "2" / "data"
    (folder / "process_0-of-1.json").unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for like in (None, {"state": STATE, "data": dataset()}, {"state": STATE}):
        with pytest.raises(CorruptError, match=problem):
            tr.restore(run / "2", like=like)
    assert not tr.verify(run / "2").ok
    assert_same(tr.restore(run / "2", like=STATE, at="state"), STATE)
    assert tr.restore(run / "2", like={"state": STATE, "data": ...})["data"] is ...


# What Treering writes


def by_grain(path: Path, make: Any) -> Any:
    """Returns an iterator that Grain's own handler has restored from an item."""
    new = make()
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        reader.restore(path, ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(new)))
    return new


@pytest.mark.parametrize("kind", ["dataset", "loader", "elastic"])
def test_grain_continues_from_an_item_that_treering_wrote(tmp_path: Path, kind: str) -> None:
    """The item comes from a live tree, from a native checkpoint, and from an item of Orbax."""
    make = KINDS[kind]
    data = drawn(make)
    tree = {"data": data, "state": STATE}
    tr.save(tmp_path / "live", tree, format="orbax", composite=True)
    tr.save(tmp_path / "native", tree)
    expected = followed(data)
    tr.convert(tmp_path / "native", tmp_path / "from-native", format="orbax", composite=True)
    assert (
        command(["convert", "--format", "orbax", "--composite", f"{tmp_path / 'live'}", f"{tmp_path / 'again'}"]) == 0
    )
    for name in ("live", "from-native", "again"):
        assert_same(followed(by_grain(tmp_path / name, make)), expected)
        assert_same(followed(tr.restore(tmp_path / name, like={"data": make(), "state": ...})["data"]), expected)
        assert tr.verify(tmp_path / name).ok and not tr.diff(tmp_path / name / "state", STATE)
    listed = json.loads((tmp_path / "again" / "_CHECKPOINT_METADATA").read_text())["item_handlers"]
    assert listed["data"] == grain.checkpoint.CheckpointHandler.typestr()
    tr.save(tmp_path / "live", {"state": STATE}, format="orbax", composite=True, overwrite=True)
    assert not (tmp_path / "live" / "data").exists()  # A save owns the files that it wrote.


def test_the_states_of_several_processes_are_converted(tmp_path: Path) -> None:
    run = of_two(tmp_path / "run")
    tr.convert(run, tmp_path / "native")
    for source, name in ((run, "a"), (tmp_path / "native", "b")):
        tr.convert(source, tmp_path / name, format="orbax", composite=True)
        for index in range(2):
            file = Path("data", f"process_{index}-of-2.json")
            assert (tmp_path / name / file).read_text() == json.dumps({"next_index": 10 + index}, indent=4)
        assert tr.open(tmp_path / name)["data"] == tr.open(run)["data"]


class Stateful:
    """An iterator of no library that Orbax knows."""

    def __init__(self, state: Any = 1) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_iterators_that_orbax_cannot_hold(tmp_path: Path) -> None:
    """Each is named with the reason, and nothing is written."""
    of_grain = type("Own", (Stateful,), {"__module__": "grain.own"})
    options = {"format": "orbax", "composite": True}
    for tree, says in (
        (
            {"data": Stateful(), "s": STATE},
            r"  data: the state of a .*Stateful; Orbax holds those of Grain's iterators alone",
        ),
        ({"data": of_grain([1j]), "s": STATE}, r"  data: a state that Grain cannot write as JSON \(.*complex"),
        (
            {"loop": {"data": dataset(), **STATE}},
            r"  loop/data: the state of an iterator, which Orbax holds as an item of",
        ),
        ({"metrics": dataset(), "s": STATE}, r"  metrics: Orbax uses this name itself"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            tr.save(tmp_path / "c", tree, **options)
    with pytest.raises(UnsupportedError, match=r"data: .*use composite=True"):
        tr.save(tmp_path / "c", {"data": dataset(), "s": STATE}, format="orbax")
    assert not list(tmp_path.iterdir())
    tr.save(tmp_path / "n", {"loop": {"data": drawn(dataset)}, "s": STATE})
    for arguments in (["--composite"], []):
        assert command(["convert", "--dry-run", "--format", "orbax", *arguments, f"{tmp_path / 'n'}", "x"]) == 3
    tr.convert(tmp_path / "n", tmp_path / "c", rules=[tr.rules.rename("loop/data", "data")], **options)
    assert tr.open(tmp_path / "c")["data"] == [{"next_index": DRAWN}]


@pytest.mark.slow
def test_processes_write_their_states_as_grain_does(tmp_path: Path) -> None:
    for result in run_job(tmp_path, "orbax_iterators.processes_write_their_states_as_grain_does", processes=2):
        assert result.report[0] == "UnsupportedError" and "x: the states of an iterator in several" in result.report[1]
    assert tr.open(tmp_path / "c")["data"] == [{"next_index": 3}, {"next_index": 5}]
    assert tr.open(tmp_path / "c")["shared"] == [{"global_next_index": 8}]
    assert not (tmp_path / "d").exists()


# What errors propose


def assert_not_proposed(text: str) -> None:
    """Fails if an error proposes to start over although the checkpoint has a position."""
    for way in ("'ignore'", "'template'", "drop(", "anew", "=['data", "=['iter", "=['more", "**"):
        assert way not in text, text


TREE = {"a": np.ones(2), "b": np.ones(3), "c": np.ones(4)}


def save_tree(path: Path, name: str = "data") -> Path:
    items = {"state": ocp.args.StandardSave(TREE), name: grain.checkpoint.CheckpointSave(drawn(dataset))}
    with ocp.CheckpointManager(path) as run:
        run.save(2, args=ocp.args.Composite(**items))
    return path


@pytest.mark.long
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    ("like", "at", "said"),
    [
        ({"state": TREE}, "", r"data: expected nothing, found iterator; put the iterator in this place"),
        ({}, "", r"data: expected nothing, found iterator; put the iterator in this place"),
        ({"state": TREE, "iter": dataset}, "", r"iter: expected \w+, found nothing.*; the checkpoint has .* at 'data'"),
        ({**TREE, "iter": dataset}, "state", r"iter: expected \w+, found nothing.*; the checkpoint has .* at 'data'"),
        (
            {"more": {"b": dataset, "a": dataset}},
            "",
            r"more/b: .*found nothing.*; the checkpoint has .* at 'data': put",
        ),
        ({"state": ..., "data": ..., "iter": dataset}, "", r"iter: .*; the checkpoint has .* at 'data'"),
        (TREE, "", r"likely: the checkpoint has one level more: at='state'; .* outside of that, at 'data': restore it"),
    ],
)
def test_no_suggestion_loses_a_position(tmp_path: Path, native: bool, like: Any, at: str, said: str) -> None:
    run = save_tree(tmp_path / "run")
    if native:
        tr.convert(run, tmp_path / "native")
    like = jax.tree.map(lambda leaf: leaf() if callable(leaf) else leaf, like)
    with pytest.raises(MismatchError, match=said) as error:
        tr.restore(tmp_path / "native" if native else run, like=like, at=at)
    assert_not_proposed(str(error.value))


@pytest.mark.long
def test_the_rule_that_an_error_names_takes_the_position(tmp_path: Path) -> None:
    run, like = save_tree(tmp_path / "run"), {"state": TREE, "iter": dataset()}
    with pytest.raises(MismatchError) as error:
        tr.restore(run, like=like)
    assert "rules=[tr.rules.rename('^data$', 'iter')]" in str(error.value)
    found = tr.restore(run, like=like, rules=[tr.rules.rename("^data$", "iter")])
    assert_same(followed(found["iter"]), followed(drawn(dataset)))


@pytest.mark.long
def test_a_position_that_is_not_there(tmp_path: Path) -> None:
    """The error names the only way to continue, and what it means."""
    with ocp.CheckpointManager(tmp_path) as run:
        run.save(2, args=ocp.args.Composite(state=ocp.args.StandardSave(TREE)))
    own = dataset()
    with pytest.raises(MismatchError, match=r"missing=\['data'\] keeps the template's, and then the data starts over"):
        tr.restore(tmp_path, like={"state": TREE, "data": own})
    assert tr.restore(tmp_path, like={"state": TREE, "data": own}, missing=["data"])["data"] is own


@pytest.mark.long
def test_a_state_that_was_saved_as_json(tmp_path: Path) -> None:
    data = drawn(dataset)
    items = {"state": ocp.args.StandardSave(TREE), "data": ocp.args.JsonSave(data.get_state())}
    with ocp.CheckpointManager(tmp_path) as run:
        run.save(2, args=ocp.args.Composite(**items))
    with pytest.raises(
        MismatchError, match=r"data: .*the checkpoint has 1 leaf below it.*set_state.*at='data'"
    ) as error:
        tr.restore(tmp_path, like={"state": TREE, "data": dataset()})
    assert_not_proposed(str(error.value))


@pytest.mark.long
def test_positions_that_cannot_be_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Treering names positions of TensorFlow's iterators, which Kauldron and T5X store as items."""
    run = save(tmp_path / "run", drawn(dataset))
    folder = run / "2" / "data"
    (folder / "process_0-of-1.json").unlink()
    real = Path(__file__).parents[1] / "real" / "t5x" / "within" / "checkpoint_3"
    for file in real.glob("train_ds*"):
        shutil.copy(file, folder)
    about = json.loads((run / "2" / "_CHECKPOINT_METADATA").read_text())
    about["item_handlers"]["data"] = "t5x.checkpoints.DatasetCheckpointHandler"
    (run / "2" / "_CHECKPOINT_METADATA").write_text(json.dumps(about))
    assert_same(tr.restore(run, like={"state": STATE})["state"], STATE)
    (said,) = warnings(caplog)
    assert "left out" in said and "data (the position of an iterator of TensorFlow: train_ds-000-of-001" in said
    with pytest.raises(MismatchError, match=r"found nothing; .*data \(the position of an iterator of TensorF") as error:
        tr.restore(run, like={"state": STATE, "data": dataset()})
    assert_not_proposed(str(error.value))
    assert "put `...` in its place" in str(error.value)
    assert tr.restore(run, like={"state": STATE, "data": ...})["data"] is ...
