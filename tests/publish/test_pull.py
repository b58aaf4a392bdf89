"""`treering pull`: a directory for engines that read Hugging Face's files."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

import treering as tr
from hostile_input import flip
from treering._cli.main import cli
from treering.errors import CorruptError, ExistsError, MismatchError, NotFoundError

pytest.importorskip("zstandard")


def _weights(version: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(20_000).astype(np.float32)
    w[: 10 * version] += 1.0
    return {"model.a.weight": w, "model.b.weight": np.full(3000, version, np.float32)}


def _publish(stream: pathlib.Path, *versions: int) -> None:
    with tr.Publisher(stream) as publisher:
        for version in versions:
            publisher.publish(version, _weights(version))


def _pull(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["pull", *map(str, arguments)])


def _read(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(directory / "model.safetensors")


def _version(directory: pathlib.Path) -> int:
    """Returns the version in a directory, and checks every weight."""
    found = _read(directory)
    version = int(found["model.b.weight"][0])
    expected = _weights(version)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
    return version


def test_a_directory_gets_a_version(tmp_path: pathlib.Path) -> None:
    stream, directory = tmp_path / "s", tmp_path / "model"
    _publish(stream, 1, 2, 3)
    assert "version 2\n" in _pull(stream, directory, "--version", 2).output and _version(directory) == 2
    (directory / "config.json").write_text("{}")
    assert "version 3\n" in _pull(stream, directory).output and _version(directory) == 3
    assert (directory / "config.json").read_text() == "{}"
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert "version 3, which was there" in _pull(stream, directory).output
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert {file.name for file in tmp_path.iterdir()} == {"s", "model"}


def test_what_cannot_be_pulled_is_named(tmp_path: pathlib.Path) -> None:
    stream, directory = tmp_path / "s", tmp_path / "model"
    assert "found nothing" in str(_pull(stream, directory).exception)
    _publish(stream, 1, 2)
    assert _pull(stream, directory, "--watch", "--version", 1).exit_code == 2
    assert isinstance(_pull(stream, directory, "--version", 9).exception, NotFoundError)
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert isinstance(_pull(stream, directory).exception, ExistsError)
    (file,) = (stream / "step-00000002").glob("*.safetensors")
    file.chmod(0o644)
    flip(file, file.stat().st_size - 3)
    assert isinstance(_pull(stream, tmp_path / "two", "--version", 2).exception, CorruptError)
    assert not (tmp_path / "two").exists()
    assert "version 1" in _pull(stream, tmp_path / "one").output and _version(tmp_path / "one") == 1
    from treering._publish.pull import pull

    with pytest.raises(MismatchError, match="or to watch for each newest one, found both"):
        next(pull(stream, directory, version=1, watch=True))


def test_watch_follows_until_the_end(tmp_path: pathlib.Path) -> None:
    stream, directory = tmp_path / "s", tmp_path / "model"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(_pull(stream, directory, "--watch")))
    thread.start()
    with tr.Publisher(stream) as publisher:
        for version in range(1, 6):
            publisher.publish(version, _weights(version)).result()  # type: ignore[union-attr]
            time.sleep(0.2)
        publisher.finish()
    thread.join(60)
    assert results[0].exit_code == 0 and _version(directory) == 5 and results[0].output.endswith("version 5\n")


_PULL = """
import itertools, sys
from treering._publish.pull import pull
print("ready", flush=True)
for version in itertools.cycle((1, 2)):
    for _ in pull(sys.argv[1], sys.argv[2], version=version):
        pass
"""


@pytest.mark.slow
def test_a_pull_is_killed_at_any_moment(tmp_path: pathlib.Path) -> None:
    """An engine that reads at any moment finds one version or the other, with its own files next to it."""
    stream, directory = tmp_path / "s", tmp_path / "model"
    _publish(stream, 1, 2)
    _pull(stream, directory)
    (directory / "config.json").write_text(json.dumps({"a": 1}))
    chance = random.Random(0)
    for _ in range(5):
        command = [sys.executable, "-c", _PULL, str(stream), str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            end = time.monotonic() + chance.uniform(0.1, 0.5)
            while time.monotonic() < end:
                assert _version(directory) in (1, 2)
            process.send_signal(signal.SIGKILL)
        assert _version(directory) in (1, 2) and json.loads((directory / "config.json").read_text()) == {"a": 1}
    for version in (1, 2):  # One of them is written, which removes leftovers.
        assert _pull(stream, directory, "--version", version).exit_code == 0 and _version(directory) == version
    assert sorted(os.listdir(tmp_path)) == ["model", "s"], "leftovers of killed jobs"
