"""The options of a save."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from ..rules import Rule


class FormatOptions(TypedDict, total=False):
    """The keyword arguments that only some formats have: safetensors the first two, Orbax the last."""

    max_shard_size: int | str
    filename_pattern: str
    composite: bool


class SaveOptions(NamedTuple):
    """The arguments of `treering.save`, which describes them.

    `given` says which of step, metrics and metadata are the caller's, and not a copied checkpoint's. With `own_disks`
    the path is on a disk of each host, where process 0 writes the manifest and everyone its own arrays.
    """

    format: str | None
    overwrite: bool
    rules: Sequence[Rule]
    dtype: Any
    memory_limit: int | None
    background: bool
    progress: bool
    of_format: Mapping[str, Any]
    given: frozenset[str] = frozenset()
    own_disks: bool = False
