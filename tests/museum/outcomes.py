"""Outcomes of a program that loses state in some library, and what each case of the museum says about itself."""

import enum
import logging
import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from treering.errors import TreeringError

_MISTAKES = (AttributeError, ImportError, NameError, TypeError, AssertionError)  # of a program, not of a library


class Outcome(enum.StrEnum):
    SILENT = "silent loss"
    WARNING = "warning"
    ERROR = "error"
    RIGHT = "right value"


class Case(NamedTuple):
    """A report. Each program returns True if the job continues with the state that was saved.

    report: owner/repository#number. summary: the report in one sentence. library: the one that is named there.
    version: the package and version that gave the outcome `today`.
    reported: the program of the report. It takes the module `orbax.checkpoint`, or an adapter, and a folder.
    native: the program with Treering. It takes a folder.
    says: a pattern. A warning, or an error of Treering, must match it: it must name the state that is lost.
    about_orbax: False if Orbax never sees the state that is lost, so no adapter can.
    adapter: the outcome of `reported` with `treering.orbax`.
    """

    report: str
    summary: str
    library: str
    version: str
    today: Outcome
    treering: Outcome
    says: str
    reported: Callable[[Any, pathlib.Path], bool]
    native: Callable[[pathlib.Path], bool]
    about_orbax: bool = True
    adapter: Outcome | None = None  # None for a case that is not about Orbax

    @property
    def row(self) -> str:
        """The case as a line of the table in benchmarks/results/museum.md."""
        repository, number = self.report.split("#")
        link = f"[{repository.split('/')[1]} {number}](https://github.com/{repository}/issues/{number})"
        adapter = (self.adapter or "not tried") if self.about_orbax else "–"
        return f"| {self.summary} {link} | {self.library} | {self.today} | {self.treering} | {adapter} |"


class _Received(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def outcome(program: Callable[[], bool], says: str) -> Outcome:
    """Runs a program. An error of Treering must match `says`, as a warning of any library must."""
    received, loggers = _Received(), [logging.getLogger(), logging.getLogger("absl")]
    for logger in loggers:
        logger.addHandler(received)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            right = program()
    except TreeringError as error:
        if not re.search(says, str(error)):
            raise
        return Outcome.ERROR
    except _MISTAKES:
        raise
    except Exception:
        return Outcome.ERROR
    finally:
        for logger in loggers:
            logger.removeHandler(received)
    if right:
        return Outcome.RIGHT
    messages = [*received.messages, *(str(warning.message) for warning in warned)]
    return Outcome.WARNING if any(re.search(says, message) for message in messages) else Outcome.SILENT
