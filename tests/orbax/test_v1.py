"""Tests of `treering.orbax.v1`, with version 1 of real Orbax as the other party."""

import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import logging
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real_v0
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
import treering.orbax as v0
from jobs import run_job
from treering.errors import CorruptError, MismatchError, TreeringError, UnsupportedError
from treering.formats.orbax.items import UNNAMED_ITEMS
from treering.orbax import pathways
from treering.orbax import v1 as ocp
from treering.stores.posix import Disk

real: Any = importlib.import_module("orbax.checkpoint.experimental.v1")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
]
WRITES = pytest.mark.parametrize("write", ["treering", "orbax"])
policies = ocp.training.save_decision_policies
keeping = ocp.training.preservation_policies


def tree(k: float = 1) -> dict[str, Any]:
    return {
        "w": jnp.arange(6.0).reshape(2, 3) * k,
        "h": np.arange(3),
        "n": 3,
        "f": 2.5,
        "s": "text",
        "l": [jnp.int32(1)],
    }


def assert_same(found: Any, expected: Any) -> None:
    assert not tr.diff(found, expected)


def shapes(of: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, of)


def files(path: Path) -> dict[str, int]:
    return {str(one.relative_to(path)): one.stat().st_mtime_ns for one in path.rglob("*")}


# Names


def test_the_import_is_light_and_has_both_names() -> None:
    code = """
import sys
from treering.orbax import v1
import treering.orbax.experimental.v1 as other
import treering.orbax
assert other is v1 is treering.orbax.v1 is treering.orbax.experimental.v1
assert not {"jax", "numpy", "orbax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists() -> None:
    """A name that is not supported raises one line when it is used."""
    used = []
    for name, value in vars(real).items():
        if name.startswith("_") or name == "orbax":
            continue
        ours = getattr(ocp, name)
        parts = [part for part in dir(value) if not part.startswith("_")] if isinstance(value, types.ModuleType) else []
        used += [getattr(ours, part) for part in parts if part != "orbax"] or [ours]
    refused = [one for one in used if type(one).__name__ == "_Refused"]
    assert 5 < len(refused) < 15 and len(used) > 60
    for one in refused:
        with pytest.raises(UnsupportedError, match=r"^treering\.orbax\.v1\.\S+ is not supported"):
            one("path", {})


def test_methods_of_the_checkpointer_exist() -> None:
    for name, value in vars(real.training.Checkpointer).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            theirs = set(inspect.signature(value).parameters)
            ours = inspect.signature(getattr(ocp.training.Checkpointer, name)).parameters
            takes_any = any(one.kind is one.VAR_KEYWORD for one in ours.values())
            assert takes_any or theirs <= {*ours}, name


# One tree


@WRITES
def test_a_tree_is_saved_and_loaded(tmp_path: Path, write: str) -> None:
    with ocp.Context(write=write):
        ocp.save(tmp_path / "a", tree(), custom_metadata={"by": "me"})
    assert tr.open(tmp_path / "a").format == write
    for abstract in (None, shapes(tree()), tree(), ocp.metadata(tmp_path / "a"), ocp.metadata(tmp_path / "a").metadata):
        found = ocp.load(tmp_path / "a", abstract)
        assert_same(found, tree())
        assert isinstance(found["w"], jax.Array) and type(found["h"]) is np.ndarray and type(found["n"]) is int
    assert_same(ocp.load(tmp_path / "a", checkpointable_name="state"), tree())
    assert_same(ocp.load_checkpointables(tmp_path / "a")["state"], tree())
    assert ocp.metadata(tmp_path / "a").custom_metadata == {"by": "me"}


def test_orbax_reads_what_is_written_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREERING_ORBAX_WRITE", "orbax")
    ocp.save(tmp_path / "a", tree())
    ocp.save_checkpointables(tmp_path / "b", {"model": tree(), "numbers": {"n": 1}})
    assert_same(real.load(tmp_path / "a", shapes(tree())), tree())
    assert_same(real.load(tmp_path / "a"), tree())
    assert_same(real.load_checkpointables(tmp_path / "b"), {"model": tree(), "numbers": {"n": 1}})


CALLS: dict[str, Any] = {
    "load": lambda path: real.load(path),
    "load of the name": lambda path: real.load(path, checkpointable_name="state"),
    "load_checkpointables": lambda path: real.load_checkpointables(path),
    "metadata": lambda path: len(jax.tree.leaves(real.metadata(path).metadata)),
    "checkpointables_metadata": lambda path: list(real.checkpointables_metadata(path).metadata),
}


@pytest.mark.parametrize("name", ["a tree", "an array", "a number"])
def test_every_call_of_orbax_takes_what_is_written_for_it(tmp_path: Path, name: str) -> None:
    given = {"a tree": {"w": jnp.arange(2.0)}, "an array": jnp.arange(2.0), "a number": 3}[name]
    real.save(tmp_path / "theirs", given)
    with ocp.Context(write="orbax"):
        ocp.save(tmp_path / "ours", given)
    for call in CALLS.values():
        found, expected = call(tmp_path / "ours"), call(tmp_path / "theirs")
        assert not tr.diff({"found": found}, {"found": expected})
    assert_same(tr.open(tmp_path / "ours").restore(), tr.open(tmp_path / "theirs").restore())
    assert_same(ocp.load_checkpointables(tmp_path / "ours"), ocp.load_checkpointables(tmp_path / "theirs"))


NAMES_BY_RELEASE = {(0, 11): "pytree", (0, 12): "state"}  # Orbax's name of the tree of `save`, by its first release


def test_the_name_of_an_only_tree_is_known_for_each_release(tmp_path: Path) -> None:
    assert set(NAMES_BY_RELEASE.values()) == set(UNNAMED_ITEMS[True])
    release = tuple(map(int, importlib.metadata.version("orbax-checkpoint").split(".")[:2]))
    real.save(tmp_path / "a", tree())
    (written,) = (one.name for one in (tmp_path / "a").iterdir() if one.is_dir())
    assert written == NAMES_BY_RELEASE[max(one for one in NAMES_BY_RELEASE if one <= release)]
    for name in NAMES_BY_RELEASE.values():
        path = tmp_path / name
        shutil.copytree(tmp_path / "a", path)
        (path / written).rename(path / name)
        about = path / "_CHECKPOINT_METADATA"
        about.write_text(about.read_text().replace(f'"{written}"', f'"{name}"'))
        assert_same(tr.restore(path, tree()), tree())
        assert_same(ocp.load(path), tree())
        assert_same(ocp.load(path, checkpointable_name=name), tree())
        assert list(ocp.load_checkpointables(path)) == [name]


@pytest.mark.long
@pytest.mark.whole
def test_what_orbax_wrote_is_loaded(tmp_path: Path) -> None:
    real.save(tmp_path / "a", tree(), custom_metadata={"by": "them"})
    real.save_checkpointables(tmp_path / "b", {"other": tree(), "pytree": tree(2)})
    assert_same(ocp.load(tmp_path / "a"), tree())
    assert_same(ocp.load(tmp_path / "a", shapes(tree())), tree())
    assert_same(ocp.load_checkpointables(tmp_path / "a"), real.load_checkpointables(tmp_path / "a"))
    assert ocp.metadata(tmp_path / "a").custom_metadata == {"by": "them"}
    assert_same(ocp.load_checkpointables(tmp_path / "b"), {"other": tree(), "pytree": tree(2)})
    assert_same(ocp.load(tmp_path / "b"), real.load(tmp_path / "b"))
    assert_same(ocp.load(tmp_path / "b", checkpointable_name="other"), tree())


@WRITES
def test_an_existing_path_is_refused_and_left_alone(tmp_path: Path, write: str) -> None:
    with ocp.Context(write=write):
        ocp.save(tmp_path / "a", tree())
        before = files(tmp_path)
        for call in (ocp.save, lambda *args: ocp.save_async(*args).result()):
            with pytest.raises(ValueError, match="overwrite=True"):
                call(tmp_path / "a", tree(2))
        assert files(tmp_path) == before
        ocp.save(tmp_path / "a", tree(2), overwrite=True)
    assert_same(ocp.load(tmp_path / "a"), tree(2))


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tr.save(tmp_path / "run/3", tree())
    for path in (tmp_path / "nothing", tmp_path / "empty", tmp_path / "run"):
        assert not ocp.is_orbax_checkpoint(path)
        for call in (ocp.load, ocp.load_checkpointables, ocp.metadata, ocp.checkpointables_metadata):
            with pytest.raises(FileNotFoundError) as caught:
                call(path)
            assert isinstance(caught.value, ocp.errors.InvalidLayoutError | ValueError)
    assert ocp.is_orbax_checkpoint(tmp_path / "run/3")


def test_an_abstract_tree_must_fit(tmp_path: Path) -> None:
    ocp.save(tmp_path / "a", {"w": jnp.arange(6.0), "i": jnp.int32(2**20), "n": 3, "h": np.ones(2)})
    fitting = ocp.metadata(tmp_path / "a").metadata
    wrong = {
        "missing": {name: fitting[name] for name in ("w", "n", "h")},
        "extra": {**fitting, "x": jax.ShapeDtypeStruct((2,), "float32")},
        "shape": {**fitting, "w": jax.ShapeDtypeStruct((8,), "float32")},
        "loses values": {**fitting, "i": jax.ShapeDtypeStruct((), "int16")},
        "another kind": {**fitting, "w": jax.ShapeDtypeStruct((6,), "int32")},
    }
    for abstract in wrong.values():
        with pytest.raises(MismatchError, match="expected"):
            ocp.load(tmp_path / "a", abstract)
    found = ocp.load(tmp_path / "a", {**fitting, "w": ..., "n": int, "i": ocp.PLACEHOLDER, "h": np.ndarray})
    assert found["w"] is ... and found["i"] is ... and found["n"] == 3 and type(found["h"]) is np.ndarray
    cast = ocp.load(tmp_path / "a", {**fitting, "w": jax.ShapeDtypeStruct((6,), "bfloat16")})
    assert cast["w"].dtype == "bfloat16"
    with_options = ocp.Context()
    with_options.pytree.loading.partial_load = True
    with_options.array.loading.enable_padding_and_truncation = True
    with with_options:
        assert_same(ocp.load(tmp_path / "a", wrong["missing"]), {"w": jnp.arange(6.0), "n": 3, "h": np.ones(2)})
        assert ocp.load(tmp_path / "a", wrong["shape"])["w"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


@pytest.mark.long
@pytest.mark.whole
def test_the_abstract_leaf_chooses_the_kind_and_the_place(tmp_path: Path) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec("x"))
    placed = jax.device_put(jnp.arange(4), sharding)
    tree = {"host": np.arange(4, dtype=np.int32), "device": placed, "key": jax.random.key(3), "weak": jnp.asarray(2.0)}
    ocp.save(tmp_path / "a", tree)
    about = ocp.metadata(tmp_path / "a").metadata
    assert about["device"].sharding == sharding and not hasattr(about["host"], "sharding")
    host = types.SimpleNamespace(shape=(4,), dtype=np.dtype(np.int32))
    abstract = {**about, "host": jax.ShapeDtypeStruct((4,), "int32"), "device": host}
    found = ocp.load(tmp_path / "a", abstract)
    assert isinstance(found["host"], jax.Array) and type(found["device"]) is np.ndarray
    assert found["weak"].weak_type
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert ocp.load(tmp_path / "a")["device"].sharding == sharding


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    for state in (None, {}, (), object(), {"a": {1, 2}}):
        with pytest.raises(ValueError, match="state: expected"):
            ocp.save(tmp_path / "a", state)
    for given in (None, {}, {"": tree()}, {"metrics": tree()}, "text"):
        with pytest.raises(ValueError, match="checkpointables"):
            ocp.save_checkpointables(tmp_path / "a", given)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="register_handler"):
        ocp.save_checkpointables(tmp_path / "a", {"fine": tree(), "odd": object()})
    assert not list(tmp_path.iterdir())


# Background saves


def test_a_background_save_has_the_values_at_the_call(tmp_path: Path) -> None:
    done, called = threading.Event(), []
    context = ocp.Context()
    context.asynchronous.post_finalization_callback = done.set
    state = {"w": np.ones(4)}
    with context:
        response = ocp.save_async(tmp_path / "a", state)
        state["w"][:] = 7
        assert response.result() is None
        assert done.wait(10)
    both = threading.Event()
    ocp.save_checkpointables_async(tmp_path / "b", {"x": state}).on_complete(
        lambda got: (called.append(got), both.set())
    )
    assert both.wait(10) and called == [None]
    assert_same(ocp.load(tmp_path / "a"), {"w": np.ones(4)})


# Options


def test_the_dtype_of_storage_is_honored(tmp_path: Path) -> None:
    context = ocp.Context()
    context.array.saving.storage_options.dtype = jnp.bfloat16
    context.array.saving.scoped_storage_options_creator = lambda path, leaf: (
        ocp.options.ArrayOptions.Saving.StorageOptions(dtype=np.float16) if "small" in str(path) else None
    )
    with context:
        ocp.save(tmp_path / "a", {"small": jnp.ones(2), "rest": np.ones(2, np.float32)})
    found = ocp.load(tmp_path / "a")
    assert (found["small"].dtype, found["rest"].dtype) == (np.float16, jnp.bfloat16)


def test_no_option_is_ignored_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refused = {
        "multiprocessing": {"primary_host": 1},
        "pathways": {"checkpointing_impl": "x"},
        "memory": {"is_prioritized_key_fn": print},
    }
    for group, options in refused.items():
        context = ocp.Context()
        for name, value in options.items():
            setattr(getattr(context, group), name, value)
        with context, pytest.raises(UnsupportedError, match=f"{group}.{next(iter(options))}"):
            ocp.save(tmp_path / "a", tree())
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    context.file.skip_sync_file_validations = True
    context.pathways.checkpointing_impl = pathways.CheckpointingImpl.NO_DISPATCHER
    context.array.saving.scoped_storage_options_creator = lambda path, leaf: None
    with caplog.at_level(logging.WARNING), context:
        ocp.save(tmp_path / "a", tree())
    assert "array.saving.use_zarr3= has no effect" in caplog.text and "file.skip_sync_file_validations" in caplog.text
    assert "pathways" not in caplog.text and "scoped" not in caplog.text
    with pytest.raises(TypeError, match="expected one of"):
        ocp.Context(arrays_options=None)
    for name, problem in (("file_options", "one by one"), ("file", "one by one"), ("fiel", "expected one of .*file")):
        with pytest.raises(AttributeError, match=problem):
            setattr(ocp.Context(), name, 1)
    with pytest.raises(MismatchError, match="write="):
        ocp.Context(write="zarr")


def test_a_context_in_use_cannot_be_changed() -> None:
    outer = ocp.Context(checkpoint_layout="safetensors", write="orbax")
    outer.pytree.loading.partial_load = True
    inner = ocp.Context(outer)
    inner.pytree.loading.partial_load = False
    assert outer.pytree.loading.partial_load and inner.write == "orbax"
    assert inner.checkpoint_layout is ocp.options.CheckpointLayout.SAFETENSORS
    with outer:
        inner.array.saving.use_ocdbt = False
        for change in (
            lambda: setattr(outer.pytree.loading, "partial_load", False),
            lambda: setattr(outer.pytree, "loading", None),
            lambda: setattr(outer, "write", None),
        ):
            with pytest.raises(RuntimeError, match="in use"):
                change()
    outer.write = None


def test_safetensors_are_loaded_on_request(tmp_path: Path) -> None:
    tr.save(tmp_path / "a.safetensors", {"w": np.ones(3)})
    with pytest.raises(ocp.errors.InvalidLayoutError, match="checkpoint_layout='auto'"):
        ocp.load(tmp_path / "a.safetensors")
    for layout in ("safetensors", "auto"):
        with ocp.Context(checkpoint_layout=layout):
            assert_same(ocp.load(tmp_path / "a.safetensors"), {"w": np.ones(3)})
            about = ocp.metadata(tmp_path / "a.safetensors")
            assert about.commit_timestamp is not None and about.metadata["w"].shape == (3,)
    with ocp.Context(checkpoint_layout="safetensors"), pytest.raises(UnsupportedError, match=r"treering\.save"):
        ocp.save(tmp_path / "b", tree())


# Checkpointables


@dataclasses.dataclass
class Note:
    text: str


class AbstractNote:
    pass


class NoteHandler:
    """A handler as programs write them for Orbax."""

    async def save(self, directory: Any, checkpointable: Note) -> Awaitable[None]:
        async def write() -> None:
            path = await directory.await_creation()
            (path / "note.json").write_text(json.dumps(checkpointable.text))

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Note]:
        async def read() -> Note:
            return Note(json.loads((directory / "note.json").read_text()))

        return read()

    async def metadata(self, directory: Any) -> AbstractNote:
        return AbstractNote()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, Note)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, AbstractNote)


class Counter:
    """An object that saves itself."""

    def __init__(self, value: int):
        self.value = value

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            ((await directory.await_creation()) / "value").write_text(str(self.value))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.value = int((directory / "value").read_text())

        return read()


@contextlib.contextmanager
def registered(module: Any, name: str | None = None, **options: Any) -> Any:
    context = module.Context(**options)
    registry = module.handlers.local_registry()
    registry.add(NoteHandler, checkpointable_name=name)
    context.checkpointables.registry = registry
    with context:
        yield


@WRITES
def test_checkpointables_of_ones_own(tmp_path: Path, write: str) -> None:
    given = {"model": tree(), "note": Note("hi"), "counter": Counter(5)}
    with registered(ocp, write=write):
        ocp.save_checkpointables(tmp_path / "a", given)
        for abstract in (None, AbstractNote()):
            counter = Counter(0)
            found = ocp.load_checkpointables(tmp_path / "a", {"note": abstract, "counter": counter})
            assert found == {"note": Note("hi"), "counter": counter} and counter.value == 5
        about = ocp.checkpointables_metadata(tmp_path / "a").metadata
        assert (
            isinstance(about["note"], AbstractNote) and about["counter"] is None and set(about["model"]) == set(tree())
        )
        with pytest.raises(KeyError, match="'other'"):
            ocp.load_checkpointables(tmp_path / "a", {"other": None})
        with pytest.raises(ValueError, match="the object that loads"):
            ocp.load_checkpointables(tmp_path / "a", {"counter": None})
    with pytest.raises(KeyError, match=r"handler such as .*NoteHandler"):
        ocp.load_checkpointables(tmp_path / "a", {"note": None})
    assert_same(ocp.load(tmp_path / "a"), tree())
    with registered(ocp, "note"):
        assert ocp.load_checkpointables(tmp_path / "a", {"note": None}) == {"note": Note("hi")}


@pytest.mark.long
@pytest.mark.whole
def test_checkpointables_go_to_orbax_and_back(tmp_path: Path) -> None:
    given = {"model": tree(), "note": Note("hi"), "counter": Counter(5)}
    with registered(ocp, "note", write="orbax"):
        ocp.save_checkpointables(tmp_path / "ours", given)
    with registered(real, "note"):
        real.save_checkpointables(tmp_path / "theirs", given)
        counter = Counter(0)
        found = real.load_checkpointables(tmp_path / "ours", {"note": None, "counter": counter, "model": None})
        assert found["note"] == Note("hi") and counter.value == 5
        assert_same(found["model"], tree())
    with registered(ocp):
        counter = Counter(0)
        found = ocp.load_checkpointables(tmp_path / "theirs", {"note": None, "counter": counter, "model": None})
        assert found["note"] == Note("hi") and counter.value == 5
        assert_same(found["model"], tree())


class Both(NoteHandler):
    """A handler that lets the handler of trees save a part."""

    async def save(self, directory: Any, checkpointable: Note) -> Awaitable[None]:
        return await ocp.handlers.PyTreeHandler().save(directory, {"text": checkpointable.text, "w": jnp.ones(2)})

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Note]:
        async def read() -> Note:
            loaded = await ocp.handlers.PyTreeHandler().load(directory, {"text": str, "w": ...})
            return Note((await loaded)["text"])

        return read()


@WRITES
def test_a_handler_may_use_the_handler_of_trees(tmp_path: Path, write: str) -> None:
    context = ocp.Context(write=write)
    context.checkpointables.registry = ocp.handlers.local_registry()
    context.checkpointables.registry.add(Both)
    with context:
        ocp.save_checkpointables(tmp_path / "a", {"note": Note("hi")})
        assert ocp.load_checkpointables(tmp_path / "a") == {"note": Note("hi")}
    assert ocp.handlers.JsonHandler().is_handleable({"a": [1]}) and not ocp.handlers.JsonHandler().is_handleable({1})


class NamedFile(Counter):
    """An object whose file has a name that the state of an iterator, or a value of JSON, has too."""

    file = ""

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            ((await directory.await_creation()) / self.file).write_text(json.dumps({"next_index": self.value}))

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        async def read() -> None:
            self.value = json.loads((directory / self.file).read_text())["next_index"]

        return read()


class FileHandler(NoteHandler):
    """A handler whose file has such a name."""

    file = ""

    async def save(self, directory: Any, checkpointable: Note) -> Awaitable[None]:
        saver = NamedFile(int(checkpointable.text))
        saver.file = self.file
        return await saver.save(directory)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Note]:
        async def read() -> Note:
            return Note(str(json.loads((directory / self.file).read_text())["next_index"]))

        return read()


@pytest.mark.parametrize("file", ["process_0-of-1.json", "data.json", "metadata"])
@pytest.mark.parametrize("writer", ["treering", "orbax", "orbax itself"])
def test_files_that_look_like_others_belong_to_their_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str, file: str
) -> None:
    monkeypatch.setattr(NamedFile, "file", file)
    monkeypatch.setattr(FileHandler, "file", file)

    def context(library: Any, **options: Any) -> Any:
        made = library.Context(**options)
        made.checkpointables.registry = library.handlers.local_registry()
        made.checkpointables.registry.add(FileHandler)
        return made

    given = {"object": NamedFile(5), "note": Note("7"), "model": {"w": jnp.ones(2)}}
    library = real if writer == "orbax itself" else ocp
    with context(library, **({} if library is real else {"write": writer})):
        library.save_checkpointables(tmp_path / "a", given)
    with context(ocp):
        for abstract in (None, AbstractNote()):
            loaded = NamedFile(0)
            found = ocp.load_checkpointables(tmp_path / "a", {"object": loaded, "note": abstract, "model": None})
            assert found["object"] is loaded and loaded.value == 5
            assert found["note"] == Note("7")
            assert_same(found["model"], {"w": np.ones(2, np.float32)})
        assert isinstance(ocp.checkpointables_metadata(tmp_path / "a").metadata["note"], AbstractNote)


def test_a_running_event_loop_is_no_obstacle(tmp_path: Path) -> None:
    import asyncio

    async def cell() -> None:
        ocp.save_checkpointables(tmp_path / "a", {"counter": Counter(5)})
        ocp.load_checkpointables(tmp_path / "a", {"counter": counter})

    counter = Counter(0)
    asyncio.run(cell())
    assert counter.value == 5


@pytest.mark.long
@pytest.mark.whole
@WRITES
def test_an_iterator_continues_where_it_was_saved(tmp_path: Path, write: str) -> None:
    import grain

    def iterator() -> Any:
        return iter(grain.MapDataset.range(10).to_iter_dataset())

    data = iterator()
    assert [next(data), next(data)] == [0, 1]
    with ocp.Context(write=write):
        ocp.save_checkpointables(tmp_path / "ours", {"state": tree(), "data": data})
    real.save_checkpointables(tmp_path / "theirs", {"state": tree(), "data": data})
    readings = [(ocp, "ours"), (ocp, "theirs"), *([(real, "ours")] if write == "orbax" else [])]
    for library, path in readings:
        other = iterator()
        found = library.load_checkpointables(tmp_path / path, {"data": other})
        assert found["data"] is other and next(other) == 2


def test_registries_refuse_what_is_there() -> None:
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(NoteHandler, "a", secondary_typestrs=["old.Name"])
    assert registry.has("a") and registry.get("a") is NoteHandler and not registry.has("b")
    assert registry.get_secondary_typestrs(NoteHandler) == ("old.Name",)
    for again in (lambda: registry.add(Counter, "c"), lambda: registry.add(ocp.handlers.JsonHandler, "a")):
        with pytest.raises(ValueError, match="expected"):
            again()
    with pytest.raises(KeyError):
        registry.get("b")


def test_damaged_checkpointables_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    real.save_checkpointables(tmp_path / "a", {"good": {"n": jnp.ones(2)}, "bad": tree()})
    (tmp_path / "a/bad/manifest.ocdbt").unlink()
    about = ocp.checkpointables_metadata(tmp_path / "a").metadata
    assert about["bad"] is None and about["good"]["n"].shape == (2,) and "bad is damaged" in caplog.text
    for call in (ocp.load, ocp.metadata):
        with pytest.raises(CorruptError):
            call(tmp_path / "a", checkpointable_name="bad")


# A run


@pytest.mark.long
@pytest.mark.whole
def test_a_loop_saves_by_policies(tmp_path: Path) -> None:
    save = policies.AnySavePolicy([policies.FixedIntervalPolicy(2), policies.SpecificStepsPolicy([5])])
    keep = keeping.AnyPreservationPolicy([keeping.LatestN(2), keeping.CustomSteps([2])])
    with ocp.training.Checkpointer(tmp_path, save_decision_policy=save, preservation_policy=keep) as ckpts:
        took = [ckpts.save(step, tree(step), metrics={"loss": step / 2}) for step in range(9)]
        assert took == [step % 2 == 0 or step == 5 for step in range(9)]
        assert [one.step for one in ckpts.checkpoints] == [2, 6, 8]
        latest = ckpts.latest
        assert (
            latest is not None and latest.metrics == {"loss": 4} and latest.path.name == "8" and latest.time is not None
        )
        assert not ckpts.should_save(8) and ckpts.should_save(10)
        assert_same(ckpts.load(), tree(8))
        assert_same(ckpts.load(latest, shapes(tree())), tree(8))
        assert ckpts.save(9, tree(9), force=True)
        assert ckpts.metadata(8).metrics == {"loss": 4}
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_dir()) == ["2", "8", "9"]
    with v0.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(None), tree(9))


def test_a_step_that_exists_is_replaced_only_on_request(tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, tree(1))
        for kind in (ocp.training.errors.StepAlreadyExistsError, FileExistsError, ValueError):
            with pytest.raises(kind, match="overwrite=True"):
                ckpts.save(1, tree(2))
        assert ckpts.save(1, tree(2), overwrite=True, metrics={"loss": 1}, custom_metadata={"a": 1})
        assert_same(ckpts.load(1), tree(2))
        assert ckpts.metadata(1).custom_metadata == {"a": 1} and ckpts.checkpoints[0].metrics == {"loss": 1}
        for call in (ckpts.load, ckpts.metadata, ckpts.load_checkpointables, ckpts.delete):
            with pytest.raises(FileNotFoundError):
                call(7)
        ckpts.delete(1)
        assert ckpts.latest is None
        with pytest.raises(ocp.training.errors.StepNotFoundError):
            ckpts.load()


@pytest.mark.parametrize(("first", "then"), [("treering", "orbax"), ("orbax", "treering")])
def test_a_step_of_the_other_format_is_not_replaced(tmp_path: Path, first: str, then: str) -> None:
    with ocp.Context(write=first), ocp.training.Checkpointer(tmp_path) as ckpts:
        ckpts.save(1, tree(1))
    before = files(tmp_path)
    with ocp.Context(write=then), ocp.training.Checkpointer(tmp_path) as ckpts:
        text = f"expected a step in the format '{then}' to replace, found one in '{first}'; delete step 1 first"
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError, match=text):
            ckpts.save(1, tree(2), overwrite=True)
        assert files(tmp_path) == before
        assert ckpts.delete(1) and ckpts.save(1, tree(2), overwrite=True)
        assert_same(ckpts.load(1), tree(2))


def test_background_saves_of_a_run(tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path, custom_metadata={"run": 1}) as ckpts:
        response = ckpts.save_async(3, tree(3))
        assert response is not None and ckpts.latest is not None and ckpts.latest.step == 3
        assert response.result(60) is True and not ckpts.is_saving_in_progress()
        assert ckpts.save_checkpointables(4, {"model": tree(4), "counter": Counter(5)})
        counter = Counter(0)
        found = ckpts.load_checkpointables(4, {"model": None, "counter": counter})
        assert_same(found["model"], tree(4))
        assert counter.value == 5 and set(ckpts.checkpointables_metadata().metadata) == {"model", "counter"}
    again = ocp.training.Checkpointer(tmp_path, custom_metadata={"run": 2})
    assert again.root_metadata() == ocp.training.RootMetadata(directory=again.directory, custom_metadata={"run": 1})
    tr.save(tmp_path / "9", tree(9))
    assert again.latest is not None and again.latest.step == 9


@pytest.mark.long
@pytest.mark.whole
def test_a_load_waits_for_the_save_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, usual = threading.Event(), Disk.preallocate

    def slow(disk: Disk, fd: int, size: int) -> None:
        assert gate.wait(30)
        usual(disk, fd, size)

    monkeypatch.setattr(Disk, "preallocate", slow)
    uses: list[Any] = [
        lambda ckpts: ckpts.load(),
        lambda ckpts: ckpts.load(1),
        lambda ckpts: ckpts.load_checkpointables()["state"],
        lambda ckpts: ckpts.metadata(),
        lambda ckpts: ckpts.checkpointables_metadata(1).metadata["state"],
    ]
    with concurrent.futures.ThreadPoolExecutor(5) as pool, ocp.training.Checkpointer(tmp_path) as ckpts:
        ckpts.save_async(1, tree(2))
        found = [pool.submit(use, ckpts) for use in uses]
        assert not concurrent.futures.wait(found, 0.2, concurrent.futures.FIRST_COMPLETED).done
        gate.set()
        for one in found[:3]:
            assert_same(one.result(), tree(2))
        assert found[3].result().metadata["w"] == found[4].result()["w"] and found[3].result().step == 1


@pytest.mark.long
@pytest.mark.whole
@WRITES
def test_a_run_of_orbax_is_continued(tmp_path: Path, write: str) -> None:
    """With Orbax's format, Orbax continues where the run ended."""
    names = real.path.step.standard_name_format(step_prefix="ckpt")
    with real.training.Checkpointer(tmp_path, step_name_format=names) as theirs:
        theirs.save(0, tree(0), metrics={"loss": 1.0})
        theirs.save(1, tree(1))
    keep = keeping.LatestN(2)
    with (
        ocp.Context(write=write),
        ocp.training.Checkpointer(tmp_path, step_name_format=names, preservation_policy=keep) as ours,
    ):
        assert [(one.step, one.metrics) for one in ours.checkpoints] == [(0, {"loss": 1}), (1, None)]
        assert_same(ours.load(0), tree(0))
        assert ours.save(2, tree(2), metrics={"loss": 0.5})
        assert [one.step for one in ours.checkpoints] == [1, 2]
    assert {one.name for one in tmp_path.glob("ckpt_*")} == {"ckpt_1", "ckpt_2"}
    if write == "orbax":
        with real.training.Checkpointer(tmp_path, step_name_format=names) as theirs:
            assert theirs.latest is not None and theirs.latest.step == 2 and theirs.latest.metrics == {"loss": 0.5}
            assert_same(theirs.load(2, shapes(tree())), tree(2))
            assert theirs.save(3, tree(3))


def test_a_context_applies_to_the_checkpointer(tmp_path: Path) -> None:
    partial = ocp.Context()
    partial.pytree.loading.partial_load = True
    with ocp.training.Checkpointer(tmp_path, context=partial) as ckpts:
        ckpts.save(0, tree())
        assert_same(ckpts.load(0, {"n": 0}), {"n": 3})
        with ocp.Context(), pytest.raises(MismatchError):
            ckpts.load(0, {"n": 0})
    refused = ocp.Context()
    refused.deletion.gcs_deletion_options.todelete_full_path = "trash"
    with pytest.raises(UnsupportedError, match="todelete_full_path"):
        ocp.training.Checkpointer(tmp_path, context=refused)


def test_threads_load_at_the_same_time(tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as ckpts, concurrent.futures.ThreadPoolExecutor(4) as pool:
        ckpts.save(0, tree())
        for found in pool.map(lambda _: ckpts.load(0), range(16)):
            assert_same(found, tree())


def test_a_variable_in_two_places_is_saved_in_both(tmp_path: Path) -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    given = {"model": nnx.state((model,)), "ema": nnx.state(model), "two": {"a": model.kernel, "b": model.kernel}}
    with ocp.training.Checkpointer(tmp_path) as ckpts:
        ckpts.save_checkpointables(1, given)
        for name, tree in given.items():
            found = ckpts.load_checkpointables(1, {name: jax.tree.map(jnp.zeros_like, tree)})[name]
            assert jax.tree.all(jax.tree.map(np.array_equal, found, tree)), name


@WRITES
def test_boxes_of_flax_are_levels(tmp_path: Path, write: str) -> None:
    model, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    real.save(tmp_path / "theirs", nnx.state(model))
    with ocp.Context(write=write):
        ocp.save(tmp_path / "ours", nnx.state(model))
    assert_same(ocp.load(tmp_path / "ours"), real.load(tmp_path / "theirs"))
    assert_same(ocp.load(tmp_path / "ours", nnx.state(other)), nnx.state(model))
    assert set(ocp.metadata(tmp_path / "ours").metadata["kernel"]) == {"value"}
    tr.convert(tmp_path / "ours", tmp_path / "back", format="orbax")
    assert_same(real.load(tmp_path / "back", nnx.state(other)), nnx.state(model))


def test_options_have_their_older_names(tmp_path: Path) -> None:
    context = ocp.Context()
    assert context.async_options is context.asynchronous and context.array_options is context.array
    assert not hasattr(context, "write_options") and not hasattr(context, "other")
    none = v0.pathways.CheckpointingImpl.from_options(use_colocated_python=False)
    context.pathways_options.checkpointing_impl = none
    with context:
        ocp.save(tmp_path / "a", tree())
    with pytest.raises(UnsupportedError, match=r"from_options\(use_colocated_python=True\) is not supported; use"):
        v0.pathways.CheckpointingImpl.from_options(use_colocated_python=True)


def test_the_old_names_warn(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="Use `save`"):
        ocp.save_pytree(tmp_path / "a", tree())
    with pytest.warns(DeprecationWarning, match="Use `load`"):
        assert_same(ocp.load_pytree(tmp_path / "a"), tree())
    with pytest.warns(DeprecationWarning, match="Use `metadata`"):
        ocp.pytree_metadata(tmp_path / "a")


def test_steps_of_version_0_are_loaded(tmp_path: Path) -> None:
    with real_v0.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=real_v0.args.StandardSave({"w": jnp.ones(2)}))
    with v0.CheckpointManager(tmp_path) as manager:
        args = v0.args.Composite(state=v0.args.StandardSave(tree()), config=v0.args.JsonSave({"lr": 1.5}))
        manager.save(1, args=args)
    with ocp.training.Checkpointer(tmp_path) as ckpts:
        assert [one.step for one in ckpts.checkpoints] == [0, 1]
        assert_same(ckpts.load(0), {"w": jnp.ones(2)})
        assert_same(ckpts.load(1), tree())
        assert ckpts.load_checkpointables(1, {"config": None}) == {"config": {"lr": 1.5}}
    assert issubclass(ocp.errors.InvalidLayoutError, TreeringError)


@pytest.mark.long
def test_several_processes(tmp_path: Path) -> None:
    """All processes save and load together, and see the same steps."""
    for one in run_job(tmp_path, "orbax_v1.several_processes", processes=2):
        assert one.report == [[True] * 4, 4, [3, 4], True, True, 4, True, {"a": 1}], one.output


@pytest.mark.slow
def test_all_processes_use_one_step(tmp_path: Path) -> None:
    """A process may see the directory late, as on a network disk."""
    for index, one in enumerate(run_job(tmp_path, "orbax_v1.all_processes_use_one_step", processes=2)):
        known = [1] if index else [1, 2]
        errors = ["StepNotFoundError", "StepAlreadyExistsError"]
        assert one.report == [known, [True] * 3, *errors, [True] * 2, [True, False]], one.output


@pytest.mark.parametrize("sent", ["text", 2**70, np.arange(3, dtype=">i4"), np.datetime64("2020-01-01")])
def test_one_process_broadcasts_anything(sent: Any) -> None:
    found, wanted = (one.broadcast_one_to_all({"x": sent})["x"] for one in (v0.multihost, real_v0.multihost))
    assert (found.dtype, found.tolist()) == (wanted.dtype, wanted.tolist())


@pytest.mark.slow
def test_a_broadcast_keeps_every_bit(tmp_path: Path) -> None:
    """JAX broadcasts by a sum in types of 32 bits, which changes large integers and the sign of zeros."""
    for one in run_job(tmp_path, "orbax_v1.a_broadcast_keeps_every_bit", processes=2):
        assert [name for name, _ in one.report] == ["TypeError"] * 2, one.output
