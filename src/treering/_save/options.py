"""The options of a save."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from ..formats.treering.room import RoomMaker
from ..rules import Rule


class FormatOptions(TypedDict, total=False):
    """The keyword arguments that only some formats have.

    safetensors has `max_shard_size` and `filename_pattern`; Orbax has `composite`.
    """

    max_shard_size: int | str
    filename_pattern: str
    composite: bool


class SaveOptions(NamedTuple):
    """The arguments of `treering.save`, which documents them.

    `given` names those of step, metrics and metadata that the caller passed; the rest come from a copied checkpoint.
    hosts: for each process, the lowest process that shares its disk, if each host has its own disk at the path. Process
        0 then writes the manifest, and each process writes its own arrays on the disk of its host. None if all
        processes share one place.
    copies: the number of disks that have each array file, 1 or 2. Processes write second copies of what they hold in
        memory. `complete_copies.missing_copies` finds the files that still lack one after the commit.
    room_maker: frees room if a disk is full.
    reuse: looks for arrays of a save that files of earlier steps have; see `UnchangedArrays`. None writes all.
    """

    format: str | None
    overwrite: bool
    rules: Sequence[Rule]
    dtype: Any
    memory_limit: int | None
    background: bool
    progress: bool
    format_options: Mapping[str, Any]
    explicit_info: frozenset[str] = frozenset()
    hosts: tuple[int, ...] | None = None
    copies: int = 1
    room_maker: RoomMaker | None = None
    reuse: Callable[[Any, Any], Any] | None = None
