"""Items of checkpoints: what the drop-in for Orbax saves for arguments, and what it restores."""

import collections
import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
import treering.orbax as ocp
from helpers import assert_same
from treering.errors import MismatchError, UnsupportedError
from treering.orbax import items, nodes

Point = collections.namedtuple("Point", "x y")
WRITES = pytest.mark.parametrize("write", ["treering", "orbax"])


def _tree() -> Any:
    return {"w": jnp.arange(12.0).reshape(4, 3), "h": np.arange(3), "n": 3, "f": 2.5, "l": [jnp.int32(1)], "none": None}


def _saved(path: Path, write: str | None = None, **args: Any) -> Any:
    """Saves items and opens their checkpoint."""
    options = items.format_options(write, several=True)
    tr.save(path, items.save_items(ocp.args.Composite(**args)), **options)
    return tr.open(path)


def _restored(tmp_path: Path, tree: Any, args: Any, write: str | None = None) -> Any:
    """Saves a tree as an item, and restores it by arguments."""
    return items.restore_item(_saved(tmp_path / "a", write, state=ocp.args.PyTreeSave(tree)), "state", args)


@WRITES
def test_without_a_target_every_leaf_has_the_kind_that_was_saved(tmp_path: Path, write: str) -> None:
    for args in (None, ocp.args.StandardRestore(), ocp.args.PyTreeRestore()):
        got = _restored(tmp_path / str(args)[:9], _tree(), args, write)
        assert not tr.diff(got, _tree())
        assert isinstance(got["w"], jax.Array) and type(got["h"]) is np.ndarray and type(got["n"]) is int
    if write == "treering":  # As in Orbax: tuples become lists, named tuples dicts, and keys text.
        tree = {"t": (1, Point(np.ones(1), 2)), "e": {}, "k": {5: "text"}}
        assert_same(_restored(tmp_path, tree, None), {"t": [1, {"x": np.ones(1), "y": 2}], "e": {}, "k": {"5": "text"}})


@WRITES
def test_items_are_the_children_of_the_checkpoint(tmp_path: Path, write: str) -> None:
    value = {"lr": 0.1, "tags": ["a", None, True, 3], "of": (1, 2)}
    ckpt = _saved(tmp_path / "a", write, state=ocp.args.StandardSave(_tree()), meta=ocp.args.JsonSave(value))
    assert items.item_names(ckpt) == ("meta", "state") and ckpt.format == write
    assert items.item_names(ckpt.at("state")) is None
    got = items.restore_items(ckpt, ocp.args.Composite(meta=ocp.args.JsonRestore()))
    assert dict(got.items()) == {"meta": {**value, "of": [1, 2]}}
    assert set(items.restore_items(ckpt)) == {"meta", "state"}
    with pytest.raises(KeyError, match="expected the item 'opt', found meta, state"):
        items.restore_item(ckpt, "opt", ocp.args.StandardRestore())
    with pytest.raises(MismatchError, match="expected one tree, found the items meta, state"):
        items.restore_item(ckpt, None, ocp.args.StandardRestore())
    with pytest.raises(MismatchError, match="at least one item"):
        items.save_items(ocp.args.Composite())


@pytest.mark.long
@pytest.mark.whole
@WRITES
def test_a_variable_in_two_places_is_saved_in_both(tmp_path: Path, write: str) -> None:
    """Each item is restored without the others, and Orbax also stores both."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    two = {"a": state, "b": {"kernel": model.kernel}}
    given = {"model": nnx.state((model,)), "ema": state, "two": two, "object": model}
    ckpt = _saved(tmp_path / "a", write, **{name: ocp.args.StandardSave(tree) for name, tree in given.items()})
    for name, tree in given.items():
        target = jax.tree.map(jnp.zeros_like, tree)  # Its Variables are not shared.
        got = items.restore_item(ckpt, name, ocp.args.StandardRestore(target))
        assert jax.tree.all(jax.tree.map(np.array_equal, got, tree)), name
    got = items.restore_item(ckpt, "two", ocp.args.StandardRestore(two))
    assert got["b"]["kernel"] is not got["a"]["kernel"] and model.kernel is state["kernel"]


@WRITES
@pytest.mark.parametrize(
    "value", [{}, [], {"a": []}, [1, {"b": None}], {"n": 1}, {"z": {"y": 1, "b": {}}, "a": 2}, 3, "x", None, True]
)
def test_json_stays_json_and_trees_of_numbers_stay_trees(tmp_path: Path, value: Any, write: str) -> None:
    ckpt = _saved(tmp_path / "a", write, meta=ocp.args.JsonSave(value), state=ocp.args.StandardSave({"n": 1}))
    for found in (items.restore_item(ckpt, "meta", ocp.args.JsonRestore()), items.restore_items(ckpt).meta):
        assert json.dumps(found) == json.dumps(value)  # The keys have the order that they were saved in.
    assert items.restore_item(ckpt, "state", ocp.args.StandardRestore({"n": 0})) == {"n": 1}
    if write == "orbax":
        assert (tmp_path / "a" / "state" / "_METADATA").exists() and not (
            tmp_path / "a" / "meta" / "_METADATA"
        ).exists()
    elif isinstance(value, dict | list):
        handlers = items.item_handlers(ckpt)
        assert handlers["meta"].endswith("JsonCheckpointHandler") and handlers["state"].endswith(
            "PyTreeCheckpointHandler"
        )
        assert items.item_metadata(ckpt).meta is None and items.item_metadata(ckpt).state["n"].shape == ()


@WRITES
@pytest.mark.parametrize("name", ["Composite", "HandlerFiles", "Json"])
def test_a_class_of_the_program_is_no_container_of_items(tmp_path: Path, name: str, write: str) -> None:
    kind = jax.tree_util.register_dataclass(dataclasses.make_dataclass(name, ["a", "n"]), ["a", "n"], [])
    tree = kind(a={"w": jnp.ones(2)}, n={"k": 3})
    tr.save(tmp_path / "a", tree, **items.format_options(write, several=False))
    assert_same(items.restore_item(tr.open(tmp_path / "a"), None, ocp.args.StandardRestore(tree)), tree)
    ckpt = _saved(tmp_path / "b", write, state=ocp.args.StandardSave(tree))
    assert items.item_names(ckpt) == ("state",) and items.item_metadata(ckpt).state is not None
    assert_same(items.restore_item(ckpt, "state", ocp.args.StandardRestore(tree)), tree)
    tr.save(tmp_path / "c", tree, format="orbax", composite=True)  # Numbers and text are JSON, as in any other class.
    assert (tmp_path / "c" / "n" / "data.json").exists() or (tmp_path / "c" / "n" / "metadata").exists()


@WRITES
def test_a_target_says_the_kinds(tmp_path: Path, write: str) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    placed = NamedSharding(mesh, PartitionSpec("x"))
    tree = {"a": jnp.arange(8.0), "b": jnp.arange(8.0), "h": np.arange(3.0), "n": jnp.float32(2.5), "i": 7}
    target = {
        "a": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=placed),
        "b": np.zeros(8, np.float32),
        "h": jax.ShapeDtypeStruct((3,), np.float64),
        "n": 0.0,
        "i": jax.ShapeDtypeStruct((), np.int32),
    }
    got = _restored(tmp_path, tree, ocp.args.StandardRestore(target), write)
    assert got["a"].sharding == placed and got["a"].dtype == jnp.bfloat16
    assert type(got["b"]) is type(got["h"]) is type(got["i"]) is np.ndarray  # A NumPy array stays one without a place.
    assert type(got["n"]) is float and got["n"] == 2.5 and got["i"] == 7


@pytest.mark.long
@pytest.mark.whole
def test_arrays_without_a_place_in_the_target_go_where_they_were(tmp_path: Path) -> None:
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    tree = {"a": jax.device_put(jnp.arange(8.0), placed)}
    shapes = {"a": jax.ShapeDtypeStruct((8,), np.float32)}
    ckpt = _saved(tmp_path / "a", state=ocp.args.StandardSave(tree))
    for args in (None, ocp.args.StandardRestore(shapes), ocp.args.PyTreeRestore(shapes)):
        assert items.restore_item(ckpt, "state", args)["a"].sharding == placed
    meta = items.item_metadata(ckpt)["state"]
    assert meta["a"].sharding.to_jax_sharding() == placed and meta["a"].shape == (8,)
    assert items.restore_item(ckpt, "state", ocp.args.StandardRestore(meta))["a"].sharding == placed


def test_a_place_that_the_job_lacks_is_an_error_or_the_fallback(tmp_path: Path, monkeypatch: Any) -> None:
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    ckpt = _saved(tmp_path / "a", state=ocp.args.StandardSave({"a": jax.device_put(jnp.arange(8.0), placed)}))
    few = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: few)
    with pytest.raises(ValueError, match="expected a job that has the saved place"):
        items.restore_item(ckpt, "state", ocp.args.StandardRestore())
    fallback = NamedSharding(Mesh(np.array(few), ("x",)), PartitionSpec("x"))
    got = items.restore_item(ckpt, "state", ocp.args.StandardRestore(fallback_sharding=fallback))
    assert got["a"].sharding == fallback


def test_metadata_are_a_target(tmp_path: Path) -> None:
    tree = {"k": jax.random.key(1), "w": jnp.ones(2), "h": np.ones(2), "n": 1, "t": "a"}
    ckpt = _saved(tmp_path / "a", state=ocp.args.PyTreeSave(tree))
    meta = items.item_metadata(ckpt, "state")
    got = items.restore_item(ckpt, "state", ocp.args.StandardRestore(meta))
    assert not tr.diff(got, tree) and type(got["h"]) is np.ndarray and isinstance(got["w"], jax.Array)
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"k": meta["k"], "w": meta["w"]})
    got = items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(shapes, partial_restore=True))
    assert not tr.diff(got, {"k": tree["k"], "w": tree["w"]})
    assert dict(meta.items()).keys() == tree.keys() and meta == items.item_metadata(ckpt, "state")
    with pytest.raises(ValueError, match="found the metadata of one"):
        ocp.args.PyTreeSave(meta)


def test_codes_do_not_become_floats_without_their_scale(tmp_path: Path) -> None:
    codes = jnp.ones((4, 4), jnp.float8_e4m3fn)
    tree = {"kernel": {"qvalue": codes, "scale": jnp.full((1, 4), 2.0)}}
    ckpt = _saved(tmp_path / "a", state=ocp.args.PyTreeSave(tree))
    part = {"kernel": {"qvalue": jnp.ones((4, 4))}}
    to_floats = {"kernel": {"qvalue": ocp.ArrayRestoreArgs(dtype=jnp.bfloat16)}}
    with pytest.raises(ValueError, match="codes of a quantized weight"):
        items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(part, to_floats, partial_restore=True))
    got = items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(part, partial_restore=True))
    assert got["kernel"]["qvalue"].dtype == codes.dtype


@pytest.mark.parametrize("partial", [False, True])
def test_a_message_says_what_the_adapter_can_do(tmp_path: Path, partial: bool) -> None:
    """`missing=`, `extra=` and `rules=` are arguments of `treering.restore` alone."""
    ckpt = _saved(tmp_path / "a", state=ocp.args.PyTreeSave({"w": jnp.ones(2)}))
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
    args = ocp.args.PyTreeRestore(target, partial_restore=partial)
    with pytest.raises(MismatchError, match="arrays in place of shapes, keeps those") as found:
        items.restore_item(ckpt, "state", args)
    assert [one.path for one in found.value.differences] == ["b"]
    args = ocp.args.PyTreeRestore({**target, "b": jnp.zeros(3)}, partial_restore=True)  # as the message says
    assert_same(items.restore_item(ckpt, "state", args), {"w": jnp.ones(2), "b": jnp.zeros(3)})


def test_restore_args_say_the_kinds(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    made = {
        "w": ocp.ArrayRestoreArgs(mesh=mesh, mesh_axes=PartitionSpec("x"), dtype=jnp.bfloat16),
        "h": ocp.RestoreArgs(),
        "n": ocp.RestoreArgs(restore_type=np.ndarray),
        "f": ocp.RestoreArgs(restore_type=float),
        "l": [ocp.RestoreArgs(restore_type=int)],
    }
    got = _restored(tmp_path, _tree(), ocp.args.PyTreeRestore(restore_args=made))
    assert got["w"].sharding.spec == PartitionSpec("x") and got["w"].dtype == jnp.bfloat16
    assert type(got["h"]) is type(got["n"]) is np.ndarray and got["f"] == 2.5 and got["l"] == [1]
    ckpt = tr.open(tmp_path / "a")
    only = {"w": object(), "f": 0}
    got = items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(only, partial_restore=True))
    assert_same(got, {"w": _tree()["w"], "f": 2.5})
    assert_same(items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(only, transforms={})), got)
    skipped = {**_tree(), "w": ocp.PLACEHOLDER, "h": None}
    got = items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(skipped))
    assert got["w"] is ... and got["h"] is None and got["n"] == 3
    with pytest.raises(ValueError, match="expected the structure of the tree, found also other"):
        items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(restore_args={"other": ocp.RestoreArgs()}))
    with pytest.raises(ValueError, match="w: expected RestoreArgs, found int"):
        items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(restore_args={"w": 1}))
    with pytest.raises(ValueError, match="use rules= of"):
        items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(only, transforms={"w": 1}))
    with pytest.raises(ValueError, match="transforms_default_to_original=False: not supported"):
        args = ocp.args.PyTreeRestore(only, transforms={}, transforms_default_to_original=False)
        items.restore_item(ckpt, "state", args)


def test_shapes_differ_only_if_the_program_says_so(tmp_path: Path) -> None:
    ckpt = _saved(tmp_path / "a", state=ocp.args.StandardSave({"w": jnp.arange(4.0), "h": np.arange(4)}))
    target = {"w": jax.ShapeDtypeStruct((2,), np.float32), "h": np.zeros(6, int)}
    for args in (ocp.args.StandardRestore(target), ocp.args.PyTreeRestore(target)):  # Orbax itself ignores the second.
        with pytest.raises(ValueError, match="shapes must be equal"):
            items.restore_item(ckpt, "state", args)
    got = items.restore_item(ckpt, "state", ocp.args.StandardRestore(target, strict=False))
    assert_same(got, {"w": jnp.arange(2.0), "h": np.array([0, 1, 2, 3, 0, 0])})
    made = {"w": ocp.ArrayRestoreArgs(global_shape=(6,), strict=False), "h": ocp.RestoreArgs()}
    got = items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(restore_args=made))
    assert_same(got["w"], jnp.array([0.0, 1, 2, 3, 0, 0]))
    made["w"] = ocp.ArrayRestoreArgs(global_shape=(6,))
    with pytest.raises(ValueError, match="shapes must be equal"):
        items.restore_item(ckpt, "state", ocp.args.PyTreeRestore(restore_args=made))


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ({"i": jax.ShapeDtypeStruct((2,), np.float32)}, "one kind of number is not converted to another"),
        ({"i": np.zeros(2, np.int8)}, "do not fit|does not fit|expected"),
        ({"i": np.zeros(2, int), "more": jax.ShapeDtypeStruct((2,), np.float32)}, "found nothing"),
        ({}, "found int"),
    ],
)
def test_what_orbax_would_do_silently_is_an_error(tmp_path: Path, target: Any, problem: str) -> None:
    with pytest.raises(MismatchError, match=problem):
        _restored(tmp_path, {"i": np.array([1, 1000])}, ocp.args.StandardRestore(target))


def test_save_args_cast_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cast = ocp.SaveArgs(dtype=jnp.bfloat16)
    tree = {"a": jnp.ones(2), "b": np.ones(2), "n": 1, "e": {}}
    tree = items.save_tree(ocp.args.PyTreeSave(tree, {"a": cast, "e": cast}))
    assert tree["a"].dtype == jnp.bfloat16 and tree["b"].dtype == np.float64 and tree["n"] == 1
    with caplog.at_level(logging.WARNING):
        ocp.SaveArgs(chunk_byte_size=5)
    assert "SaveArgs: chunk_byte_size= has no effect" in caplog.text
    with pytest.raises(ValueError, match="found also c"):
        items.save_tree(ocp.args.PyTreeSave({"a": 1}, {"c": cast}))
    with pytest.raises(ValueError, match="a: expected SaveArgs, found int"):
        items.save_tree(ocp.args.PyTreeSave({"a": 1}, {"a": 1}))


@pytest.mark.parametrize("item", [None, {}, 1, jnp.ones(1)])
def test_a_tree_to_save_has_leaves_below_its_root(item: Any) -> None:
    with pytest.raises(ValueError, match="item: expected a tree"):
        items.save_tree(ocp.args.StandardSave(item))


def test_arrays_and_keys_are_items(tmp_path: Path) -> None:
    key, state = jax.random.key(3), np.random.RandomState(5).get_state()
    ckpt = _saved(
        tmp_path / "a",
        array=ocp.args.ArraySave(jnp.arange(3)),
        number=ocp.args.ArraySave(4),
        key=ocp.args.JaxRandomKeySave(key),
        old=ocp.args.JaxRandomKeySave(jax.random.PRNGKey(1)),
        numpy=ocp.args.NumpyRandomKeySave(state),
    )
    wanted = ocp.args.Composite(
        array=ocp.args.ArrayRestore(restore_args=ocp.RestoreArgs(restore_type=np.ndarray)),
        number=ocp.args.ArrayRestore(),
        key=ocp.args.JaxRandomKeyRestore(),
        old=ocp.args.JaxRandomKeyRestore(),
        numpy=ocp.args.NumpyRandomKeyRestore(),
    )
    got = items.restore_items(ckpt, wanted)
    assert type(got.array) is np.ndarray and got.array.tolist() == [0, 1, 2] and got.number == 4
    assert_same([got.key, got.old], [key, jax.random.PRNGKey(1)])
    assert type(got.numpy) is tuple
    random = np.random.RandomState()
    random.set_state(got.numpy)
    assert random.rand() == np.random.RandomState(5).rand()
    with pytest.raises(TypeError, match="expected an array or a number, found a str"):
        items.save_tree(ocp.args.ArraySave("text"))
    with pytest.raises(ValueError, match="expected a tuple or a dict"):
        items.save_tree(ocp.args.NumpyRandomKeySave(1))


class _Lines(ocp.CheckpointHandler):
    closed = 0

    def save(self, directory: Any, args: Any) -> None:
        (directory / "sub").mkdir()
        (directory / "sub" / "lines.txt").write_text("\n".join(args.lines))
        (directory / "empty").write_text("")

    def restore(self, directory: Any, args: Any = None) -> Any:
        assert (directory / "empty").read_text() == ""
        return (directory / "sub" / "lines.txt").read_text().split("\n")


@ocp.args.register_with_handler(_Lines, for_save=True)
@dataclasses.dataclass
class _LinesSave(ocp.args.CheckpointArgs):
    lines: list[str]


@ocp.args.register_with_handler(_Lines, for_restore=True)
@dataclasses.dataclass
class _LinesRestore(ocp.args.CheckpointArgs):
    pass


@WRITES
def test_the_files_of_a_handler_of_ones_own_are_an_item(tmp_path: Path, write: str) -> None:
    args = {"state": ocp.args.StandardSave(_tree()), "notes": _LinesSave(["a", "b"])}
    ckpt = _saved(tmp_path / "a", write, **args)
    assert items.restore_item(ckpt, "notes", _LinesRestore()) == ["a", "b"]
    assert items.restore_items(ckpt, None, {"notes": _Lines()}).state["n"] == 3
    assert_same(items.restore_item(ckpt, "state", ocp.args.StandardRestore(_tree())), _tree())
    if write == "orbax":
        assert (tmp_path / "a" / "notes" / "sub" / "lines.txt").read_text() == "a\nb"
        return
    assert tr.verify(tmp_path / "a").ok and items.item_metadata(ckpt).notes is None
    with pytest.raises(MismatchError, match="handler of its own; give its arguments or handler"):
        items.restore_item(ckpt, "notes", ocp.args.StandardRestore())
    with pytest.raises(MismatchError, match="not saved by a handler of its own"):
        items.restore_item(ckpt, "state", _LinesRestore())


class _Files(ocp.CheckpointHandler):
    """Runs a function in its directory, and restores the text of each file there."""

    def save(self, directory: Any, args: Any) -> None:
        args.make(Path(directory))

    def restore(self, directory: Any, args: Any = None) -> Any:
        return {one.name: one.read_text() for one in Path(directory).iterdir()}


@ocp.args.register_with_handler(_Files, for_save=True)
@dataclasses.dataclass
class _FilesSave(ocp.args.CheckpointArgs):
    make: Any


@ocp.args.register_with_handler(_Files, for_restore=True)
@dataclasses.dataclass
class _FilesRestore(ocp.args.CheckpointArgs):
    pass


@WRITES
@pytest.mark.parametrize("found", [{}, {"commit_success.txt": "mine", "a": "1"}])
def test_a_handler_may_write_no_files_or_one_named_as_the_mark(tmp_path: Path, found: Any, write: str) -> None:
    own = _FilesSave(lambda folder: [(folder / name).write_text(text) for name, text in found.items()])
    ckpt = _saved(tmp_path / "a", write, own=own, state=ocp.args.StandardSave({"n": 1}))
    got = items.restore_item(ckpt, "own", _FilesRestore())
    if write == "orbax":  # As in Orbax, the handler sees the mark of completion of its item.
        found = {"commit_success.txt": "committed", **found}
    assert got == found
    if write == "treering":  # The only item, without a name.
        tr.save(tmp_path / "b", items.save_tree(own))
        assert items.restore_item(tr.open(tmp_path / "b"), None, _FilesRestore()) == found


@pytest.mark.parametrize("make", [
    lambda folder: (folder / "empty" / "below").mkdir(parents=True),
    lambda folder: (folder / "link").symlink_to(folder.parent, target_is_directory=True),
    lambda folder: (folder / "link").symlink_to(folder / "nothing"),
    lambda folder: os.mkfifo(folder / "pipe"),
], ids=["empty", "link", "broken", "pipe"])  # fmt: skip
def test_what_is_no_file_of_a_handler_is_refused(make: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=r"(empty/below|link|pipe): expected files and directories that have some"
    ):
        items.save_tree(_FilesSave(make))


_OUTSIDE = ("../../x", "/{}/x", "", ".", "..", "a/../../../x", "a//b", "a\\b", "a\0b", "a/")


@pytest.mark.parametrize("files", [*({name: b"1"} for name in _OUTSIDE), {"a": b"1", "a/b": b"2"}])
def test_no_file_of_a_handler_is_written_out_of_its_directory(tmp_path: Path, files: dict[str, bytes]) -> None:
    """A checkpoint from elsewhere may have any names."""
    found = {name.format(tmp_path): np.frombuffer(data, np.uint8) for name, data in files.items()}
    tr.save(tmp_path / "evil", nodes.composite({"own": nodes.handler_files(found), "b": {"w": np.ones(2)}}))
    before = sorted(tmp_path.rglob("*"))
    for use in (
        lambda: tr.convert(tmp_path / "evil", tmp_path / "to", format="orbax", composite=True),
        lambda: items.restore_item(tr.open(tmp_path / "evil"), "own", _LinesRestore()),
        lambda: nodes.write_files(found, str(tmp_path / "evil")),
    ):
        with pytest.raises(UnsupportedError, match=r"relative path of a file within its folder|is a file, and so no"):
            use()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("content", [np.ones(2), np.ones((2, 2), np.uint8), 3, {"b": np.ones(2, np.uint8)}])
def test_files_of_handlers_are_bytes(tmp_path: Path, content: Any) -> None:
    tree = nodes.composite({"own": nodes.handler_files({"a": content}), "b": {"w": np.ones(2)}})
    with pytest.raises(UnsupportedError, match=r"own/a.*one-dimensional array of uint8"):
        tr.save(tmp_path / "a", tree, format="orbax", composite=True)


@pytest.mark.peers
def test_what_orbax_wrote_is_read_by_the_same_arguments(tmp_path: Path) -> None:
    real = pytest.importorskip("orbax.checkpoint")
    with real.Checkpointer(real.CompositeCheckpointHandler()) as saver:
        saver.save(
            tmp_path / "a",
            real.args.Composite(state=real.args.StandardSave({"w": jnp.ones(3), "h": np.ones(2), "n": 1}),
                                meta=real.args.JsonSave({"s": 2}), key=real.args.JaxRandomKeySave(jax.random.key(3))),
        )  # fmt: skip
    ckpt = tr.open(tmp_path / "a")
    got = items.restore_items(ckpt)
    assert_same(got.state, {"w": jnp.ones(3), "h": np.ones(2), "n": 1})
    assert isinstance(got.state["w"], jax.Array) and got.meta == {"s": 2}
    assert_same(items.restore_item(ckpt, "key", ocp.args.JaxRandomKeyRestore()), jax.random.key(3))
    theirs = real.args.StandardRestore({"w": jnp.zeros(3), "h": np.zeros(2), "n": 0})
    assert_same(items.restore_item(ckpt, "state", theirs), got.state)


@pytest.mark.peers
def test_orbax_reads_the_items_that_are_written_for_it(tmp_path: Path) -> None:
    real = pytest.importorskip("orbax.checkpoint")
    values = {"meta": {"s": 2, "a": 1}, "list": [], "number": 3, "text": "x", "none": None}
    saved = {name: ocp.args.JsonSave(value) for name, value in values.items()}
    _saved(tmp_path / "a", "orbax", state=ocp.args.StandardSave({"w": jnp.ones(3)}), **saved)
    with real.Checkpointer(real.CompositeCheckpointHandler()) as reader:
        wanted = {name: real.args.JsonRestore() for name in values}
        got = reader.restore(tmp_path / "a", real.args.Composite(state=real.args.StandardRestore(), **wanted))
    assert not tr.diff(got.state, {"w": jnp.ones(3)})
    assert json.dumps({name: got[name] for name in values}) == json.dumps(values)


@pytest.mark.peers
def test_the_iterators_of_grain_are_items(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain")
    make = lambda: iter(grain.MapDataset.range(10).to_iter_dataset())  # noqa: E731
    iterator = make()
    for _ in range(3):
        next(iterator)
    ckpt = _saved(
        tmp_path / "a", data=grain.checkpoint.CheckpointSave(iterator), state=ocp.args.StandardSave({"w": jnp.ones(1)})
    )
    got = items.restore_item(ckpt, "data", grain.checkpoint.CheckpointRestore(new := make()))
    assert got is new and next(new) == 3


def test_the_format_is_chosen_by_an_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    native = {"format": "treering"}
    assert items.format_options(None, several=True) == items.format_options("treering", several=True) == native
    monkeypatch.setenv("TREERING_ORBAX_WRITE", "orbax")
    assert items.format_options(None, several=False) == {"format": "orbax", "composite": False}
    assert items.format_options("treering", several=True) == native
    with pytest.raises(MismatchError, match="write='zip': expected 'treering' or 'orbax'"):
        items.format_options("zip", several=True)


def test_handlers_of_ones_own_refuse_jobs_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "is_multi_process", lambda: True)
    with pytest.raises(UnsupportedError, match="one process only"):
        items.save_tree(_LinesSave(["a"]))
