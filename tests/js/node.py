"""Runs the package in `js` in one Node process. npm installs its dependency once, next to pytest."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
_INSTALL_SECONDS = 300
_MIN_MAJOR = 20


class UnavailableError(Exception):
    """The package cannot run: Node or npm is missing, or npm cannot reach its registry."""


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
    """Copies what npm would pack, and the tests, into a folder with the dependency. Raises `UnavailableError`."""
    _node()
    package = folder / "js"
    shutil.copytree(ROOT / "js", package, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(pathlib.Path(__file__).with_name("driver.mjs"), package)
    (package / "node_modules").symlink_to(_dependency() / "node_modules")
    return package


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise UnavailableError("the package in js needs Node, which is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < _MIN_MAJOR:
        raise UnavailableError(f"the package in js needs Node {_MIN_MAJOR}, found {version.strip()}")
    return node


def _dependency() -> pathlib.Path:
    """Returns the folder with the dependency. The first test process installs it. Raises `UnavailableError`."""
    import fcntl  # missing on Windows

    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("the package in js needs npm, which is not installed")
    folder = pathlib.Path(sys.prefix, "js")
    folder.mkdir(exist_ok=True)
    lock_file = (ROOT / "js" / "package-lock.json").read_bytes()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = folder / "installed.json"
        if not installed.exists() or installed.read_bytes() != lock_file:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(ROOT / "js" / name, folder)
            command = [npm, "ci", "--omit=dev", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
            if done.returncode:
                raise UnavailableError(f"npm cannot install hash-wasm: {done.stderr.strip()[-300:]}")
            installed.write_bytes(lock_file)
    return folder
