"""The namespace `step` of Orbax: names of steps, and the steps in a directory."""

import dataclasses
import datetime
import errno
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from .. import stores
from .._run import run_layout
from .._run.run_layout import steps
from ..formats.orbax.schema import UNFINISHED
from .errors import warn_unused
from .namespaces import lookup

__getattr__ = lookup("step")

TMP_DIR_SUFFIX = UNFINISHED  # in the names of what Orbax has not finished; Treering leaves none
_NAME = re.compile(r"(?:.+_)?([0-9]+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class StandardNameFormat:
    """Names steps ``3``, or ``ckpt_003`` with a prefix and a number of digits."""

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    def build_name(self, step: int) -> str:
        """Returns the name of a step's directory."""
        return f"{step_prefix_with_underscore(self.step_prefix)}{step:0{self.step_format_fixed_length or 1}}"

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator["Metadata"]:
        """Yields the complete steps in a directory, of either format, ascending."""
        from .run import as_path

        for step, path in _found(base_path).items():
            if posixpath.basename(path) == self.build_name(step):
                yield Metadata(step, as_path(path))

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> "Metadata":
        """Returns a complete step in a directory. Raises `ValueError` if there is none."""
        for one in self.find_all(base_path):
            if one.step == step:
                return one
        raise ValueError(f"{os.fspath(base_path)}: expected the step {self.build_name(step)}, found no complete one")


class NameFormat(Protocol):
    """Names the steps of a run, and finds them."""

    def build_name(self, step: int) -> str:
        """Returns the name of the directory of a step."""
        ...

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator["Metadata"]:
        """Yields the complete steps in a directory."""
        ...

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> "Metadata":
        """Returns a complete step in a directory. Raises `ValueError` if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class Metadata:
    """A step, and its directory."""

    step: int
    path: Any

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        """The time of the commit, in nanoseconds since 1970; None if it is not recorded."""
        from .._run.open import open_checkpoint

        created = open_checkpoint(os.fspath(self.path)).created
        return None if created is None else int(created.timestamp() * 1_000_000) * 1000

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """The same time: Treering records one for each checkpoint."""
        return self.commit_timestamp_nsecs

    @property
    def commit_timestamp(self) -> datetime.datetime:
        """The time of the commit in UTC, or else that of the last change of the directory."""
        if (recorded := self.commit_timestamp_nsecs) is not None:
            return datetime.datetime.fromtimestamp(recorded / 1e9, datetime.UTC)
        place = stores.absolute(self.path)
        if (there := stores.get(place).stat(place)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        return datetime.datetime.fromtimestamp(there.modified, datetime.UTC)


def standard_name_format(
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
    temporary_path_cls: Any = None,
    atomicity_options: Any = None,
) -> StandardNameFormat:
    """Returns the way to name steps. The last two options have no effect, which is logged."""
    warn_unused(
        "standard_name_format",
        temporary_path_cls=(temporary_path_cls, None),
        atomicity_options=(atomicity_options, None),
    )
    return StandardNameFormat(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


def as_standard(format: Any) -> Any:
    """Returns a format of another library as one of this module, or as it is if its names are not of that form."""
    if format is None or isinstance(format, StandardNameFormat):
        return format
    found = re.fullmatch(r"(?:(?P<prefix>.+)_)?(?P<digits>0*)1", format.build_name(1), re.DOTALL)
    made = None if found is None else StandardNameFormat(found["prefix"], len(found["digits"]) + 1)
    alike = made is not None and all(made.build_name(step) == format.build_name(step) for step in (0, 23, 4567))
    return made if alike else format


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str], single_host_load_and_broadcast: bool = False) -> list[int]:
    """Returns the complete steps in a directory, of either format, ascending."""
    return steps(checkpoint_dir)


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns a complete step in a directory; None if there is none."""
    return next(iter(steps(checkpoint_dir)), None)


def latest_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns the newest complete step in a directory; None if there is none."""
    return max(steps(checkpoint_dir), default=None)


def _found(run: str | os.PathLike[str]) -> run_layout.Steps[str]:
    root = stores.absolute_run(run)
    return run_layout.all_steps(stores.get(root), root)


def step_prefix_with_underscore(step_prefix: str | None) -> str:
    """Returns the text before the number in the name of a step."""
    return f"{step_prefix}_" if step_prefix else ""


def build_step_metadatas(step_paths: Iterable[Any], build_metadata: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields what a function makes of paths, without None."""
    return (made for made in map(build_metadata, step_paths) if made is not None)


def find_step_path(
    base_path: str | os.PathLike[str], name_format: NameFormat, *, step: int, include_uncommitted: bool = False
) -> Any:
    """Returns the directory of a step. Raises `ValueError` if it is not complete, unless `include_uncommitted`.

    Treering has nothing at the path of a step before its commit, so that is then the path at which it will be.
    """
    return (
        build_step_path(base_path, name_format, step)
        if include_uncommitted
        else name_format.find_step(base_path, step).path
    )


def get_save_directory(
    step: int,
    directory: str | os.PathLike[str],
    name: str | None = None,
    step_prefix: str | None = None,
    override_directory: str | os.PathLike[str] | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Any:
    """Returns the directory of a step, or of its item `name`. It need not exist."""
    from .run import as_path

    named = step_name_format or StandardNameFormat(step_prefix, step_format_fixed_length)
    place = (
        build_step_path(directory, named, step)
        if override_directory is None
        else as_path(os.fspath(override_directory))
    )
    return place if name is None else place / name


def checkpoint_steps_paths(checkpoint_dir: str | os.PathLike[str]) -> list[Any]:
    """Returns the directories of the complete steps, ascending."""
    from .run import as_path

    return [as_path(path) for path in _found(checkpoint_dir).values()]


def build_step_path(base_path: str | os.PathLike[str], name_format: Any, step: int) -> Any:
    """Returns the directory that a format of names has for a step. It need not exist."""
    from .run import as_path

    return as_path(stores.absolute_run(base_path)) / name_format.build_name(step)


def latest_step_metadata(root_path: str | os.PathLike[str], name_format: Any = None) -> Metadata | None:
    """Returns the newest complete step in a directory; None if there is none. All formats of names are found."""
    from .run import as_path

    found = _found(root_path)
    return Metadata(max(found), as_path(found[max(found)])) if found else None


def step_from_checkpoint_name(name: str) -> int:
    """Returns the step in the name of a directory. Raises `ValueError` if there is none."""
    found = step_or_none(name)
    if found is None:
        raise ValueError(f"{name!r}: expected the name of a step, such as 3 or ckpt_3")
    return found


def step_or_none(path: str) -> int | None:
    """Returns the step that the name of a directory says; None for another name."""
    found = _NAME.fullmatch(posixpath.basename(path))
    return int(found[1]) if found and int(found[1]) <= run_layout.MAX_STEP else None


def is_path_finalized(path: str | os.PathLike[str]) -> bool:
    """Returns True if a directory is a complete checkpoint."""
    from .. import formats

    place = stores.absolute(path)
    store = stores.get(place)
    found = store.stat(place)
    return found is not None and found.is_folder and formats.is_known(store, place)
