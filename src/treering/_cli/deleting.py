"""The commands that delete steps of a run: prune, delete."""

import contextlib
import logging
import posixpath
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from .._core.units import count, nbytes
from .._printable import safe
from ..errors import TreeringError
from .arguments import PREFIX, STEP, Keep, union
from .output import FAILED, PATH, as_json, say, say_json
from .runs import open_run

_log = logging.getLogger("treering")  # The command prints it in the words of the shell.

if TYPE_CHECKING:
    from .._run.plain_run import PlainRun
    from .._tools.deletion import Inspection, RemovalResult
    from .._tools.listing import Row
    from ..keep import Policy


def _options(function: Any) -> Any:
    """Adds the options of both commands."""
    for option in (
        as_json,
        PREFIX,
        click.option("--no-verify", is_flag=True, help="Do not read the newest step that stays."),
        click.option("--yes", "-y", is_flag=True, help="Do not ask."),
        click.option("--dry-run", is_flag=True, help="Only print what would be deleted."),
    ):
        function = option(function)
    return function


@click.command()
@click.argument("run", type=PATH)
@click.argument("keep", nargs=-1, required=True, type=Keep())
@click.option("--to", metavar="DIR", type=PATH, help="Move the steps to this run instead of deleting them.")
@_options
def prune(
    run: str,
    keep: "tuple[Any, ...]",
    to: str | None,
    dry_run: bool,
    yes: bool,
    no_verify: bool,
    prefix: str | None,
    json_: bool,
) -> int:
    """Delete the steps of a RUN that no KEEP keeps. It first reads the newest valid step, which always stays.

    KEEP is last:N, last:TIME, every:N, every:TIME, best:N:METRIC:min (or max), size:BYTES, or steps:N,N,…; TIME is as
    in 12h, BYTES as in 50G. Pinned, damaged and unfinished steps stay, and so do links, steps that links lead to, and
    other libraries' steps. A damaged step of which only the manifest is left is deleted, unless --to is given. In a
    directory of runs it prunes each, and --to is a directory of runs, too.
    """
    from .. import stores
    from .._tools.runs_folder import scan_runs_folder

    policy = union(keep)
    assert policy is not None
    place = stores.absolute(run)
    folder = scan_runs_folder(stores.get(place), place, None, prefix)
    if folder is None or not folder.runs:
        return _prune(run, policy, to, prefix, dry_run=dry_run, yes=yes, no_verify=no_verify, json_=json_)
    found: list[dict[str, Any]] = []
    code = 0
    for one in folder.runs:
        name = posixpath.basename(one)
        if not json_:
            say(f"{safe(name)}:")
        try:
            below = None if to is None else posixpath.join(to, name)
            options = {"dry_run": dry_run, "yes": yes, "no_verify": no_verify, "json_": json_}
            code = max(code, _prune(one, policy, below, prefix, **options, report=found.append))
        except (TreeringError, PermissionError) as error:
            _log.error("not pruned: %s", error)
            code = FAILED
    if json_:
        say_json({"path": place, "runs": found})
    else:
        steps, size = sum(len(one["deleted"]) for one in found), sum(one["nbytes"] for one in found)
        verb = f"{'would be ' if dry_run else ''}{'deleted' if to is None else 'moved'}"
        say(f"{count(len(folder.runs), 'run')}: {count(steps, 'step')} {verb}, {nbytes(size)}")
    return code


def _prune(
    run: str,
    policy: "Policy",
    to: str | None,
    prefix: str | None,
    *,
    dry_run: bool,
    yes: bool,
    no_verify: bool,
    json_: bool,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Prunes one run, and returns the exit code. `report` takes what was done; without it, `json_` prints it."""
    from .. import stores
    from .._tools.listing import list_run

    directory = open_run(run, prefix)
    for step in sorted(policy.numbers):
        directory.committed_path(step)
    inspection = _inspection(not no_verify)
    place = None if to is None else stores.absolute_run(to)

    def choose() -> "list[Row]":
        listed = list_run(run, policy, prefix, inspection.inspect).rows
        rows = [row for row in listed if row.deleted]
        deletion.foreign = sum(row.format != "treering" for row in listed)
        if place is not None:
            rows = [row for row in rows if row.emptied is None]  # They cannot be copied.
            from .._tools.move import check_target_run

            check_target_run(directory, [row.path for row in rows], place)
        return rows

    deletion = _Deletion(directory, inspection, dry_run, json_, place, report=report)
    return deletion.carry_out(choose, yes=yes)


@click.command()
@click.argument("run", type=PATH)
@click.argument("steps", nargs=-1, required=True, type=STEP)
@click.option("--pinned", is_flag=True, help="Delete STEPS also if they are pinned.")
@_options
def delete(
    run: str,
    steps: tuple[int, ...],
    pinned: bool,
    dry_run: bool,
    yes: bool,
    no_verify: bool,
    prefix: str | None,
    json_: bool,
) -> int:
    """Delete STEPS of a RUN: all of them, or none if one is refused. It first reads a valid step that stays.

    Pinned steps are deleted only with --pinned, links and steps that links lead to never. While a job writes the run,
    its newest valid step is not deleted.
    """
    from .._tools.deletion import select_steps
    from .._tools.listing import list_run

    directory = open_run(run, prefix)
    inspection = _inspection(not no_verify)
    deletion = _Deletion(directory, inspection, dry_run, json_, pinned=pinned)

    def choose() -> "list[Row]":
        listing = list_run(run, prefix=prefix)
        deletion.needs_lock = listing.latest in steps
        return select_steps(directory, listing.rows, steps, pinned=pinned, inspect=inspection.inspect)

    return deletion.carry_out(choose, yes=yes)


def _inspection(enabled: bool) -> "Inspection":
    from .._tools.deletion import Inspection

    def on_begin(row: "Row") -> None:
        if sys.stderr.isatty():
            say(f"reading step {row.step}, {nbytes(row.nbytes or 0)}, the newest that would stay …", err=True)

    return Inspection(enabled, on_begin)


class _Deletion:
    """Asks the user, deletes or moves steps, and reports what was done, also after an interrupt."""

    def __init__(
        self,
        directory: "PlainRun",
        inspection: "Inspection",
        dry_run: bool,
        json_: bool,
        to: str | None = None,
        *,
        pinned: bool = False,
        report: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._directory, self._inspection = directory, inspection
        self._report_to = report or (say_json if json_ else lambda about: None)
        self._dry_run, self._json, self._to, self._pinned = dry_run, json_, to, pinned
        # True if the latest step is deleted. It needs the run's lock, because a job would continue from that step.
        self.needs_lock = False
        self.foreign = 0  # steps of other libraries, which always stay
        self._freed: int | None = None  # the bytes that deleting the chosen steps frees, if known

    def carry_out(self, choose: "Callable[[], list[Row]]", *, yes: bool) -> int:
        """Deletes or moves the chosen steps, and returns the exit code."""
        from .._tools.deletion import RemovalResult, listed_identities

        known = {} if self._dry_run else listed_identities(self._directory)
        rows = choose()
        self._freed = self._count_freed(rows)
        if self._dry_run:
            self._report(rows, RemovalResult(rows))
            return 0
        if rows and not yes:
            if self._json or not sys.stdin.isatty():
                what = "pass --yes, or --dry-run to see what would be deleted"
                why = "--json is given" if self._json else "stdin is not a terminal"
                raise click.UsageError(f"cannot ask, because {why}; {what}")
            self._say(rows, f"{count(len(rows), 'step')} would be")
            if not click.confirm("Delete them?" if self._to is None else "Move them?"):
                say(f"nothing was {self._verb}")
                return 1
            # A job may have saved, deleted or rewound while the question was open. Only what the user saw may go.
            now, still = listed_identities(self._directory), {(row.path, row.created) for row in choose()}
            rows = [
                row for row in rows if (row.path, row.created) in still and now.get(row.path) == known.get(row.path)
            ]
            self._freed = self._count_freed(rows)
        done = RemovalResult()
        try:
            if self.needs_lock and rows:
                self._directory.acquire_run()
            try:
                self._remove(rows, known, done)
            finally:
                self._report(rows, done)
        finally:
            self._directory.release()
        return FAILED if done.failed else 0

    def _remove(self, rows: "list[Row]", known: "dict[str, str | None]", done: "RemovalResult") -> None:
        from .._tools.deletion import remove_steps

        with contextlib.ExitStack() as stack:
            on_step = lambda: None  # noqa: E731
            if rows and sys.stderr.isatty() and not self._json:
                bar = stack.enter_context(click.progressbar(length=len(rows), file=sys.stderr))
                on_step = lambda: bar.update(1)  # noqa: E731
            directory, inspection, pinned = self._directory, self._inspection, self._pinned
            remove_steps(directory, rows, known, inspection, done, to=self._to, pinned=pinned, on_step=on_step)

    def _report(self, rows: "list[Row]", done: "RemovalResult") -> None:
        for step, why in done.failed.items():
            say(f"step {step} is not {self._verb}: {safe(why)}", err=True)
        inspection = self._inspection
        about = {
            "path": self._directory.root,
            "deleted": [row.step for row in done.deleted],
            "nbytes": _size(done.deleted),
            "dry_run": self._dry_run,
            "failed": done.failed,
            "gone": done.gone,
            "to": self._to,
            "verified": inspection.verified_step,
            "damaged": inspection.damaged,
        }
        self._report_to(about)
        if self._json:
            return
        if not rows:
            others = f"; never deleted: {count(self.foreign, 'step')} of another library" if self.foreign else ""
            say(f"nothing to delete{others}")
            return
        some = count(len(rows), "step") if done.deleted == rows else f"{len(done.deleted)} of {len(rows)}"
        self._say(done.deleted, f"{some} would be" if self._dry_run else some)
        if done.gone:
            say(f"{len(done.gone)} deleted by another process meanwhile: {', '.join(map(str, done.gone))}")
        if not inspection.enabled:
            say("no step was read (--no-verify): the newest that stays may be damaged")
        elif inspection.verified_step is not None:
            say(f"step {inspection.verified_step}, which stays, was read and is good")

    @property
    def _verb(self) -> str:
        return "deleted" if self._to is None else "moved"

    def _say(self, rows: "Sequence[Row]", which: str) -> None:
        where = "" if self._to is None else f" to {safe(self._to)}"
        steps = ", ".join(str(row.step) for row in rows)
        say(f"{which} {self._verb}{where}, {nbytes(_size(rows))}{': ' if rows else ''}{steps}")
        if rows and self._freed is not None and self._freed < _size(rows):
            say(f"this frees at most {nbytes(self._freed)}: other steps share the remaining files")

    def _count_freed(self, rows: "Sequence[Row]") -> int | None:
        from .._tools.listing import freed_bytes

        steps, going = self._directory.steps, [row.path for row in rows]
        return freed_bytes(steps.store, going, set(steps.committed().values()) - set(going))


def _size(rows: "Sequence[Row]") -> int:
    return sum(row.nbytes or 0 for row in rows)


COMMANDS = (prune, delete)
