"""Damaged Orbax checkpoints: Treering names the missing part, reads the rest, and leaves out nothing silently."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint.experimental import v1 as ocp1

import treering as tr
from helpers import assert_same
from treering import rules
from treering.errors import CorruptError, MismatchError, NotFoundError

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::pytest.PytestWarning"),
]

TREE = {"w": np.arange(6.0).reshape(2, 3), "b": {"c": np.ones(2, np.float32)}}
OPT = {"m": np.full(3, 7.0)}
CONFIG = {"rate": 0.5}
ALL_ITEMS = {"config": CONFIG, "opt": OPT, "params": TREE}


def save_run(path: Path, *steps: int) -> Path:
    # With this option, Orbax stores metrics as an item
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(path, options=options, item_names=("params", "opt", "config")) as run:
        for step in steps:
            items = {name: ocp.args.StandardSave(tree) for name, tree in (("params", TREE), ("opt", OPT))}
            run.save(step, args=ocp.args.Composite(**items, config=ocp.args.JsonSave(CONFIG)), metrics={"loss": 1.0})
        run.wait_until_finished()
    return path


def save_tree(path: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(params=["params", "params/_METADATA", "config", "config/metadata"])
def gone(request: pytest.FixtureRequest) -> str:
    """Names the part that a test removes from a step: an item's folder, or the file that describes the item."""
    return request.param


@pytest.mark.long
def test_an_item_is_gone(tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture) -> None:
    step = save_run(tmp_path / "run", 1) / "1"
    remove(step / gone)
    item = gone.split("/")[0]
    for attempt in (
        lambda: tr.restore(step),
        lambda: tr.restore(step, ALL_ITEMS),
        lambda: tr.restore(step, ALL_ITEMS, missing="template"),
        lambda: tr.restore(step, at=item),
        lambda: tr.open(step).select(f"{item}/*").restore(),
        lambda: tr.restore(tmp_path / "run"),
        lambda: tr.open(tmp_path / "run"),
        lambda: tr.open(step).abstract(),
        lambda: tr.convert(step, tmp_path / "copy"),
        lambda: tr.convert(step, tmp_path / "copy.safetensors"),
        lambda: tr.diff(step, step),
    ):
        with pytest.raises(CorruptError, match=item):
            attempt()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    report = tr.verify(step)
    assert not report.ok and all(item in problem.what and problem.leaves for problem in report.problems)
    assert "lost" in repr(tr.open(step))
    rest = {name: value for name, value in ALL_ITEMS.items() if name != item}
    assert_same(tr.restore(step, rest, extra=[item, f"{item}/**"]), rest)
    assert_same(tr.restore(step, {**rest, item: ...}), {**rest, item: ...})
    for name, value in rest.items():
        assert_same(tr.restore(step, at=name), value)
    with pytest.raises(CorruptError, match=item):  # by default, Treering leaves out no part of a checkpoint
        tr.restore(step, rest)
    with pytest.raises(MismatchError, match="opt/m"):
        tr.restore(step, {}, extra=[item, f"{item}/**"])


@pytest.fixture
def headless(tmp_path: Path) -> Path:
    """Makes a checkpoint without the folder of the item `params`, so that the names of its leaves are unknown."""
    params, opt = {"dense": {"kernel": np.ones(2)}}, {"mu": {"kernel": np.full(2, 3.0)}, "n": [np.zeros(1)]}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = {name: ocp.args.StandardSave(tree) for name, tree in (("params", params), ("opt", opt))}
        checkpointer.save(tmp_path / "c", args=ocp.args.Composite(**items))
    shutil.rmtree(tmp_path / "c" / "params")
    return tmp_path / "c"


@pytest.mark.parametrize(
    "globs",
    [
        "**/kernel",
        "*/dense/kernel",
        "p*/**",
        "params/dense/kernel",
        "params/*/kernel",
        "params",
        "**",
        ["params/*/kernel", "opt/**"],
    ],
)
def test_a_selection_that_a_lost_tree_may_belong_to(headless: Path, globs: str | list[str]) -> None:
    selected = tr.open(headless).select(globs)
    for attempt in (
        selected.restore,
        selected.abstract,
        lambda: tr.save(headless.parent / "out", selected),
        lambda: tr.save(headless.parent / "out", {"a": selected}),
        lambda: tr.diff(selected, selected),
    ):
        with pytest.raises(CorruptError, match="the item 'params'"):
            attempt()
    assert not (headless.parent / "out").exists()


@pytest.mark.parametrize("globs", ["opt/**", "opt/*/kernel", ["o*/**/kernel"], "?pt/mu/*"])
def test_a_selection_that_a_lost_tree_cannot_belong_to(headless: Path, globs: str | list[str]) -> None:
    selected = tr.open(headless).select(globs)
    assert "opt/mu/kernel" in list(selected) and selected.restore()["opt"]["mu"]["kernel"].tolist() == [3, 3]


def test_a_leaf_of_a_lost_tree(headless: Path) -> None:
    opened = tr.open(headless)
    for attempt in (
        lambda: opened["params/dense/kernel"],
        lambda: opened.get("params/x"),
        lambda: "params/dense/kernel" in opened,
        lambda: opened.at("params/dense"),
    ):
        with pytest.raises(CorruptError, match="the item 'params'"):
            attempt()
    with pytest.raises(KeyError):
        opened["paramsx"]
    like = {"opt": tr.restore(headless, at="opt")}
    for extra in (["*"], ["params/*"], ["**/params"], ["params/dense/**"], ["**/kernel"]):
        with pytest.raises(CorruptError, match="the item 'params'"):
            tr.restore(headless, like, extra=extra)
    for extra in ("ignore", ["**"], ["params"], ["params/**"], ["p*/**"]):
        assert_same(tr.restore(headless, like, extra=extra), like)
    with pytest.raises(CorruptError, match="the item 'params'"):
        tr.restore(headless, {**like, "params": {"x": np.ones(1)}}, missing="template", extra="ignore")


@pytest.mark.parametrize(
    "rule",
    [
        rules.drop("*"),
        rules.drop("**/kernel"),
        rules.drop("params/dense/**"),
        rules.cast("params/*/kernel", "float16"),
        rules.cast("**/kernel", "float16"),
        rules.map("params/dense/*", np.negative),
        rules.transpose("**/kernel", (0,)),
        rules.copy("params/dense", "dense"),
        rules.rename("^params/", "model/"),
        rules.rename("kernel", "weight"),
        rules.stack("*/n/*", optional=True),
        rules.stack("params/*/kernel"),
        rules.unstack("params/*/kernel"),
        rules.split("params/(.*)", ["a", "b"]),
        rules.concat(["opt/mu/kernel", "params/dense/kernel"], "x"),
        rules.combine(["opt/mu/kernel", "params/dense/kernel"], "x", np.add),
        rules.scale("params/(.*)", r"opt/\1", "float32"),
    ],
)
def test_a_rule_for_leaves_of_a_lost_tree(headless: Path, rule: rules.Rule) -> None:
    with pytest.raises(CorruptError, match="the item 'params'"):
        tr.open(headless).apply([rule]).restore()
    with pytest.raises(CorruptError, match="the item 'params'"):
        tr.save(headless.parent / "out", tr.open(headless), rules=[rule])
    assert not (headless.parent / "out").exists()


@pytest.mark.parametrize("glob", ["params/**", "params", "p*/**"])
def test_a_lost_tree_that_is_dropped(headless: Path, glob: str) -> None:
    rest = tr.restore(headless, at="opt")
    both = [rules.drop(glob), rules.rename("^opt/", "state/")]
    assert_same(tr.open(headless).apply(both).restore(), {"state": rest})
    like = {"opt": rest}
    assert "opt/n" in tr.open(headless).apply([rules.stack("opt/n/*"), rules.cast("opt/**", "float32")])
    kept = [
        rules.cast("params/**", "float16"),
        rules.copy("params/dense", "d"),
    ]  # these stay lost under their new names
    assert list(tr.open(headless).apply(kept)) == ["opt/mu/kernel", "opt/n/0", "params", "d"]
    assert_same(tr.restore(headless, like, rules=kept, extra=["params/**", "d/**"]), like)
    with pytest.raises(CorruptError, match="the item 'params'"):
        tr.restore(headless, like, rules=kept, extra=["params/**"])


def test_a_lost_leaf_is_no_tree(tmp_path: Path) -> None:
    path = save_tree(
        tmp_path / "c", {"layers": {str(n): {"w": np.full(2, 1.0 + n)} for n in range(3)}}, use_ocdbt=False
    )
    shutil.rmtree(path / "layers.1.w")
    assert list(tr.open(path).select(["layers/*/b", "layers/*/w/**", "**/0/w"])) == [
        "layers/0/w",
        "layers/1/w",
        "layers/2/w",
    ]
    for find in (tr.open(path).select, tr.open(path).at):
        for what in ("**/w/*", "layers/1/w/x"):
            with pytest.raises(NotFoundError):
                find(what)
    for rule in (rules.stack("layers/*/**"), rules.stack("layers/*/w"), rules.unstack("layers/1/*/w")):
        with pytest.raises(CorruptError, match=r"layers\.1\.w/\.zarray"):
            tr.restore(path, rules=[rule])
    renamed = tr.open(path).apply([rules.rename("layers/", "l")])
    assert list(renamed) == ["l0/w", "l1/w", "l2/w"]
    with pytest.raises(CorruptError, match=r"layers\.1\.w/\.zarray"):
        renamed.restore()


KEYS = {
    "k": jax.random.key(1),
    "many": jax.random.split(jax.random.key(2, impl="rbg"), 3),
    "u": jnp.arange(2, dtype="uint32"),
    "n": np.arange(2, dtype=np.uint32),
    "count": jnp.uint32(3),
    "w": jnp.ones(2),
}


@pytest.mark.parametrize("by", ["treering", "orbax", "version 1", "files", "zarr3"])
@pytest.mark.parametrize("gone", ["array_metadatas", "array_metadatas/process_0"])
def test_what_tells_keys_from_numbers_is_gone(tmp_path: Path, by: str, gone: str) -> None:
    """Without `array_metadatas`, arrays that may be PRNG keys are lost; Treering does not guess."""
    path = folder = tmp_path / "c"
    if by == "treering":
        tr.save(path, KEYS, format="orbax")
    elif by == "version 1":
        ocp1.save(path, KEYS)
        folder = next(file.parent for file in path.rglob("array_metadatas"))
    else:
        save_tree(path, KEYS, use_ocdbt=by != "files", use_zarr3=by == "zarr3")
    assert_same(tr.restore(path, KEYS), KEYS)
    remove(folder / gone)
    assert sorted(name for problem in tr.verify(path).problems for name in problem.leaves) == ["k", "many", "u"]
    for attempt in (
        lambda: tr.restore(path),
        lambda: tr.restore(path, KEYS),
        lambda: tr.open(path)["k"],
        lambda: tr.convert(path, tmp_path / "copy"),
    ):
        with pytest.raises(CorruptError, match="array_metadatas: expected a record whether 'k' is a PRNG key"):
            attempt()
    rest = {name: KEYS[name] for name in ("n", "count", "w")}
    assert_same(tr.restore(path, rest, extra=["k", "many", "u"]), rest)


def test_uint32_arrays_of_old_orbax_are_numbers(tmp_path: Path) -> None:
    """Old releases have no `array_metadatas`; their uint32 arrays are plain numbers."""
    path = save_tree(tmp_path / "c", {"u": KEYS["u"]})
    about = json.loads((path / "_METADATA").read_text())
    for leaf in about["tree_metadata"].values():
        del leaf["value_metadata"]["write_shape"]
    (path / "_METADATA").write_text(json.dumps(about))
    remove(path / "array_metadatas")
    assert_same(tr.restore(path), {"u": np.arange(2, dtype=np.uint32)})


def test_keys_where_two_lists_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tree(tmp_path / "c", KEYS)
    for name in ("_METADATA", "array_metadatas"):
        remove(path / name)
    tr.open(path).select("k").restore()
    assert "PRNG keys are plain without array_metadatas" in caplog.text


@pytest.mark.parametrize("text", [None, "{}", '{"typed": null}', '{"typed": 1}'])
def test_whether_an_item_is_a_key_is_gone(tmp_path: Path, text: str | None) -> None:
    """An item of Orbax's key handler is lost without the record whether the key is typed."""
    with ocp.CheckpointManager(tmp_path) as run:
        args = ocp.args.Composite(key=ocp.args.JaxRandomKeySave(jax.random.key(3)), opt=ocp.args.StandardSave(OPT))
        run.save(0, args=args)
    about = tmp_path / "0" / "key" / "jax_random_key_metadata"
    remove(about) if text is None else (about / "metadata").write_text(text)
    with pytest.raises(CorruptError, match=r"key.*expected true or false"):
        tr.restore(tmp_path / "0")
    assert_same(tr.restore(tmp_path / "0", {"opt": OPT}, extra=["key"]), {"opt": OPT})


def test_the_array_of_a_key_is_gone(tmp_path: Path) -> None:
    handler = ocp.JaxRandomKeyCheckpointHandler()
    with ocp.CheckpointManager(tmp_path, item_names=("key", "opt"), item_handlers={"key": handler}) as run:
        args = ocp.args.Composite(key=ocp.args.JaxRandomKeySave(jax.random.key(3)), opt=ocp.args.StandardSave(OPT))
        run.save(0, args=args)
    item = tmp_path / "0" / "key" / "jax_random_key"
    remove(item / "array_metadatas")
    assert list(tr.open(tmp_path / "0")) == ["key", "opt/m"]
    like = {"key": jax.random.key(0), "opt": OPT}
    with pytest.raises(CorruptError, match="PRNG key"):
        tr.restore(tmp_path / "0", like, missing="template", extra="ignore")
    remove(item / "_METADATA")
    with pytest.raises(CorruptError, match="_METADATA"):
        tr.restore(tmp_path / "0", like, missing="template", extra="ignore")


@pytest.mark.long
def test_an_earlier_step_is_taken(tmp_path: Path, gone: str, caplog: pytest.LogCaptureFixture) -> None:
    save_run(tmp_path / "run", 1, 2)
    remove(tmp_path / "run" / "2" / gone)
    assert_same(tr.restore(tmp_path / "run"), ALL_ITEMS)
    assert "step 2 is damaged" in caplog.text and gone.split("/")[0] in caplog.text
    assert tr.open(tmp_path / "run").step == 1 and tr.open(tmp_path / "run", step=2).step == 2
    with tr.Checkpointer(tmp_path / "run") as run:
        assert_same(run.restore_or_init(lambda: ALL_ITEMS), (ALL_ITEMS, 1))
    tr.convert(tmp_path / "run", tmp_path / "copy")
    assert tr.open(tmp_path / "copy").step == 1
    assert_same(tr.restore(tmp_path / "run", at="opt"), OPT)


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_template_stands_in_for_the_list_of_leaves(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    tree = {**TREE, "l": [jnp.ones(2), {"x": np.zeros(1)}], "n": 3, "k": jax.random.key(1), "t": "text", "f": 1.5}
    path = save_tree(tmp_path / "ckpt", tree, use_ocdbt=ocdbt, use_zarr3=zarr3)
    (path / "_METADATA").unlink()
    with pytest.raises(CorruptError, match="_METADATA: expected the list of the tree's leaves"):
        tr.restore(path)
    with pytest.raises(CorruptError, match="_METADATA"):
        tr.restore(path, tree)
    assert [problem.leaves for problem in tr.verify(path).problems] == [("_METADATA",)]
    assert_same(tr.restore(path, tree, extra=["_METADATA"]), tree)
    assert_same(tr.restore(path, {"l": tree["l"]}, extra="ignore"), {"l": tree["l"]})
    with pytest.raises(MismatchError, match="l/2"):
        tr.restore(path, {**tree, "l": [*tree["l"], 1]}, extra="ignore")
    (path / "_CHECKPOINT_METADATA").unlink()
    (path / "commit_success.txt").unlink()
    if ocdbt:  # a database leaves `array_metadatas` next to it
        with pytest.raises(CorruptError, match="_METADATA"):
            tr.restore(path)


@pytest.mark.long
def test_every_array_that_is_gone_is_named(tmp_path: Path) -> None:
    tree = {f"a{n}": np.full(4, n + 1.0) for n in range(122)} | {"n": 5, "s": 6}
    for zarr3, about in ((False, ".zarray"), (True, "zarr.json")):
        path = save_tree(tmp_path / about, tree, use_ocdbt=False, use_zarr3=zarr3)
        for name in [*tree][2:]:
            (path / name / about).unlink()
        names = sorted([*tree][2:])
        assert sorted(problem.leaves[0] for problem in tr.verify(path).problems) == names
        assert all(f"{p.leaves[0]}/{about}" in p.what for p in tr.verify(path).problems)
        with pytest.raises(CorruptError, match="and 117 more"):
            tr.restore(path)
        assert_same(tr.restore(path, at="a1"), tree["a1"])


@pytest.mark.long
def test_every_chunk_that_is_gone_is_named(tmp_path: Path) -> None:
    array = np.arange(123 * 4.0).reshape(123, 4) + 1
    for name, ocdbt in (("files", False), ("database", True)):
        args = ocp.SaveArgs(chunk_byte_size=32)  # bytes of a row
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
            checkpointer.save(
                tmp_path / name, args=ocp.args.PyTreeSave({"w": array, "v": array}, {"w": args, "v": args})
            )
        base: Any = {"driver": "file", "path": f"{tmp_path / name}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base} if ocdbt else base).result()
        for n in range(1, 123):
            store.delete_range(ts.KvStore.KeyRange(f"w/{n}.0", f"w/{n}.0\0")).result()
        problems = tr.verify(tmp_path / name).problems
        assert len(problems) == 122 and {problem.leaves for problem in problems} == {("w",)}
        assert all(any(f"w/{n}.0" in problem.what for problem in problems) for n in range(1, 123))
        assert_same(tr.restore(tmp_path / name, at="v"), array)
        assert_same(tr.open(tmp_path / name)["w"][0], array[0])


def test_numbers_and_texts_that_are_gone(tmp_path: Path) -> None:
    path = save_tree(tmp_path / "ckpt", {"a": 1, "b": 2, "c": 3, "t": "x", "u": "y"}, use_ocdbt=False)
    (path / "b" / "0").unlink()
    (path / "c" / ".zarray").unlink()
    (path / "_strings.json").write_text('{"t": "x"}')
    assert [problem.leaves for problem in tr.verify(path).problems] == [("b",), ("c",), ("u",)]
    assert tr.restore(path, {"a": 0, "t": ""}, extra="ignore") == {"a": 1, "t": "x"}
    with pytest.raises(CorruptError, match="b/0"):
        tr.restore(path)


@pytest.mark.long
@pytest.mark.whole
def test_metrics_that_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = save_run(tmp_path / "run", 1) / "1"
    (step / "metrics" / "metrics").write_text("{")
    for gone in ("metrics/metrics", "metrics", ""):
        caplog.clear()
        assert_same(tr.restore(step), ALL_ITEMS)
        assert "opened without metrics" in caplog.text and tr.open(step).metrics == {}
        assert [problem.file for problem in tr.verify(step).problems] == [str(step)]
        if gone:
            remove(step / gone)


def test_items_within_items(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ocp.CheckpointManager(tmp_path) as run:
        args = ocp.args.Composite(key=ocp.args.JaxRandomKeySave(jax.random.key(3)), opt=ocp.args.StandardSave(OPT))
        run.save(0, args=args)
    for part in ("_METADATA", ""):
        remove(tmp_path / "0" / "key" / "jax_random_key" / part)
        with pytest.raises(CorruptError, match="key"):
            tr.restore(tmp_path / "0")
        assert not tr.verify(tmp_path / "0").ok
        assert_same(tr.restore(tmp_path / "0", at="opt"), OPT)
    save_tree(tmp_path / "0" / "more" / "a", OPT)
    (tmp_path / "0" / "more" / "a" / "_CHECKPOINT_METADATA").unlink()
    (tmp_path / "0" / "more" / "b").mkdir()
    caplog.clear()
    assert_same(tr.restore(tmp_path / "0", at="more"), {"a": OPT})
    assert "left out, because it cannot be read here: more/b (an empty folder)" in caplog.text


def test_version_1_says_the_same(tmp_path: Path) -> None:
    ocp1.save_checkpointables(tmp_path / "ckpt", {"state": TREE, "config": CONFIG})
    shutil.rmtree(tmp_path / "ckpt" / "config")
    with pytest.raises(CorruptError, match="the item 'config'"):
        tr.restore(tmp_path / "ckpt")
    # The item keeps its level, even if it is the only one left
    assert_same(tr.restore(tmp_path / "ckpt", at="state"), TREE)
    ocp1.save(tmp_path / "alone", TREE)
    shutil.rmtree(tmp_path / "alone" / "state")
    with pytest.raises(CorruptError, match="the item 'state'"):
        tr.open(tmp_path / "alone")


def test_folders_of_checkpoints(tmp_path: Path) -> None:
    names = ("best", "ema", "state")
    for name in names:
        save_tree(tmp_path / "checkpoints" / name, {**TREE, "of": name})
    with pytest.raises(
        NotFoundError, match="folder of checkpoints; open one of them by its own path: best, ema, state"
    ):
        tr.open(tmp_path / "checkpoints")
    with pytest.raises(NotFoundError, match="best, ema, state"):
        tr.verify(tmp_path / "checkpoints")
    assert all(tr.restore(tmp_path / "checkpoints" / name)["of"] == name for name in names)
    (tmp_path / "checkpoints" / "best" / "_CHECKPOINT_METADATA").unlink()  # as in one that is older than the others
    with pytest.raises(NotFoundError, match="ema, state"):
        tr.open(tmp_path / "checkpoints")


@pytest.mark.long
def test_steps_without_the_time_of_their_commit(tmp_path: Path) -> None:
    save_run(tmp_path, 1, 2, 3)
    for step, change in ((1, lambda about: about.pop("commit_timestamp_nsecs")), (2, dict.clear)):
        file = tmp_path / str(step) / "_CHECKPOINT_METADATA"
        about = json.loads(file.read_text())
        change(about)
        file.write_text(json.dumps(about))
        (tmp_path / str(step) / "commit_success.txt").unlink()
    with ocp.CheckpointManager(tmp_path) as run:
        assert sorted(run.all_steps()) == tr.steps(tmp_path) == [1, 2, 3]
    for step in (1, 2):
        assert_same(tr.restore(tmp_path, step=step), ALL_ITEMS)


def test_what_is_not_known_is_left_out_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Treering logs a warning for an item of an unknown kind that it leaves out."""
    step = save_run(tmp_path / "run", 1) / "1"
    (step / "data").mkdir()
    (step / "data" / "process_0.bin").write_bytes(b"?")
    with caplog.at_level(logging.WARNING, "treering"):
        assert_same(tr.restore(step), ALL_ITEMS)
    assert "left out, because it cannot be read here: data (files of an unknown kind: process_0.bin)" in caplog.text
