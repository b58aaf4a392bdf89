"""Small programs that save with one library and restore with one: they do the same with Orbax and with the drop-in."""

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as real
import pytest
from flax import linen, nnx
from flax.training import orbax_utils, train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering.orbax as ocp

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # by Orbax
]
PROGRAMS: list[Callable[[Any, Any, Path], Any]] = []
# the library that saves, the one that restores, and the format that the drop-in writes
WAYS = {
    "drop-in": (ocp, ocp, "treering"),
    "drop-in, in Orbax's format": (ocp, ocp, "orbax"),
    "the drop-in reads": (real, ocp, "treering"),
    "Orbax reads": (ocp, real, "orbax"),
}


def program(function: Callable[[Any, Any, Path], Any]) -> Callable[[Any, Any, Path], Any]:
    PROGRAMS.append(function)
    return function


class Raised:
    """An error. It equals one that an `except` clause for a built-in class would catch, too."""

    def __init__(self, error: Exception):
        self.kinds = {kind.__name__ for kind in type(error).__mro__[:-3] if hasattr(builtins, kind.__name__)}
        self.text = f"{type(error).__name__}: {error}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and bool(self.kinds & other.kinds)

    def __repr__(self) -> str:
        return self.text


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return Raised(error)


class Leaf(NamedTuple):
    kind: str
    dtype: str
    shape: tuple[int, ...]
    values: Any
    place: str = ""


def described(found: Any) -> Any:
    """Returns a result as nested dicts and lists that can be compared."""
    name = type(found).__name__
    if isinstance(found, jax.Array):
        values = jax.random.key_data(found) if jnp.issubdtype(found.dtype, jax.dtypes.prng_key) else found
        where = found.sharding
        place = "one device" if len(where.device_set) == 1 else f"{where}"
        return Leaf("jax", str(found.dtype), found.shape, np.asarray(values).tolist(), place)
    if isinstance(found, np.ndarray):
        return Leaf("numpy", str(found.dtype), found.shape, found.tolist())
    if name in ("ArrayMetadata", "ScalarMetadata"):
        return Leaf(name, str(found.dtype), found.shape, None)
    if "TreeMetadata" in name:
        return described(found.tree)
    if name in ("Composite", "CompositeArgs"):
        return {name: described(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [name, *map(described, found)]
    if isinstance(found, dict):
        return {key: described(value) for key, value in found.items()}
    if found is None or isinstance(found, Raised | int | float | str):
        return found
    return [name, *map(described, jax.tree.leaves(found))]


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def tree(k: float = 1.0) -> dict[str, Any]:
    return {"w": jnp.arange(6.0).reshape(2, 3) * k, "n": jnp.int32(k)}


def shapes(of: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), of)


def manager(library: Any, path: Path, **options: Any) -> Any:
    return library.CheckpointManager(path, options=library.CheckpointManagerOptions(**options))


def save(library: Any, to: Any, step: int, what: Any = None, **given: Any) -> bool:
    return to.save(step, args=library.args.StandardSave(tree(step) if what is None else what), **given)


@program
def sharded_arrays(w: Any, r: Any, path: Path) -> Any:
    devices, explicit = jax.devices(), (jax.sharding.AxisType.Explicit,)
    meshes = [
        (Mesh(np.array(devices).reshape(4, 2), ("x", "y")), PartitionSpec("x", "y")),
        (Mesh(np.array(devices).reshape(2, 4), ("x", "y")), PartitionSpec(("x", "y"))),
        (Mesh(np.array(devices), ("x",), axis_types=explicit), PartitionSpec(None, "x")),
        (Mesh(np.array(devices[:4]), ("x",)), PartitionSpec()),
    ]
    what = [jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(*one)) for one in meshes]
    with w.StandardCheckpointer() as saver:
        saver.save(path / "a", what)
    other = NamedSharding(Mesh(np.array(devices), ("z",)), PartitionSpec("z"))
    target = [jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=other)] * len(what)
    one = r.ArrayRestoreArgs(mesh=other.mesh, mesh_axes=other.spec)
    with w.StandardCheckpointer() as saver:
        saver.save(path / "b", {"a": what[0], "n": jnp.int32(3)})
    like = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with jax.set_mesh(meshes[0][0]):
        found = r.StandardCheckpointer().restore(path / "b", {"a": like, "n": jax.ShapeDtypeStruct((), jnp.int32)})
        values = [found["a"], int(found["n"])]
    return [
        r.StandardCheckpointer().restore(path / "a"),
        r.StandardCheckpointer().restore(path / "a", shapes(what)),
        r.StandardCheckpointer().restore(path / "a", target),
        r.PyTreeCheckpointer().restore(path / "a", restore_args=[one] * len(what)),
        r.StandardCheckpointer().restore(path / "b", {"a": like, "n": jnp.int32(0)})["a"],
        values,
    ]


@program
def prefixes_in_one_directory(w: Any, r: Any, path: Path) -> Any:
    for prefix in ("gen", "disc", None):
        with manager(w, path, step_prefix=prefix, max_to_keep=2) as steps:
            for step in range(3):
                save(w, steps, step)
    found = []
    for prefix in ("gen", None, "other"):
        with manager(r, path, step_prefix=prefix, max_to_keep=1) as steps:
            found += [steps.all_steps(), save(r, steps, 5), steps.restore(5, args=r.args.StandardRestore(tree()))]
    return [*found, names(path)]


@program
def the_state_of_nnx(w: Any, r: Any, path: Path) -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)))
    with manager(w, path / "a") as steps:
        save(w, steps, 0, state)
    with manager(r, path / "a") as steps:
        raw = steps.restore(0, args=r.args.StandardRestore())
        abstract = nnx.eval_shape(lambda: nnx.state(Model(nnx.Rngs(0))))
        got = steps.restore(0, args=r.args.StandardRestore(abstract))
        return [raw, nnx.to_pure_dict(got), steps.restore(0, args=r.args.StandardRestore(raw)), steps.item_metadata(0)]


@program
def partitioned_parameters_and_an_optimizer(w: Any, r: Any, path: Path) -> Any:
    params = {"k": linen.Partitioned(jnp.ones((2, 2)), ("x", None)), "b": jnp.zeros(2)}
    tx = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = train_state.TrainState.create(apply_fn=lambda: None, params=params, tx=tx)
    with w.PyTreeCheckpointer() as saver:
        saver.save(path / "a", {"state": state, "empty": (), "none": None})
    like = {"state": state, "empty": (), "none": None}
    reader = r.PyTreeCheckpointer()
    return [
        reader.restore(path / "a"),
        reader.restore(path / "a", item=like),
        reader.metadata(path / "a").item_metadata,
    ]


@program
def the_first_lines_of_tutorials(w: Any, r: Any, path: Path) -> Any:
    root = w.test_utils.erase_and_create_empty(path / "run")
    (root / "old").mkdir()
    root = w.test_utils.erase_and_create_empty(str(path / "run"))
    what = {"model": tree(), "config": {"dim": np.array([1, 2]), "name": "x"}, "data": [jnp.ones(2), None, 3]}
    w.PyTreeCheckpointer().save(root / "one", what, save_args=orbax_utils.save_args_from_target(what))
    args = orbax_utils.restore_args_from_target(what)
    reader = r.PyTreeCheckpointer()
    return [names(root), reader.restore(root / "one"), reader.restore(root / "one", item=what, restore_args=args)]


@program
def a_checkpoint_that_is_replaced(w: Any, r: Any, path: Path) -> Any:
    """Replaces checkpoints of the library that saves, of Orbax and of the drop-in, and an empty folder."""
    (path / "empty").mkdir()
    w.PyTreeCheckpointer().save(path / "own", tree())
    real.PyTreeCheckpointer().save(path / "theirs", tree())
    ocp.PyTreeCheckpointer(write="treering").save(path / "ours", tree())
    found: list[Any] = []
    with w.StandardCheckpointer() as saver, r.StandardCheckpointer() as reader:
        for k, place in enumerate(("own", "theirs", "ours", "empty")):
            if place != "empty":
                found.append(attempt(saver.save, path / place, tree(9)))
            saver.save(path / place, tree(k), force=True)
            saver.wait_until_finished()
            found.append(reader.restore(path / place))
    return [*found, names(path)]


@program
def a_reader_that_comes_first(w: Any, r: Any, path: Path) -> Any:
    with manager(r, path / "run", read_only=True) as reader, manager(r, path / "run", create=False) as other:
        found = [reader.latest_step(), reader.all_steps(), other.latest_step(), attempt(reader.restore, None)]
        with manager(w, path / "run") as steps:
            save(w, steps, 3)
        reader.reload()
        return [*found, reader.latest_step(), reader.restore(3, args=r.args.StandardRestore(tree()))]


@program
def numbers_of_64_bits_in_jax(w: Any, r: Any, path: Path) -> Any:
    what = {"f": np.arange(3.0), "i": np.arange(3), "n": 3, "b": np.array([True])}
    with manager(w, path) as steps:
        steps.save(0, args=w.args.PyTreeSave(what))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    args = jax.tree.map(lambda _: r.ArrayRestoreArgs(sharding=place), what)
    with manager(r, path) as steps:
        return steps.restore(0, args=r.args.PyTreeRestore(restore_args=args))


@program
def policies_by_module(w: Any, r: Any, path: Path) -> Any:
    keep, when = w.checkpoint_managers.preservation_policy, w.checkpoint_managers.save_decision_policy
    options = {"preservation_policy": keep.AnyPreservationPolicy([keep.LatestN(1), keep.EveryNSteps(4)])}
    options["save_decision_policy"] = when.FixedIntervalPolicy(2)
    with manager(w, path, **options) as steps:
        took = [save(w, steps, step) for step in range(8)]
    with manager(r, path) as steps:
        return [took, steps.all_steps(), [steps.should_save(step) for step in (5, 6, 7)]]


@program
def an_item_by_its_path(w: Any, r: Any, path: Path) -> Any:
    args = w.args.Composite(state=w.args.StandardSave(tree()), config=w.args.JsonSave({"a": 1}))
    with manager(w, path / "several") as steps:
        steps.save(5, args=args)
    with manager(w, path / "one") as steps:
        save(w, steps, 5)
    with manager(w, path / "named") as steps:
        steps.save(5, args=w.args.Composite(default=w.args.StandardSave(tree())))
    w.Checkpointer(w.CompositeCheckpointHandler("state", "config")).save(path / "x", args=args)
    reader = r.StandardCheckpointer()
    places = [path / "several/5/state", path / "one/5/default", path / "named/5/default", path / "x/state"]
    found = [reader.restore(place) for place in places] + [reader.restore(place, tree()) for place in places]
    found += [reader.metadata(place).item_metadata for place in places]
    found += [r.Checkpointer(r.JsonCheckpointHandler()).restore(path / "several/5/config")]
    with manager(r, path / "named") as steps:
        found += [
            steps.restore(5, args=r.args.StandardRestore(tree())),
            attempt(reader.restore, path / "one/5/nothing"),
        ]
    return found


@program
def a_loop_that_is_continued_twice(w: Any, r: Any, path: Path) -> Any:
    log: list[Any] = []
    for library in (w, r, r):
        options = library.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=3)
        steps = library.CheckpointManager(str(path), options=options, item_names=("params", "loop"))
        begin, params, args = 0, jnp.zeros(()), library.args
        if (latest := steps.latest_step()) is not None:
            like: dict[str, Any] = {"params": args.StandardRestore({"p": params}), "loop": args.JsonRestore()}
            found = steps.restore(latest, args=args.Composite(**like))
            begin, params = found.loop["next"], found["params"]["p"]
        for step in range(begin, begin + 5):
            params = params + 1
            what: dict[str, Any] = {
                "params": args.StandardSave({"p": params}),
                "loop": args.JsonSave({"next": step + 1}),
            }
            log.append((step, float(params), steps.save(step, args=args.Composite(**what)), steps.latest_step()))
        steps.wait_until_finished()
        log.append(list(steps.all_steps()))
        steps.close()
    return [*log, names(path)]


@program
def a_part_of_a_tree(w: Any, r: Any, path: Path) -> Any:
    what = {"params": {"w": jnp.ones(2), "b": jnp.zeros(3)}, "opt": {"m": [jnp.ones(1), np.ones(2)]}, "step": 3}
    with manager(w, path) as steps:
        steps.save(0, args=w.args.PyTreeSave(what))
    part, skipped = {"params": {"w": jnp.zeros(2)}}, r.PLACEHOLDER
    rest = {"params": {"w": jnp.zeros(2), "b": skipped}, "opt": {"m": [skipped, skipped]}, "step": skipped}
    with manager(r, path) as steps:
        args = r.checkpoint_utils.construct_restore_args(part)
        found = [
            steps.restore(0, args=r.args.PyTreeRestore(item=part, transforms={}, restore_args=args)),
            steps.restore(0, args=r.args.PyTreeRestore(item=part, partial_restore=True)),
            steps.restore(0, args=r.args.PyTreeRestore(item=rest)),
            attempt(steps.restore, 0, args=r.args.PyTreeRestore(item=part)),
            attempt(steps.restore, 0, args=r.args.PyTreeRestore(item={**what, "more": jnp.ones(1)})),
        ]
        return [jax.tree.map(lambda leaf: 0 if leaf is ... else leaf, one) for one in found]


@program
def all_kinds_of_leaves_and_containers(w: Any, r: Any, path: Path) -> Any:
    what = {
        "numbers": [3, 2.5, True, float("inf")],
        "bits": {1: jnp.ones(2, jnp.bfloat16), 10: jnp.ones(2, jnp.float8_e4m3fn), 2: jnp.ones(2, jnp.int4)},
        "tuple": (jnp.ones(1), (np.ones(2), [None, {}])),
        "a.b": {"e f": np.ones(1, np.uint8), "empty": [], "none": None},
        "scalars": [np.array(1.5), jnp.array(True), jnp.int32(3)],
        "keys": [jax.random.key(1), jax.random.split(jax.random.PRNGKey(2), 2), jax.random.key(3, impl="rbg")],
    }
    found = []
    for kind in ("Standard", "PyTree"):
        saver, reader = (getattr(one, f"{kind}Checkpointer")() for one in (w, r))
        saver.save(path / kind, what)
        saver.close()
        found += [reader.restore(path / kind), reader.restore(path / kind, what)]
        found.append(reader.metadata(path / kind).item_metadata)
    return found


@program
def the_old_style(w: Any, r: Any, path: Path) -> Any:
    def handlers(library: Any) -> Any:
        return {"state": library.PyTreeCheckpointer(), "cfg": library.Checkpointer(library.JsonCheckpointHandler())}

    options = w.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    steps = w.CheckpointManager(path, handlers(w), options)
    kwargs = {"state": {"save_args": orbax_utils.save_args_from_target(tree())}}
    took = [steps.save(n, {"state": tree(n), "cfg": {"n": n}}, kwargs, metrics={"loss": -n}) for n in range(4)]
    steps = r.CheckpointManager(path, handlers(r), r.CheckpointManagerOptions())
    like = {"state": {"restore_args": orbax_utils.restore_args_from_target(tree())}}
    found = [steps.restore(3)[name] for name in ("state", "cfg")]
    return [
        took,
        found,
        dict(steps.restore(2, {"state": tree(), "cfg": None}, like)),
        steps.metrics(3),
        steps.all_steps(),
    ]


@program
def metadata_make_a_target(w: Any, r: Any, path: Path) -> Any:
    what = {"p": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "l": [np.ones(2), 3, 2.5]}
    w.PyTreeCheckpointer().save(path / "x", what)
    found = r.PyTreeCheckpointer().metadata(path / "x").item_metadata
    args = r.checkpoint_utils.construct_restore_args(found.tree)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found.tree)
    return [
        r.PyTreeCheckpointer().restore(path / "x", restore_args=args),
        r.StandardCheckpointer().restore(path / "x", like),
        sorted(found.keys()),
        jax.tree.map(lambda leaf: leaf.shape, found.tree),
    ]


@program
def arrays_that_change_after_the_call(w: Any, r: Any, path: Path) -> Any:
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    donated, numpy = jnp.zeros(1000), np.zeros(1000)
    with manager(w, path) as steps:
        for step in range(3):
            save(w, steps, step, {"a": donated, "n": numpy})
            donated, numpy[:] = add(donated), step + 1
    with manager(r, path) as steps:
        found = [steps.restore(step, args=r.args.StandardRestore()) for step in range(3)]
    return [(float(one["a"][7]), float(one["n"][7])) for one in found]


@program
def errors_within_a_run(w: Any, r: Any, path: Path) -> Any:
    def interrupted() -> None:
        with manager(w, path) as steps:
            save(w, steps, 1)
            raise RuntimeError("interrupted")

    found = [attempt(interrupted)]
    steps = manager(r, path)
    found += [list(steps.all_steps()), save(r, steps, 3)]
    steps.wait_until_finished()
    steps.delete(3)
    found += [steps.latest_step(), steps.should_save(2), save(r, steps, 2), attempt(save, r, steps, 2, force=True)]
    steps.close()
    return [*found, names(path)]


@pytest.mark.slow
@pytest.mark.parametrize("one", PROGRAMS, ids=lambda one: one.__name__)
def test_programs_do_the_same(one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Orbax").mkdir()
    expected = described(one(real, real, tmp_path / "Orbax"))
    for name, (writer, reader, write) in WAYS.items():
        monkeypatch.setenv("TREERING_ORBAX_WRITE", write)
        (place := tmp_path / re.sub(r"\W+", "-", name)).mkdir()
        assert described(one(writer, reader, place)) == expected, name


@pytest.mark.parametrize("library", [real, ocp], ids=["Orbax", "drop-in"])
def test_items_that_are_no_trees(library: Any, tmp_path: Path) -> None:
    state = np.random.RandomState(0).get_state()
    with manager(library, tmp_path) as steps:
        args = library.args
        items = {"key": args.NumpyRandomKeySave(state), "n": args.ArraySave(3), "json": args.JsonSave([1, {"a": None}])}
        steps.save(0, args=args.Composite(**items))
    expected = described({"key": state, "n": 3, "json": [1, {"a": None}]})
    args = ocp.args
    like = {"key": args.NumpyRandomKeyRestore(), "n": args.ArrayRestore(), "json": args.JsonRestore()}
    with manager(ocp, tmp_path) as steps:
        assert described(dict(steps.restore(0, args=args.Composite(**like)))) == expected
        if library is ocp:
            assert described(dict(steps.restore(0))) == expected
