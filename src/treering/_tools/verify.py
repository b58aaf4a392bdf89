"""Reads every byte of a checkpoint or run and reports all damage."""

import dataclasses
import os
from collections.abc import Collection

from .._core import printing
from .._core.source import Problem
from .._core.tracebacks import hide_internal_frames
from .._core.units import count, nbytes
from ..errors import UnsupportedError
from .check import check

UNFINISHED = "it has no manifest, so its save or copy is not complete"


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of `verify`. `problems` name the file, the leaves and the 1 MiB block. `nbytes` bytes were read.

    `unfinished` are steps that were not checked, because they have no manifest: their save or copy is not complete.
    `without_checksums` are checkpoints in formats whose checksums do not cover every byte: they were read and decoded,
    but changed values may not show. "." is `path` itself.
    """

    path: str
    nbytes: int
    problems: tuple[Problem, ...]
    unfinished: tuple[str, ...] = ()
    without_checksums: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        found = [(problem.file, str(problem)) for problem in self.problems]
        summary = good(self.without_checksums) if self.ok else count(len(found), "problem")
        unfinished = printing.listed("not checked", [(name, UNFINISHED) for name in self.unfinished])
        line = printing.line(nbytes(self.nbytes), summary, *unsummed(self.without_checksums))
        return printing.page(self.path, line, printing.listed("damage", found), unfinished)

    def __repr__(self) -> str:
        return f"<VerifyReport {self._head()}>"

    def __str__(self) -> str:
        not_checked = [f"  not checked: {name}: {UNFINISHED}" for name in self.unfinished]
        problems = [f"  {problem}" for problem in self.problems]
        unsummed_ = [f"  {line}" for line in unsummed(self.without_checksums)]
        return "\n".join([self._head(), *problems, *unsummed_, *not_checked])

    def _head(self) -> str:
        found = count(len(self.problems), "problem") if self.problems else good(self.without_checksums)
        unfinished = f", {len(self.unfinished)} unfinished" if self.unfinished else ""
        return f"{self.path}: {self.nbytes} bytes, {found}{unfinished}"


def good(without_checksums: Collection[str]) -> str:
    """Returns what a check that found no damage says."""
    return "no damage found" if without_checksums else "all good"


def unsummed(without_checksums: Collection[str]) -> list[str]:
    """Returns the line about checkpoints of which a check sees less, if there are any."""
    which = "" if [*without_checksums] == ["."] else f"of {count(len(without_checksums), 'checkpoint')}, "
    what = "only the structure was checked: the bytes were read, but the format has no checksums for all of them"
    return [f"{which}{what}"] if without_checksums else []


@hide_internal_frames
def verify(
    path: str | os.PathLike[str], *, subset: tuple[int, int] | None = None, format: str | None = None
) -> VerifyReport:
    """Checks every byte of a checkpoint, or of all steps of a run (of any library), against its checksum.

    Formats without checksums are read and decoded; see `VerifyReport.without_checksums`.

    >>> assert tr.verify("runs/gpt").ok

    subset: ``(2, 5)`` reads the second of five equal parts of the arrays' bytes. The five parts together are all bytes.
        Manifests and headers are checked each time. A part consists of blocks: 1 MiB in the native format, up to
        128 MiB in others. In other formats `nbytes` is then an estimate.
    format: the format to read, instead of the recognized one. In a run, only steps of this format are checked.

    Damage is reported, not raised. In a run, archived steps are checked too. Raises `NotFoundError` if there is nothing
    to check. After it has checked everything else, raises `UnsupportedError` for checkpoints of a later release, and
    `PermissionError` for those that this process may not read. The message says what damage was found.
    """
    checked = check(path, subset, format)
    report = VerifyReport(
        checked.path,
        checked.nbytes,
        tuple(checked.problems),
        tuple(checked.unfinished),
        tuple(checked.without_checksums),
    )
    unchecked = [*checked.unsupported, *checked.closed]
    if len(unchecked) == 1 and not checked.checkpoints and report.ok:
        raise unchecked[0]
    if unchecked:
        messages = "\n".join(f"  {error}" for error in unchecked)
        total = checked.checkpoints + len(unchecked)
        kind = UnsupportedError if checked.unsupported else PermissionError
        head = f"{report.path}: {len(unchecked)} of {total} checkpoints cannot be checked:"
        raise kind(f"{head}\n{messages}\nof the others, {report}")
    return report
