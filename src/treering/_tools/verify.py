"""Reading everything and reporting all damage."""

import dataclasses
import os

from .._core import html
from .._core.readable import count, nbytes
from .._core.source import Problem
from .._core.tracebacks import at_the_caller
from ..errors import UnsupportedError
from .check import check


@dataclasses.dataclass(frozen=True, repr=False)
class VerifyReport:
    """The result of `verify`: `problems` name the file, the leaves and the 1 MiB block; `nbytes` were read."""

    path: str
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def _repr_html_(self) -> str:
        found = [(problem.file, str(problem)) for problem in self.problems]
        said = "all good" if self.ok else count(len(found), "problem")
        return html.page(self.path, html.line(nbytes(self.nbytes), said), html.listed("damage", found))

    def __repr__(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "all good"
        return f"<VerifyReport {self.path}: {self.nbytes} bytes, {found}>"

    def __str__(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "all good"
        return "\n".join([f"{self.path}: {self.nbytes} bytes, {found}", *(f"  {problem}" for problem in self.problems)])


@at_the_caller
def verify(
    path: str | os.PathLike[str], *, subset: tuple[int, int] | None = None, format: str | None = None
) -> VerifyReport:
    """Checks every byte of a checkpoint, or of all steps of a run (of any library), against its checksum.

    >>> assert tr.verify("runs/gpt").ok

    subset: ``(2, 5)`` reads the second of five equal parts of the arrays' bytes; all five together read every byte.
        What is small (manifests, headers) is checked each time. Parts are equal as far as arrays can be read in part:
        blocks of 1 MiB in the native format, up to 128 MiB in others, of which `nbytes` then says about how much.
    format: the format to read it in, whatever it is recognized as; of a run, only steps of this format are checked.

    Damage is reported, not raised. Of a run, archived steps are checked, too. Raises `NotFoundError` when there is
    nothing to check, `UnsupportedError` for what a later release wrote, and `PermissionError` for what this process may
    not read; the last two when all else is checked: the message says what damage there is.
    """
    checked = check(path, subset, format)
    report = VerifyReport(checked.path, checked.nbytes, tuple(checked.problems))
    cannot = [*checked.unsupported, *checked.closed]
    if len(cannot) == 1 and not checked.parts and report.ok:
        raise cannot[0]
    if cannot:
        named = "\n".join(f"  {error}" for error in cannot)
        total = checked.parts + len(cannot)
        kind = UnsupportedError if checked.unsupported else PermissionError
        head = f"{report.path}: {len(cannot)} of {total} checkpoints cannot be checked:"
        raise kind(f"{head}\n{named}\nand of all else, {report}")
    return report
