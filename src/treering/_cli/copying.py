"""The commands that write checkpoints to other formats and places (convert, cp, pull), and migrate for programs."""

import contextlib
import dataclasses
import logging
import posixpath
import sys
from typing import TYPE_CHECKING, Any

import click

from .._core.units import count, nbytes
from .._printable import safe
from ..errors import TreeringError
from .arguments import BEST, MAX_EXPANSION, PREFIX, STEP, Bytes, FormatName, RenameOption, StepNumbers
from .listing import chosen_step
from .output import FAILED, PATH, as_json, say, say_json

if TYPE_CHECKING:
    from .._tools.convert import RunConversion
    from .._tools.copy import CopyResult
    from .._tools.migrate import Migration

_log = logging.getLogger("treering")  # The command prints it in the words of the shell.


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--format", type=FormatName(written=True), help="The format of TARGET; by default that of its suffix, or treering."
)
@click.option("--source-format", type=FormatName(), help="The format of SOURCE; by default recognized from its files.")
@click.option("--step", type=STEP, metavar="N", help="A step of a run; by default the latest valid one, for orbax all.")
@BEST
@click.option("--at", default="", metavar="PATH", help="Only the subtree at this path.")
@click.option("--drop", multiple=True, metavar="GLOB", help="Omit these leaves.")
@click.option("--rename", type=RenameOption(), multiple=True, help="Rename leaves, as treering.rules.rename does.")
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point arrays to this dtype.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint, atomically.")
@click.option(
    "--memory-limit", type=Bytes(), default="1G", show_default=True, help="Most bytes of arrays in memory at a time."
)
@MAX_EXPANSION
@click.option("--max-shard-size", type=Bytes(), help="safetensors: write a folder of files of at most this size.")
@click.option("--composite", is_flag=True, help="orbax: write one item for each top-level key, for Composite.")
@click.option("--dry-run", is_flag=True, help="Only print what would be written.")
@PREFIX
@as_json
def convert(
    source: str,
    target: str,
    format: str | None,
    source_format: str | None,
    step: int | None,
    best: tuple[str, str] | None,
    at: str,
    drop: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    dtype: str | None,
    overwrite: bool,
    memory_limit: int,
    max_expansion: float,
    max_shard_size: int | None,
    composite: bool,
    dry_run: bool,
    prefix: str | None,
    json_: bool,
) -> int:
    """Write the checkpoint SOURCE as TARGET, in any format. The memory that it takes is bounded.

    With --format orbax, all steps of a run become the directory of a CheckpointManager; the exit code is 1 if damaged
    ones are left behind. Rules are applied in the order drop, rename. It refuses to write a step of a run that a job
    writes.
    """
    from .. import formats, stores
    from .. import rules as r
    from .._run import external_writes
    from .._run.open import open_prefixed
    from .._save.target import SaveOptions
    from .._tools.convert import convert as write
    from .._tools.convert import convert_run, open_source, plan
    from .._tools.listing import is_run

    step = chosen_step(source, step, best, prefix)
    rules = [*(r.drop(glob) for glob in drop), *(r.rename(pattern, new) for pattern, new in rename)]
    options: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    if composite:
        options["composite"] = True
    what = SaveOptions(format, overwrite, rules, dtype, memory_limit, False, not (json_ or dry_run), options)
    place, to = stores.absolute(source), stores.absolute(target)
    # A target that is named as a step, such as orbax/30, or is in a run gets one step.
    is_step = posixpath.basename(to).isdecimal() or external_writes.enclosing_run(stores.get(to), to) is not None
    if format == "orbax" and step is None and not is_step and is_run(stores.get(place), place, prefix):
        about = {"source_format": source_format, "prefix": prefix, "at": at, "max_expansion": max_expansion}
        done = convert_run(source, target, what, **about, dry_run=dry_run)
        _say_run(done, dry_run=dry_run, json_=json_)
        return int(bool(done.left_behind))
    if prefix is not None:
        # The Python function has no prefix: it gets the path of the step.
        source, step = open_prefixed(source, prefix, step=step, format=source_format).path, None
    if dry_run:
        found = plan(open_source(source, target, step, source_format, at, max_expansion), target, what)
        if json_:
            say_json({**found._asdict(), "dry_run": True})
        else:
            leaves = count(found.leaves, "leaf", "leaves")
            say(f"{safe(found.path)}: would be written, {found.format}, {leaves}, {nbytes(found.nbytes)} of arrays")
        return 0
    place = stores.absolute(target)
    store = stores.get(place)
    run, replaces = external_writes.enclosing_run(store, place), overwrite and store.stat(place) is not None
    with contextlib.nullcontext() if run is None else external_writes.locked_run(store, run, replaces=replaces):
        report = write(
            source,
            target,
            step=step,
            source_format=source_format,
            format=format,
            at=at,
            rules=rules,
            dtype=dtype,
            overwrite=overwrite,
            memory_limit=memory_limit,
            max_expansion=max_expansion,
            progress=not json_,
            **options,
        )
    if json_:
        say_json({"path": report.path, "nbytes": report.nbytes, "seconds": report.seconds, "dry_run": False})
    else:
        written = formats.for_path(report.path, format).name
        say(f"{safe(report.path)}: {written}, {nbytes(report.nbytes)} in {report.seconds:.1f} s")
    return 0


def _say_run(done: "RunConversion", *, dry_run: bool, json_: bool) -> None:
    if json_:
        say_json({**dataclasses.asdict(done), "dry_run": dry_run})
        return
    steps = f"{count(len(done.written), 'step')} {'would be written' if dry_run else 'written'}"
    newest = f", the newest as {safe(posixpath.basename(done.written[-1]))}" if done.written else ""
    say(f"{safe(done.path)}: {steps}{newest}, {nbytes(done.nbytes)}{' of arrays' * dry_run}")


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--steps", type=StepNumbers(), metavar="N,N..N", help="Copy only these steps of a run, such as 100,200..300."
)
@click.option(
    "--overwrite", is_flag=True, help="Read the copies that exist, and replace those that differ or are damaged."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be copied.")
@PREFIX
@as_json
def cp(
    source: str,
    target: str,
    steps: tuple[range, ...] | None,
    overwrite: bool,
    dry_run: bool,
    prefix: str | None,
    json_: bool,
) -> int:
    """Copy a checkpoint or a run to another disk or bucket. Of a run, it copies the valid steps.

    It copies files byte for byte and checks each byte that it reads, with pins and recorded metrics. Existing copies
    of steps receive only pins and metrics, and are not read; --overwrite reads them, and replaces those that differ
    or are damaged. The exit code is 1 if it left steps behind: damaged ones, and those of other libraries, which
    convert copies. It refuses a TARGET that a job writes. In a directory of runs it copies each run and checkpoint.
    """
    from .. import stores
    from .._tools.copy import copy_checkpoints
    from .._tools.runs_folder import scan_runs_folder

    options: dict[str, Any] = {"steps": steps or (), "overwrite": overwrite, "dry_run": dry_run, "prefix": prefix}
    place = stores.absolute(source)
    folder = scan_runs_folder(stores.get(place), place, None, prefix)
    if folder is None:
        done = copy_checkpoints(source, target, **options)
        if json_:
            say_json(_copy_fields(done, overwrite, dry_run))
        else:
            _say_copied(done, overwrite, dry_run)
        return int(bool(done.left_behind))
    found: list[CopyResult] = []
    failed = False
    for one in [*folder.checkpoints, *folder.runs]:
        name = posixpath.relpath(one, place)
        try:
            found.append(copy_checkpoints(one, posixpath.normpath(posixpath.join(target, name)), **options))
        except (TreeringError, PermissionError) as error:
            _log.error("not copied: %s", error)
            failed = True
            continue
        if not json_:
            say(f"{safe(name)}:")
            _say_copied(found[-1], overwrite, dry_run)
    for one in folder.folders_below:
        _log.error("not copied: %s, which has runs or checkpoints in it", one)
    if json_:
        say_json({"path": place, "runs": [_copy_fields(done, overwrite, dry_run) for done in found]})
    return FAILED if failed else int(any(done.left_behind for done in found) or bool(folder.folders_below))


def _copy_fields(done: "CopyResult", overwrite: bool, dry_run: bool) -> dict[str, Any]:
    return {**dataclasses.asdict(done), "there_read": overwrite, "dry_run": dry_run}


def _say_copied(done: "CopyResult", overwrite: bool, dry_run: bool) -> None:
    what = "would be copied" if dry_run else "copied"
    names = f": {safe(', '.join(map(posixpath.basename, done.copied)))}" if dry_run and done.copied else ""
    unread = "" if overwrite else " (sizes checked, contents not read)"
    there = f"; {count(len(done.there), 'is', 'are')} there already{unread}" if done.there else ""
    say(f"{count(len(done.copied), 'checkpoint')} {what}, {nbytes(done.nbytes)} of arrays{names}{there}")


@click.command()
@click.argument("path", type=PATH)
@click.option("--native", is_flag=True, help="Use Treering's own calls instead of the adapter, for the common forms.")
@click.option("--write", is_flag=True, help="Write the files; by default only print the diff.")
@as_json
def migrate(path: str, native: bool, write: bool, json_: bool) -> int:
    """Change Python programs from Orbax to Treering. This needs the extra migrate.

    PATH is a file or a folder. It prints a diff, in which imports of orbax.checkpoint are imports of treering.orbax.
    Comments and formatting stay. What is left to do by hand is printed on stderr with file and line, and then the exit
    code is 1.
    """
    from ..errors import UnsupportedError

    try:
        from .._tools.migrate import migrate as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        raise UnsupportedError(f"migrating needs LibCST: pip install 'treering[migrate]' ({error})") from None

    done = run(path, to_native=native, write=write)
    if json_:
        say_json({**dataclasses.asdict(done), "findings": [one._asdict() for one in done.findings], "written": write})
    else:
        _say(done, write)
    return FAILED if done.failed else int(bool(done.findings))


def _say(done: "Migration", write: bool) -> None:
    if not write:
        click.echo(_shown(done.diff), nl=False)
    places: dict[str, list[str]] = {}  # The same advice for several places is said once.
    for one in done.findings:
        places.setdefault(one.what, []).append(f"{safe(one.file)}:{one.line}")
    for what, where in places.items():
        say(f"{', '.join(where)}: {safe(what)}", err=True)
    for name, why in done.failed.items():
        say(f"{safe(name)}: {safe(why)}", err=True)
    skipped = [count(len(names), kind) for names, kind in ((done.notebooks, "notebook"), (done.links, "link")) if names]
    say(
        f"{count(done.looked_at, 'file')} read"
        + (f", {' and '.join(skipped)} not read" if skipped else "")
        + f"; {len(done.changed)} {'changed' if write else 'would change'}"
        + f"; {count(len(done.findings), 'place')} left to do by hand"
    )


def _shown(text: str) -> str:
    """Returns a diff as it is, but without characters that a terminal would obey."""
    if not sys.stdout.isatty():
        return text
    return "".join(one if one in "\n\t" or one.isprintable() else safe(one) for one in text)


@click.command()
@click.argument("stream", type=PATH)
@click.argument("directory", type=PATH)
@click.option("--version", type=STEP, metavar="N", help="The version; by default the newest that can be read.")
@click.option("--watch", is_flag=True, help="Continue with each newest version, until the stream is finished.")
def pull(stream: str, directory: str, version: int | None, watch: bool) -> None:
    """Write a version of published weights to DIRECTORY. It is a complete checkpoint of Hugging Face.

    DIRECTORY is new, or has a checkpoint in safetensors, whose weights are replaced in one step. Other files stay.
    """
    from .._publish.pull import pull

    if watch and version is not None:
        raise click.UsageError("expected --version or --watch, found both")
    for number, is_new in pull(stream, directory, version=version, watch=watch):
        say(f"{safe(directory)}: version {number}{'' if is_new else ', which was there'}")


COMMANDS = (convert, cp, migrate, pull)
