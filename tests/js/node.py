"""Runs the package in `js` in one Node process."""

import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
_MIN_MAJOR = 20


class UnavailableError(Exception):
    """The package cannot run: Node is missing, or too old."""


class CallError(Exception):
    """A call raised an error in Node. `name` is its class there."""

    def __init__(self, name: str, message: str, stack: str) -> None:
        super().__init__(f"{name}: {message}\n{stack}")
        self.name, self.message = name, message


class Driver:
    """Calls the functions of driver.mjs. `package` is the folder of the package."""

    def __init__(self, process: subprocess.Popen[str], package: pathlib.Path) -> None:
        self._process = process
        self.package = package

    def __call__(self, call: str, *arguments: Any) -> Any:
        """Returns the result of a call. Raises `CallError`."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"call": call, "arguments": arguments}, default=str) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise CallError(answer["error"], answer["message"], answer["stack"])
        return answer["result"]


@contextlib.contextmanager
def driver(folder: pathlib.Path) -> Iterator[Driver]:
    """Yields the driver while the `with` block runs. `folder` gets a copy of the package. Raises `UnavailableError`."""
    package = _install(folder)
    command = [_node(), str(package / "driver.mjs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Driver(process, package)
        finally:
            process.kill()


def _install(folder: pathlib.Path) -> pathlib.Path:
    """Copies what npm would pack, and the tests, into a folder. Raises `UnavailableError`."""
    _node()
    package = folder / "js"
    shutil.copytree(ROOT / "js", package, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(pathlib.Path(__file__).with_name("driver.mjs"), package)
    return package


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise UnavailableError("the package in js needs Node, which is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < _MIN_MAJOR:
        raise UnavailableError(f"the package in js needs Node {_MIN_MAJOR}, found {version.strip()}")
    return node
