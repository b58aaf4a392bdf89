"""Runs the checkpoint code of public programs, with Orbax or with the adapter. Their files are read from snapshots.

A program is a folder `owner+name` (a git directory, bare or in `repo`) in the folder `TREERING_PROGRAMS`. A snapshot's
modules are imported from its commit; for the adapter, each import of Orbax is changed as docs/migrate/orbax.md says.
A driver calls the functions of the program as its training loop does, on states that are made here.

    python tests/orbax/public_programs.py save|restore PROGRAM orbax|treering FOLDER …
"""

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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct

IMPORTS = [  # the one changed line, in its forms
    (r"^import orbax\.checkpoint\b", "import treering.orbax"),
    (r"^from orbax\.checkpoint\b", "from treering.orbax"),
    (r"^from orbax import checkpoint as\b", "from treering import orbax as"),
    (r"^from orbax import checkpoint$", "from treering import orbax as checkpoint"),
]


class Program(NamedTuple):
    """A snapshot, and a driver.

    packages: folders of the snapshot by the names of packages; stubs: modules that are imitated, because they need what
    is not installed here, and checkpoints do not.
    """

    commit: str
    drive: Callable[..., Iterator[Any]]
    packages: Mapping[str, str]
    stubs: tuple[str, ...] = ()


def git_directory(repository: str) -> pathlib.Path | None:
    """Returns the git directory of a snapshot; None if there is none."""
    folder = pathlib.Path(os.environ.get("TREERING_PROGRAMS", ""), repository.replace("/", "+"))
    return next((path for path in (folder, folder / "repo", folder / ".git") if (path / "objects").is_dir()), None)


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
        source = self._read(file)  # A package's own `__init__` imports all of it, so it is left out.
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


# Each driver saves, pauses at `yield`, and restores what it yields. The test pauses by the end of the process: a driver
# is called twice, with `saving` and without.


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


PROGRAMS = {
    "Physical-Intelligence/openpi": Program(
        "15a9616a00943ada6c20a0f158e3adb39df2ccac",
        openpi,
        {"openpi": "src/openpi"},
        ("openpi.shared", "openpi.training.data_loader", "openpi.training.utils"),
    ),
}


def compare(found: Any, expected: Any) -> None:
    """Fails unless two trees have the same structure, and the same bits."""
    ours, theirs = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected), (found, expected)
    for one, other in zip(ours, theirs, strict=True):
        assert isinstance(one, type(other)) and np.asarray(one).dtype == np.asarray(other).dtype, (one, other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (one, other)


def main(action: str, repository: str, *cases: str) -> None:
    program = PROGRAMS[repository]
    for library, folder in zip(cases[::2], cases[1::2], strict=True):
        os.environ["TREERING_ORBAX_WRITE"] = "orbax" if folder.endswith("-orbax") else "treering"
        with Snapshot(repository, program, library) as load:
            restored = list(program.drive(load, pathlib.Path(folder), action == "save"))
        assert (action == "restore") == bool(restored)
        for found, expected in restored:
            compare(found, expected)
        print(action, repository, library, pathlib.Path(folder).name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
