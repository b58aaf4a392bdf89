"""A `treering.Checkpointer` whose run has the layout of Orbax: its names of steps, and steps in both formats."""

import functools
import importlib
import json
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .. import formats, stores
from .._restore.checkpoint import Checkpoint
from .._run import resume, run_layout
from .._run.checkpointer import Checkpointer
from .._run.run_layout import RunLayout, parse_step_name
from ..errors import MismatchError, UnsupportedError
from ..formats.orbax.run import read_run_metadata, write_run_metadata
from ..keep import Policy
from .items import format_options
from .options import CheckpointManagerOptions, restrict
from .policies import CheckpointInfo, info_of

T = TypeVar("T")
_log = logging.getLogger("treering")


class OrbaxRun(Checkpointer):
    """Saves and restores the steps of a `CheckpointManager`."""

    def __init__(
        self, run: str, options: CheckpointManagerOptions, write: str | None, keep: Policy | None, **given: Any
    ):
        chosen = format_options(write, several=True)
        self._layout = RunLayout(
            *_step_names(options),
            format=chosen.pop("format"),
            format_options=chosen,
            shared_with_orbax=True,
            deleted_to=_checked_subdir(run, options),
            removes_unfinished=options.cleanup_tmp_directories,
        )
        super().__init__(run, prefix=self._layout.prefix, keep=keep, **given)

    def check_layout(self) -> None:
        """Raises `MismatchError` for a directory that is a checkpoint, or a run with other names or of T5X."""
        store, root = stores.get(self.directory), self.directory
        if not store.list(root) or self._directory.all_steps():
            return
        what = ""
        if found := run_layout.list_step_names(store, root, run_layout.DEFAULT_PREFIX):
            what = f"a run of treering.Checkpointer ({found[-1][1]} is in it); continue it with treering.Checkpointer"
        elif t5x := formats.foreign_steps(store, root, only=formats.get("t5x")):
            what = f"a run of T5X ({max(t5x)} is its newest step); restore it with treering.restore"
        elif formats.is_known(store, root):
            what = "a checkpoint; give the directory above it, or restore it with StandardCheckpointer"
        if what:
            raise MismatchError(f"{root}: expected the directory of a CheckpointManager, found {what}")

    @property
    def writes_orbax(self) -> bool:
        """True if new steps are in the format of Orbax."""
        return self._directory.steps.layout.format == "orbax"

    def use_step(self, step: int | None, use: Callable[[Checkpoint], T]) -> T:
        """Returns what `use` makes of a step; None is the latest that is not damaged. All processes make the call."""
        what = f"restore({'' if step is None else f'step={step}'})"
        return resume.use_step(what, self._collective, self._directory, step, True, lambda ckpt, _: use(ckpt))[1]

    def load_metadata(self) -> Any:
        """Returns the metadata of the run; None if it has none."""
        return read_run_metadata(stores.get(self.directory), self.directory)

    def save_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Writes the metadata of a run that has none yet. Logs it if the run has others."""
        write = functools.partial(write_run_metadata, stores.get(self.directory), self.directory, metadata)
        self._collective.run_on_process_0("metadata", write)
        if (found := self.load_metadata()) != json.loads(json.dumps(dict(metadata))) and metadata:
            _log.warning("%s: the metadata of the run stay as an earlier job wrote them: %.200r", self.directory, found)

    def make_root(self, options: CheckpointManagerOptions) -> None:
        """Makes the directory of the run. A manager that must not make it waits for another job to do so."""
        store = stores.get(self.directory)
        if not store.has_folders or store.stat(self.directory):
            return
        if options.create and not _is_secondary_process():
            store.make_folders(self.directory, [])
            restrict(self.directory, options.file_options)

    def has_step(self, step: int) -> bool:
        """Returns True for one of `steps`. Does not look at the others."""
        return step in self._pending_saves.pending_steps() or step in self._directory.all_steps()

    def infos(self) -> list[CheckpointInfo]:
        """Returns the valid steps, ascending, with their times and metrics."""
        return [info_of(one) for one in self._directory.valid_steps(foreign=True)]

    def wait_for_deletions(self) -> None:
        """Waits until the steps are gone that the last save has made superfluous."""
        self._saver._retention.wait()


def _is_secondary_process() -> bool:
    import jax

    return jax.process_index() > 0


def _checked_subdir(run: str, options: CheckpointManagerOptions) -> str | None:
    """Returns `todelete_subdir`. Raises `UnsupportedError` for a bucket, and for a name that the run uses."""
    name = options.todelete_subdir
    if name is None:
        return None
    if not stores.get(run).has_folders:
        raise UnsupportedError(f"{run}: todelete_subdir: a bucket cannot move steps; leave the option out")
    if name == "metadata" or parse_step_name(name, _step_names(options)[0]) is not None:
        raise UnsupportedError(f"todelete_subdir={name!r}: the run uses this name itself; choose another")
    return name


def _step_names(options: CheckpointManagerOptions) -> tuple[str, int]:
    """Returns the prefix of the names of steps, and the least number of digits."""
    if (named := options.step_name_format) is not None:
        if not (hasattr(named, "step_prefix") and hasattr(named, "step_format_fixed_length")):
            raise UnsupportedError(
                f"step_name_format={named!r:.200}: expected one of orbax.checkpoint.step.standard_name_format(…), "
                "because Treering finds steps by their numbers"
            )
        prefix, digits = named.step_prefix, named.step_format_fixed_length
    else:
        prefix, digits = options.step_prefix, options.step_format_fixed_length
    return (f"{prefix}_" if prefix else ""), digits or 1


def as_path(path: str) -> Any:
    """Returns a path as Orbax does: of `etils.epath` if that is installed, else of `pathlib`."""
    try:
        return importlib.import_module("etils.epath").Path(path)
    except ImportError:
        return pathlib.Path(path)


def directory_of(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a run, as text."""
    return stores.absolute_run(path)
