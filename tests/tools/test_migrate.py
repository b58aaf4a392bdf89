"""Tests that `treering migrate` changes programs from Orbax to the adapter, or to calls of Treering that do the same."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from treering._tools.migrate import Migration, migrate

# Imports and names, before and after.
IMPORTS = [
    ("import orbax.checkpoint as ocp  # why", "import treering.orbax as ocp  # why"),
    ("import os, orbax.checkpoint as ocp, sys", "import os, treering.orbax as ocp, sys"),
    ("from orbax import checkpoint as ocp", "from treering import orbax as ocp"),
    ("from orbax import checkpoint", "from treering import orbax as checkpoint"),
    ("from orbax.checkpoint import (\n    args,  # one\n    utils as u,\n)", "from treering.orbax import (\n    args,  # one\n    utils as u,\n)"),
    ("import orbax.checkpoint\nx = orbax . checkpoint.args", "import treering.orbax\nx = treering.orbax.args"),
    ("import orbax\nimport orbax.checkpoint\norbax.checkpoint.args", "import treering.orbax\nimport treering.orbax\ntreering.orbax.args"),
    ("import orbax.checkpoint as ocp\nimport orbax.checkpoint as ocp", "import treering.orbax as ocp\nimport treering.orbax as ocp"),
    ("import orbax.checkpoint.v1 as ocp", "import treering.orbax.v1 as ocp"),
    ("from orbax.checkpoint import v1 as ocp", "from treering.orbax import v1 as ocp"),
    ("import orbax.checkpoint.experimental.v1 as ocp", "import treering.orbax.v1 as ocp"),
    ("from orbax.checkpoint.experimental import v1 as ocp", "from treering.orbax import v1 as ocp"),
    ("from orbax.checkpoint.experimental.v1 import save", "from treering.orbax.v1 import save"),
    ("from orbax import checkpoint as ocp, export", "from treering import orbax as ocp\nfrom orbax import export"),
    ("import os; from orbax import export, checkpoint", "import os; from orbax import export; from treering import orbax as checkpoint"),
    (
        "def f():\n\ttry:\n\t\timport orbax.checkpoint as ocp\n\texcept ImportError:\n\t\tocp = None\n\tif ocp is None: return",
        "def f():\n\ttry:\n\t\timport treering.orbax as ocp\n\texcept ImportError:\n\t\tocp = None\n\tif ocp is None: return",
    ),
    ("if x: import orbax.checkpoint as ocp", "if x: import treering.orbax as ocp"),
    ("import orbax.checkpoint as ocp\ndef f(ocp): return ocp.type_handlers", "import treering.orbax as ocp\ndef f(ocp): return ocp.type_handlers"),
    ("import orbax.checkpoint as ocp\ndef f(m: 'ocp.args', /) -> ocp.args: f(ocp=1)", "import treering.orbax as ocp\ndef f(m: 'ocp.args', /) -> ocp.args: f(ocp=1)"),
    ("x = 'orbax'  # orbax.checkpoint", "x = 'orbax'  # orbax.checkpoint"),
]  # fmt: skip
# Lines that a person must look at: the program, the line, and the beginning of the text.
FINDINGS = [
    ("import orbax.checkpoint as ocp\n\nocp.type_handlers.X", 3, "ocp.type_handlers.X is not in treering.orbax; register"),
    ("from orbax.checkpoint import args, type_handlers as t\nt.X", 1, "orbax.checkpoint.type_handlers is not in"),
    ("import os\nfrom orbax.checkpoint._src.path import step", 2, "orbax.checkpoint._src.path.step is private to Orbax"),
    ("import orbax.checkpoint as ocp\nocp._src.x", 2, "ocp._src.x is private to Orbax"),
    ("from orbax.checkpoint.experimental.emergency import x", 1, "orbax.checkpoint.experimental.emergency.x is not in"),
    ("import orbax.checkpoint as ocp\nocp.NoSuch()", 2, "ocp.NoSuch is not in treering.orbax; see docs/migrate"),
    ("import orbax.checkpoint as ocp\nocp2 = ocp", 2, "ocp is used as a value; check by hand"),
    ("from orbax.checkpoint import *", 1, "from orbax.checkpoint import * hides the names"),
    ("import orbax\norbax.export.x(orbax.checkpoint.args)", 1, "this import stays; import orbax.checkpoint"),
    ("m = __import__('orbax.checkpoint')", 1, "the text 'orbax.checkpoint' names a module of Orbax"),
    ("import orbax.checkpoint as ocp\nf(1,\n  ocp.args.PyTreeRestore(t, transforms={'a': 1}))", 3, "transforms= is not in"),
    ("import orbax.checkpoint as ocp\nx = (", 2, "not changed: '(' was never closed"),
    ("# coding: nosuch\nimport orbax", 1, "not changed: unknown encoding"),
    ("# orbax\n" + "(" * 300, 2, "not changed: too many nested parentheses"),
]  # fmt: skip


def migrated(path: pathlib.Path, program: str | bytes, **options: bool) -> tuple[str, Migration]:
    """Writes and migrates a program, and returns its new text with the result."""
    path.write_bytes(program.encode() if isinstance(program, str) else program)
    done = migrate(str(path), write=True, **options)
    return path.read_bytes().decode(), done


@pytest.mark.parametrize(("before", "after"), IMPORTS)
def test_imports_become_those_of_the_adapter(before: str, after: str, tmp_path: pathlib.Path) -> None:
    found, done = migrated(tmp_path / "a.py", f"{before}\n")
    assert found == f"{after}\n" and done.findings == []


@pytest.mark.parametrize(("program", "line", "what"), FINDINGS)
def test_findings_name_the_line(program: str, line: int, what: str, tmp_path: pathlib.Path) -> None:
    _, done = migrated(tmp_path / "a.py", program)
    (found,) = done.findings
    assert (found.file, found.line) == (str(tmp_path / "a.py"), line) and found.what.startswith(what), found


SETUP = """
import os

import jax
import jax.numpy as jnp
import numpy as np

state = {"w": jnp.arange(6.0), "opt": [jnp.zeros(2), jnp.int32(3)]}
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def here(name):
    return os.path.abspath(name)


def show(tree):
    print(jax.tree.map(lambda x: (np.asarray(x).tolist(), str(x.dtype), isinstance(x, jax.Array)), tree))


"""
# Programs as users write them. Each prints the same before and after.
PROGRAMS = {
    "loop": """
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=2, create=True)
        with ocp.CheckpointManager(here("loop"), options=options) as manager:
            for step in range(10):
                manager.save(step, args=ocp.args.StandardSave(state), force=step == 9)
            manager.wait_until_finished()
            print(manager.latest_step(), sorted(manager.all_steps()))
            show(manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract)))
            manager.save(9, args=ocp.args.StandardSave(state))
    """,
    "resume": """
        import orbax.checkpoint as ocp

        def run(n):
            # Each job continues the run.
            manager = ocp.CheckpointManager(
                here("resume"),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=1,
                    keep_period=4,
                ),
            )
            tree, first = state, 0
            if manager.latest_step() is not None:
                first = manager.latest_step() + 1
                tree = manager.restore(first - 1, args=ocp.args.PyTreeRestore(
                    item=state, restore_args=ocp.checkpoint_utils.construct_restore_args(state)))
            for step in range(first, first + n):
                tree = jax.tree.map(lambda x: x + 1, tree)
                manager.save(step, args=ocp.args.PyTreeSave(tree))
            manager.close()
            print(first, manager.latest_step(), 4 in manager.all_steps())
            show(tree)

        run(3)
        run(4)
    """,
    "trainer": """
        from orbax import checkpoint as ocp

        class Trainer:
            def __init__(self, path):
                self.manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(
                    max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min", step_prefix="ckpt"))

            def save(self, step, loss):
                self.manager.save(step, args=ocp.args.StandardSave({"w": state["w"] * step}), metrics={"loss": loss})

            def best(self):
                self.manager.wait_until_finished()
                step = self.manager.best_step()
                return step, self.manager.restore(step, args=ocp.args.StandardRestore({"w": state["w"]}))

        trainer = Trainer(here("trainer"))
        for step, loss in enumerate([3.0, 1.0, 2.0, 0.5]):
            trainer.save(step, loss)
        print(trainer.best()[0])
        show(trainer.best()[1])
    """,
    "old": """
        import orbax.checkpoint
        from flax.training import orbax_utils

        checkpointer = orbax.checkpoint.PyTreeCheckpointer()
        options = orbax.checkpoint.CheckpointManagerOptions(max_to_keep=2, create=True)
        manager = orbax.checkpoint.CheckpointManager(here("old"), checkpointer, options)
        save_args = orbax_utils.save_args_from_target(state)
        for step in range(3):
            manager.save(step, state, save_kwargs={"save_args": save_args})
        manager.wait_until_finished()
        print(sorted(manager.all_steps()))
        show(manager.restore(2, items=state))
        checkpointer.save(here("single"), state, save_args=save_args)
        show(checkpointer.restore(here("single"), item=state))
    """,
    "functions": """
        from orbax.checkpoint import CheckpointManager, CheckpointManagerOptions, args

        def save(manager: CheckpointManager, step, tree):
            manager.save(step, args=args.StandardSave(tree))

        def load(target, *, manager):
            return manager.restore(None, args=args.StandardRestore(target))

        def main():
            mngr = CheckpointManager(here("functions"), options=CheckpointManagerOptions(max_to_keep=None))
            save(mngr, 1, state)
            mngr.wait_until_finished()
            show(load(abstract, manager=mngr))

        main()
    """,
    "single": """
        import orbax.checkpoint as ocp

        path = here("one")
        checkpointer = ocp.StandardCheckpointer()  # saves in the background
        checkpointer.save(path, state)
        # Wait for it.
        checkpointer.wait_until_finished()
        show(checkpointer.restore(path, abstract))
        with ocp.StandardCheckpointer() as c:  # again
            c.save(path, {"w": state["w"]}, force=True)
            c.wait_until_finished()
            show(c.restore(path, target={"w": state["w"]}))
            # the end
        show(ocp.PyTreeCheckpointer().restore(path, item={"w": state["w"]}))
        asynchronous = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), timeout_secs=60)
        if True:
            asynchronous.save(here("two"), args=ocp.args.StandardSave(state))
        asynchronous.wait_until_finished()
        show(asynchronous.restore(here("two"), args=ocp.args.StandardRestore(abstract)))
        asynchronous.close()
    """,
}
RUN = """
import runpy, sys
if sys.argv[1] == "native":
    sys.modules["orbax.checkpoint"] = sys.modules["treering.orbax"] = None  # Importing them is an error.
for name in sys.argv[2:]:
    runpy.run_path(name)
"""


def run(folder: pathlib.Path, kind: str) -> str:
    folder.mkdir()
    for name, program in PROGRAMS.items():
        (folder / f"{name}.py").write_text(SETUP + textwrap.dedent(program))
    if kind == "native":
        done = migrate(str(folder), to_native=True, write=True)
        assert sorted(os.path.basename(one) for one in done.changed) == sorted(f"{name}.py" for name in PROGRAMS)
        remarks = [("loop.py", "save_every="), ("old.py", "Treering sa")]
        assert [(os.path.basename(one.file), one.what[:11]) for one in done.findings] == remarks
    command = [sys.executable, "-W", "ignore", "-c", RUN, kind, *(f"{name}.py" for name in PROGRAMS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_converted_programs_do_the_same_without_orbax(tmp_path: pathlib.Path) -> None:
    before, after = run(tmp_path / "orbax", "orbax"), run(tmp_path / "native", "native")
    assert before == after and before.count("\n") > 2 * len(PROGRAMS)
