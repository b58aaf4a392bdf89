"""Migrates the programs below a path: reads them, edits them, and writes those that changed.

It reports the uses of Orbax that the adapter `treering.orbax` does not cover.
"""

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import libcst as cst

from ... import stores
from ...errors import NotFoundError
from . import imports, native
from .calls import descendants
from .program import ADAPTER, Program, Unreadable, dotted, problem_of, relative_name
from .variables import Shared, shared_names

_NOTEBOOK = ".ipynb"
_MODULE_TEXT = re.compile(r"orbax\.checkpoint(\.\w+)*")


@dataclasses.dataclass
class Files:
    """The files of a program, and what the search left out, as paths that begin with the given one."""

    programs: list[str] = dataclasses.field(default_factory=list)
    notebooks: list[str] = dataclasses.field(default_factory=list)
    links: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def find_files(path: str) -> Files:
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


def report_uncovered(program: Program) -> None:
    """Adds a finding for each use of Orbax that a person must change, unless an edit leaves it out."""
    missing: set[str] = set()  # Names whose import is reported. Their uses are not.
    for one in program.imports:
        inner = relative_name(one.full_name)
        if inner and one.alias not in program.consumed and (problem := problem_of(inner)):
            program.report(one.alias, f"{one.full_name} {problem}")
            missing.add(one.bound_name)
    for node, inner in program.references:
        if not program.is_consumed(node):
            _report_reference(program, node, inner, missing)
    for node in program.nodes:
        if isinstance(node, cst.ClassDef) and any(program.orbax_name(base.value) for base in node.bases):
            _report_private_attributes(program, node)
        if isinstance(node, cst.SimpleString) and not isinstance(program.parent(node), cst.Expr):
            value = node.evaluated_value
            if isinstance(value, str) and _MODULE_TEXT.fullmatch(value):
                program.report(node, f"the text {value!r} names a module of Orbax; change it by hand")


def _report_private_attributes(program: Program, subclass: cst.ClassDef) -> None:
    """Reports the private attributes that a subclass of a class of Orbax reads, and does not define itself."""
    own: set[str] = set()
    used: dict[cst.CSTNode, str] = {}
    for node in descendants(subclass):
        parent = program.parent(node)
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            own.add(node.name.value)
        elif isinstance(node, cst.Name) and isinstance(parent, cst.AssignTarget | cst.AnnAssign):
            own.add(node.value)
        elif isinstance(node, cst.Attribute) and program.code(node.value) in ("self", "cls", "super()"):
            name = node.attr.value
            if isinstance(parent, cst.AssignTarget) or (isinstance(parent, cst.AnnAssign) and parent.target is node):
                own.add(name)
            elif name.startswith("_") and not name.startswith("__"):
                used[node] = name
    base = next(name for one in subclass.bases if (name := program.orbax_name(one.value)))
    for node, name in used.items():
        if name not in own:
            program.report(node, f"{program.code(node)} is private to {base} of Orbax; use a public name")


def _report_reference(program: Program, node: cst.CSTNode, inner: str, missing: Collection[str]) -> None:
    text, parent = dotted(node) or "", program.parent(node)
    if not inner:
        if not isinstance(parent, cst.Comparison | cst.ComparisonTarget | cst.If):
            program.report(node, f"{text} is used as a value; check by hand which names are used through it")
    elif text.partition(".")[0] not in missing and (problem := problem_of(inner)):
        program.report(node, f"{text} {problem}")
    if isinstance(parent, cst.Call) and parent.func is node:
        for argument in parent.args:
            if argument.keyword and argument.keyword.value == "transforms" and program.code(argument.value) != "{}":
                advice = "use rules=[tr.rules.rename(old, new)] of tr.restore"
                program.report(argument, f"transforms= is not in {ADAPTER}, except {{}}; {advice}")


class Remainder(NamedTuple):
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
    findings: list[Remainder]
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
    found = find_files(path)
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
            result.findings.append(Remainder(name, line, f"not changed: {reason}"))
            continue
        lines: dict[int, int] = {}
        if done.after != source:
            with _noting_failure(name, result):
                if write:
                    _write(name, source, done.after)
                    lines = _new_lines(*done.texts)
                result.changed.append(name)
                result.diff += _diff(os.path.relpath(name, base), *done.texts)
        result.findings += [Remainder(name, lines.get(line, line), what) for line, what in done.findings]
    for name in found.notebooks:
        with _noting_failure(name, result):
            if _mentions_orbax(_read(name)):
                result.findings.append(Remainder(name, 1, "notebooks are not changed; change the imports by hand"))
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
    report_uncovered(program)
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
