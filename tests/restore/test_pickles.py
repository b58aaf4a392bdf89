"""Tests of open checkpoints, and what else can be sent to other processes, as pickles and copies."""

import copy
import inspect
import multiprocessing
import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering import keep, rules, stores
from treering._processes import consistency
from treering.errors import NotFoundError, TreeringError, UnsupportedError
from treering.stores.memory import MemoryStore

TREE = {"layers": [{"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3)}, {"w": np.zeros((2, 3)), "b": np.ones(3)}]}


def _sum(handle: Any) -> Any:
    return float(np.asarray(handle).sum())


def _contents(ckpt: Any) -> dict[str, Any]:
    return {path: np.asarray(leaf).tolist() for path, leaf in ckpt.items()}


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """A process that shares nothing with this one, as workers of data loaders, Ray and Dask."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.long
def test_open_checkpoints_go_to_a_worker(tmp_path: pathlib.Path, worker: Any) -> None:
    """The worker sees the same part and the same view, of a run's step and of other formats too."""
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        ckpts.save(3, TREE, metrics={"loss": 1.0})
    ckpt = tr.open(tmp_path / "run")
    for handle in (ckpt["layers/0/w"], ckpt.at("layers").at("0")["w"], tr.open(tmp_path / "run", step=3)["layers/0/w"]):
        assert worker.apply(_sum, (handle,)) == 15.0
    changes = [rules.drop("*/b"), rules.unstack("*/*/w"), rules.cast("**", "float32"), rules.rename("^0", "first")]
    for view in (ckpt, ckpt.at("layers/1"), ckpt.select(["**/b", "*/0/*"]), ckpt.at("layers").apply(changes)):
        assert worker.apply(_contents, (view,)) == _contents(view) != {}
        again = pickle.loads(pickle.dumps(view))
        assert (again.step, again.metrics, again.path) == (3, {"loss": 1.0}, ckpt.path)
        assert not tr.diff(view, again) and not tr.diff(again.restore(), view.restore())
    for name in ("c.safetensors", "c.msgpack", "c.eqx"):
        tr.save(tmp_path / name, TREE)
        assert worker.apply(_contents, (tr.open(tmp_path / name),)) == _contents(tr.open(tmp_path / name))


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_a_replaced_checkpoint_is_not_the_pickled_one(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / name
    tr.save(path, TREE)
    sent = pickle.dumps([tr.open(path)["layers/0/w"], tr.open(path)])
    tr.save(path, {"layers": [{**TREE["layers"][0], "b": np.zeros(3)}, TREE["layers"][1]]}, overwrite=True)
    os.utime(path, (1, 1))
    with pytest.raises(NotFoundError, match=f"{name}: expected the checkpoint that was open .* found another one"):
        pickle.loads(sent)
    os.rename(path, tmp_path / "elsewhere")
    with pytest.raises(NotFoundError, match=f"{name}: expected the checkpoint that was open .* found nothing"):
        pickle.loads(sent)


def test_a_pickle_has_no_arrays_and_reading_it_opens_files_only(tmp_path: pathlib.Path) -> None:
    tr.save(tmp_path / "c", {"w": np.random.default_rng(0).random(10_000)})
    ckpt = tr.open(tmp_path / "c")
    sent = pickle.dumps([ckpt, ckpt["w"], ckpt["w"]])
    assert len(sent) < 1000
    first, one, other = pickle.loads(sent)
    assert one._reader is other._reader is first._source, "the checkpoint is opened once"
    assert copy.copy(ckpt) is ckpt is copy.deepcopy(ckpt) and copy.deepcopy({"a": ckpt["w"]})["a"][3] == ckpt["w"][3]


def test_what_only_this_process_can_open_says_so(tmp_path: pathlib.Path) -> None:
    obstore = pytest.importorskip("obstore.store")
    bucket = obstore.MemoryStore()
    tr.save(bucket, TREE)
    given = obstore.S3Store("bucket-of-a-pickle", region="x", access_key_id="secret", secret_access_key="secret")
    stores.absolute(given)
    assert "credentials do not go into a pickle" in stores.why_private("s3://bucket-of-a-pickle/run")
    assert not stores.why_private("s3://bucket-of-a-pickle-2/run") and not stores.why_private(str(tmp_path))
    with stores.using(MemoryStore(), "mine"):
        tr.save("mine://c", TREE)
        for ckpt in (tr.open("mine://c"), tr.open(bucket)):
            for handle in (ckpt, ckpt["layers/0/w"], ckpt.at("layers")):
                with pytest.raises(UnsupportedError, match=r"in the memory of this process; open it in the worker"):
                    pickle.dumps(handle)
                assert copy.deepcopy(handle) is handle
    with tr.Checkpointer(tmp_path / "run") as ckpts:
        pending = ckpts.save(1, TREE)
        for handle in (ckpts, pending):
            for send in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(UnsupportedError, match=r"/run.*cannot be copied or sent to another process; pass"):
                    send(handle)


def test_reports_rules_and_policies_can_be_pickled(tmp_path: pathlib.Path) -> None:
    report = tr.save(tmp_path / "c", TREE)
    policy = keep.last(2) | keep.best(1, "loss", "min") | keep.every(3) | keep.size(9) | keep.steps(4)
    for one in (report, tr.verify(tmp_path / "c"), tr.diff(tmp_path / "c", {"x": 1}), policy):
        assert pickle.loads(pickle.dumps(one)) == one
    made: list[rules.Rule] = [
        rules.rename("layers", "l"), rules.copy("layers", "m"), rules.drop("layers/1/b"), rules.cast("**/b", "float16"),
        rules.transpose("**/w", (1, 0)), rules.reshape("layers/0/w", (-1,)), rules.tile("**/b", 2), rules.take("**", 0),
        rules.pad("**/b", ((1, 0),)), rules.map("**", np.negative), rules.stack("layers/*/b"),
        rules.unstack("layers/*/*/w"), rules.split("(.*)/w", [r"\1/a", r"\1/b2"]),
        rules.concat(["layers/0/b", "layers/1/b"], "b"), rules.combine(["(.*)/b"], r"\1/c", np.square),
        rules.scale("(.*)/w", r"\1/b", "float32"), rules.wrap_key_data("**", optional=True),
        rules.dequantize("**", "float32", config={"bits": 4}), rules.pack("**/w"), rules.unpack("**/w", "uint4", 0),
        *(make({"peft_type": "LORA", "r": 2, "lora_alpha": 4}) for make in (rules.from_peft, rules.to_peft)),
    ]  # fmt: skip
    assert {type(one).__name__ for one in made} and len(made) == len(rules.__all__) + 1  # and `map`
    ckpt = tr.open(tmp_path / "c")
    for rule in made:
        (sent,) = pickle.loads(pickle.dumps([rule]))
        try:
            expected = _contents(ckpt.apply([rule]))
        except TreeringError as error:
            with pytest.raises(type(error)):
                ckpt.apply([sent])
        else:
            assert _contents(ckpt.apply([sent])) == expected
            assert _contents(pickle.loads(pickle.dumps(ckpt.apply([rule])))) == expected


def test_errors_survive_the_way_from_a_worker() -> None:
    def below(kind: type) -> Iterator[type]:
        yield kind
        for one in kind.__subclasses__():
            yield from below(one)

    kinds = [kind for kind in below(TreeringError) if kind is not consistency.CollectiveError]  # which is internal
    assert len(kinds) >= len(inspect.getmembers(tr.errors, inspect.isclass)) - 1
    for kind in kinds:
        error = kind("runs/a: expected a step, found nothing")
        error.add_note("in the worker")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error) and again.__notes__ == error.__notes__
    with pytest.raises(NotFoundError) as caught:
        tr.restore("/nowhere")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
