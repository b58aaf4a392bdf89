"""The metadata of a step and of a run."""

import dataclasses
import datetime
from typing import Any, TypeVar

from .. import metadata_types

T = TypeVar("T")


class CheckpointMetadata(metadata_types.CheckpointMetadata[T]):
    """The metadata of a step. `metadata` is None in lists of steps. `metrics` is None if the step has none."""

    def __init__(self, step: int, path: Any, *, metadata: T, metrics: Any = None, **about: Any):
        super().__init__(path, metadata=metadata, **about)
        self.step, self.metrics = step, metrics

    @property
    def time(self) -> datetime.datetime | None:
        """The time of the commit, in UTC."""
        return self.commit_timestamp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootMetadata:
    """The metadata of a run, which are the same for all its steps."""

    directory: Any
    custom_metadata: Any = None
