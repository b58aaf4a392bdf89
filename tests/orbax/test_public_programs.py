"""Runs the checkpoint code of public programs with the adapter, and with Orbax.

The files of a program are read from a snapshot: a git directory with the name `owner+name` in the folder that the
environment variable `TREERING_PROGRAMS` names. Modules are imported from a fixed commit. For the adapter, each import
of Orbax is changed as docs/migrate/orbax.md says. A driver calls the functions of the program as its training loop
does.
"""

import collections
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

from helpers import git_directory

# by writer: the library, and the format of the adapter
WRITERS = {"orbax": ("orbax", ""), "treering": ("treering", "treering"), "treering-as-orbax": ("treering", "orbax")}
IMPORTS = [  # the one changed line, in its forms
    (r"^import orbax\.checkpoint\b", "import treering.orbax"),
    (r"^from orbax\.checkpoint\b", "from treering.orbax"),
    (r"^from orbax import checkpoint as\b", "from treering import orbax as"),
    (r"^from orbax import checkpoint$", "from treering import orbax as checkpoint"),
]


class Program(NamedTuple):
    """A snapshot, and a driver.

    packages: folders of the snapshot by the names of packages.
    stubs: modules that are imitated, because they need what is not installed, and the checkpoints do not.
    """

    commit: str
    drive: Callable[..., Iterator[Any]]
    packages: Mapping[str, str]
    stubs: tuple[str, ...] = ()


class Snapshot(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of a program."""

    def __init__(self, repository: str, program: Program, library: str):
        self._git, self._program, self._library = git_directory(repository), program, library

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not self._has(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def _has(self, name: str) -> bool:
        return name.split(".")[0] in {*self._program.packages, *(stub.split(".")[0] for stub in self._program.stubs)}

    def _is_stub(self, name: str) -> bool:
        return any(name == stub or name.startswith(stub + ".") for stub in self._program.stubs)

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock() if self._is_stub(spec.name) else None

    def exec_module(self, module: Any) -> None:
        name = module.__spec__.name
        top, *rest = name.split(".")
        if self._is_stub(name):
            return
        file = "/".join([self._program.packages[top], *rest]) + ".py"
        source = self._read(file)  # A package's own `__init__` imports all of the program, so it is left out.
        if source is not None:
            exec(compile(source, file, "exec"), module.__dict__)

    def _read(self, file: str) -> str | None:
        command = ["git", f"--git-dir={self._git}", "show", f"{self._program.commit}:{file}"]
        done = subprocess.run(command, capture_output=True, text=True)
        source = done.stdout if done.returncode == 0 else None
        if source is not None and self._library == "treering":
            for old, new in IMPORTS:
                source = re.sub(old, new, source, flags=re.MULTILINE)
        return source

    def __enter__(self) -> Callable[[str], Any]:
        sys.meta_path.insert(0, self)
        return importlib.import_module

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if self._has(name)]:
            del sys.modules[name]


class Net(nnx.Module):
    """A small model with batch statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.hidden(x))))


def trained(seed: int, steps: int) -> tuple[Net, nnx.Optimizer]:
    """Returns a model and its optimizer after some updates."""
    model = Net(nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for step in range(steps):
        x = jax.random.normal(jax.random.key(step), (16, 4))
        grads = nnx.grad(lambda model, x: (model(x) ** 2).mean())(model, x)
        optimizer.update(model, grads)
    return model, optimizer


# A driver saves with `saving`. Without it, in another process, it restores, and yields what it found and expected.


def openpi(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """A manager with `item_handlers`, an asynchronous handler of its own, and calls in the old style."""
    checkpoints, normalize = load("openpi.training.checkpoints"), load("openpi.shared.normalize")
    model, _ = trained(0, 2)
    params = nnx.state(model)
    tx = optax.adam(1e-3)
    state = State(jnp.int32(7), params, tx.init(nnx.state(model, nnx.Param)), jax.tree.map(lambda x: x * 2, params))
    loader = types.SimpleNamespace(data_config=lambda: types.SimpleNamespace(norm_stats={"x": 1.5}, asset_id="robot"))
    normalize.save.side_effect = lambda path, stats: path.parent.mkdir(exist_ok=True) or path.write_text(str(stats))
    manager, resuming = checkpoints.initialize_checkpoint_dir(folder, keep_period=2, overwrite=False, resume=not saving)
    assert resuming != saving
    if saving:
        for step in (1, 2, 3):
            checkpoints.save_state(manager, state, loader, step)
        manager.wait_until_finished()
    else:
        assert list(manager.all_steps()) == [2, 3]
        yield checkpoints.restore_state(manager, jax.tree.map(jnp.zeros_like, state), loader), state


@struct.dataclass
class State:
    """The state of openpi: parameters, and an average of them."""

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any


def brax(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """A `PyTreeCheckpointer` for each call: `save_args` of Flax, metadata, and `RestoreArgs`; a file next to it."""
    checkpoint, statistics = load("brax.training.checkpoint"), load("brax.training.acme.running_statistics")
    ppo, array = load("brax.training.agents.ppo.networks"), load("brax.training.acme.specs").Array
    config = checkpoint.network_config(4, 2, True, ppo.make_ppo_networks)
    network = checkpoint.get_network(config, ppo.make_ppo_networks)
    normalizer = statistics.update(statistics.init_state(array((4,), jnp.float32)), jnp.arange(12.0).reshape(3, 4))
    params = [normalizer, network.policy_network.init(jax.random.key(1)), network.value_network.init(jax.random.key(2))]
    if saving:
        checkpoint.save(folder, 100, tuple(params), config)
        checkpoint.save(folder, 100, tuple(params), config)  # It replaces the checkpoint.
    else:
        expected = jax.tree.map(np.asarray, params)
        yield checkpoint.load(folder / f"{100:012d}"), expected
        assert '"action_size": 2' in (folder / f"{100:012d}" / "config.json").read_text()


def jax_measure_transport(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """NNX states in a `Composite`, by a manager with a prefix, and by `CompositeCheckpointHandler`."""
    checkpoint = load("utils.checkpoint")
    model, optimizer = trained(1, 3)
    states = nnx.state((model, optimizer)), nnx.state(model)
    blank = nnx.state(nnx.eval_shape(lambda: trained(0, 0))), nnx.state(nnx.eval_shape(lambda: trained(0, 0)[0]))
    options = {"save_interval_steps": 2, "max_to_keep": 2, "keep_period": 4}
    manager = checkpoint.build_checkpoint_manager(folder / "run", **options)
    if saving:
        for step in range(9):
            checkpoint.save_checkpoints(folder / "run", step, *states, mngr=manager)
        manager.wait_until_finished()
        checkpoint.save_checkpoints(folder / "single", 9, *states)
    else:
        assert list(manager.all_steps()) == [0, 4, 6, 8] and manager.latest_step() == 8
        restored = checkpoint.restore_checkpoints(folder / "run", 8, *blank, mngr=manager)
        yield (restored.state, restored.ema_state), states
        restored = checkpoint.restore_checkpoints(folder / "single", 9, *blank)
        yield (restored.state, restored.ema), states


def flatdino(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """`best_fn` and metrics, a `Composite` with JSON and a Grain iterator, `item_names`, managers that only read."""
    train, distributed = load("flatdino.train"), load("flatdino.distributed")
    jax.config.update("jax_compilation_cache_dir", None)  # The program chose one outside of the test's folder.
    model, optimizer = trained(2, 3)
    items, mesh = ["net", "optim", "loader", "config"], jax.make_mesh((1,), ("data",))
    numbers = iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset())
    if saving:
        holder = types.SimpleNamespace(get_state=lambda: {"net": nnx.to_pure_dict(nnx.state(model))})
        manager, _ = train.create_checkpoint_managers(folder, items, None, save_interval_steps=2, total_steps=7)
        for step, loss in enumerate([9.0, 5.0, 1.0, 5.0, 3.0, 5.0, 4.0, 2.0]):
            metrics = {"val/loss": loss}
            train.save_checkpoint(manager, step, holder, optimizer, numbers, Config(step), metrics)
            next(numbers)
        manager.wait_until_finished()
        return
    manager, step = distributed.open_restore_manager(folder, None, "", None, items)
    assert step == 7 and list(manager.all_steps()) == [2, 7]
    for _ in range(7):
        next(numbers)
    (new_model, new_optimizer), new = (
        trained(3, 0),
        iter(grain.MapDataset.range(100).shuffle(seed=1).batch(4).to_iter_dataset()),
    )
    distributed.restore_optimizer_state(manager, step, new_optimizer, mesh)
    yield nnx.to_pure_dict(nnx.state(new_optimizer)), nnx.to_pure_dict(nnx.state(optimizer))
    distributed.restore_model_state(manager, step, new_model, mesh, "net")
    yield nnx.to_pure_dict(nnx.state(new_model)), nnx.to_pure_dict(nnx.state(model))
    new = distributed.restore_data_loader(manager, step, new, graceful=False)
    yield next(new), next(numbers)


@dataclasses.dataclass
class Config:
    """A configuration of flatdino."""

    step: int
    name: str = "small"


class Pair(NamedTuple):
    """The items of kauldron."""

    net: Any
    timer: Any


def kauldron(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """Items that make their handlers and arguments, and an evaluator that waits for steps."""
    lazy, items = load("kauldron.checkpoints.lazy_checkpoint_manager"), load("kauldron.checkpoints.checkpoint_items")
    fields = {"__annotations__": {"w": Any, "n": Any}}
    item = struct.dataclass(type("Item", (items.StandardCheckpointItem,), fields))
    both = type("Both", (Pair, items.TopLevelCheckpointItem), {"DEFAULT_ITEM": "net"})
    state = both(item(w=jnp.arange(6.0).reshape(2, 3), n=jnp.int32(3)), item(w=jnp.ones(2), n=jnp.int32(1)))
    options = lazy.ocp.CheckpointManagerOptions(
        save_interval_steps=2,
        max_to_keep=2,
        step_prefix="ckpt",
        async_options=lazy.ocp.AsyncOptions(timeout_secs=60 * 30),
        multiprocessing_options=lazy.ocp.options.MultiprocessingOptions(),
    )
    run = lazy.LazyCheckpointManager(directory=folder, options=options, fast=False)
    if saving:
        for step in range(7):
            if run.should_save(step):
                run.save(state, step=step)
        run.wait_until_finished()
    else:
        assert (run.latest_step(), run.all_steps()) == (6, [4, 6])
        for step in run.iter_new_checkpoints(timeout=0):
            assert step == 6
            yield run.restore(jax.tree.map(jnp.zeros_like, state), step=step), state
        assert run.item_metadata(4)["timer"]["w"].shape == (2,)


def swirl_dynamics(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """A callback with `item_handlers`, metrics, and a forced save at the end."""
    callbacks, states = load("swirl_dynamics.templates.callbacks"), load("swirl_dynamics.templates.train_states")
    params = {"dense": {"kernel": jnp.arange(8.0).reshape(2, 4), "bias": jnp.ones(4, jnp.bfloat16)}}
    state = states.BasicTrainState.create(params=params, opt_state=optax.adam(1e-3).init(params))
    trainer = types.SimpleNamespace(is_distributed=False, _maybe_replicate=lambda x: x)
    options = sys.modules[callbacks.ocp.__name__].CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    callback = callbacks.TrainStateCheckpoint(folder, options=options)
    trainer.train_state = trainer.unreplicated_train_state = state
    callback.on_train_begin(trainer)
    if saving:
        for step in range(1, 6):
            trainer.train_state = trainer.unreplicated_train_state = state.replace(step=jnp.array(step))
            callback.on_eval_batches_end(trainer, {})
            callback.on_train_batches_end(trainer, {})
        callback.on_train_end(trainer)
    else:
        end = state.replace(step=jnp.array(5))
        yield trainer.train_state, end
        found = states.BasicTrainState.restore_from_orbax_ckpt(folder / "checkpoints", ref_state=state)
        yield found, end
        found = states.BasicTrainState.restore_from_orbax_ckpt(folder / "checkpoints")
        yield found.params, end.params


def recml(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """A subclass of the manager in the old style, for Keras; `construct_restore_args`, and `transforms={}`."""
    import keras

    utils = load("recml.core.utils.keras_utils")
    keras.utils.set_random_seed(0 if saving else 1)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    weights = [np.full(x.shape, i + 1, x.dtype) for i, x in enumerate(model.get_weights())]
    manager = utils.KerasOrbaxCheckpointManager(str(folder), max_to_keep=2)
    if saving:
        model.set_weights(weights)
        for epoch in range(3):
            manager.save_model_variables(model, epoch, {"loss": 1.0})
        manager.wait_until_finished()
    else:
        assert list(manager.all_steps()) == [1, 2]
        manager.restore_model_variables(model, 2)
        yield model.get_weights(), weights
        model.set_weights([x * 0 for x in weights])
        utils.restore_keras_model(model, str(folder))
        yield model.get_weights(), weights


def tunix(load: Callable[[str], Any], folder: pathlib.Path, saving: bool) -> Iterator[Any]:
    """Version 1: a `Context`, `training.Checkpointer` with checkpointables, and metadata of the program's own."""
    checkpoint = load("tunix.sft.checkpoint_manager")
    options = load("tunix.sft.checkpoint_options").TunixCheckpointingOptions(enable_async_checkpointing=True)
    manager = checkpoint.CheckpointManager(str(folder), options)
    model, optimizer = trained(4, 3)
    if saving:
        for step in (1, 2):
            assert manager.save(step, model, optimizer, force=True, custom_metadata={"epoch": step})
    else:
        new = trained(5, 0)
        assert manager.maybe_restore(*new) == (2, {"epoch": 2})
        yield nnx.state(new), nnx.state((model, optimizer))
    manager.close()


PROGRAMS = {
    "Physical-Intelligence/openpi": Program(
        "15a9616a00943ada6c20a0f158e3adb39df2ccac",
        openpi,
        {"openpi": "src/openpi"},
        ("openpi.shared", "openpi.training.data_loader", "openpi.training.utils"),
    ),
    "google/brax": Program("0b96d056328d15ea7ebfd3ce07f42be72ec76e40", brax, {"brax": "brax"}),
    "willisma/jax_measure_transport": Program(
        "c12ac49cf0d3f427d9eb23c5c49dc7109c5605b9", jax_measure_transport, {"utils": "utils"}
    ),
    "noctrog/flatdino": Program(
        "cdd398fde236fcae95f7e313f16b7001de5dee35",
        flatdino,
        {"flatdino": "flatdino"},
        (
            *("chex", "dacite", "einops", "jmp", "tyro", "wandb", "flatdino.data", "flatdino.pretrained"),
            *("flatdino.augmentations", "flatdino.eval", "flatdino.utils"),
        ),
    ),
    "google-research/kauldron": Program("c9b3ec86316cdfcfadd3c79f9bce074ea6333c04", kauldron, {"kauldron": "kauldron"}),
    "google-research/swirl-dynamics": Program(
        "7eeea7a53417ace1d485d58939e09faee0896f22",
        swirl_dynamics,
        {"swirl_dynamics": "swirl_dynamics"},
        ("clu", "gin", "matplotlib", "swirl_dynamics.templates.trainers", "swirl_dynamics.templates.utils"),
    ),
    "AI-Hypercomputer/RecML": Program(
        "c1d33cb79cdc044fc70c781bdc9c82119be85c0b", recml, {"recml": "recml"}, ("tensorflow",)
    ),
    "google/tunix": Program("c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3", tunix, {"tunix": "tunix"}),
}


def compare(found: Any, expected: Any) -> None:
    """Fails unless two trees have the same structure, and the same bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), (found, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes(), (one, other)


def main(action: str, repository: str, folder: str, *cases: str) -> None:
    """Saves, with writers as cases, or restores, with pairs of a reader and a writer. Prints the kinds of leaves."""
    program = PROGRAMS[repository]
    for case in cases:
        reader, _, writer = case.rpartition(":")
        library, written = WRITERS[writer]
        os.environ["TREERING_ORBAX_WRITE"] = written
        with Snapshot(repository, program, reader or library) as load:
            restored = list(program.drive(load, pathlib.Path(folder, writer), action == "save"))
        assert (action == "restore") == bool(restored)
        for found, expected in restored:
            compare(found, expected)
        kinds = collections.Counter(type(leaf).__name__ for found, _ in restored for leaf in jax.tree.leaves(found))
        print(sorted(kinds.items()), flush=True)


def run(*arguments: object) -> list[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("repository", PROGRAMS)
def test_public_program_restores_the_bits_that_it_saved(repository: str, tmp_path: pathlib.Path) -> None:
    """Each library restores what it saved, and what the other one saved, with the same kinds of leaves."""
    git, program = git_directory(repository), PROGRAMS[repository]
    if git is None:
        pytest.skip(f"{repository}: no git directory {repository.replace('/', '+')} in the folder TREERING_PROGRAMS")
    if subprocess.run(["git", f"--git-dir={git}", "cat-file", "-e", program.commit], capture_output=True).returncode:
        pytest.skip(f"{repository}: its git directory lacks the commit {program.commit}")
    run("save", repository, tmp_path, *WRITERS)
    pairs = [(reader, writer) for writer in WRITERS for reader in ("orbax", "treering")]
    cases = [f"{reader}:{writer}" for reader, writer in pairs if (reader, writer) != ("orbax", "treering")]
    kinds = run("restore", repository, tmp_path, *cases)
    assert len(kinds) == len(cases) and len(set(kinds)) == 1


if __name__ == "__main__":
    main(*sys.argv[1:])
