"""Migrates the programs below a path: reads them, edits them, and writes those that changed."""

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator
from typing import NamedTuple

from ... import stores
from . import files, findings, imports, native
from .program import Program, Unreadable
from .shared import Shared, shared_names


class Finding(NamedTuple):
    """A place that a person must change or check."""

    file: str
    line: int
    what: str


@dataclasses.dataclass
class Migration:
    """The result: files that change, findings, and files that could not be read or written, with the reasons.

    The lines of findings are those of the files as they are now.

    `looked_at` counts the programs that were read. Links were not, and of notebooks nothing is changed.
    """

    path: str
    looked_at: int
    changed: list[str]
    diff: str
    findings: list[Finding]
    notebooks: list[str]
    links: list[str]
    failed: dict[str, str]


class _Edited(NamedTuple):
    """A program before and after, as bytes and as text."""

    after: bytes
    texts: tuple[str, str]
    findings: list[tuple[int, str]]


def migrate(path: str, *, to_native: bool = False, write: bool = False) -> Migration:
    """Changes the programs at a path from Orbax to the adapter `treering.orbax`.

    With `to_native` it uses Treering's own calls for the objects of which every use is known. Without `write` it only
    computes the diff. Raises `OSError` if the path cannot be read.
    """
    found = files.find(path)
    result = Migration(path, 0, [], "", [], found.notebooks, found.links, found.failed)
    base = _base_of_diff(path)
    sources: dict[str, bytes] = {}
    for name in found.programs:
        with _noting_failure(name, result):
            sources[name] = _read(name)
    result.looked_at = len(sources)
    shared = shared_names(sources) if to_native else {}
    for name, source in sources.items():
        if not _mentions_orbax(source):
            continue
        try:
            done = _edited(source, shared.get(name))
        except (Unreadable, RecursionError) as error:
            line, reason = (error.line, error.reason) if isinstance(error, Unreadable) else (1, "nested too deeply")
            result.findings.append(Finding(name, line, f"not changed: {reason}"))
            continue
        lines: dict[int, int] = {}
        if done.after != source:
            with _noting_failure(name, result):
                if write:
                    _write(name, source, done.after)
                    lines = _new_lines(*done.texts)
                result.changed.append(name)
                result.diff += _diff(os.path.relpath(name, base), *done.texts)
        result.findings += [Finding(name, lines.get(line, line), what) for line, what in done.findings]
    for name in found.notebooks:
        with _noting_failure(name, result):
            if _mentions_orbax(_read(name)):
                result.findings.append(Finding(name, 1, "notebooks are not changed; change the imports by hand"))
    return result


def _base_of_diff(path: str) -> str:
    """Returns the folder to which the names in the diff are relative: the current one, where ``git apply`` runs.

    For a path elsewhere it is the given folder, or that of the file.
    """
    here = os.getcwd()
    if os.path.commonpath([os.path.realpath(path), os.path.realpath(here)]) == os.path.realpath(here):
        return here
    return path if os.path.isdir(path) else os.path.dirname(path) or "."


@contextlib.contextmanager
def _noting_failure(name: str, result: Migration) -> Iterator[None]:
    """Notes an error of the file system within a ``with`` block, so that the other files are still migrated."""
    try:
        yield
    except OSError as error:
        result.failed[name] = error.strerror or str(error)


def _edited(source: bytes, shared: Shared | None) -> _Edited:
    """Edits a program, to Treering's own calls if `shared` is given. Raises `Unreadable`."""
    program = Program(source)
    imports.rewrite(program, native=None if shared is None else native.rewrite(program, shared))
    findings.report(program)
    after = program.edited()
    return _Edited(after, (program.text(source), program.text(after)), sorted(set(program.findings)))


def _read(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()


def _write(name: str, source: bytes, after: bytes) -> None:
    """Writes a program. Raises `OSError` if it is no longer what was read, as after an edit in the meantime."""
    place = stores.absolute(name)
    with stores.get(place).new_file(place, overwrite=True) as file:
        file.write(after)
        if _read(name) != source:
            raise OSError("it was edited meanwhile and is not changed; migrate it again")


def _mentions_orbax(source: bytes) -> bool:
    return b"orbax" in source


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in lines)


def _new_lines(before: str, after: str) -> dict[int, int]:
    """Returns the numbers of lines after a change by those before it. A line that is gone has that of its place."""
    found: dict[int, int] = {}
    matcher = difflib.SequenceMatcher(None, _lines(before), _lines(after), autojunk=False)
    for _, begin, end, new_begin, new_end in matcher.get_opcodes():
        last = max(new_end - 1, new_begin)
        found.update((line + 1, min(new_begin + line - begin, last) + 1) for line in range(begin, end))
    return found


def _lines(text: str) -> list[str]:
    # `splitlines` also splits at characters that do not end a line of a program.
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])
