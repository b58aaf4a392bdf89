"""The arguments, handlers and names of the drop-in for Orbax."""

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering.orbax as ocp
from treering.errors import MismatchError, TreeringError, UnsupportedError
from treering.orbax import registration
from treering.orbax.errors import UnsupportedNameError


class _Own(ocp.CheckpointHandler):
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None: ...

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any: ...


@ocp.args.register_with_handler(_Own, for_save=True, for_restore=True)
@dataclasses.dataclass
class _OwnArgs(ocp.args.CheckpointArgs):
    text: str = ""


def test_the_import_takes_neither_jax_nor_numpy_nor_orbax() -> None:
    code = "import sys, treering.orbax; print(sorted({'jax', 'numpy', 'orbax', 'etils'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_name_that_is_listed_exists() -> None:
    for name in (
        "args",
        "checkpoint_args",
        "checkpoint_utils",
        "checkpointers",
        "handlers",
        "metadata",
        "options",
        "utils",
    ):
        assert getattr(ocp, name).__doc__
    assert ocp.type_handlers.ArrayRestoreArgs is ocp.ArrayRestoreArgs and ocp.checkpoint_manager.FileOptions
    assert ocp.checkpoint_manager.DEFAULT_ITEM_NAME == "default"
    assert ocp.PLACEHOLDER is ... and ocp.SaveArgs and ocp.Checkpointer and ocp.args.Composite
    for place in (ocp, ocp.args, ocp.v1.training):  # Such as a name of a later release.
        with pytest.raises(
            UnsupportedNameError, match=r"no attribute 'Nothing', and neither has Orbax .*migrate/orbax"
        ):
            _ = place.Nothing
        assert not hasattr(place, "Nothing") and getattr(place, "Nothing", None) is None


@pytest.mark.parametrize("name", ["type_handlers", "pathways", "serialization"])
def test_what_is_not_supported_says_so_when_it_is_used(name: str) -> None:
    stand_in = getattr(ocp, name)
    with pytest.raises(UnsupportedError, match=rf"treering\.orbax\.{name}\.Something is not supported; ") as error:
        _ = stand_in.Something
    assert "\n" not in str(error.value) and not hasattr(stand_in, "Something")
    with pytest.raises(UnsupportedError, match="use rules= of"):
        ocp.Transform(original_key="a")
    with pytest.raises(UnsupportedError, match="handler of your own"):
        ocp.args.ProtoSave(object())


@pytest.mark.long
@pytest.mark.whole
def test_copies_on_all_devices_become_one_array() -> None:
    devices = np.array(jax.local_devices())
    everywhere = NamedSharding(Mesh(devices, ("data",)), PartitionSpec())
    together = ocp.utils.fully_replicated_host_local_array_to_global_array
    rows = jax.device_put(
        jnp.tile(jnp.arange(3), (len(devices), 1)), NamedSharding(everywhere.mesh, PartitionSpec("data"))
    )
    for given in (jax.device_put(jnp.arange(3), everywhere), rows):
        found = together(given)
        assert found.is_fully_replicated and found.sharding.device_set == set(devices) and found.tolist() == [0, 1, 2]
    with pytest.raises(ValueError):
        together(jnp.arange(3))


def test_a_composite_is_a_constant_mapping_with_attributes() -> None:
    made = ocp.args.Composite(state=1, items=2)
    assert made.state == made["state"] == 1 and made["items"] == 2 and callable(made.items)
    assert set(made.keys()) == {"state", "items"} and "state" in made and made.get("no") is None
    assert made == ocp.args.Composite(items=2, state=1) and pickle.loads(pickle.dumps(made)) == made
    assert made | {"more": 3} == ocp.args.Composite(state=1, items=2, more=3)
    assert made & {"state": 0} == ocp.args.Composite(state=1)
    with pytest.raises(KeyError, match="there is no item 'no'; expected one of state, items"):
        _ = made.no
    with pytest.raises(ValueError, match="make a new Composite"):
        made.state = 2
    with pytest.raises(ValueError, match="__x"):
        ocp.args.Composite(__x=1)


def test_an_unknown_argument_is_an_error() -> None:
    for make in (ocp.args.StandardSave, ocp.args.PyTreeRestore, ocp.SaveArgs, ocp.RestoreArgs):
        with pytest.raises(TypeError, match="unexpected keyword"):
            make(nothing=1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        ocp.StandardCheckpointHandler(nothing=1)


def test_an_option_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        ocp.PyTreeCheckpointHandler(save_concurrent_gb=7)
    assert [r.message for r in caplog.records if "save_concurrent_gb" in r.message] == [
        "PyTreeCheckpointHandler: save_concurrent_gb= has no effect; Treering chooses its own files and buffers"
    ]
    with pytest.raises(UnsupportedError, match="processes='this'"):
        ocp.PyTreeCheckpointHandler(multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes={1}))


def test_registered_arguments_and_handlers_are_found() -> None:
    assert ocp.args.get_registered_handler_cls(_OwnArgs) is ocp.args.get_registered_handler_cls(_OwnArgs("a")) is _Own
    assert ocp.args.get_registered_args_cls(_Own()) == (_OwnArgs, _OwnArgs)
    pair = ocp.args.get_registered_args_cls(ocp.StandardCheckpointHandler)
    assert pair == (ocp.args.StandardSave, ocp.args.StandardRestore)
    assert not ocp.args.has_registered_args(object())
    with pytest.raises(ValueError, match="neither"):
        ocp.args.register_with_handler(_Own)
    with pytest.raises(TypeError, match="must subclass"):
        ocp.args.register_with_handler(_Own, for_save=True)(int)
    with pytest.raises(ValueError, match="register_with_handler"):
        ocp.args.get_registered_handler_cls(type("Unregistered", (ocp.args.CheckpointArgs,), {}))


def test_a_registry_finds_handlers_by_item_and_arguments() -> None:
    registry = ocp.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.StandardSave)
    registry.add(None, _OwnArgs, _Own())
    assert isinstance(registry.get("state", ocp.args.StandardSave({})), ocp.StandardCheckpointHandler)
    assert registry.has(None, _OwnArgs) and not registry.has("state", _OwnArgs)
    with pytest.raises(ValueError, match="already exists"):
        registry.add("state", ocp.args.StandardSave)
    with pytest.raises(KeyError, match="no handler for item='state'"):
        registry.get("state", _OwnArgs)
    copied = ocp.DefaultCheckpointHandlerRegistry(registry)
    assert copied.get_all_entries().keys() == registry.get_all_entries().keys()
    with pytest.raises(ValueError, match="item_names and items_and_handlers"):
        ocp.CompositeCheckpointHandler("a", handler_registry=registry)


@pytest.mark.peers
def test_arguments_of_orbax_itself_and_of_grain_are_recognized() -> None:
    real = pytest.importorskip("orbax.checkpoint")
    grain = pytest.importorskip("grain.checkpoint")
    for theirs, kind in [
        (real.args.StandardSave({"a": 1}), "standard"),
        (real.args.PyTreeRestore(), "pytree"),
        (real.args.JsonSave({}), "json"),
        (real.args.ArraySave(1), "array"),
        (real.args.Composite(a=real.args.JsonRestore()), "composite"),
        (grain.CheckpointSave(iter([])), "iterator"),
    ]:
        assert registration.args_kind(theirs) == kind
    assert registration.handler_kind(real.StandardCheckpointHandler()) == "standard"
    assert registration.handler_kind(_Own()) == "own"
    assert registration.handler_kind(type("Mine", (ocp.JsonCheckpointHandler,), {"save": print})()) == "own"
    assert ocp.args.get_registered_handler_cls(real.args.JsonSave) is real.JsonCheckpointHandler


def test_arguments_of_another_handler_are_refused() -> None:
    with pytest.raises(MismatchError, match="StandardCheckpointHandler: expected its own arguments, found JsonSave"):
        registration.resolve(ocp.args.JsonSave({}), ocp.StandardCheckpointHandler())
    with pytest.raises(MismatchError, match="register_with_handler"):
        registration.resolve(object())


def test_restore_args_say_the_kinds_of_a_target() -> None:
    import jax
    import jax.numpy as jnp

    target = {"j": jnp.ones(2), "s": jax.ShapeDtypeStruct((3,), "int32"), "n": np.ones(1), "i": 1, "t": "a", "p": ...}
    made = ocp.checkpoint_utils.construct_restore_args(target)
    assert type(made["j"]) is ocp.ArrayRestoreArgs and made["j"].global_shape == (2,)
    assert made["j"].sharding == target["j"].sharding and made["j"].restore_type is jax.Array
    assert {name: one.restore_type for name, one in made.items() if name != "j"} == {
        "s": np.ndarray, "n": np.ndarray, "i": int, "t": str, "p": type(...),
    }  # fmt: skip
    placed = jax.tree.map(lambda _: target["j"].sharding, {"s": 0})
    (only,) = jax.tree.leaves(ocp.checkpoint_utils.construct_restore_args({"s": target["s"]}, placed))
    assert only.sharding == target["j"].sharding and only.dtype == np.int32
    with pytest.raises(ValueError, match="found a object"):
        ocp.checkpoint_utils.construct_restore_args({"a": object()})
    with pytest.raises(ValueError, match="expected shape= and global_shape= to be equal"):
        ocp.ArrayRestoreArgs(shape=(1,), global_shape=(2,))


def test_the_errors_are_those_of_both_libraries() -> None:
    from treering.orbax import errors

    for error, classes in [
        (errors.CheckpointExistsError, (ValueError, FileExistsError, TreeringError)),
        (errors.ItemNotFoundError, (KeyError, ValueError, FileNotFoundError, TreeringError)),
        (errors.UnsupportedNameError, (AttributeError, TypeError, TreeringError)),
    ]:
        assert all(issubclass(error, one) for one in classes)
        assert str(error("a: b")) == "a: b"
