"""The commands verify, which reads every byte of checkpoints and runs, and doctor, which tests a place for them."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .._core.units import count, nbytes, number
from .._printable import safe
from ..errors import NotFoundError, TreeringError
from .arguments import PREFIX, Bytes, Seconds, Subset
from .contents import FORMAT
from .output import FAILED, PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._tools.check import CheckResult
    from ..stores.probe import Finding


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--subset",
    type=Subset(),
    help="Read only a part: 2/5 is the second of five equal parts; 10G is a random part of about that size.",
)
@click.option(
    "--newer",
    type=Seconds(),
    help="Check only what was committed within this time, such as 7d. Without a record, the time of the file counts.",
)
@FORMAT
@PREFIX
@as_json
def verify(
    path: str,
    subset: tuple[int, int] | int | None,
    newer: float | None,
    format: str | None,
    prefix: str | None,
    json_: bool,
) -> int:
    """Check every byte of a checkpoint, or of a run's steps. Bytes are checked by checksum. Damage is exit code 1.

    Formats without checksums are only read and decoded, and the output says so. In a run it also checks the steps that
    a rewind archived. PATH may be a directory of runs and checkpoints. It names what it cannot check; the exit code is
    3 then, unless there is damage.
    """
    from .. import formats, stores
    from .._tools.runs_folder import scan_runs_folder

    since = None if newer is None else time.time() - newer
    place = stores.absolute(path)
    folder = scan_runs_folder(stores.get(place), place, None if format is None else formats.get(format), prefix)
    if folder is None:
        part, (checked,) = _check([place], subset, format, prefix, since)
        say_json({**_result_fields(checked), "part": part}) if json_ else _print_result(checked, part)
        return _exit_code([checked])
    part, found = _check([*folder.checkpoints, *folder.runs], subset, format, prefix, since, many=True)
    if json_:
        total = {"path": place, "ok": not _exit_code(found), "nbytes": sum(one.nbytes for one in found), "part": part}
        total["not_checked"] = folder.folders_below
        say_json({**total, "runs": [_result_fields(one) for one in found]})
        return _exit_code(found)
    for one in found:
        _print_result(one, part)
    for one in folder.folders_below:
        say(f"not checked: {safe(one)}, which has runs or checkpoints in it")
    numbers = [count(len(folder.runs), "run")] * bool(folder.runs)
    numbers += [count(len(folder.checkpoints), "checkpoint")] * bool(folder.checkpoints)
    numbers.append(nbytes(sum(one.nbytes for one in found)))
    if damaged := sum(bool(one.problems) for one in found):
        numbers.append(click.style(f"{damaged} with problems", fg="red"))
    if closed := sum(bool(one.unsupported or one.closed) for one in found):
        numbers.append(click.style(f"{closed} not checked completely", fg="yellow"))
    if unfinished := sum(len(one.unfinished) for one in found):
        numbers.append(count(unfinished, "unfinished step"))
    say(", ".join(numbers))
    return _exit_code(found)


def _check(
    paths: Sequence[str],
    subset: tuple[int, int] | int | None,
    format: str | None,
    prefix: str | None,
    since: float | None,
    *,
    many: bool = False,
) -> "tuple[tuple[int, int] | None, list[CheckResult]]":
    """Checks checkpoints or runs, and returns the part of their bytes that was read, and the results.

    With `many`, an error of one is part of its result, and the others are checked.
    """
    from .._tools.check import CheckResult, check

    part = _choose_part(paths, subset, format, prefix, many=many) if isinstance(subset, int) else subset
    found: list[CheckResult] = []
    for path in paths:
        try:
            found.append(check(path, part, format, prefix=prefix, since=since))
        except (TreeringError, PermissionError) as error:
            if not many:
                raise
            if isinstance(error, PermissionError):
                found.append(CheckResult(path, closed=[error]))
            else:
                found.append(CheckResult(path, unsupported=[] if _has_just_begun(path, prefix) else [error]))
    return part, found


def _has_just_begun(path: str, prefix: str | None) -> bool:
    """Returns True if a run has no committed step yet, which is not a failure in a directory of runs."""
    from .._tools.listing import list_run

    try:
        listing = list_run(path, prefix=prefix)
    except (TreeringError, PermissionError):
        return False
    return not listing.closed and all(row.state == "unfinished" for row in listing.rows)


def _exit_code(found: "Sequence[CheckResult]") -> int:
    if any(one.problems for one in found):
        return 1
    return 0 if all(one.ok for one in found) else FAILED


def _result_fields(checked: "CheckResult") -> dict[str, Any]:
    return {
        "path": checked.path,
        "ok": checked.ok,
        "nbytes": checked.nbytes,
        "checked": checked.checkpoints,
        "problems": [problem._asdict() for problem in checked.problems],
        "unsupported": [str(error) for error in checked.unsupported],
        "closed": [str(error) for error in checked.closed],
        "deleted": checked.deleted,
        "archived": checked.archived,
        "passed_over": checked.passed_over,
        "unfinished": checked.unfinished,
        "without_checksums": checked.without_checksums,
    }


def _print_result(checked: "CheckResult", part: tuple[int, int] | None) -> None:
    from .._tools.verify import UNFINISHED, unsummed

    which = "" if part is None else f", part {part[0]} of {part[1]}"
    say(f"{safe(checked.path)}: {nbytes(checked.nbytes)}{which}, {_result_text(checked)}")
    for problem in checked.problems:
        what = problem.what.replace(f"{checked.path}/", "")
        say(f"  {safe(problem._replace(what=what))}")
    for error in (*checked.unsupported, *checked.closed):
        what, listed, _ = str(error).replace(f"{checked.path}/", "").partition(":\n")  # reasons, one for each format
        say(f"  cannot be checked: {safe(what)}{'; `treering show` says why' if listed else ''}")
    for line in unsummed(checked.without_checksums):
        say(f"  {line}")
    for step in checked.deleted:
        say(f"  deleted meanwhile: {safe(step)}")
    for archived in checked.archived:
        say(f"  archived steps were also checked: {safe(archived)}")
    for step in checked.unfinished:
        say(f"  not checked: {safe(step)}: {UNFINISHED}")
    if checked.passed_over:
        say(f"  skipped, committed earlier: {count(checked.passed_over, 'checkpoint')}")


def _result_text(checked: "CheckResult") -> str:
    from .._tools.verify import good

    cannot = len(checked.unsupported) + len(checked.closed)
    if checked.problems:
        return click.style(count(len(checked.problems), "problem"), fg="red")
    if cannot:
        return click.style(
            f"{cannot} of {count(checked.checkpoints + cannot, 'checkpoint')} cannot be checked", fg="yellow"
        )
    if checked.checkpoints:
        text = click.style(good(checked.without_checksums), fg="green")
        if not checked.unfinished:
            return text
        return text + click.style(f", {count(len(checked.unfinished), 'unfinished step')} not checked", fg="yellow")
    return "nothing was checked" if checked.passed_over or checked.deleted else "nothing to check yet"


def _choose_part(
    paths: Sequence[str], max_bytes: int, format: str | None, prefix: str | None, *, many: bool
) -> tuple[int, int]:
    """Splits the bytes into equal parts of at most `max_bytes`. Returns the number of a random part, and of all parts.

    With `many`, a checkpoint of unknown size adds nothing to the total.
    """
    total = 0
    for path in paths:
        try:
            total += _total_bytes(path, format, prefix)
        except (TreeringError, PermissionError):  # The check reports the same error.
            if not many:
                raise
    parts = max(1, -(-total // max(max_bytes, 1)))
    return random.randint(1, parts), parts


def _total_bytes(path: str, format: str | None, prefix: str | None) -> int:
    """Returns the bytes of a checkpoint, or of a run's steps including archived ones."""
    from .._run.open import open_checkpoint
    from .._tools.listing import list_run

    try:
        listing = list_run(path, prefix=prefix)
    except NotFoundError:
        return open_checkpoint(path, format=format).nbytes
    total = sum(row.nbytes or 0 for row in listing.rows)
    for archived in listing.archived:
        # An empty archive has no size. The check names an unreadable one.
        with contextlib.suppress(NotFoundError, PermissionError):
            total += _total_bytes(archived, format, None)
    return total


@click.command()
@click.argument("place", type=PATH)
@click.option("--size", type=Bytes(), default="256M", show_default=True, help="Size of the test checkpoint in bytes.")
@as_json
def doctor(place: str, size: int, json_: bool) -> None:
    """Test the features and the speed of PLACE. It is a directory or the prefix of a bucket.

    Writes files there and removes them. Times a save and a restore of --size bytes: with checksums, and until the disk
    has the data. The exit code is 3 if the place cannot be tested; advice leaves it at 0.
    """
    from .._tools.doctor import examine

    findings = examine(place, size=size)
    if json_:
        say_json([dataclasses.asdict(one) for one in findings])
        return
    column = max(len(one.name) for one in findings)
    for one in findings:
        say(f"{one.name:{column}}  {_finding_text(one)}")
    for one in findings:
        if one.advice:
            say(f"{click.style(one.name, fg='yellow')}: {one.advice}")


def _finding_text(one: "Finding") -> str:
    from ..stores.probe import BYTES_PER_SECOND

    if isinstance(one.value, bool):
        return click.style("yes", fg="green") if one.value else click.style("no", fg="yellow")
    if isinstance(one.value, str):
        return safe(one.value)
    if one.unit == "seconds":
        return f"{number(one.value * 1e3)} ms"
    return nbytes(one.value) + ("/s" if one.unit == BYTES_PER_SECOND else "")


COMMANDS = (verify, doctor)
