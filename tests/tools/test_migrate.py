"""Tests that `treering migrate` moves programs from Orbax to the adapter, or to calls of Treering that do the same."""

import errno
import os
import pathlib
import stat
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

from orbax_names import names
from treering._tools.migrate import Migration, migrate
from treering.stores.posix import Disk, Entry

ALIAS, NEW_ALIAS = "import orbax.checkpoint as ocp", "import treering.orbax as ocp"
# Imports and names, before and after.
IMPORTS = [
    (f"{ALIAS}  # why", f"{NEW_ALIAS}  # why"),
    (f"{ALIAS}\n{ALIAS}", f"{NEW_ALIAS}\n{NEW_ALIAS}"),
    ("import os, orbax.checkpoint as ocp, sys", "import os, treering.orbax as ocp, sys"),
    ("from orbax import checkpoint as ocp", "from treering import orbax as ocp"),
    ("from orbax import checkpoint", "from treering import orbax as checkpoint"),
    ("from orbax.checkpoint import (args,  # one\n  utils)", "from treering.orbax import (args,  # one\n  utils)"),
    ("import orbax.checkpoint\nx = orbax . checkpoint.args", "import treering.orbax\nx = treering.orbax.args"),
    ("import orbax\nimport orbax.checkpoint as o", "import treering.orbax\nimport treering.orbax as o"),
    ("import orbax.x, orbax.checkpoint\norbax.x.y", "import orbax.x, treering.orbax\norbax.x.y"),
    ("import orbax.checkpoint.v1 as ocp", "import treering.orbax.v1 as ocp"),
    ("from orbax.checkpoint import v1 as ocp", "from treering.orbax import v1 as ocp"),
    ("import orbax.checkpoint.experimental.v1 as ocp", "import treering.orbax.v1 as ocp"),
    ("import orbax.checkpoint.v1\norbax.checkpoint.v1.save", "import treering.orbax.v1\ntreering.orbax.v1.save"),
    ("from orbax.checkpoint.experimental import v1 as ocp", "from treering.orbax import v1 as ocp"),
    ("from orbax.checkpoint.experimental.v1 import save", "from treering.orbax.v1 import save"),
    ("from orbax import checkpoint as o, export", "from treering import orbax as o\nfrom orbax import export"),
    ("x; from orbax import export, checkpoint as o", "x; from orbax import export; from treering import orbax as o"),
    (f"try:\n\t{ALIAS}\nexcept E: ocp = None\nif ocp: 1", f"try:\n\t{NEW_ALIAS}\nexcept E: ocp = None\nif ocp: 1"),
    (f"{ALIAS}\ndef f(ocp): return ocp.type_handlers", f"{NEW_ALIAS}\ndef f(ocp): return ocp.type_handlers"),
    (f"{ALIAS}\ndef f() -> 'ocp.args': f(ocp=1)", f"{NEW_ALIAS}\ndef f() -> 'ocp.args': f(ocp=1)"),
    ("x = 'orbax'  # orbax.checkpoint", "x = 'orbax'  # orbax.checkpoint"),
]  # fmt: skip
# Lines that a person must look at: the program, the line, and the beginning of the text.
FINDINGS = [
    (f"{ALIAS}\n\nocp.type_handlers.X", 3, "ocp.type_handlers.X is not in"),
    ("from orbax.checkpoint import args, serialization as t\nt.X", 1, "orbax.checkpoint.serialization is not in"),
    ("from orbax.checkpoint import type_handlers as t\nt.RestoreArgs, t.X", 2, "t.X is not in"),
    ("import os\nfrom orbax.checkpoint._src.path import step", 2, "orbax.checkpoint._src.path.step is private"),
    (f"{ALIAS}\nocp._src.x", 2, "ocp._src.x is private to Orbax"),
    ("from orbax.checkpoint.experimental.emergency import x", 1, "orbax.checkpoint.experimental.emergency.x is not in"),
    (f"{ALIAS}\nocp.NoSuch()", 2, "ocp.NoSuch is not in treering.orbax; see docs/migrate"),
    (f"{ALIAS}\nocp2 = ocp", 2, "ocp is used as a value; check by hand"),
    (f"{ALIAS}\nclass M(ocp.CheckpointManager):\n  def f(self):\n    self._a = 1\n    return self._checkpoints", 5,
     "self._checkpoints is private to CheckpointManager of Orbax"),
    (f"{ALIAS}\nclass M(ocp.CheckpointManager):\n  _a = 1\n  def _b(self): return self._a, super()._save(self._b)", 4,
     "super()._save is private to CheckpointManager of Orbax"),
    ("from orbax import checkpoint as o, export\no.NoSuch()\n", 3, "o.NoSuch is not in treering.orbax"),
    ("from orbax.checkpoint import *", 1, "from orbax.checkpoint import * hides the names"),
    ("import orbax.checkpoint\norbax.export.x(orbax.checkpoint.args)", 2, "nothing imports orbax any more; add import"),
    ("m = __import__('orbax.checkpoint')", 1, "the text 'orbax.checkpoint' names a module of Orbax"),
    (f"{ALIAS}\nf(1,\n  ocp.args.PyTreeRestore(t, transforms={{'a': 1}}))", 3, "transforms= is not in"),
    (f"{ALIAS}\nx = (", 2, "not changed: '(' was never closed"),
    ("import orbax.checkpoint.serialization\norbax.checkpoint.serialization.X", 1, "orbax.checkpoint.serialization is"),
    ("x = 1\n\x0cimport orbax", 1, "not changed: LibCST cannot reproduce this file exactly"),
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
    text, done = migrated(tmp_path / "a.py", program)
    (found,) = done.findings
    if "import orbax.checkpoint.serialization" in program or "_src.path" in program:  # no such module in the adapter
        assert text == program
    assert (found.file, found.line) == (str(tmp_path / "a.py"), line) and found.what.startswith(what), found


def test_lines_without_a_change_are_those_of_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("from orbax import checkpoint as o, export\no.NoSuch()\n")
    assert [one.line for one in migrate(str(path)).findings] == [2]
    assert [one.line for one in migrate(str(path), write=True).findings] == [3]
    assert path.read_text().splitlines()[2] == "o.NoSuch()"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_import_works_or_is_reported(tmp_path: pathlib.Path) -> None:
    """Each public name of the installed Orbax is imported in each way that Orbax allows."""
    statements: list[str] = []
    for path, value in names():
        module, _, name = f"orbax.checkpoint.{path}".rpartition(".")
        statements.append(f"from {module} import {name}")
        if isinstance(value, types.ModuleType):
            statements += [f"import {module}.{name} as m", f"import {module}.{name}"]
    statements = [one for one in dict.fromkeys(statements) if fails(one) is None]
    assert len(statements) > 300
    text, done = migrated(tmp_path / "a.py", "\n".join(statements))
    changed, reported = text.splitlines(), {one.line for one in done.findings}
    assert len(changed) == len(statements)
    wrong = {line: found for n, line in enumerate(changed, 1) if n not in reported and (found := fails(line))}
    assert wrong == {}


def fails(statement: str) -> str | None:
    try:
        exec(statement, {})
    except (ImportError, AttributeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "imports", ["import orbax", "import orbax\nimport orbax.export\nimport orbax.checkpoint as ocp"]
)
def test_full_names_stay_if_their_import_stays(imports: str, tmp_path: pathlib.Path) -> None:
    """Otherwise nothing would bind the new name."""
    local = "def f():\n    import orbax.checkpoint\n    return orbax.checkpoint.args"
    use = "orbax.export.x(orbax.checkpoint.args)"
    text, done = migrated(tmp_path / "a.py", f"{imports}\n{use}\n{local}\n")
    assert text.startswith(imports.replace("import orbax.checkpoint as", "import treering.orbax as"))
    assert text.endswith(f"{use}\n{local.replace('orbax.checkpoint', 'treering.orbax')}\n")
    assert [(one.line, one.what) for one in done.findings] == [
        (1, "this import stays; import orbax.checkpoint, so that migrate can change it"),
        (
            imports.count("\n") + 2,
            "orbax.checkpoint.args stays; import orbax.checkpoint, so that migrate can change it",
        ),
    ]


def base_names(paths: list[str]) -> list[str]:
    return sorted(map(os.path.basename, paths))


def test_files_keep_their_encoding_line_endings_and_mode(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.py"
    for before in (
        f"{ALIAS}\r\nx = 1\n".encode(),
        f"\ufeff{ALIAS}\n".encode(),
        f"# coding: latin-1\nx = '\xe9'\n{ALIAS}".encode("latin-1"),
    ):
        path.write_bytes(before)
        path.chmod(0o750)
        assert "treering" in migrate(str(path)).diff and path.read_bytes() == before
        assert migrate(str(path), write=True).changed == [str(path)]
        assert path.read_bytes() == before.replace(ALIAS.encode(), NEW_ALIAS.encode())
        assert stat.S_IMODE(path.stat().st_mode) == 0o750 and os.listdir(tmp_path) == ["a.py"]


def test_folders_are_searched_without_links_and_environments(tmp_path: pathlib.Path) -> None:
    root, outside = tmp_path / "code", tmp_path / "outside"
    for folder in (".git", ".venv", "__pycache__", "env", "pkg"):
        (root / folder).mkdir(parents=True)
        (root / folder / "a.py").write_text(ALIAS)
    (root / "env" / "pyvenv.cfg").touch()
    outside.mkdir()
    (outside / "b.py").write_text(ALIAS)
    (root / "linked").symlink_to(outside)
    (root / "c.py").symlink_to(outside / "b.py")
    (root / "other.py").write_text("x = 1")
    (root / "bad.py").write_bytes(b"# orbax \xff\n")
    (root / "with.ipynb").write_text(ALIAS)
    (root / "without.ipynb").touch()
    os.mkfifo(root / "pipe.py")
    done = migrate(str(root), write=True)
    assert done.changed == [str(root / "pkg" / "a.py")] and done.looked_at == 3
    assert base_names(done.links) == ["c.py", "linked"] and base_names(done.notebooks) == [
        "with.ipynb",
        "without.ipynb",
    ]
    assert done.failed == {str(root / "pipe.py"): "not a regular file"}
    assert base_names([one.file for one in done.findings]) == ["bad.py", "with.ipynb"]
    assert (outside / "b.py").read_text() == ALIAS


def test_a_file_that_is_edited_meanwhile_stays(tmp_path: pathlib.Path, use_disk: Any) -> None:
    edited = f"{ALIAS}\nrate = 3e-4\n"

    class Edited(Disk):
        def create(self, path: str) -> int:
            (tmp_path / "b.py").write_text(edited)  # when the first program is written
            return super().create(path)

    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(ALIAS)
    use_disk(Edited())
    done = migrate(str(tmp_path), write=True)
    assert done.failed == {str(tmp_path / "b.py"): "it was edited meanwhile and is not changed; migrate it again"}
    assert done.changed == [str(tmp_path / "a.py")] and "b.py" not in done.diff
    assert (tmp_path / "a.py").read_text() == NEW_ALIAS and (tmp_path / "b.py").read_text() == edited
    assert base_names(os.listdir(tmp_path)) == ["a.py", "b.py"]


def test_a_file_that_cannot_be_written_is_named_and_stays(tmp_path: pathlib.Path, use_disk: Any) -> None:
    class ReadOnly(Disk):
        def rename(self, old: Entry, new: Entry) -> None:
            if new.endswith("/a.py"):
                raise PermissionError(errno.EACCES, "Permission denied")
            super().rename(old, new)

    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(ALIAS)
    use_disk(ReadOnly())
    done = migrate(str(tmp_path), write=True)
    assert done.failed == {str(tmp_path / "a.py"): "Permission denied"} and done.changed == [str(tmp_path / "b.py")]
    assert (tmp_path / "a.py").read_text() == ALIAS and (tmp_path / "b.py").read_text() == NEW_ALIAS
    assert base_names(os.listdir(tmp_path)) == ["a.py", "b.py"]


def test_the_diff_is_a_patch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pkg").mkdir()
    for name, before in (("a.py", f"x\n{ALIAS}"), ("pkg/b.py", f"{ALIAS}\r\ny\r\n")):
        (tmp_path / name).write_bytes(before.encode())
    diff = migrate(str(tmp_path)).diff.encode()
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, check=True)
    assert (tmp_path / "a.py").read_bytes() == f"x\n{NEW_ALIAS}".encode()
    assert (tmp_path / "pkg" / "b.py").read_bytes() == f"{NEW_ALIAS}\r\ny\r\n".encode()


@pytest.mark.parametrize("path", ["src", ".", "src/train.py", "{root}/src"])
def test_git_applies_the_diff_from_the_current_folder(
    path: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(f"{ALIAS}\n")
    monkeypatch.chdir(tmp_path)
    path = path.format(root=tmp_path)
    done = subprocess.run([sys.executable, "-m", "treering", "migrate", path], capture_output=True, check=True)
    subprocess.run(["git", "apply"], input=done.stdout, check=True)  # git ignores the summary at the end
    assert (tmp_path / "src" / "train.py").read_text() == f"{NEW_ALIAS}\n"


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
        assert [(os.path.basename(one.file), one.what.split()[0]) for one in done.findings] == [
            ("loop.py", "save_every="), ("old.py", "Treering"), ("single.py", "overwrite="),
            ("trainer.py", "best_step()"),
        ]  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-c", RUN, kind, *(f"{name}.py" for name in PROGRAMS)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.whole
def test_converted_programs_do_the_same_without_orbax(tmp_path: pathlib.Path) -> None:
    before, after = run(tmp_path / "orbax", "orbax"), run(tmp_path / "native", "native")
    assert before == after and before.count("\n") > 2 * len(PROGRAMS)


# What `--native` leaves as it is, with the line and the beginning of the reason. `S` is `args=ocp.args.StandardSave`.
LEFT = {
    "m = ocp.CheckpointManager(d)\nm.item_metadata(1)": (3, "m stays with treering.orbax: item_metadata() has no"),
    "m = ocp.CheckpointManager(d)\nm.save(1, S(x))\nf(m)": (4, "m stays with treering.orbax: it is passed on"),
    "m = ocp.CheckpointManager(d)\nif m.save(1, S(x)): pass": (3, "m stays with treering.orbax: the result of save()"),
    "m = ocp.CheckpointManager(d)\nm.save(1, *a)": (3, "m stays with treering.orbax: * hides the arguments"),
    "m = ocp.CheckpointManager(d, item_names=n)": (2, "m stays with treering.orbax: item_names= has no counterpart"),
    "m = ocp.CheckpointManager(d, options=o)": (2, "m stays with treering.orbax: options=o is not made in the same"),
    "m = ocp.CheckpointManager(d)\nm = 1": (3, "m stays with treering.orbax: m is assigned another value"),
    "class A:\n  m = ocp.CheckpointManager(d)\n  def f(self): self.m.save(1, S(x))": (
        3,
        "m stays with treering.orbax: m",
    ),
    "class A:\n  def f(self): self.m = ocp.CheckpointManager(d)\na.m.save(1, S(x))": (
        4,
        "self.m stays with treering.orbax",
    ),
    "def f():\n  return ocp.CheckpointManager(d)": (
        3,
        "ocp.CheckpointManager stays with treering.orbax: a function returns it",
    ),
    "f(ocp.CheckpointManager(d))": (2, "ocp.CheckpointManager stays with treering.orbax: it is passed on"),
    "a.b = ocp.CheckpointManager(d)": (2, "ocp.CheckpointManager stays with treering.orbax: a.b = ocp.Ch"),
    "def f(m): m.save(1, S(x))": (2, "ocp.args.StandardSave stays with treering.orbax: the manager or check"),
    "a = ocp.utils.to_shape_dtype_struct(x)": (
        2,
        "ocp.utils.to_shape_dtype_struct stays with treering.orbax: Treering also takes the state itself",
    ),
    "a = ocp.utils.checkpoint_steps(d)": (2, "ocp.utils.checkpoint_steps stays with treering.orbax: nothing in this"),
    "def f(m=None): m.save(1)\nm = ocp.CheckpointManager(d)\nf(m)": (2, "m stays with treering.orbax: m has a default"),
    "def f(m): m.close()\nm = ocp.CheckpointManager(d)\nf(m)\nf(1)": (5, "m stays with treering.orbax: f is also used"),
    "c = ocp.StandardCheckpointer()\ndef f(c): c.save(p, x)\nf(c)": (3, "c stays with treering.orbax: it is passed"),
    "ocp.StandardCheckpointer().save(p,  # why\n  x)": (2, "ocp.StandardCheckpointer stays with treering.orbax: there"),
    "ocp.PyTreeCheckpointer().restore(p, restore_args=a)": (
        2,
        "ocp.PyTreeCheckpointer stays with treering.orbax: restore",
    ),
    "tr = treering = 1": (1, "everything stays with treering.orbax"),
}


@pytest.mark.parametrize("program", LEFT)
def test_forms_that_are_not_known_stay_and_are_reported(program: str, tmp_path: pathlib.Path) -> None:
    before = f"{ALIAS}\n{program.replace('S(', 'args=ocp.args.StandardSave(')}\n"
    found, done = migrated(tmp_path / "a.py", before, to_native=True)
    assert found == before.replace(ALIAS, NEW_ALIAS)
    line, what = LEFT[program]
    assert [one for one in done.findings if one.line == line and one.what.startswith(what)], done.findings


@pytest.mark.long
@pytest.mark.whole
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_can_move_to_the_adapter_first(name: str, tmp_path: pathlib.Path) -> None:
    program = SETUP + textwrap.dedent(PROGRAMS[name])
    adapted, _ = migrated(tmp_path / "a.py", program)
    assert "treering.orbax" in adapted.replace("from treering import orbax", "treering.orbax")
    assert migrated(tmp_path / "a.py", adapted)[0] == adapted
    assert (
        migrated(tmp_path / "a.py", adapted, to_native=True)[0]
        == migrated(tmp_path / "b.py", program, to_native=True)[0]
    )


CONTINUED = """
import orbax.checkpoint as ocp
import numpy as np

manager = ocp.CheckpointManager(here("run")OPTIONS)
start = 0 if manager.latest_step() is None else manager.latest_step() + 1
for step in range(start, start + 2):
    manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
manager.wait_until_finished()
print(start, np.asarray(manager.restore(start + 1, args=ocp.args.StandardRestore({"w": np.zeros(3, int)}))["w"])[0])
"""


@pytest.mark.long
@pytest.mark.parametrize("options", ["", "options=ocp.CheckpointManagerOptions(step_prefix='ckpt')", "options=None"])
def test_a_migrated_program_continues_its_run(options: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train.py"
    text = SETUP + CONTINUED.replace("OPTIONS", options and f", {options}")
    said: list[str] = []
    for native in (None, False, None, True, True):  # at first Orbax, later the adapter and twice Treering's own calls
        if native is not None:
            text, done = migrated(path, text, to_native=native)
            assert not done.findings
        path.write_text(text)
        ran = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.strip())
    assert said == ["0 1", "2 3", "4 5", "6 7", "8 9"] and "tr.Checkpointer" in text


def test_comments_of_removed_statements_stay(tmp_path: pathlib.Path) -> None:
    before = """\
import orbax.checkpoint as ocp  # one
def f(m: "ocp.CheckpointManager", path, tree):
    # two
    c = ocp.StandardCheckpointer()  # three

    c.save(path, tree)  # four
    if True:
        # five
        c.close()
    with ocp.StandardCheckpointer() as c:  # six
        # seven
        c.save(path, tree); c.close()
        # eight
    # nine
    c.wait_until_finished()
"""
    after = """\
import treering.orbax as ocp  # one
import treering as tr
def f(m: "ocp.CheckpointManager", path, tree):
    # two
    # three

    tr.save(path, tree)  # four
    if True:
        # five
        pass
    # six
    # seven
    tr.save(path, tree)
    # eight
    # nine
"""
    assert migrated(tmp_path / "a.py", before, to_native=True)[0] == after


def test_an_object_that_another_file_uses_stays(tmp_path: pathlib.Path) -> None:
    """A manager of a module or class, or a function that gets one, stays if another file uses it."""
    (tmp_path / "a.py").write_text(f"{ALIAS}\nm = ocp.CheckpointManager(d)\nm.close()\n")
    (tmp_path / "b.py").write_text(
        f"{ALIAS}\nclass T:\n  def __init__(self): self.mngr = ocp.CheckpointManager(d)\n"
        "def f(k): k.close()\ndef g():\n  n = ocp.CheckpointManager(d)\n  f(n)\n  n.latest_step()\n"
    )
    assert "tr.Checkpointer" in migrate(str(tmp_path), to_native=True).diff
    (tmp_path / "c.py").write_text("from a import m\nimport pkg.b as b\nT().mngr.save(1)\nb.f(1)\n")
    done = migrate(str(tmp_path), to_native=True)
    assert "tr.Checkpointer" not in done.diff
    assert [(os.path.basename(one.file), one.line, one.what.partition(": ")[2]) for one in done.findings] == [
        ("a.py", 2, "m may be used in other files"),
        ("b.py", 3, "self.mngr may be used in other files"),
        ("b.py", 4, "f may be called in other files"),
    ]
