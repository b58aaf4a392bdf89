"""Runs the checkpoint tests of public programs with Orbax, and with the adapter after `treering migrate --write`.

The environment variable `TREERING_PROGRAMS` names the folder with the snapshots, git directories of the name
`owner+name`. A program whose snapshot or packages are not there is skipped.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from typing import NamedTuple

import pytest

from helpers import git_directory
from treering._tools.migrate import migrate


class Client(NamedTuple):
    """A snapshot, and its tests.

    folders: what is read of the snapshot. tests: the files in it that are run.
    needs: packages that the tests import and this project does not.
    differences: the tests that pass with Orbax alone, with the reason of each.
    """

    commit: str
    folders: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    differences: dict[str, str] = {}  # noqa: RUF012


CLIENTS = {
    "google/brax": Client(
        "0b96d05",
        ("brax", ":(exclude)brax/experimental"),
        ("brax/training/agents/ppo/checkpoint_test.py", "brax/training/agents/sac/checkpoint_test.py"),
        ("mujoco", "ml_collections"),
    ),
    "google/tunix": Client(
        "c7d8950f",
        ("tunix", "tests/sft"),
        ("tests/sft/checkpoint_manager_test.py", "tests/sft/checkpoint_options_test.py"),
        ("qwix", "perfetto"),
        {
            "CheckpointManagerTest.test_save": "looks for the directory of an item, which only Orbax's format has",
            "CheckpointManagerTest.test_restore_with_pathways_persistence": "Pathways",
        },
    ),
    "jax-ml/jax-ai-stack": Client("59de2e1", ("jax_ai_stack",), ("jax_ai_stack/tests/test_nnx_with_orbax.py",)),
    "keras-team/keras": Client("3422977a5e", ("keras",), ("keras/src/callbacks/orbax_checkpoint_test.py",)),
}


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("repository", CLIENTS)
def test_the_tests_of_a_client_do_the_same(repository: str, tmp_path: pathlib.Path) -> None:
    client, git = CLIENTS[repository], git_directory(repository)
    if git is None:
        pytest.skip(f"{repository}: no snapshot; TREERING_PROGRAMS names the folder that has them")
    if gone := [name for name in client.needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{repository}: its tests need {', '.join(gone)}")
    command = ["git", f"--git-dir={git}", "archive", "-o", str(tmp_path / "snapshot.tar"), client.commit]
    subprocess.run([*command, *client.folders], check=True)
    with tarfile.open(tmp_path / "snapshot.tar") as archive:
        archive.extractall(tmp_path / "orbax", filter="data")
    shutil.copytree(tmp_path / "orbax", tmp_path / "treering")
    done = migrate(str(tmp_path / "treering"), write=True)
    by_hand = {one.file for one in done.findings if one.what.endswith("names a module of Orbax; change it by hand")}
    for file in map(pathlib.Path, by_hand):
        file.write_text(re.sub(r"(?<=[\"'])orbax\.checkpoint\b", "treering.orbax", file.read_text()))
    assert done.changed or by_hand
    expected = outcomes(tmp_path / "orbax", client)
    if all(expected.values()):
        pytest.skip(
            f"{repository}: its tests do not run with Orbax here: {next(iter(expected.values()), 'none found')}"
        )
    found = outcomes(tmp_path / "treering", client)
    failed = {name: found.get(name, "was not run") for name, result in expected.items() if not result}
    assert {name: why for name, why in failed.items() if why and name not in client.differences} == {}
    assert [name for name in client.differences if failed.get(name) == ""] == []  # The list has no others.


def outcomes(folder: pathlib.Path, client: Client) -> dict[str, str]:
    """Runs the tests in a folder. Returns for each why it failed; "" for one that passed."""
    report = folder / "report.xml"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "jax", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *client.tests], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        problem = next((one for one in case if one.tag in ("failure", "error")), None)
        if case.find("skipped") is None:
            name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
            lines = [] if problem is None else [*(problem.text or problem.tag).strip().splitlines()]
            found[name] = "" if problem is None else lines[-1].strip()
    return found
