"""Finds the Python files below a folder."""

import dataclasses
import os
from collections.abc import Iterator

from ...errors import NotFoundError

_NOTEBOOK = ".ipynb"


@dataclasses.dataclass
class Files:
    """The files of a program, and what the search left out, as paths that begin with the given one."""

    programs: list[str] = dataclasses.field(default_factory=list)
    notebooks: list[str] = dataclasses.field(default_factory=list)
    links: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def find(path: str) -> Files:
    """Returns the Python files and notebooks below a folder, sorted, or the file itself.

    Links, hidden folders, ``__pycache__`` and virtual environments are left out. Raises `NotFoundError`, and `OSError`
    if the folder cannot be read.
    """
    found = Files()
    if not os.path.isdir(path):
        if not os.path.isfile(path):
            kind = "something else" if os.path.exists(path) else "nothing"
            raise NotFoundError(f"{path}: expected a Python file on a local disk, or a folder of them; found {kind}")
        (found.notebooks if path.endswith(_NOTEBOOK) else found.programs).append(path)
        return found
    os.listdir(path)
    for name in _walk(path, found):
        if name.endswith((".py", _NOTEBOOK)):
            if os.path.islink(name):
                found.links.append(name)
            elif not os.path.isfile(name):  # Opening a pipe would wait for its writer.
                found.failed[name] = "not a regular file"
            else:
                (found.programs if name.endswith(".py") else found.notebooks).append(name)
    return found


def _walk(path: str, found: Files) -> Iterator[str]:
    def fail(error: OSError) -> None:
        found.failed[str(error.filename)] = error.strerror or str(error)

    for folder, folders, names in os.walk(path, onerror=fail):
        inner = [os.path.join(folder, name) for name in sorted(folders) if not _is_skipped(os.path.join(folder, name))]
        found.links += [name for name in inner if os.path.islink(name)]
        folders[:] = [os.path.basename(name) for name in inner if not os.path.islink(name)]
        yield from (os.path.join(folder, name) for name in sorted(names))


def _is_skipped(folder: str) -> bool:
    name = os.path.basename(folder)
    return name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, "pyvenv.cfg"))
