"""Migrates the programs below a path: reads them, edits them, and writes those that changed."""

import dataclasses
import difflib
import os
from typing import NamedTuple

from ... import stores
from . import files, findings, imports
from .program import Program, Unreadable


class Finding(NamedTuple):
    """A place that a person must change or check."""

    file: str
    line: int
    what: str


@dataclasses.dataclass
class Migration:
    """The result: files that change, findings, and files that could not be read or written, with the reasons.

    `looked_at` counts the files that were read. `links` and `notebooks` were not.
    """

    path: str
    looked_at: int
    changed: list[str]
    diff: str
    findings: list[Finding]
    notebooks: list[str]
    links: list[str]
    failed: dict[str, str]


def migrate(path: str, *, native: bool = False, write: bool = False) -> Migration:
    """Changes the programs at a path from Orbax to the adapter `treering.orbax`, or with `native` to Treering's calls.

    Without `write` it only computes the diff. Raises `OSError` if the path cannot be read.
    """
    found = files.find(path)
    result = Migration(path, 0, [], "", [], found.notebooks, found.links, found.failed)
    base = path if os.path.isdir(path) else os.path.dirname(path)
    for name in found.programs:
        try:
            _migrate_file(name, os.path.relpath(name, base or "."), native, write, result)
        except OSError as error:
            result.failed[name] = error.strerror or str(error)
    for name in found.notebooks:
        try:
            if _mentions_orbax(_read(name)):
                result.findings.append(Finding(name, 1, "notebooks are not read; change the imports by hand"))
        except OSError as error:
            result.failed[name] = error.strerror or str(error)
    return result


def _migrate_file(name: str, shown: str, native: bool, write: bool, result: Migration) -> None:
    source = _read(name)
    result.looked_at += 1
    if not _mentions_orbax(source):
        return
    try:
        program = Program(source)
        imports.rewrite(program, native=None)
        findings.report(program)
        after = program.edited()
    except Unreadable as error:
        result.findings.append(Finding(name, error.line, f"not changed: {error.reason}"))
        return
    except RecursionError:
        result.findings.append(Finding(name, 1, "not changed: nested too deeply"))
        return
    result.findings += [Finding(name, line, what) for line, what in sorted(program.findings)]
    if after == source:
        return
    if write:
        place = stores.absolute(name)
        with stores.get(place).new_file(place, overwrite=True) as file:
            file.write(after)
    result.changed.append(name)
    result.diff += _diff(shown, program.text(source), program.text(after))


def _read(name: str) -> bytes:
    with open(name, "rb") as file:
        return file.read()


def _mentions_orbax(source: bytes) -> bool:
    return b"orbax" in source


def _diff(name: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in lines)


def _lines(text: str) -> list[str]:
    # `splitlines` also splits at characters that do not end a line of a program.
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])
